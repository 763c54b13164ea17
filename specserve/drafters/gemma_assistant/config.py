"""The config of an assistant."""

from dataclasses import dataclass

from specserve.models.config import ModelConfig


@dataclass(frozen=True)
class AssistantConfig:
    """The shape of an assistant beside its target. Static and hashable."""

    layers: ModelConfig  # of it; `LayerKind.kv_from` names the target's layers
    target_d_model: int
    num_target_layers: int
    target_norm_eps: float
    target_embedding_scale: float
    num_centroids: int = 0  # clusters of tokens, of which only those of the best get logits; 0: all tokens do
    num_chosen: int = 0  # clusters

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's last layer, whose normed output the assistant goes on from."""
        return (self.num_target_layers - 1,)

    @property
    def draft_vocab_size(self) -> int:
        """All tokens."""
        return self.layers.vocab_size
