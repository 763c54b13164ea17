"""LoRA adapters over HTTP: requests choose one as their model, and clients with a key load and unload them under vLLM's
names and SGLang's."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from engines import Fixed, Letters, compile_programs, make_engine, make_runner, serving
from fakes import FakeEngine, assert_needs_a_key, assert_refused
from served import OF_FLAGS
from tiny import write_adapter

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import CheckpointError, ConfigError
from specserve.serve import launch
from specserve.serve.engine.swap import ServedWeights
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.launch import Models
from specserve.serve.llm import LLM
from specserve.serve.loras import read_loras
from specserve.serve.requests.request import SamplingParams
from specserve.serve.settings import ServeRun
from specserve.train.head import adapter_notes

PROMPTS = [[int(i) for i in np.random.default_rng(seed).integers(3, 64, 30)] for seed in range(3)]
ROUTES = ("v1/load_lora_adapter", "v1/unload_lora_adapter", "load_lora_adapter", "unload_lora_adapter")


@pytest.fixture(scope="module")
def folders(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / f"of-{name}", tiny_target, seed) for seed, name in enumerate("abc")}


@pytest.fixture(scope="module")
def served(tiny_target: Target, tiny_head: Head, folders: dict[str, Path]) -> Iterator[httpx.Client]:
    """A client of a server that began with "a", has room for another, and lets it load some."""
    runner = make_runner(tiny_target, tiny_head, "chain:3", max_loras=2, has_constrained=False)
    compile_programs(runner)
    run = ServeRun(lora=(f"a={folders['a']}",), max_loras=2, max_lora_rank=4, allow_load_lora=True)
    loras, run = read_loras(tiny_target.config, run)
    runner.use(runner.with_adapters([*loras.adapters, None]))
    engine = make_engine(runner, Fixed(parse_speculation("chain:3")), loras)
    engine._tokenizer = type("ServedLetters", (Letters,), {"token_id": lambda _self, _token: None})()
    engine._swaps.weights = ServedWeights(read=launch._weights_reader(Models("tiny", tiny_target, None, None)))
    server = HttpServer(create_app(engine, run=run), port=0)
    with serving(engine):
        server.start()
        try:
            with httpx.Client(base_url=server.url, timeout=600) as http:
                yield http
        finally:
            server.stop()


def _answers(http: httpx.Client, model: str) -> list[str]:
    found = []
    for prompt in PROMPTS:
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
        reply = http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == model
        found.append(reply.json()["choices"][0]["text"])
    return found


def test_a_model_is_the_target_or_an_adapter_that_is_loaded(served: httpx.Client, folders: dict[str, Path]) -> None:
    """Each says something else, under its own name, and is counted under it; an adapter that was unloaded is no model
    any more, and another one in its place says what it says in any place."""
    texts = {name: _answers(served, name) for name in ("tiny", "a")}
    for route, name in (("/v1/load_lora_adapter", "b"), ("/load_lora_adapter", "c")):
        reply = served.post(route, json={"lora_name": name, "lora_path": str(folders[name])})
        assert reply.status_code == 200, reply.text
        assert reply.json()["success"]
        if name == "b":
            texts[name] = _answers(served, name)
            cards = {card["id"]: card for card in served.get("/v1/models").json()["data"]}
            assert cards["b"] == served.get("/v1/models/b").json()
            assert (cards["b"]["parent"], cards["b"]["root"]) == ("tiny", "of-b")
            assert cards["b"]["tau"] >= 1
            reply = served.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
            assert reply.json()["message"] == "Success: LoRA adapter 'a' removed successfully."
            assert_refused(served.post("/v1/completions", json={"model": "a", "prompt": PROMPTS[0]}), 404)
        else:
            assert reply.json()["loaded_adapters"] == {"b": "of-b", "c": "of-c"}
    texts["c"] = _answers(served, "c")
    assert len(set(map(tuple, texts.values()))) == 4
    params = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    for name in ("", "b"):
        body = {"input_ids": PROMPTS, "sampling_params": params, "lora_path": name}
        assert [each["text"] for each in served.post("/generate", json=body).json()] == texts[name or "tiny"]
    series = served.get("/metrics").text
    assert 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}' in series
    for name in "abc":
        for kind in ("steps", "accepted_tokens", "draft_tokens", "cut_steps"):
            assert f'specserve:adapter_{kind}_total{{adapter="{name}",model_name="tiny"}}' in series
    assert served.post("/unload_lora_adapter", json={"lora_name": "c"}).json()["loaded_adapters"] == {"b": "of-b"}
    served.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": str(folders["a"])})
    assert _answers(served, "a") == texts["a"]


def test_wrong_adapters_are_refused_and_nothing_changes(
    served: httpx.Client, tiny_target: Target, folders: dict[str, Path], tmp_path: Path
) -> None:
    before = served.get("/v1/models").json()["data"]
    write_adapter(tmp_path / "large", tiny_target, 7, rank=5)
    write_adapter(tmp_path / "dora", tiny_target, 7, use_dora=True)
    write_adapter(tmp_path / "saved", tiny_target, 7, modules_to_save=["lm_head"])
    for body, words in (
        ({"lora_name": "x", "lora_path": str(tmp_path / "none")}, "no such folder"),
        ({"lora_name": "x", "lora_path": "a" * 300}, "cannot be read"),
        ({"lora_name": "x", "lora_path": "~nobody-of-this-name/x"}, "cannot be read"),
        ({"lora_name": "x", "lora_path": str(tmp_path / "dora")}, "use_dora"),
        ({"lora_name": "x", "lora_path": str(tmp_path / "saved")}, "modules_to_save"),
        ({"lora_name": "b", "lora_path": str(folders["b"])}, "loaded already"),
        ({"lora_name": "x", "lora_path": str(folders["b"])}, "all 2 places"),
        ({"lora_name": "x", "lora_path": str(folders["b"]), "load_inplace": True}, "load_inplace"),
        ({"lora_name": "x"}, "lora_path"),
    ):
        if "places" not in words and "already" not in words:
            served.post("/v1/unload_lora_adapter", json={"lora_name": "b"})  # room for it
        elif not served.get("/v1/models/b").is_success:
            served.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": str(folders["b"])})
        error = assert_refused(served.post("/v1/load_lora_adapter", json=body))
        assert words in f"{error['message']} {error['param']}"
    served.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": str(folders["b"])})
    assert_refused(served.post("/v1/unload_lora_adapter", json={"lora_name": "x"}), 404)
    assert {card["id"] for card in served.get("/v1/models").json()["data"]} == {card["id"] for card in before}


def test_only_those_with_a_key_may_and_no_other_server_has_the_routes(
    http: httpx.Client, fake_engine: FakeEngine
) -> None:
    for route in ROUTES:
        assert http.post(f"/{route}", json={}).status_code == 404
    run, words = ServeRun(allow_load_lora=True), "--allow-load-lora: whoever may load adapters needs a key"
    assert_needs_a_key(fake_engine, run, ROUTES, words)


def test_settings_name_adapters_and_their_room(tiny_target: Target, folders: dict[str, Path], tmp_path: Path) -> None:
    a, b = (f"{name}={folders[name]}" for name in "ab")
    loras, run = read_loras(tiny_target.config, ServeRun(lora=(a, b)))
    assert loras.fingerprint(loras.folders["b"]) == adapter_notes(str(folders["b"]))["lora_fingerprint"]
    assert (run.max_loras, run.max_lora_rank) == (2, 2)
    _, run = read_loras(tiny_target.config, ServeRun(max_loras=3))
    assert (run.max_loras, run.max_lora_rank) == (3, 16)
    for settings, message in (
        ({"lora": ("a",)}, "expected NAME=FOLDER"),
        ({"lora": (a, a)}, "two adapters are named 'a'"),
        ({"lora": (a, b), "max_loras": 1}, "--max-loras 1: --lora names 2"),
        ({"lora": (a,), "max_lora_rank": 1}, "over --max-lora-rank 1"),
        ({"lora": (f"a={tmp_path / 'none'}",)}, "no such folder"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=message):
            read_loras(tiny_target.config, dataclasses.replace(ServeRun(), **settings))
    for settings in ({"max_lora_rank": 4}, {"allow_load_lora": True}):
        with pytest.raises(ConfigError, match="give --max-loras or --lora"):
            launch._read_loras(Models("tiny", tiny_target, None, None), ServeRun(**settings), None)


@pytest.mark.slow
def test_python_answers_by_adapters_and_without_them_nothing_of_them_is_imported(
    tiny_target: Target, folders: dict[str, Path]
) -> None:
    options = {"speculation": "off", "tokenizer": None, "progress": False, "max_slots": 1, "max_model_len": 64}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(tiny_target.folder, lora=(f"a={folders['a']}",), max_loras=2, **options) as llm:
        plain, adapted = (llm.generate(PROMPTS, params, lora=name) for name in ("", "a"))
        llm.load_lora("b", folders["a"])
        again = llm.generate(PROMPTS, params, lora="b")
        llm.unload_lora("b")
    said = [[each.outputs[0].token_ids for each in found] for found in (plain, adapted, again)]
    assert said[0] != said[1] == said[2]
    code = f"""
import re, sys
from specserve.cli import serve
from specserve.serve.llm import LLM
from specserve.serve.requests.request import SamplingParams
with LLM({str(tiny_target.folder)!r}, **{options!r}) as llm:
    found = llm.generate({PROMPTS!r}, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
print([list(each.outputs[0].token_ids) for each in found])
print([name for name in sys.modules if re.match({OF_FLAGS!r}, name)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    tokens, imported = done.stdout.strip().splitlines()[-2:]
    assert tokens == str([list(each) for each in said[0]])
    assert imported == "[]"
