"""A server whose head learns, as its clients meet it: real requests, a real round beside them, and the head that it
chooses."""

import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import served
import tiny
from engines import PATIENCE
from fakes import wait_for

from specserve.checkpoints.load import Target
from specserve.interop.head import save_head

HONEST, GARBAGE = ("first", "second", "third"), "garbage"  # keys: each is a client
NUM_PROMPTS = 40  # of each client
NUM_STEPS = 200


def _ask(http: httpx.Client, key: str, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    found = []
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        headers = {"authorization": f"Bearer {key}"}
        reply = http.post("/v1/completions", json=body | options, headers=headers)
        assert reply.status_code == 200, reply.text
        found.append(reply.json()["choices"][0]["token_ids"])
    return found


@pytest.mark.slow
def test_a_server_learns_from_its_clients_and_answers_as_before(tiny_target: Target, tmp_path: Path) -> None:
    """Three clients ask with a random head, and a fourth sends nonsense; the round beside them stands still while they
    ask on, comes to an end in their pause, and its head serves: the same tokens, in fewer steps."""
    target = served.write_folder(tiny_target, tmp_path / "model")
    save_head(tmp_path / "head", tiny.random_head(tiny_target.config, 1), tiny_target, dtype="bfloat16", notes={})
    (tmp_path / "keys").write_text("\n".join((*HONEST, GARBAGE)))
    command = [served.LEARNING + served.SCRIPT, "serve", "--target", str(target), "--draft", str(tmp_path / "head")]
    command += ["--speculation", "chain:2", "--port", "0", "--max-model-len", "64", "--max-slots", "1"]
    command += ["--api-key-file", str(tmp_path / "keys"), "--learn", str(tmp_path / "learn")]
    command += ["--learn-answers", str(NUM_PROMPTS * 4), "--learn-steps", str(NUM_STEPS)]
    rng = np.random.default_rng(0)
    prompts = {key: rng.integers(3, 64, (NUM_PROMPTS, 12)).tolist() for key in (*HONEST, GARBAGE)}
    with served.started(command, served.environment(tmp_path / "cache"), seconds=PATIENCE, timeout=PATIENCE) as started:
        process, http = started
        http.headers["authorization"] = f"Bearer {HONEST[0]}"

        def series(name: str) -> dict[str, float]:
            """The values of a series above 0, by version, head or result."""
            form = rf'^specserve:learn_{name}{{.*\b(?:version|head|result)="(\w+)".*}} (\S+)$'
            lines = re.findall(form, http.get("/metrics").text, re.MULTILINE)
            return {label: float(value) for label, value in lines if float(value)}

        before = {key: _ask(http, key, prompts[key]) for key in HONEST}
        _ask(http, GARBAGE, prompts[GARBAGE], temperature=2.0)
        assert series("version") == {"0": 1.0}
        wait_for(lambda: bool(served.learners(process)), PATIENCE)
        [learner] = served.learners(process)
        asked = prompts[HONEST[0]]
        wait_for(lambda: bool(_ask(http, HONEST[0], asked)) and learner.status() == psutil.STATUS_STOPPED, PATIENCE)
        wait_for(lambda: bool(series("rounds_total")), PATIENCE)
        assert series("rounds_total") == {"candidate": 1.0}
        wait_for(lambda: series("version") == {"001": 1.0}, PATIENCE)
        assert series("held_out_tau")["candidate"] > series("held_out_tau")["static"]
        assert {key: _ask(http, key, prompts[key]) for key in HONEST} == before
        live = series("live_tau")
        assert live["001"] > live["0"]
