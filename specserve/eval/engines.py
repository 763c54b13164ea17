"""Two engines over one loaded target, plain and speculative, for measurements that compare them."""

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from specserve.serve.engine import Engine
from specserve.serve.launch import Models, make_engine
from specserve.serve.settings import ServeRun


class EnginePair:
    """A context in which both engines run."""

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
    plain = make_engine(
        models, ServeRun(speculation="off", max_slots=num_slots, max_model_len=max_model_len), on_warmup
    )
    run = ServeRun(speculation=speculation, max_slots=num_slots, max_model_len=max_model_len)
    return EnginePair(plain, make_engine(models, run, on_warmup))
