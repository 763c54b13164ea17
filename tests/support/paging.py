"""Pages for tests of attention: in both layouts, and with whatever attends to them."""

import contextlib
import functools
import re
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from specserve.kernels import paged, paged_gpu, reference
from specserve.kernels.attention import attend
from specserve.kernels.paged import PagedPrefix, PagesKernel
from specserve.kernels.pages import Layout, Pages

TRITON = "__gpu$xla.gpu.triton"  # the custom call that XLA compiles with Triton


def make_prefix(
    k: Any,  # [page, kv_head, page_size, head_dim]
    v: Any | None,  # [page, kv_head, page_size, v_dim]
    table: Any,
    lens: Any,
    first: int = 0,
    *,
    layout: Layout = "columns",
    is_exact: bool = False,
    k_scale: Any | None = None,  # [page, kv_head, page_size]
    v_scale: Any | None = None,
) -> PagedPrefix:
    k, v_first = np.asarray(k), 0
    if layout == "joined" and v is not None:
        k, v, v_first = np.concatenate([k, v], axis=-1), None, k.shape[-1]
    elif layout == "columns":
        k = k.swapaxes(2, 3)
    given = (None if x is None else jnp.asarray(x) for x in (k, v, k_scale, v_scale))
    pages = Pages(*given, layout, v_first=v_first)
    return PagedPrefix(pages, jnp.asarray(table, jnp.int32), jnp.asarray(lens, jnp.int32), first, is_exact)


def as_stored(x: np.ndarray, stored: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Numbers as pages of this dtype keep them, their scales, and what both stand for."""
    if stored in ("float32", "bfloat16"):
        kept = x.astype(stored)
        return kept, None, kept.astype(np.float32)
    kept, scale = reference.quantize(x, np.dtype(stored))
    return kept, scale, reference.dequantize(kept, scale)


def in_floats(tree: Any) -> Any:
    """The same numbers, those of bfloat16 in float32: rounding moves float32 numbers alone (`rounding.tolerance`)."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def attend_by_kernel(*args: Any, **kwargs: Any) -> jax.Array:
    """`attend` as it runs on an accelerator: compiled there, and on a CPU as on a GPU, interpreted."""
    if jax.default_backend() != "cpu":
        return attend(*args, **kwargs)

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        return paged_gpu.attend_pages(*args, **kwargs, interpret=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "kernel_for", lambda pages: PagesKernel(interpreted, takes_new=True))
        return attend(*args, **kwargs)


def lower_for_cuda(function: Any, *args: Any) -> str:
    """The module that JAX lowers a function to for an NVIDIA GPU, which this machine need not have."""
    allowed = [jax.export.DisabledSafetyCheck.custom_call(TRITON)]
    with _pretended_gpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        # a function object of its own: what JAX traced for this machine must not be found again
        jitted = jax.jit(lambda *args: function(*args))
        return jax.export.export(jitted, platforms=["cuda"], disabled_checks=allowed)(*args).mlir_module()


def kernel_calls(module: str) -> int:
    """The calls of kernels in one run of such a module, whose functions layers may share. No loop is in it."""
    bodies = dict(re.findall(r"func\.func \w+ @([\w.]+)\((.*?)\n  }", module, flags=re.DOTALL))

    @functools.cache
    def of(name: str) -> int:
        called = re.findall(r"\bcall @([\w.]+)\(", bodies[name])
        return bodies[name].count(TRITON) + sum(map(of, called))

    return of("main")


@contextlib.contextmanager
def _pretended_gpu() -> Iterator[None]:
    """What is traced takes the default backend to be a GPU. JAX lowers Pallas for the GPU that it finds, and in newer
    versions needs a description of one where there is none."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(jax, "default_backend", lambda: "gpu")
        if jax.__version_info__ >= (0, 12):
            device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
            mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def as_rows(pages: Pages) -> tuple[np.ndarray, np.ndarray | None]:
    """Keys and values of pages, [page, kv_head, page_size, dim] each. The values are None where they are keys."""
    k, v = np.asarray(pages.k), None if pages.v is None else np.asarray(pages.v)
    if pages.v_first:
        return k[..., : pages.v_first], k[..., pages.v_first :]
    return k.swapaxes(2, 3) if pages.layout == "columns" else k, v
