"""The settings of the head that a training run makes (see `config`), as far as several kinds have them. A kind's own
ones are in its folder, and `registry.DraftSettings` has those of all kinds together."""

from typing import Literal

from pydantic.dataclasses import dataclass

from specserve.config import RULES, setting

ALL_TOKENS = -1  # as the size of a draft vocabulary: all that the target has

# of a head's weights where it runs: floats, or with matrices rounded at load
DraftQuantization = Literal["none", "int8", "fp8", "int4"]
DRAFT_QUANTIZATIONS: tuple[DraftQuantization, ...] = ("none", "int8", "fp8", "int4")


def draft_vocab_size(asked: int, vocab_size: int) -> int:
    """Return how many of a target's tokens a head can propose, where the settings ask for so many."""
    return vocab_size if asked == ALL_TOKENS else asked or min(vocab_size // 2, 32_000)


@dataclass(frozen=True, config=RULES)
class HeadSettings:
    """The settings that every kind of head has. Zero means the target's own, or with `init_from` the earlier head's."""

    vocab_size: int = setting(0, help="draft vocabulary; 0: half the target's, at most 32,000; -1: all of it", ge=-1)
    num_layers: int = setting(0, help="decoder layers of the head; 0: one", ge=0)
    d_ff: int = setting(0, help="width of the head's MLP; 0: the target's", ge=0)
    num_heads: int = setting(0, help="attention heads; 0: the target's", ge=0)
    num_kv_heads: int = setting(0, help="key/value heads; 0: the target's", ge=0)
    aux_layers: tuple[int, ...] = setting((), help="tapped target layers, 0-based; empty: 1, L//2-1, L-4")
    export_dtype: Literal["bfloat16", "float32"] = setting("bfloat16", help="dtype of the exported weights")


@dataclass(frozen=True, config=RULES)
class WindowSettings(HeadSettings):
    """The settings of a head whose layers may see no further back than a window."""

    window: int = setting(0, help="tokens that a position of the head sees, its own among them; 0: all", ge=0)
    window_layers: tuple[int, ...] = setting((), help="the head's layers with that window; empty: all")


@dataclass(frozen=True, config=RULES)
class WidthSettings(HeadSettings):
    """The settings of a head that may be narrower or wider than its target."""

    d_model: int = setting(0, help="width of the head, which then has its own embedding; 0: the target's", ge=0)


@dataclass(frozen=True, config=RULES)
class MaskSettings(HeadSettings):
    """The settings of a head that fills masked positions."""

    block_size: int = setting(
        0, help="of a block drafter: positions of a block, its anchor included; 0: 8", ge=0, le=64
    )
    mask_token: int = setting(
        -1, help="of a block drafter: id of the token in its masked positions; -1: the last one", ge=-1
    )
