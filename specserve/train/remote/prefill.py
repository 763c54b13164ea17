"""The target's pass over rows alone, whose states are sent to training."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve import provenance
from specserve.checkpoints.load import load_target
from specserve.checkpoints.source import resolve_target
from specserve.drafters.learning import Rows
from specserve.errors import CheckpointError
from specserve.mesh import on_mesh, parse_mesh, use_compilation_cache, whole
from specserve.models.config import ModelConfig
from specserve.train.features import States, states_of_rows
from specserve.train.remote.messages import PrefillSpec
from specserve.train.step import cut_rows, join_rows, place_rows


class Prefill:
    """A target on its mesh, and the program that runs it."""

    def __init__(self, spec: PrefillSpec) -> None:
        """Raises ConfigError or CheckpointError, also where the target's files are not those of the spec."""
        use_compilation_cache()
        folder = resolve_target(spec.target).folder
        if (found := provenance.fingerprint(folder)) != spec.fingerprint:
            raise CheckpointError(
                f"{folder}: the target here has the fingerprint {found}, that of training has {spec.fingerprint}; "
                "give all hosts the same files"
            )
        self._mesh = parse_mesh(spec.mesh)
        quantization: Any = spec.quantization
        target = load_target(
            folder,
            dtype=spec.dtype,
            quantization=quantization,
            mesh=self._mesh,
            is_checked=spec.is_checked,
            is_looped=True,
        )
        self._params = target.params
        self._run = make_prefill(target.config, spec, self._mesh)

    def __call__(
        self, token_ids: np.ndarray, document_ids: np.ndarray, position_ids: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The fields of `States` of packed rows [batch, seq], as arrays that Ray sends without copying."""
        arrays = token_ids, np.zeros(token_ids.shape, bool), document_ids, position_ids
        rows = Rows(*jax.device_put(arrays, place_rows(self._mesh, token_ids.shape)))
        return to_bytes(jax.device_get(self._run(self._params, rows)))


def make_prefill(config: ModelConfig, spec: PrefillSpec, mesh: Mesh | None) -> Any:
    """Return the jitted program: (target's parameters, rows) -> States. It runs as many rows at once as the training
    step would, so that its numbers are the same."""
    how: Any = spec.transport

    def of_part(params: Any, rows: Rows) -> States:
        return States.of(*states_of_rows(params, config, rows, spec.aux_layers), how)

    def run(params: Any, rows: Rows) -> States:
        if spec.accumulate == 1:
            return of_part(params, rows)
        return join_rows(jax.lax.map(lambda part: of_part(params, part), cut_rows(rows, spec.accumulate)))

    return jax.jit(on_mesh(mesh, run), out_shardings=whole(mesh))


def to_bytes(states: States) -> dict[str, np.ndarray]:
    """The arrays by name; those of dtypes that are not NumPy's own as unsigned integers of their size."""
    named = {name: np.asarray(leaf) for name, leaf in vars(states).items() if isinstance(leaf, np.ndarray)}
    return {
        name: leaf if leaf.dtype.isbuiltin else leaf.view(f"u{leaf.dtype.itemsize}") for name, leaf in named.items()
    }


def from_bytes(named: dict[str, np.ndarray], like: States) -> States:
    """The inverse of `to_bytes`, for states of these dtypes."""
    dtypes = {name: leaf.dtype for name, leaf in vars(like).items() if hasattr(leaf, "dtype")}
    arrays: Any = {name: named[name].view(dtype) for name, dtype in dtypes.items()}
    return dataclasses.replace(like, **arrays)


def expected_states(config: ModelConfig, spec: PrefillSpec, shape: tuple[int, ...]) -> States:
    """The shapes and dtypes of the states of rows [batch, seq]."""
    how: Any = spec.transport
    hidden = jax.ShapeDtypeStruct((*shape, config.d_model), jnp.dtype(config.dtype))
    aux = jax.ShapeDtypeStruct((*shape, len(spec.aux_layers) * config.d_model), hidden.dtype)
    return jax.eval_shape(lambda aux, hidden: States.of(aux, hidden, how), aux, hidden)
