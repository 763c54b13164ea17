"""The layer that a run begins with: the one that the target's checkpoint carries, or a copy of the target's last."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.load import Target, load_params, renamer
from specserve.checkpoints.quantized import stored_block
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.drafters.mtp.carried import is_carried, load_carried
from specserve.drafters.mtp.config import MtpConfig, config_of
from specserve.drafters.mtp.model import MtpParams, draft_spec
from specserve.drafters.settings import WidthSettings
from specserve.errors import ConfigError
from specserve.kernels.matmul import dequantize
from specserve.models.config import ModelConfig
from specserve.models.params import init_params
from specserve.models.target import Layer, head_columns, target_spec


def new_config(settings: WidthSettings, target: ModelConfig, draft_vocab_size: int) -> MtpConfig:
    """Return the layer's shape, all of which but its vocabulary the target decides. Raises ConfigError where the
    settings ask for another."""
    own = {
        "num_layers": 1,
        "d_model": target.d_model,
        "d_ff": target.d_ff,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
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
    """Return the layer of the target's checkpoint. Where it has none, it is a copy of the target's last layer, whose
    input is the mean of its two normed halves, and whose final norm is the target's. The output rows of a part of the
    tokens, `target_ids` [draft_vocab] int32, are the target's. Raises CheckpointError."""
    whole = config_of(target.config, dtype=config.layer.dtype)
    has_layer = is_carried(target.folder, whole)
    params = load_carried(target, whole) if has_layer else _from_last(whole, target, seed)
    if not config.is_partial:
        return params
    columns = head_columns(target.params, jnp.asarray(target_ids)).astype(config.layer.dtype)
    return dataclasses.replace(params, head=columns)


def _from_last(config: MtpConfig, target: Target, seed: int) -> MtpParams:
    spec = draft_spec(config)
    params: MtpParams = init_params(spec, jax.random.key(seed), config.layer.dtype)
    half = jnp.eye(config.layer.d_model, dtype=config.layer.dtype) / 2
    params = dataclasses.replace(
        params, fc=jnp.concatenate([half, half]), norm=jnp.array(target.params.norm, config.layer.dtype)
    )
    last = target.params.layers[-1] if target.params.layers else _read_last(target, config.layer.dtype)
    return dataclasses.replace(params, layer=_copy(last, params.layer))


def _read_last(target: Target, dtype: str) -> Layer:
    """Read the target's last layer out of its checkpoint: where states are captured, or come from elsewhere, no layer
    is loaded."""
    tensors, where = TensorFolder(target.folder), target.folder / CONFIG
    return load_params(
        target_spec(target.config).layers[-1],
        tensors,
        dtype,
        skipped={".*": "layers below the last, whose outputs are not needed"},
        rename=renamer(tensors.names()),
        block=stored_block(read_json(where), str(where)),
    )


def _copy(layer: Layer, like: Layer) -> Layer:
    """Return a layer's values in the dtypes of another's, as arrays of their own; quantised ones are multiplied out."""
    return jax.tree.map(lambda new, old: jnp.array(dequantize(old, new.dtype), new.dtype), like, layer)
