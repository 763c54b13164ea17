"""The config of a P-EAGLE head (arXiv 2602.01469): an EAGLE-3 network that predicts several tokens in one pass."""

from dataclasses import dataclass

from specserve.drafters.eagle3.config import Eagle3Config

NUM_SLOTS = 8  # of published heads


@dataclass(frozen=True)
class PEagleConfig:
    """The shape of a head. Static and hashable."""

    network: Eagle3Config
    mask_token_id: int  # stands in every slot whose token is not known
    num_slots: int  # tokens that it was trained to foresee in one pass: by the last known token, and by masked slots

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.network.aux_layers

    @property
    def draft_vocab_size(self) -> int:
        return self.network.draft_vocab_size
