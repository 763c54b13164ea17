"""The body of SGLang's own POST /generate, and how it becomes one of completions."""

from typing import Annotated, Any, ClassVar

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
from specserve.serve.http.openai.fields import Body, Neutral

Json = dict[str, Any]
DEFAULT_NEW_TOKENS = 128  # SGLang's


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
    list[int] | list[list[int]],
    PlainValidator(_check_ids, json_schema_input_type=list[int] | list[list[int]]),
]
_RENAMED = {  # completions' names of sampling_params
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "sampling_seed",
}


class SamplingOptions(Body):
    """The value of `sampling_params`."""

    UNSUPPORTED: ClassVar[Neutral] = {
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
        return fields | ({"structured_outputs": given} if given else {})


class GenerateBody(Body):
    """POST /generate: `text` or `input_ids`, one prompt or a list of them."""

    UNSUPPORTED: ClassVar[Neutral] = {
        "audio_data": ([],),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "custom_logit_processor": (),
        "data_parallel_rank": (),
        "extra_key": (),
        "image_data": ([], ""),
        "input_embeds": (),
        "log_metrics": (True,),
        "lora_path": ("",),
        "modalities": ([],),
        "return_hidden_states": (False,),
        "return_routed_experts": (False,),
        "session_params": ({},),
        "token_ids_logprob": ([],),
        "video_data": ([],),
    }

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
        elif name == "structured_outputs":
            grammar = next(each for each in ("json_schema", "regex", "ebnf") if getattr(options, each) is not None)
            ours = f"sampling_params.{grammar}"
        elif _RENAMED.get(name, name) in SamplingOptions.model_fields:
            ours = f"sampling_params.{_RENAMED.get(name, name)}"
        else:
            return error
        return RequestError(str(error).replace(whole, name).replace(name, ours.rpartition(".")[2]), param=ours)
