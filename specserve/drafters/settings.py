"""The settings of the head that a training run makes (see `config`)."""

from typing import Literal

from pydantic.dataclasses import dataclass

from specserve.config import RULES, setting

ALL_TOKENS = -1  # as the size of a draft vocabulary: all that the target has
# what every kind of head has; of the others each says which it understands
COMMON = frozenset({"vocab_size", "num_layers", "d_ff", "num_heads", "num_kv_heads", "aux_layers", "export_dtype"})


def draft_vocab_size(asked: int, vocab_size: int) -> int:
    """Return how many of a target's tokens a head can propose, where the settings ask for so many."""
    return vocab_size if asked == ALL_TOKENS else asked or min(vocab_size // 2, 32_000)


@dataclass(frozen=True, config=RULES)
class DraftSettings:
    """The size of the head that is trained. Zero means the target's own, or with `init_from` the earlier head's."""

    vocab_size: int = setting(0, help="draft vocabulary; 0: half the target's, at most 32,000; -1: all of it", ge=-1)
    num_layers: int = setting(0, help="decoder layers of the head; 0: one", ge=0)
    d_model: int = setting(0, help="width of the head, which then has its own embedding; 0: the target's", ge=0)
    d_ff: int = setting(0, help="width of the head's MLP; 0: the target's", ge=0)
    num_heads: int = setting(0, help="attention heads; 0: the target's", ge=0)
    num_kv_heads: int = setting(0, help="key/value heads; 0: the target's", ge=0)
    aux_layers: tuple[int, ...] = setting((), help="tapped target layers, 0-based; empty: 1, L//2-1, L-4")
    block_size: int = setting(
        0, help="of a block drafter: positions of a block, its anchor included; 0: 8", ge=0, le=64
    )
    window: int = setting(0, help="of a block drafter: committed tokens that a masked position sees; 0: all", ge=0)
    window_layers: tuple[int, ...] = setting((), help="of a block drafter: its layers with that window; empty: all")
    causal: Literal["", "all", "none"] = setting(
        "", help="of a block drafter: layers whose masked positions see those before them alone; empty: with a window"
    )
    sinks: bool = setting(False, help="of a block drafter: heads may attend to nothing, by a learned sink each")
    mask_token: int = setting(
        -1, help="of a block drafter: id of the token in its masked positions; -1: the last one", ge=-1
    )
    rank: int = setting(0, help="of a block drafter's joint head; 0: half the target's width, at most 256", ge=0)
    norm_output: bool = setting(False, help="hand the normed state to the next draft step (version 3.1)")
    fc_norm: bool = setting(False, help="normalise each tapped state before fusing (version 3.1)")
    export_dtype: Literal["bfloat16", "float32"] = setting("bfloat16", help="dtype of the exported weights")
