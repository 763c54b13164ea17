"""The config of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), with the switches of version 3.1."""

from dataclasses import dataclass

from specserve.errors import ConfigError
from specserve.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(ModelConfig):
    """The shape and the switches of a head: a transformer layer over (token embedding, fused target features), or
    several, with the windows, norms, biases and activations that layers of targets have. Its vocabulary is the
    target's. Static and hashable."""

    family: str = "llama"
    num_layers: int = 1
    target_d_model: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # target layers whose outputs are tapped, 0-based
    has_embedding: bool = False  # its own token embedding; otherwise the target's is shared
    has_own_head: bool = True  # its own output rows; otherwise the target's are shared, which are those of all tokens
    norm_before_residual: bool = False  # the residual is the normed hidden state
    fc_norm: bool = False  # 3.1: an RMS norm on each tapped state
    norm_before_fc: bool = False  # 3.1: one RMS norm over the concatenated taps
    norm_output: bool = False  # 3.1: the state handed on is the normed one
    yarn_scales: tuple[float, float] = (0.0, 0.0)  # of latents: mscale and mscale_all_dim, as they are stated

    @property
    def entry_dims(self) -> tuple[int, int, int]:
        """The sizes of a layer's entry: its KV heads, and the width of a key and of a value. An entry of latents is its
        key, the first channels of which are its value."""
        if self.latent is None:
            return self.num_kv_heads, self.head_dim, self.head_dim
        return 1, self.latent.cache_dim, self.latent.kv_rank


def default_taps(target: ModelConfig) -> tuple[int, int, int]:
    """Return the default taps, the outputs of layers 1, L//2-1 and L-4 (0-based), before the final norm. Raises
    ConfigError where the target has too few layers."""
    if target.num_layers < 5:
        raise ConfigError(f"a target of {target.num_layers} layers has no default taps; give three layer indices")
    return (1, target.num_layers // 2 - 1, target.num_layers - 4)
