"""The config of a layer of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2). It is one more layer
of the target's own kind, over the target's last hidden state of a token and the embedding of the token after it."""

import dataclasses
from dataclasses import dataclass

from specserve.drafters.mtp.layouts import Layout, layout_of
from specserve.errors import ConfigError
from specserve.models.config import ModelConfig


@dataclass(frozen=True)
class MtpConfig:
    """The shape of a layer and where its tensors stand. Static and hashable."""

    layer: ModelConfig  # the target's, of this one layer
    layout: Layout
    num_target_layers: int
    draft_vocab_size: int  # the tokens that it proposes
    has_embedding: bool = False  # its own token embedding; otherwise the target's is shared
    has_own_head: bool = False  # its own output head for all tokens; otherwise the target's is shared

    @property
    def is_partial(self) -> bool:
        """Return whether it proposes a part of the target's tokens."""
        return self.draft_vocab_size < self.layer.vocab_size

    @property
    def has_head(self) -> bool:
        """Return whether it has output rows of its own, as it must for a part of the tokens."""
        return self.has_own_head or self.is_partial


def config_of(target: ModelConfig, *, dtype: str) -> MtpConfig:
    """The layer that a target's checkpoint carries after its last one, or that is trained for it: of the last one's
    kind, for all tokens. Raises ConfigError where that keeps a recurrent state, which knows no trees of a draft's
    own."""
    kind, layout = target.kind(target.num_layers - 1), layout_of(target)
    if kind.mixer not in ("attention", "latent"):
        raise ConfigError(
            f"the last layer of a {target.family} target keeps a recurrent state ({kind.mixer}); a layer of "
            "multi-token prediction needs one that attends. Give a head of another kind (--drafter)"
        )
    layer = dataclasses.replace(
        target,
        num_layers=1,
        layers=(kind,),
        names=dataclasses.replace(target.names, layer=layout.layer),
        dtype=dtype,
        cache_dtype="",
    )
    return MtpConfig(layer, layout, target.num_layers, target.vocab_size)
