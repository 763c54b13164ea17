"""Devices of several processes wait for each other where these do not dispatch the same programs in the same order."""

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import dispatches
import httpx
import numpy as np
import pytest
import tiny
from engines import PATIENCE, VOCAB
from served import SCRIPT, write_folder
from several import Several

from specserve.checkpoints.load import Target
from specserve.interop.head import save_head
from specserve.speculative.program import Kind

SERVERS: dict[str, tuple[str, ...]] = {  # by how each speculates: the ways that are set by hand, one after another
    "auto": ("auto", "off", "head+suffix:3", "tree:4x2x7"),
    "tree:4x2x7": ("tree:4x2x7",),  # without a choice all steps with grammars are proposed first
}
SIZES = {"--max-slots": 4, "--max-model-len": 96, "--page-size": 16, "--cache-tokens": 224, "--prefill-tokens": 32}
OF_GRAMMARS = {"proposal", "verification"}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logit_bias": {"7": 3.0}, "bad_words": ["a"], "min_tokens": 6},
    {"structured_outputs": {"regex": "[a-f]{9,30}"}},
    {"prompt_logprobs": 1, "max_tokens": 3},
    {"stop_token_ids": [*range(20, 30)], "min_tokens": 4, "n": 2},
    {"allowed_token_ids": [*range(3, 40)], "speculation": "off"},
    {"stop": ["b"], "speculation": 1},
]


def _ask(url: str, body: dict[str, Any], is_cut: bool) -> None:
    if is_cut:  # gone after a few tokens
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=PATIENCE) as reply:
            next(reply.iter_lines())
    else:
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text


def _storm(url: str, rng: np.random.Generator) -> None:
    """Requests at once with every option, prompts of up to several chunks, of which some begin alike, and clients that
    go away."""
    common = rng.integers(3, VOCAB, 30).tolist()
    bodies = []
    for seed, options in enumerate(OPTIONS * 2):
        prompt = rng.integers(3, VOCAB, int(rng.integers(1, 50))).tolist()
        bodies.append({"prompt": common + prompt[:9] if seed % 2 else prompt, "seed": seed, "max_tokens": 40} | options)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(_ask, url, body, i % 5 == 4) for i, body in enumerate(bodies)]
    for each in running:
        each.result()


@pytest.mark.slow
@pytest.mark.parametrize("speculation", SERVERS)
def test_all_processes_dispatch_the_same_programs_in_the_same_order(
    speculation: str, shallow_target: Target, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of servers that have done all that they can: every way to speculate, set by hand and chosen by what steps cost,
    every option, grammars, prefixes that are found, sequences that are preempted, requests that go away, a cache that
    is flushed; with prompts side by side and beside steps, as accelerators have them. Each process has sequences of its
    own."""
    folder, head = write_folder(shallow_target, tmp_path / "target"), tmp_path / "head"
    save_head(head, tiny.random_head(shallow_target.config, seed=1), shallow_target, dtype="float32", notes={})
    monkeypatch.setenv(dispatches.FOLDER, str(tmp_path))
    flags = ["--draft", str(head), "--speculation", speculation, "--constrained", "--allow-load-draft"]
    flags += itertools.chain.from_iterable((name, str(size)) for name, size in SIZES.items())
    script = f"import dispatches; dispatches.write_down(); dispatches.mix(); {SCRIPT}"
    with Several(folder, tmp_path / "cache", mesh="data=2", more=flags, script=script) as two:
        two.wait_until_ready()
        for way in SERVERS[speculation]:
            reply = httpx.post(f"{two.url}/v1/speculation", json={"speculation": way}, timeout=PATIENCE)
            assert reply.status_code == 200, reply.text
            _storm(two.url, rng)
            httpx.post(f"{two.url}/flush_cache", timeout=PATIENCE)
        swap = httpx.post(f"{two.url}/v1/load_draft", json={"draft": str(head)}, timeout=PATIENCE)
        assert swap.status_code == 400, "the other process has no other head"
        metrics = httpx.get(two.url + "/metrics", timeout=PATIENCE).text
        two.processes[1].terminate()
        assert [code for code, _ in two.end()] == [0, 0]
    first, second = (dispatches.read(each.pid) for each in two.processes)
    found = next((i for i, pair in enumerate(itertools.zip_longest(first, second)) if len({*pair}) > 1), None)
    assert found is None, f"dispatch {found} is {first[found:][:3]} in the first and {second[found:][:3]} in the other"
    kinds = {kind for kind in get_args(Kind) if any(f"kind='{kind}'" in line for line in first)}
    assert any("kind='prefill'" in line and "batch=4" in line for line in first), "two prompts of each process"
    if speculation == "auto":  # time decides whether a step with a grammar is proposed first
        assert kinds | OF_GRAMMARS == {*get_args(Kind)}
    else:
        assert kinds >= OF_GRAMMARS
    for name in ("num_preemptions", "prefix_cache_hits"):
        assert float(re.search(rf"^vllm:{name}_total\S* (\S+)$", metrics, re.M)[1]) > 0, name  # type: ignore[index]
