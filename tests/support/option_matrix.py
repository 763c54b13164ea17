"""Requests at random over all routes that generate, each with some of all options; and what their replies say, whole or
streamed, in one form."""

import itertools
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from described import check_events

from specserve.serve.http.adapters.generate import SamplingOptions

Json = dict[str, Any]

COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE = ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/generate",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
REGEX = r"(def|class) [a-z_]{2,20}\(.{0,30}\)"
LARK = 'start: "def " NAME "(" NAME (", " NAME)* ")"\nNAME: /[a-z_]{1,12}/'
CHOICES = ["os.path.join", "json.dumps", "json.loads"]
NAMED: Json = {"name": "x", "schema": SCHEMA}
SPELLINGS: dict[str, list[Json]] = {  # of what an answer must be
    "": [{}],
    "schema": [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    "object": [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
    "regex": [{"guided_regex": REGEX}, {"structured_outputs": {"regex": REGEX}}],
    "choice": [{"guided_choice": CHOICES}, {"structured_outputs": {"choice": CHOICES}}],
    "grammar": [{"guided_grammar": LARK}, {"structured_outputs": {"grammar": LARK}}],
}
OWN: dict[tuple[str, str], Json] = {  # where a route has another name
    (RESPONSES, "schema"): {"text": {"format": {"type": "json_schema"} | NAMED}},
    (MESSAGES, "schema"): {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    (GENERATE, "schema"): {"json_schema": json.dumps(SCHEMA)},
    (GENERATE, "regex"): {"regex": REGEX},
    (GENERATE, "grammar"): {"ebnf": LARK},
}
CALLS = ("may call", "must call", "must call look_up")  # of tools, which the routes of chat have
KINDS = {
    COMPLETIONS: [*SPELLINGS],
    CHAT: [*SPELLINGS, *CALLS],
    RESPONSES: [*SPELLINGS, *CALLS],
    MESSAGES: ["", "schema", "regex", *CALLS],
    GENERATE: ["", "schema", "regex", "grammar"],
}
OPTIONS: list[Json] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.02},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logit_bias": {"300": 2.5, "40": -100}, "bad_words": ["return", " the"]},
    {"stop": [".", "return"], "include_stop_str_in_output": True},
    {"min_tokens": 6},
    {"n": 2},
    {"skip_special_tokens": False, "return_token_ids": True},
    {"allowed_token_ids": [*range(3, 900)]},
    {"stop_token_ids": [*range(40, 80)], "min_tokens": 2},
    {"ignore_eos": True},
    {"truncate_prompt_tokens": 7},
]
OF_ONE_ANSWER = ("n", "return_token_ids")  # the dialects of chat lack them
THOUGHTS: dict[str, list[Json]] = {
    CHAT: [{"reasoning_effort": "high"}, {"reasoning_effort": "high", "include_reasoning": False}],
    RESPONSES: [{"reasoning": {"effort": "high"}}],
    MESSAGES: [{"thinking": {"type": "adaptive"}}],
}
REPORTED: dict[str, list[Json]] = {
    COMPLETIONS: [{}, {"echo": True}, {"echo": True, "logprobs": 1}],
    CHAT: [{}, {"logprobs": True, "top_logprobs": 2}],
    RESPONSES: [{}, {"top_logprobs": 2}],
}
QUESTIONS = ["What does `os.path.join` do?", "Write the function `json.dumps`.", "Describe `list.sort` in a word."]
_GENERATES = {"min_tokens": "min_new_tokens", "seed": "sampling_seed", "include_stop_str_in_output": "no_stop_trim"}
_GENERATES |= {"max_tokens": "max_new_tokens"}


@dataclass(frozen=True)
class Ask:
    """A request, without how it is to be spoken to: streamed or not, with speculation or without."""

    path: str
    body: Json
    kind: str  # of the answer

    @property
    def has_grammar(self) -> bool:
        return self.kind not in ("", "may call")

    def spelled(self, speculation: str, *, stream: bool) -> Json:
        said: Json = {"speculation": speculation}
        if self.path == GENERATE:
            said = {"sampling_params": self.body["sampling_params"] | said}
        return self.body | said | {"stream": stream}


def asks(number: int, seed: int) -> Iterator[Ask]:
    """Give so many requests, each route in turn."""
    rng = random.Random(seed)
    for i, path in enumerate(itertools.islice(itertools.cycle(ROUTES), number)):
        kind = rng.choice(KINDS[path])
        options: Json = {"seed": i, "max_tokens": 40}
        for each in rng.sample(OPTIONS, rng.randint(1, 4)):
            options |= each
        if kind not in ("", "may call"):
            options.pop("ignore_eos", None)  # nothing may follow the end of a grammar
        said = OWN.get((path, kind)) if rng.random() < 0.5 or path == GENERATE else None
        said = _tools(path, kind) if kind in CALLS else said or rng.choice(SPELLINGS[kind])
        said = said | rng.choice(REPORTED.get(path, [{}]))
        if rng.random() < 0.3:
            said |= rng.choice(THOUGHTS.get(path, [{}]))
        yield Ask(path, _body(path, options, said, rng.choice(QUESTIONS)), kind)


def _tools(path: str, kind: str) -> Json:
    functions: Json = {"look_up": SCHEMA, "stop": {"type": "object", "properties": {}}}
    if path == MESSAGES:
        choice: Any = {"must call": {"type": "any"}, "may call": {"type": "auto"}}.get(kind)
        tools = [{"name": name, "input_schema": schema} for name, schema in functions.items()]
        return {"tools": tools, "tool_choice": choice or {"type": "tool", "name": "look_up"}}
    each = [{"name": name, "parameters": schema} for name, schema in functions.items()]
    named: Json = {"name": "look_up"}
    if path == RESPONSES:
        tools, named = [{"type": "function"} | one for one in each], {"type": "function"} | named
    else:
        tools, named = [{"type": "function", "function": one} for one in each], {"type": "function", "function": named}
    choice = {"must call": "required", "may call": "auto"}.get(kind, named)
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


def _body(path: str, options: Json, said: Json, question: str) -> Json:
    if path == COMPLETIONS:
        return options | said | {"prompt": question}
    if path == CHAT:
        return options | said | {"messages": [{"role": "user", "content": question}]}
    if path == GENERATE:
        ours = {_GENERATES.get(name, name): value for name, value in options.items()}
        known = {name: value for name, value in ours.items() if name in SamplingOptions.model_fields}
        return {"text": question, "sampling_params": known | said}
    own = {name: value for name, value in options.items() if name not in OF_ONE_ANSWER} | said
    if path == MESSAGES:
        return own | {"messages": [{"role": "user", "content": question}]}
    own["max_output_tokens"] = own.pop("max_tokens")
    return own | {"input": question}


# --- what replies say ------------------------------------------------------------------------------------------------

REFUSED = "refused"  # where options and grammar together leave no token


def said(path: str, reply: httpx.Response) -> Any:
    """What a reply says, without what is drawn for each, and without numbers that programs may round differently."""
    if reply.headers["content-type"].startswith("text/event-stream"):
        bodies = check_events(path, reply.text)
    else:
        bodies = [reply.json()]
    for body in bodies:
        error = body.get("error") or (body.get("response") or {}).get("error") if isinstance(body, dict) else None
        if error:
            assert "ban every token" in error["message"], error
            return REFUSED
    assert reply.status_code == 200, reply.text
    if path == RESPONSES:
        return _of_response(bodies)
    if path == MESSAGES:
        return _of_message(bodies)
    return _of_generated(bodies) if path == GENERATE else _of_choices(bodies)


def _of_choices(bodies: Sequence[Json]) -> Any:
    found: dict[int, Json] = defaultdict(lambda: {"text": "", "reasoning": "", "calls": [], "ids": []})
    for choice in itertools.chain.from_iterable(body["choices"] for body in bodies):
        one, part = found[choice["index"]], choice.get("message", choice.get("delta", choice))
        one["text"] += part.get("text") or part.get("content") or ""
        one["reasoning"] += part.get("reasoning_content", "")
        one["ids"] += choice.get("token_ids", [])
        one["end"] = choice["finish_reason"], choice["stop_reason"]
        for call in part.get("tool_calls", ()):
            if "name" in call["function"]:
                one["calls"].append([call["function"]["name"], ""])
            one["calls"][call.get("index", -1)][1] += call["function"]["arguments"]
    return dict(found)


def _of_response(bodies: Sequence[Json]) -> Any:
    whole = bodies[-1].get("response", bodies[-1])
    items = [{name: each for name, each in item.items() if name not in ("id", "call_id")} for item in whole["output"]]
    for item in items:
        for part in item.get("content", ()):
            part.pop("logprobs", None)
    if len(bodies) > 1:
        deltas = "".join(body["delta"] for body in bodies if body["type"] == "response.output_text.delta")
        assert deltas == "".join(
            part["text"] for item in items if item["type"] == "message" for part in item["content"]
        )
    return items, whole["status"], whole["incomplete_details"]


def _of_message(bodies: Sequence[Json]) -> Any:
    if len(bodies) == 1:
        blocks, end = bodies[0]["content"], bodies[0]
    else:
        blocks, end = [], next(body["delta"] for body in bodies if body["type"] == "message_delta")
        for body in bodies:
            if body["type"] == "content_block_start":
                blocks.append(body["content_block"] | ({"input": ""} if "input" in body["content_block"] else {}))
            elif body["type"] == "content_block_delta":
                [(name, piece)] = [item for item in body["delta"].items() if item[0] != "type"]
                blocks[body["index"]][{"partial_json": "input"}.get(name, name)] += piece
    found = []
    for block in blocks:
        written = block.get("input")
        if isinstance(written, str):
            try:
                block["input"] = json.loads(written or "{}")
            except ValueError:  # cut by a length
                block["input"] = {"text": written}
        found.append({name: each for name, each in block.items() if name != "id"})
    return found, end["stop_reason"], end["stop_sequence"]


def _of_generated(bodies: Sequence[Any]) -> Any:
    found: Json = {}
    for number, each in enumerate(bodies[0] if isinstance(bodies[0], list) else bodies):
        is_event = not isinstance(bodies[0], list)
        meta = each["meta_info"]
        index = each.get("index", 0) if is_event else number
        found[index] = each["text"], each["output_ids"], meta["finish_reason"]
    return found
