"""Law 1 as clients see it: whatever a request asks of whichever route, its reply is the same with and without
speculation, whole and streamed; and what must follow a schema does."""

import concurrent.futures
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from option_matrix import CHAT, COMPLETIONS, REFUSED, ROUTES, Ask, asks, said

from specserve.checkpoints.load import Target
from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.kernels import native
from specserve.serve.engine.engine import Engine
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.is_available(), reason="a row's bits depend on the batch without the native kernels"),
]

NUM_REQUESTS = 60
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>{% elif enable_thinking is defined %}<think></think>{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def http(pydoc_target: Target, pydoc_head: Head) -> Iterator[httpx.Client]:
    import transformers

    backend = transformers.PreTrainedTokenizerFast.from_pretrained(str(BUNDLED_FOLDER))
    backend.chat_template = TEMPLATE
    tree = parse_speculation("tree:3x3x8")
    sizes = {"num_slots": 4, "max_model_len": 512, "page_size": 16, "num_pages": 4 * 32}
    runner = Runner(pydoc_target, pydoc_head, make_shapes([tree], pydoc_target.config, **sizes))
    with Engine(
        runner, Tokenizer(backend, pydoc_target.eos_ids), model_name="m", eos_ids=pydoc_target.eos_ids
    ) as engine:
        server = HttpServer(create_app(engine), port=0)
        server.start()
        with httpx.Client(base_url=server.url, timeout=600) as client:
            yield client
        server.stop()


def test_no_option_of_a_request_tells_whether_there_is_speculation(http: httpx.Client) -> None:
    """Nor does a stream: each reply comes whole or streamed, with speculation and without."""
    asked, rng = list(asks(NUM_REQUESTS, seed=11)), random.Random(3)
    replies = {}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for way in ("off", "auto"):
            bodies = [ask.spelled(way, stream=rng.random() < 0.5) for ask in asked]
            replies[way] = list(pool.map(lambda ask, body: http.post(ask.path, json=body), asked, bodies))
    num_structured = num_refused = num_accepted = 0
    seen = set()
    for ask, plain, speculative in zip(asked, replies["off"], replies["auto"], strict=True):
        found, media_type = said(ask.path, speculative), speculative.headers["content-type"].partition(";")[0]
        assert found == said(ask.path, plain), (ask.path, ask.body)
        seen.add((ask.path, media_type))
        num_refused += found == REFUSED
        if ask.path in (COMPLETIONS, CHAT) and found != REFUSED:
            num_structured += sum(_follows(ask, each) for each in found.values())
            if ask.has_grammar and media_type == "application/json":
                details = speculative.json()["usage"]["completion_tokens_details"]
                num_accepted += details["accepted_prediction_tokens"]
    assert len(seen) == 2 * len(ROUTES)
    assert num_refused < NUM_REQUESTS // 4
    assert num_accepted > 20, "grammars were hardly met by drafts"
    assert num_structured > 3


def _follows(ask: Ask, answer: dict[str, Any]) -> bool:
    """Whether an answer that ended by itself had to be JSON, which it then is."""
    reason, cause = answer["end"]
    for _, arguments in answer["calls"] if reason == "tool_calls" else ():
        json.loads(arguments)
    is_json = ask.kind in ("schema", "object") and reason == "stop" and cause is None
    if is_json:
        json.loads(answer["text"].removeprefix(ask.body["prompt"] if ask.body.get("echo") else ""))
    return is_json or reason == "tool_calls"
