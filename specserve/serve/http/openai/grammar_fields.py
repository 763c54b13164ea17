"""The fields of a body that say what an answer must be: OpenAI's `response_format`, vLLM's `structured_outputs` and its
older `guided_*`."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from specserve.errors import RequestError
from specserve.serve.http.openai.fields import Body, No
from specserve.serve.requests.request import GrammarSpec

MAX_CHOICES = 10_000


def _as_schema(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str):
        return value
    raise PydanticCustomError("schema", "should be a JSON schema, as an object or as its text")


Schema = Annotated[str, PlainValidator(_as_schema, json_schema_input_type=dict[str, Any] | str)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class JsonSchema(Body):
    """The value of `response_format.json_schema`. A schema always holds, whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """The value of `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """The value of `structured_outputs`: exactly one of the five kinds."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # of vLLM's backends: only at the values that change nothing here
    disable_any_whitespace: No | None = None
    whitespace_pattern: None = None
    structural_tag: None = None
    disable_fallback: bool | None = None
    disable_additional_properties: No | None = None


class GrammarFields(Body):
    """The fields for structured output, for all bodies that generate. At most one of them may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def grammar(self) -> GrammarSpec | None:
        """The grammar that the answers must follow. Raises RequestError."""
        found = self._grammars()
        if len(found) > 1:
            *_, last = found
            raise RequestError(f"{' and '.join(found)} each say what the answer must be; send one", param=last)
        return next(iter(found.values()), None)

    @property
    def grammar_field(self) -> str:
        """The field that `grammar` comes from."""
        return next(iter(self._grammars()), "response_format")

    def _grammars(self) -> dict[str, GrammarSpec]:
        """Return the grammars that are asked for, each by the field that asks for it."""
        asked: dict[str, GrammarSpec | None] = {
            "response_format": _of_format(self.response_format),
            "guided_json": _text("json_schema", self.guided_json),
            "guided_regex": _text("regex", self.guided_regex),
            "guided_choice": _text("choice", self.guided_choice),
            "guided_grammar": _text("lark", self.guided_grammar),
        }
        if (own := self.structured_outputs) is not None:
            asked |= {
                "structured_outputs.json": _text("json_schema", own.json_),
                "structured_outputs.regex": _text("regex", own.regex),
                "structured_outputs.choice": _text("choice", own.choice),
                "structured_outputs.grammar": _text("lark", own.grammar),
                "structured_outputs.json_object": _ANY_OBJECT if own.json_object else None,
            }
        return {name: spec for name, spec in asked.items() if spec is not None}


_ANY_OBJECT = GrammarSpec("json_schema", '{"type": "object"}')


def _of_format(response_format: ResponseFormat | None) -> GrammarSpec | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return _ANY_OBJECT
    if response_format.json_schema is None:
        raise RequestError("response_format.json_schema is required with this type", param="response_format")
    return GrammarSpec("json_schema", json.dumps(response_format.json_schema.schema_))


def _text(kind: Literal["json_schema", "regex", "lark", "choice"], text: str | list[str] | None) -> GrammarSpec | None:
    if text is None:
        return None
    return GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text))
