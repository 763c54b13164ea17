"""The config of a DFlash drafter (arXiv 2602.06036): a few layers that fill a block of masked slots in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specserve.models.config import ModelConfig

Markov = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class DFlashConfig:
    """The shape and the switches of a head. Static and hashable."""

    backbone: ModelConfig  # its layers: windows, norms, rotary embeddings; its vocabulary is the target's
    aux_layers: tuple[int, ...]  # target layers whose outputs are tapped, 0-based
    draft_vocab_size: int
    block_size: int  # slots of a block, the anchor's among them
    mask_token_id: int  # stands in every slot but the anchor's
    is_causal: tuple[bool, ...]  # of each layer: a slot sees those before it alone, else the whole block
    has_embedding: bool = False  # its own token embedding; otherwise the target's is shared
    has_own_head: bool = False  # output rows of its own for all tokens; without, those of a part are its own at least
    embedding_scale: float = 1.0  # of the tokens in a block
    output_scale: float = 1.0  # of its logits
    foresees_anchor: bool = False  # slot k is about the token k + 1 places after the anchor, so slot 0 counts
    markov_rank: int = 0  # of DSpark's bias by the token before; 0: none
    markov_type: Markov = "vanilla"  # how the bias follows: from the token alone, gated by the slot, or from all before
    confidence: Literal["", "state", "state and token"] = ""  # the inputs of DSpark's confidence
    has_confidence_bias: bool = False
    conv_taps: int = 0  # of DFlash2's convolutions; 0: none
    conv_group: int = 0  # channels that share what a slot adds to its kernel
    selector_rank: int = 0  # of DFlash2's ranking of candidates; 0: none
    selector_top_k: int = 0  # candidates of a slot
    gru_width: int = 0  # of Domino's state, which reads the tokens before; 0: none
    correction_rank: int = 0  # of what Domino adds to logits
    num_uncorrected: int = 0  # slots that Domino leaves as they are, after the anchor's token

    @property
    def name(self) -> str:
        """The name of its kind."""
        names = {"dspark": self.markov_rank, "dflash2": self.selector_rank, "domino": self.gru_width}
        return next((name for name, size in names.items() if size), "dflash")

    @property
    def is_partial(self) -> bool:
        """Return whether it proposes a part of the target's tokens."""
        return self.draft_vocab_size < self.backbone.vocab_size

    @property
    def has_head(self) -> bool:
        """Return whether it has output rows of its own, as it must for a part of the vocabulary. Otherwise the
        target's head is shared."""
        return self.has_own_head or self.is_partial

    @property
    def num_slots(self) -> int:
        """The number of tokens that a block predicts."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The slot that predicts the token after the anchor."""
        return 0 if self.foresees_anchor else 1


def short_windows(windows: Sequence[int], is_causal: Sequence[bool], block_size: int) -> list[int]:
    """Return the windows that are shorter than a block in layers whose slots see what follows them. What such a window
    leaves out is not agreed on, so no head of ours has one."""
    layers = zip(windows, is_causal, strict=True)
    return [window for window, sees_before in layers if 0 < window < block_size and not sees_before]
