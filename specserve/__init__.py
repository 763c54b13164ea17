"""specserve: speculative decoding, trained and served by the same code.

Python programs use `from specserve import LLM, SamplingParams`. Both are imported when they are first used, so that
importing the package stays quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specserve.serve.llm import LLM, RequestOutput
    from specserve.serve.requests.completion import CompletionOutput
    from specserve.serve.requests.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_ROOMS = {
    "LLM": "specserve.serve.llm",
    "CompletionOutput": "specserve.serve.requests.completion",
    "RequestOutput": "specserve.serve.llm",
    "SamplingParams": "specserve.serve.requests.request",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'specserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return __all__
