"""The errors that a user can cause. A message says what is wrong, where, what was expected, what was got, and
the fix."""


class SpecServeError(Exception):
    """The base of all errors that are raised on purpose. The CLI prints such an error as one line, without a
    traceback."""

    param: str | None = None  # the field of a request that it is about, where there is one


class ConfigError(SpecServeError):
    """A setting, flag, YAML key or model config that cannot be used."""


class CheckpointError(SpecServeError):
    """Weights on disk that are missing, extra, truncated, of another shape, or of another model."""


class DataError(SpecServeError):
    """Training or evaluation data that cannot be read."""


class RequestError(SpecServeError):
    """A request that can never be served as it stands (HTTP 400). `param` names the field, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(SpecServeError):
    """A request that cannot be served now (HTTP 503): the queue is full or the engine is stopping."""


def as_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class where it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def first_line(error: Exception) -> str:
    """Return the class and the first line of another library's error, for a message in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
