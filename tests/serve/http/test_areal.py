"""AReaL's own driver of rollouts for SGLang, live against our server: answers that an update breaks off and that go on
by the next version, log-probabilities, the device given back, and versions that are LoRA adapters.

`pip install --no-deps areal` and what this imports of it (`.ci/run all` has the list): its requirements name CUDA's."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from engines import (
    PATIENCE,
    Ask,
    Fixed,
    Letters,
    Reference,
    check_equal,
    compile_programs,
    greedy,
    hold_next,
    make_engine,
    make_runner,
    serving,
    wait_until,
)
from tiny import write_adapter
from two_versions import firm_asks, updatable_engine

from specserve.checkpoints.load import Target, to_numpy
from specserve.checkpoints.tensors import write_tensors
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.models.target import target_spec
from specserve.serve import launch
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.swap import ServedWeights
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.launch import Models
from specserve.serve.loras import read_loras
from specserve.serve.programs.runner import Runner
from specserve.serve.settings import ServeRun

pytestmark = [pytest.mark.areal, pytest.mark.filterwarnings("ignore")]
KEY, MOST = "k", 40  # tokens of an answer
NAMES = {"experiment_name": "experiment", "trial_name": "trial"}


@contextmanager
def _driver(engine: Engine, names: Path, run: ServeRun, **options: Any) -> Iterator[Any]:
    """AReaL's engine of a server with a key. AReaL knows of no keys, so this one is in the address."""
    from areal.api.cli_args import InferenceEngineConfig, NameResolveConfig
    from areal.engine.sglang_remote import RemoteSGLangEngine
    from areal.utils import name_resolve

    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=str(names)))
    server = HttpServer(create_app(engine, api_keys=[KEY], run=run), port=0)
    driver = RemoteSGLangEngine(
        InferenceEngineConfig(
            backend="sglang:d1",
            max_concurrent_rollouts=4,
            consumer_batch_size=2,
            pause_grace_period=0.1,
            **NAMES,
            **options,
        )
    )
    with serving(engine):
        server.start()
        try:
            driver.initialize("0", f"areal:{KEY}@{server.url.removeprefix('http://')}", 1)
            yield driver
        finally:
            driver.destroy()
            server.stop()


def _hold_next(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """`hold_next`, and an event of the moment in which the answer waits."""
    submit, has_begun = engine.submit, threading.Event()

    def submit_noted(prompt: Any, params: Any, listen: Any, **options: Any) -> Any:
        def note(delta: Any) -> None:
            has_begun.set()
            listen(delta)

        return submit(prompt, params, note, **options)

    monkeypatch.setattr(engine, "submit", submit_noted)
    hold_next(engine, monkeypatch)
    return has_begun


async def _generate(driver: Any, ask: Ask) -> Any:
    from areal.api.cli_args import GenerationHyperparameters
    from areal.api.io_struct import ModelRequest

    assert ask.params.temperature == 0
    params = GenerationHyperparameters(
        max_new_tokens=ask.params.max_tokens or MOST, greedy=True, ignore_eos=True, lora_name="policy"
    )
    return await driver.agenerate(ModelRequest(input_ids=list(ask.prompt), gconfig=params))


def _generate_all(driver: Any, asks: list[Ask]) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(_generate(driver, ask) for ask in asks))

    return asyncio.run(all_of_them())


def _update(driver: Any, version: int, folder: Path, **options: Any) -> None:
    """What AReaL's trainers do between two steps. The folder's name and its end are AReaL's."""
    from areal.api.io_struct import WeightUpdateMeta
    from areal.utils import name_resolve, names

    driver.pause()
    driver.pause_generation()
    name_resolve.add(names.update_weights_from_disk(*NAMES.values(), version - 1), str(time.time()), keepalive_ttl=120)
    driver.update_weights_from_disk(WeightUpdateMeta("disk", str(folder), version=version, **options)).result()
    driver.continue_generation()
    driver.set_version(version)
    driver.resume()


def test_answers_go_on_by_the_next_version(
    runner: Runner,
    tiny_target: Target,
    tiny_head: Head,
    moved: Target,
    old: Reference,
    new: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    folder = tmp_path / "step-1"
    folder.mkdir()
    for each in tiny_target.folder.glob("*.json"):
        (folder / each.name).write_bytes(each.read_bytes())
    write_tensors(folder / "model.safetensors", to_numpy(moved.params, target_spec(moved.config), "float32"))
    asks = [ask for ask in firm_asks(old, new, max_tokens=MOST) if ask.params.temperature == 0]
    engine = updatable_engine(runner, tiny_target, tiny_head, "chain:3")
    with _driver(engine, tmp_path / "names", ServeRun(allow_update_weights=True)) as driver:
        first = _generate_all(driver, asks)
        assert [answer.output_tokens for answer in first] == [old.answer(ask).token_ids for ask in asks]
        with ThreadPoolExecutor() as pool:
            has_begun = _hold_next(engine, monkeypatch)
            begun = pool.submit(_generate_all, driver, asks[:1])
            assert has_begun.wait(PATIENCE)
            _update(driver, 1, folder)
            [answer] = begun.result()
        num_old = answer.output_versions.count(0)
        assert 0 < num_old < MOST == len(answer.output_tokens)
        assert answer.output_versions == [0] * num_old + [1] * (MOST - num_old)
        assert answer.output_tokens[:num_old] == old.answer(asks[0]).token_ids[:num_old]
        rest = Ask((*asks[0].prompt, *answer.output_tokens[:num_old]), greedy(MOST - num_old, ignore_eos=True))
        by_new = new.answer(rest).token_ids
        check_equal(new.target, Letters(), rest, answer.output_tokens[num_old:], by_new, "the rest")
        wait_until(lambda: not folder.exists())  # AReaL removes it
        driver.pause_generation()
        driver.offload()
        driver.onload(["weights"])
        driver.onload(["kv_cache"])
        driver.continue_generation()
        second = _generate_all(driver, asks)
        assert [answer.output_tokens for answer in second] == [new.answer(ask).token_ids for ask in asks]
        for answer in second:
            row = torch.tensor([answer.input_tokens + answer.output_tokens])
            mask = torch.tensor([[0] * len(answer.input_tokens) + [1] * MOST])
            [found] = driver.compute_logp([{"input_ids": row, "loss_mask": mask}])
            np.testing.assert_allclose(found[0, -MOST:], answer.output_logprobs, rtol=0, atol=2 * new.off)


def test_versions_that_are_adapters(tiny_target: Target, tiny_head: Head, tmp_path: Path) -> None:
    """Each answers as requests of its name do; those that are old make room."""
    base = write_adapter(tmp_path / "first", tiny_target, 0)
    runner = make_runner(tiny_target, tiny_head, "chain:3", max_loras=3, has_constrained=False)
    compile_programs(runner)
    allowed = {"allow_load_lora": True, "allow_update_weights": True}  # the latter for its pauses
    run = ServeRun(lora=(f"policy-v0={base}",), max_loras=3, max_lora_rank=4, **allowed)
    loras, run = read_loras(tiny_target.config, run)
    runner.use(runner.with_adapters([*loras.adapters, None, None]))
    engine = make_engine(runner, Fixed(parse_speculation("chain:3")), loras)
    engine._tokenizer = type("ServedLetters", (Letters,), {"token_id": lambda _self, _token: None})()
    engine._swaps.weights = ServedWeights(read=launch._weights_reader(Models("tiny", tiny_target, None, None)))
    ask, found = Ask((3, 4, 5, 6, 7), greedy(MOST, ignore_eos=True)), []
    with _driver(engine, tmp_path / "names", run, use_lora=True) as driver:
        for version in range(5):
            if version:
                folder = write_adapter(tmp_path / f"step-{version}", tiny_target, version)
                _update(driver, version, folder, use_lora=True, lora_name="policy", lora_keep_versions=2)
            [answer] = _generate_all(driver, [ask])
            found.append(answer.output_tokens)
            own = httpx.post(
                f"http://{driver._engine.addresses[0]}/v1/completions",
                json={"model": f"policy-v{version}", "prompt": list(ask.prompt), "max_tokens": MOST, "temperature": 0}
                | {"ignore_eos": True, "return_token_ids": True},
            ).json()
            assert own["choices"][0]["token_ids"] == answer.output_tokens
    assert len(set(map(tuple, found))) == 5
