"""Laws of native kernels by all instruction sets that this processor can run, not only the one that it would choose."""

from collections.abc import Iterator

import jax
import pytest

from specserve.kernels import native
from specserve.kernels.native import build

SETS = ["amx", "vnni", "avx512", "avxvnni", "avx2"] if build.machine() == "x86_64" else ["dotprod", "neon"]


@pytest.fixture(scope="module", params=SETS)
def each_instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """What uses this runs by one after the other. Matrices must be packed anew for each."""
    found = native._native()
    if found.library is None or not found.library.specserve_kernels_use(request.param.encode()):
        pytest.skip(f"{request.param}: not an instruction set of this processor that was built")
    yield
    found.library.specserve_kernels_use(found.text.encode())
    jax.clear_caches()  # shapes of packed matrices differ, and those of programs that were traced do not
