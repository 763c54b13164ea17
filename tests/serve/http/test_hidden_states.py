"""The hidden states of a prompt are those of one forward over it: whatever chunks it is run in, whatever is cached,
whatever runs beside it, with a head that reads other layers; and over HTTP they are a safetensors file."""

import functools
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounding
import tiny
from engines import Ask, Dice, compile_programs, greedy, make_engine, make_runner, run, serving
from safetensors.numpy import load

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.errors import RequestError
from specserve.models.target import forward
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.programs.runner import Runner
from specserve.serve.settings import ServeRun

LAYERS = (4, 0)  # in the order in which they are asked for
PROMPT = tuple(int(i) for i in np.random.default_rng(8).integers(3, 64, 61))


@pytest.fixture(scope="module")
def keeping(tiny_target: Target, tiny_head: Head) -> Runner:
    runner = make_runner(tiny_target, tiny_head, "chain:2", "off", has_constrained=False, kept_layers=LAYERS)
    compile_programs(runner)
    return runner


@functools.partial(jax.jit, static_argnums=1)
def _states(params: Any, config: Any, token_ids: jax.Array) -> jax.Array:
    n = token_ids.shape[1]
    position_ids = jnp.arange(n, dtype=jnp.int32)[None]
    out = forward(params, config, token_ids, position_ids, tiny.causal(n), aux_layers=LAYERS)
    assert out.aux_hidden_states is not None
    return jnp.concatenate([out.aux_hidden_states, out.hidden_states], axis=-1)[0]


def check(target: Target, prompt: tuple[int, ...], found: np.ndarray) -> None:
    ids, width = jnp.asarray([prompt]), target.config.d_model
    made = functools.partial(_states, config=target.config, token_ids=ids)
    expected, off = np.asarray(made(target.params)), rounding.tolerance(made, target.params)
    assert found.shape == expected.shape == (len(prompt), (len(LAYERS) + 1) * width)
    assert found.dtype == target.config.dtype
    rounding.assert_same(found, expected, off)


def test_states_are_those_of_one_forward(keeping: Runner, tiny_target: Target) -> None:
    lengths = (1, 15, 16, 17, 61)
    asks = [Ask(PROMPT[:n], greedy(1, hidden_states=True)) for n in lengths]
    others = [
        Ask(PROMPT[:n], greedy(9, prompt_logprobs=k)) for n, k in zip(lengths, (None, 1, None, None, 2), strict=True)
    ]
    with serving(make_engine(keeping, Dice(5))) as engine:
        alone = run(engine, others)  # now most of it is cached
        inboxes = run(engine, [*asks, *others])
    for ask, inbox in zip(asks, inboxes, strict=False):
        [states] = [delta.hidden_states for delta in inbox.deltas if delta.hidden_states is not None]
        check(tiny_target, ask.prompt, states)
        assert not any(delta.prompt for delta in inbox.deltas)
    for before, inbox in zip(alone, inboxes[len(asks) :], strict=True):
        assert inbox.token_ids == before.token_ids
        assert all(delta.hidden_states is None for delta in inbox.deltas)


def test_a_preempted_prompt_has_its_states_once(keeping: Runner, tiny_target: Target) -> None:
    asks = [Ask(PROMPT[i : i + 30], greedy(60, hidden_states=True, ignore_eos=True)) for i in (0, 9)]
    with serving(make_engine(keeping, Dice(2), num_pages=14)) as engine:
        inboxes = run(engine, asks)
        assert engine.stats().num_preemptions
    for ask, inbox in zip(asks, inboxes, strict=True):
        [states] = [delta.hidden_states for delta in inbox.deltas if delta.hidden_states is not None]
        check(tiny_target, ask.prompt, states)


def test_over_http_they_are_a_file(keeping: Runner, tiny_target: Target) -> None:
    with serving(make_engine(keeping)) as engine:
        server = HttpServer(create_app(engine, run=ServeRun(hidden_states=LAYERS)), port=0)
        server.start()
        with httpx.Client(base_url=server.url) as http:
            reply = http.post("/v1/hidden_states", json={"model": "tiny", "prompt": [list(PROMPT)]})
            bodies = {"prompt": ["a", "b"]}, {"prompt": [999]}, {"prompt": "a", "layers": [1]}
            refused = [http.post("/v1/hidden_states", json=body) for body in bodies]
        server.stop()
        closed = HttpServer(create_app(engine), port=0)
        closed.start()
        without = httpx.post(f"{closed.url}/v1/hidden_states", json={"prompt": "a"})
        closed.stop()
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/octet-stream")
    found, width = load(reply.content), tiny_target.config.d_model
    assert found["token_ids"].tolist() == list(PROMPT)
    assert found["hidden_states"].shape == (len(PROMPT), len(LAYERS), width)
    flat = found["hidden_states"].reshape(len(PROMPT), -1)
    check(tiny_target, PROMPT, np.concatenate([flat, found["last_hidden_state"]], axis=-1))
    assert [each.status_code for each in refused] == [400] * 3
    assert "one prompt a request, got 2" in refused[0].text
    assert without.status_code == 403
    assert "--hidden-states names the layers" in without.text


def test_a_server_that_keeps_none_refuses(runner: Runner) -> None:
    with serving(make_engine(runner)) as engine, pytest.raises(RequestError, match="without --hidden-states"):
        run(engine, [Ask(PROMPT, greedy(1, hidden_states=True))])
