"""The common part of the bodies of other APIs than OpenAI's chat: each is translated into the fields of a chat
body."""

from collections.abc import Mapping
from typing import Any, ClassVar

from specserve.errors import RequestError
from specserve.serve.http.openai.bodies import ChatBody, SamplingBody
from specserve.serve.http.openai.fields import No, One

Json = dict[str, Any]


class DialectBody(SamplingBody):
    """A body with one answer, which takes chat's options beside the fields of its own API. `RENAMED` has chat's names
    of what it calls by another name."""

    RENAMED: ClassVar[Mapping[str, str]] = {}

    n: One = 1  # type: ignore[assignment]
    best_of: One | None = None  # type: ignore[assignment]
    return_tokens_as_token_ids: No = False  # type: ignore[assignment]
    return_token_ids: No = False  # type: ignore[assignment]
    return_draft_depths: No = False  # type: ignore[assignment]
    return_tree: No = False  # type: ignore[assignment]
    prompt_logprobs: None = None  # type: ignore[assignment]

    @property
    def thinks(self) -> bool | None:
        """Return whether the model is to reason; None leaves it to the chat template."""
        return None

    def chat_fields(self) -> Json:
        """Return this body as the fields of a ChatBody. Raises RequestError."""
        raise NotImplementedError

    def shared_fields(self) -> Json:
        """Return the fields that have chat's name and meaning."""
        shared = self.model_fields_set & SamplingBody.model_fields.keys() - {"stream_options", "max_tokens"}
        return {name: getattr(self, name) for name in shared & ChatBody.model_fields.keys()}

    def reword(self, error: RequestError) -> RequestError:
        field, dot, rest = (error.param or "").partition(".")
        name, bracket, index = field.partition("[")
        ours = self.RENAMED.get(name)
        if ours is None:
            return error
        if name == "messages":  # their numbers are not those of what was sent
            return RequestError(f"{ours} cannot be served as a chat: {error}", param=ours)
        param = ours + bracket + index + dot + rest
        return RequestError(str(error).replace(error.param or name, param).replace(name, ours), param=param)


class Tagged:
    """The names of the alternatives in a list of objects, which error messages leave out of the path."""

    @staticmethod
    def tag(kind: str) -> str:
        return f"<{kind}>"

    @staticmethod
    def of(value: Any, default: str = "") -> str:
        """The tag of an object by its `type`."""
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return Tagged.tag(str(default if kind is None else kind))
