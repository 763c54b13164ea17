"""Tiny programs compile in less than half of XLA's time, and are kept for the tests that compile the same."""

import contextlib
from pathlib import Path
from typing import Any

import jax

OPTIONS = {
    "xla_cpu_use_fusion_emitters": False,  # XLA's newer code generation for fusions takes half of the time
    "xla_cpu_parallel_codegen_split_count": 1,  # in 32 modules for as many threads, a program takes a third more
}
LARGEST_BYTES = 2**30  # of kept programs


def compile_quickly() -> None:
    """Compile programs that have no use of LLVM's optimiser without what only pays where programs run for long. JAX has
    no settings for it that a process can change, hence the private door; where that is another one, tests are slower.
    Nothing here asks for devices, so that a process can still join others: the first program that is compiled finds
    out whether this XLA knows the options."""
    from jax._src import compiler

    make_options = compiler.get_compile_options

    def with_options(*args: Any, **kwargs: Any) -> Any:
        options = make_options(*args, **kwargs)
        if options.executable_build_options.debug_options.xla_backend_optimization_level == 0:
            options.env_option_overrides = [*options.env_option_overrides, *OPTIONS.items()]
        return options

    def of_first_program(*args: Any, **kwargs: Any) -> Any:
        compiler.get_compile_options = make_options
        compiler.get_compile_options = with_options if _knows_options() else make_options
        return compiler.get_compile_options(*args, **kwargs)

    compiler.get_compile_options = of_first_program


def _knows_options() -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=OPTIONS)
    except jax.errors.JaxRuntimeError:  # a newer XLA has no other code generation
        return False
    return True


def keep_compiled(folder: Path, *, is_first: bool) -> None:
    """Keep programs in JAX's cache in this folder. The first process of a test run makes room there. JAX would look for
    room, and read every file's time of use, whenever a program is added: a tenth of a second among a thousand."""
    with contextlib.suppress(ImportError, AttributeError):  # without that private part, tests are only slower
        from jax._src.lru_cache import LRUCache

        if is_first:
            LRUCache(str(folder), max_size=LARGEST_BYTES)._evict_if_needed()
        LRUCache._evict_if_needed = lambda self, **_sizes: None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", LARGEST_BYTES)  # with a size, processes wait for each other
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
