"""Half of the time that compiling tiny programs takes."""

from typing import Any

import jax

OPTION = "xla_cpu_use_fusion_emitters"


def compile_without_emitters() -> None:
    """Programs that are compiled without LLVM's optimiser are compiled without XLA's newer code generation for fusions
    too, which takes half of their time. JAX has no setting for it that a process can change, hence the private door;
    where that is another one, tests are slower. Nothing here asks for devices, so that a process can still join
    others: the first program that is compiled finds out whether this XLA knows the option."""
    from jax._src import compiler

    make_options = compiler.get_compile_options

    def with_option(*args: Any, **kwargs: Any) -> Any:
        options = make_options(*args, **kwargs)
        if options.executable_build_options.debug_options.xla_backend_optimization_level == 0:
            options.env_option_overrides = [*options.env_option_overrides, (OPTION, False)]
        return options

    def of_first_program(*args: Any, **kwargs: Any) -> Any:
        compiler.get_compile_options = make_options
        compiler.get_compile_options = with_option if _knows_option() else make_options
        return compiler.get_compile_options(*args, **kwargs)

    compiler.get_compile_options = of_first_program


def _knows_option() -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={OPTION: False})
    except jax.errors.JaxRuntimeError:  # a newer XLA has no other code generation
        return False
    return True
