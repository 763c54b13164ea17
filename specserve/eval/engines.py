"""Engines for measurements: over models that are loaded once, and without programs that no measurement runs."""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from specserve.serve.engine import Engine
from specserve.serve.launch import Models, make_engine
from specserve.serve.settings import ServeRun


class EnginePair:
    """Plain and speculative, over one loaded target. A context in which both engines run."""

    def __init__(self, plain: Engine, speculative: Engine) -> None:
        self.plain, self.speculative = plain, speculative
        self._stack = ExitStack()

    def __enter__(self) -> "EnginePair":
        self._stack.enter_context(self.plain)
        self._stack.enter_context(self.speculative)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def engine_pair(
    models: Models,
    speculation: str,
    *,
    num_slots: int,
    max_model_len: int,
    on_warmup: Callable[[int, int, str], None] = lambda _done, _total, _name: None,
) -> EnginePair:
    """Compiled and not yet started."""
    plain, speculative = (
        measured_engine(models, each, num_slots=num_slots, max_model_len=max_model_len, on_warmup=on_warmup)
        for each in ("off", speculation)
    )
    return EnginePair(plain, speculative)


def measured_engine(
    models: Models,
    speculation: str,
    *,
    num_slots: int,
    max_model_len: int,
    is_coupled: bool = True,
    on_warmup: Callable[[int, int, str], None] = lambda _done, _total, _name: None,
) -> Engine:
    """Compiled and not yet started, for requests without constraints."""
    run = ServeRun(
        speculation=speculation,
        max_slots=num_slots,
        max_model_len=max_model_len,
        constrained=False,
        early_ready=False,
    )
    return make_engine(models, run, on_warmup, is_coupled=is_coupled)
