"""The layer that a run begins with: the one that the target's checkpoint carries, or a copy of the target's last."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.load import Target, load_params, renamer
from specserve.checkpoints.quantized import read_storing
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.drafters.mtp.carried import is_carried, load_carried
from specserve.drafters.mtp.config import MtpConfig, config_of
from specserve.drafters.mtp.model import MtpParams, draft_spec
from specserve.drafters.settings import WidthSettings
from specserve.errors import ConfigError
from specserve.kernels.matmul import dequantize
from specserve.models.config import ModelConfig
from specserve.models.params import init_params, silenced
from specserve.models.stacked import last_layer
from specserve.models.target import Layer, head_columns, layer_spec


def new_config(settings: WidthSettings, target: ModelConfig, draft_vocab_size: int) -> MtpConfig:
    """Return the layer's shape, all of which but its vocabulary the target decides. Raises ConfigError where the
    settings ask for another."""
    layer = target.of(target.carried or target.kind(target.num_layers - 1))
    own = {
        "num_layers": 1,
        "d_model": target.d_model,
        "d_ff": layer.d_ff,
        "num_heads": target.num_heads,
        "num_kv_heads": layer.num_kv_heads,
        "aux_layers": (target.num_layers - 1,),
    }
    defaults = WidthSettings()
    other = [
        f"draft.{name} {getattr(settings, name)}"
        for name, value in own.items()
        if getattr(settings, name) not in (value, getattr(defaults, name))
    ]
    if other:
        raise ConfigError(
            f"{', '.join(other)}: a layer of multi-token prediction is one layer of the target's own kind and size; "
            "leave that out, or train a head of another kind (--drafter)"
        )
    return dataclasses.replace(config_of(target, dtype="float32"), draft_vocab_size=draft_vocab_size)


def initial_params(config: MtpConfig, target: Target, target_ids: np.ndarray, seed: int) -> MtpParams:
    """Return the layer of the target's checkpoint. Where it has none, it is a copy of the target's last layer that adds
    nothing yet to its input, which is the target's normed state, and its final norm is the target's. The output rows of
    a part of the tokens, `target_ids` [draft_vocab] int32, are the target's. Raises CheckpointError, and ConfigError
    where the last layer cannot be copied."""
    whole = config_of(target.config, dtype=config.layer.dtype)
    params = load_carried(target, whole) if is_trained(config, target) else _from_last(whole, target, seed)
    if not config.is_partial:
        return params
    columns = head_columns(target.params, jnp.asarray(target_ids)).astype(config.layer.dtype)
    return dataclasses.replace(params, head=columns)


def is_trained(config: MtpConfig, target: Target) -> bool:
    """Return whether the target's checkpoint has the layer. Raises CheckpointError where there is no checkpoint."""
    return is_carried(target.folder, config_of(target.config, dtype=config.layer.dtype))


def _from_last(config: MtpConfig, target: Target, seed: int) -> MtpParams:
    layers = target.params.layers
    if config.layout.mixture or config.layer.kind(0) != target.config.kind(config.num_target_layers - 1):
        raise ConfigError(
            f"{target.folder}: its checkpoint carries no layer of multi-token prediction to begin with, and a copy of "
            "its last layer is none, as those have several streams or are of another kind; train a head of another "
            "kind (--drafter)"
        )
    params: MtpParams = init_params(draft_spec(config), jax.random.key(seed), config.layer.dtype)
    state = jnp.eye(config.layer.d_model, dtype=config.layer.dtype)
    halves = (state, jnp.zeros_like(state)) if config.layout.hidden_first else (jnp.zeros_like(state), state)
    norm = jnp.array(target.params.norm, config.layer.dtype)
    last = last_layer(layers) if layers else _read_last(target, config.layer.dtype)
    layer = _silenced(_copy(last, params.layer), config.layer)
    return dataclasses.replace(params, fc=jnp.concatenate(halves), layer=layer, norm=norm)


def _silenced(layer: Layer, config: ModelConfig) -> Layer:
    """Return the layer with nothing added to its input. Where what it adds is normed first, that norm is silent: it
    would make as much of small numbers as of large ones."""
    if not config.out_norms:
        return silenced(layer)
    assert layer.mlp_out_norm is not None
    silent = jnp.full_like(layer.mlp_out_norm, -1.0 if config.norm_offset else 0.0)
    return dataclasses.replace(layer, attention_out_norm=silent, mlp_out_norm=jnp.array(silent))


def _read_last(target: Target, dtype: str) -> Layer:
    """Read the target's last layer out of its checkpoint: where states are captured, or come from elsewhere, no layer
    is loaded."""
    tensors, where = TensorFolder(target.folder), target.folder / CONFIG
    return load_params(
        layer_spec(target.config, target.config.num_layers - 1),
        tensors,
        dtype,
        skipped={".*": "layers below the last, whose outputs are not needed"},
        rename=renamer(tensors.names()),
        storing=read_storing(read_json(where), str(where)),
    )


def _copy(layer: Layer, like: Layer) -> Layer:
    """Return a layer's values in the dtypes of another's, as arrays of their own; quantised ones are multiplied out."""
    return jax.tree.map(lambda new, old: jnp.array(dequantize(old, new.dtype), new.dtype), like, layer)
