"""The settings of the head that a training run makes (see `config`)."""

from typing import Literal

from pydantic.dataclasses import dataclass

from specserve.config import RULES, setting


@dataclass(frozen=True, config=RULES)
class DraftSettings:
    """The size of the head that is trained. Zero means the target's own, or with `init_from` the earlier head's."""

    vocab_size: int = setting(0, help="draft vocabulary; 0: half the target's, at most 32,000", ge=0)
    num_layers: int = setting(0, help="decoder layers of the head; 0: one", ge=0)
    d_model: int = setting(0, help="width of the head, which then has its own embedding; 0: the target's", ge=0)
    d_ff: int = setting(0, help="width of the head's MLP; 0: the target's", ge=0)
    num_heads: int = setting(0, help="attention heads; 0: the target's", ge=0)
    num_kv_heads: int = setting(0, help="key/value heads; 0: the target's", ge=0)
    aux_layers: tuple[int, ...] = setting((), help="tapped target layers, 0-based; empty: 1, L//2-1, L-4")
    norm_output: bool = setting(False, help="hand the normed state to the next draft step (version 3.1)")
    fc_norm: bool = setting(False, help="normalise each tapped state before fusing (version 3.1)")
    export_dtype: Literal["bfloat16", "float32"] = setting("bfloat16", help="dtype of the exported weights")
