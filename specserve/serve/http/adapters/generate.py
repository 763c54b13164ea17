"""SGLang's own POST /generate: its body, which becomes one of completions, and its replies."""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from specserve.errors import RequestError
from specserve.serve.http.openai.bodies import (
    MAX_ID_CHARS,
    Biases,
    CacheSalt,
    Int64,
    Speculation,
    Stops,
    TokenIds,
    as_prompts,
)
from specserve.serve.http.openai.fields import Body, UnsupportedFields
from specserve.serve.http.openai.logprobs import TokenTexts, finite
from specserve.serve.http.openai.replies import Answer, ReplyFormat, Usage, event
from specserve.serve.http.transport.json_codec import Json, ReplyObject
from specserve.serve.requests.request import TokenLogprobs

DEFAULT_NEW_TOKENS = 128  # SGLang's
_LONG = 512  # tokens of an answer; spelling more of them again would hold the event loop


def _check_texts(value: Any) -> Any:
    if not all(isinstance(prompt, str) for prompt in as_prompts(value)):
        raise PydanticCustomError("text", "should be a string or a list of strings")
    return value


def _check_ids(value: Any) -> Any:
    if any(isinstance(prompt, str) for prompt in as_prompts(value)):
        raise PydanticCustomError("ids", "should be a list of token ids or a list of such lists")
    return value


_Texts = Annotated[str | list[str], PlainValidator(_check_texts, json_schema_input_type=str | list[str])]
_Ids = Annotated[
    list[int] | list[list[int]], PlainValidator(_check_ids, json_schema_input_type=list[int] | list[list[int]])
]
_RENAMED = {  # completions' names of sampling_params
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "sampling_seed",
}


class SamplingOptions(Body):
    """The value of `sampling_params`."""

    UNSUPPORTED: ClassVar[UnsupportedFields] = {
        "custom_params": ({},),
        "spaces_between_special_tokens": (True,),
        "stop_regex": ([], ""),
        "stream_interval": (1,),
        "structural_tag": (),
    }

    n: Int64 | None = None
    max_new_tokens: Int64 | None = None
    min_new_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    sampling_seed: Int64 | None = None
    speculation: Speculation | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    def completion_fields(self) -> Json:
        ours = {theirs: name for name, theirs in _RENAMED.items()}
        grammars = {"json": self.json_schema, "regex": self.regex, "grammar": self.ebnf}
        given = {name: text for name, text in grammars.items() if text is not None}
        same = self.model_dump(exclude={"json_schema", "regex", "ebnf"}, exclude_none=True)
        fields: Json = {"max_tokens": DEFAULT_NEW_TOKENS} | {ours.get(name, name): same[name] for name in same}
        return fields | {"structured_outputs": given or None}


class GenerateBody(Body):
    """POST /generate: `text` or `input_ids`, one prompt or a list of them."""

    # fmt: off
    UNSUPPORTED: ClassVar[UnsupportedFields] = {
        "audio_data": ([],), "bootstrap_host": (), "bootstrap_port": (), "bootstrap_room": (),
        "custom_logit_processor": (), "data_parallel_rank": (), "extra_key": (), "image_data": ([], ""),
        "input_embeds": (), "log_metrics": (True,), "modalities": ([],),
        "return_hidden_states": (False,), "return_routed_experts": (False,), "session_params": ({},),
        "token_ids_logprob": ([],), "video_data": ([],),
    }
    # fmt: on

    text: _Texts | None = None
    input_ids: _Ids | None = None
    sampling_params: SamplingOptions = Field(default_factory=SamplingOptions)
    rid: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Annotated[Int64, Field(ge=-1)] = -1  # where those of the prompt begin; -1: none of it
    top_logprobs_num: Int64 = 0
    return_text_in_logprobs: bool = False
    priority: Int64 = 0
    cache_salt: CacheSalt = ""
    learn: bool = True
    """As of /v1/completions."""
    lora_path: str | None = None  # the name of a LoRA adapter that is loaded

    @property
    def may_learn(self) -> bool:
        """Return whether a draft head may learn from the answers."""
        return self.learn and not self.cache_salt

    @property
    def is_batch(self) -> bool:
        """Return whether the reply is a list of answers."""
        one_each = isinstance(self.text, str) if self.input_ids is None else isinstance(self.input_ids[0], int)
        return not one_each or self.sampling_params.n not in (None, 1)

    def completion_fields(self) -> Json:
        """Return this body as the fields of a CompletionBody. Raises RequestError."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("send either text or input_ids", param="text")
        fields = {
            "prompt": self.input_ids if self.text is None else self.text,
            "stream": self.stream,
            "return_token_ids": True,
            "request_id": self.rid,
            "model": self.lora_path or None,
        }
        if self.return_logprob:
            fields["logprobs"] = self.top_logprobs_num
            if self.logprob_start_len >= 0:
                fields["prompt_logprobs"] = self.top_logprobs_num
        return self.sampling_params.completion_fields() | fields

    def reword(self, error: RequestError) -> RequestError:
        """Return an error of the completions body under the name that the client sent."""
        whole = error.param or ""
        name = whole.partition("[")[0].partition(".")[0]
        options = self.sampling_params
        if name == "prompt":
            ours = "text" if self.input_ids is None else "input_ids"
        elif name in ("logprobs", "prompt_logprobs"):
            ours = "top_logprobs_num"
        elif name == "model":
            return type(error)(str(error), param="lora_path")
        elif name == "structured_outputs":
            grammar = next(each for each in ("json_schema", "regex", "ebnf") if getattr(options, each) is not None)
            ours = f"sampling_params.{grammar}"
        elif _RENAMED.get(name, name) in SamplingOptions.model_fields:
            ours = f"sampling_params.{_RENAMED.get(name, name)}"
        else:
            return error
        return RequestError(str(error).replace(whole, name).replace(name, ours.rpartition(".")[2]), param=ours)


# --- replies: every answer is an object, in a stream with all that has come so far ---

Row = list[float | int | str | None]  # log-probability, token id, text


class GenerateMeta(ReplyObject):
    """Facts about one answer. The last four are there where log-probabilities were asked for."""

    id: str
    finish_reason: Json | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: NotRequired[int]
    spec_verify_ct: NotRequired[int]
    e2e_latency: NotRequired[float]
    weight_version: NotRequired[str]
    output_token_logprobs: NotRequired[list[Row]]
    output_top_logprobs: NotRequired[list[list[Row] | None]]
    input_token_logprobs: NotRequired[list[Row]]
    input_top_logprobs: NotRequired[list[list[Row] | None]]


class Generated(ReplyObject):
    """POST /generate: one answer, in a stream with all that has come so far; `index` of a batch's stream."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: NotRequired[int]


@dataclass
class _Output:
    """The content of one answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class GenerateFormat(ReplyFormat):
    """Spells the answers to one body of /generate."""

    can_abort = True

    def __init__(self, body: GenerateBody, texts: TokenTexts) -> None:
        self._body = body
        self._texts = texts
        self._id = body.rid or uuid.uuid4().hex
        self._start_time = time.monotonic()
        self._outputs: dict[int, _Output] = {}
        self.is_long = body.return_logprob  # every event has all of its answer

    def reply(self, answers: Sequence[Answer], usage: Usage) -> Any:  # noqa: ARG002
        spelled = [self._spell(answer) for answer in answers]
        return spelled if self._body.is_batch else spelled[0]

    def piece(self, answer: Answer, usage: Callable[[], Usage]) -> Iterable[bytes]:  # noqa: ARG002
        generated = self._spell(answer)
        if self._body.is_batch:
            generated["index"] = answer.index
        yield event(generated, is_long=self.is_long)

    def _spell(self, answer: Answer) -> Generated:
        output = self._outputs.setdefault(answer.index, _Output())
        output.text += answer.part.content
        output.token_ids += answer.token_ids
        output.logprobs += answer.logprobs
        self.is_long = self.is_long or len(output.token_ids) >= _LONG
        meta: GenerateMeta = {
            "id": self._id if not self._body.is_batch else f"{self._id}-{answer.index}",
            "finish_reason": _finish_reason(answer, output),
            "prompt_tokens": len(answer.prompt_ids),
            "completion_tokens": len(output.token_ids),
        }
        if answer.stats is not None:
            meta["cached_tokens"] = answer.stats.num_cached_tokens
            meta["spec_verify_ct"] = answer.stats.num_steps
            meta["e2e_latency"] = time.monotonic() - self._start_time
            meta["weight_version"] = answer.stats.version
        if self._body.return_logprob:
            meta["output_token_logprobs"] = self._rows(output.logprobs)
            if self._body.top_logprobs_num:
                meta["output_top_logprobs"] = self._top_rows(output.logprobs)
        if self._body.return_logprob and answer.prompt:
            items = [token.logprobs or TokenLogprobs(token.token_id, 0.0, ()) for token in answer.prompt]
            items = items[self._body.logprob_start_len :]
            meta["input_token_logprobs"] = rows = self._rows(items)
            if self._body.logprob_start_len == 0 and rows:  # the first token of the prompt has none
                rows[0][0] = None
            if self._body.top_logprobs_num:
                meta["input_top_logprobs"] = self._top_rows(items)
        return {"text": output.text, "output_ids": list(output.token_ids), "meta_info": meta}

    def _rows(self, items: Sequence[TokenLogprobs]) -> list[Row]:
        return [self._row(item.token_id, item.logprob) for item in items]

    def _top_rows(self, items: Sequence[TokenLogprobs]) -> list[list[Row] | None]:
        return [[self._row(*top) for top in item.top] or None for item in items]

    def _row(self, token_id: int, logprob: float) -> Row:
        return [finite(logprob), token_id, self._texts[token_id] if self._body.return_text_in_logprobs else None]


def _finish_reason(answer: Answer, output: _Output) -> Json | None:
    if answer.finish_reason is None:
        return None
    if answer.finish_reason == "length":
        return {"type": "length", "length": len(output.token_ids)}
    if answer.finish_reason == "abort":
        return {"type": "abort", "message": "the server's operator has ended it"}
    last = output.token_ids[-1] if output.token_ids else None
    return {"type": "stop", "matched": last if answer.stop_reason is None else answer.stop_reason}
