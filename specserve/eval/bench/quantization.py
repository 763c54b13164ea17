"""The loss by weights in few bits: how the distribution of the next token changes, the answers, and how many draft
tokens are accepted.

The target answers prompts greedily with its weights as floats. Each quantisation answers them too, and runs over the
floats' answers, token by token the same: what it makes of them is compared position by position, as llama.cpp's
`--kl-divergence` does over a text. All of it is what an engine serves: the hidden states come from its own programs,
and the logits from its own output head, in the layout that its steps multiply by.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.load import Quantization
from specserve.errors import ConfigError, SpecServeError
from specserve.eval.bench.comparison import PLAIN, has_draft
from specserve.eval.prompts import load_chats, render
from specserve.eval.settings import QuantizationRun
from specserve.kernels import native
from specserve.mesh import SERVING_AXES, on_mesh, parse_mesh
from specserve.models import target as target_model
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import measured_engine
from specserve.serve.launch import Models, load_models
from specserve.serve.requests.completion import CompletionOutput, answer_all
from specserve.serve.requests.request import FinishReason, SamplingParams
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.intervals import Interval, bootstrap, tau_interval

FLOATS: Quantization = "none"
ROWS = 64  # positions whose logits are there at once
WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
OnProgress = Callable[[str, int, int], None]  # the work's name, how much of it is done, of how much


@dataclass(frozen=True)
class QuantizationLoss:
    """The loss by one form of the weights, over the floats' answers, and its own answers beside them."""

    quantization: str
    kl: np.ndarray  # [position] float32, nats: of the floats' distribution to this one's
    is_same_top: np.ndarray  # [position] bool: the likeliest token is the floats'
    gain: np.ndarray  # [position] float32: log-probability of the answer's token, less the floats'
    sizes: tuple[int, ...]  # positions of each answer
    equal: tuple[int, ...]  # tokens with which each of its own answers begins as the floats' does
    num_same: int  # of its answers are the floats', token for token
    acceptance: tuple[Acceptance, ...] | None  # of each of its answers; None: nothing was drafted

    @property
    def kl_interval(self) -> Interval | None:
        """The 95% interval of the mean over answers. The positions of an answer stay together."""
        ends = np.cumsum(self.sizes)
        sums = np.add.reduceat(self.kl.astype(np.float64), ends - np.array(self.sizes))
        return bootstrap(len(sums), lambda drawn: sums[drawn].sum(1) / np.array(self.sizes)[drawn].sum(1))

    @property
    def perplexity_ratio(self) -> float:
        """The perplexity of the floats' answers here, over that by the floats."""
        return float(np.exp(-self.gain.mean(dtype=np.float64)))

    @property
    def tau(self) -> float | None:
        """The mean number of tokens of a step, or None where nothing was drafted."""
        return None if self.acceptance is None else sum(self.acceptance, Acceptance()).tau

    @property
    def tau_interval(self) -> Interval | None:
        """The 95% interval of tau over answers."""
        return None if self.acceptance is None else tau_interval(self.acceptance)

    def to_json(self) -> dict[str, Any]:
        kl, tau = self.kl_interval, self.tau_interval
        return {
            "quantization": self.quantization,
            "kl": float(self.kl.mean(dtype=np.float64)),
            "kl_interval": kl and kl.to_json(),
            "kl_99th_percentile": float(np.percentile(self.kl, 99)),
            "same_top_token": float(self.is_same_top.mean()),
            "perplexity_ratio": self.perplexity_ratio,
            "positions": len(self.kl),
            "answers": len(self.equal),
            "same_answers": self.num_same,
            "mean_equal_beginning": float(np.mean(self.equal)),
            "tau": self.tau,
            "tau_interval": tau and tau.to_json(),
        }


def load_quantized(run: QuantizationRun, quantization: Quantization) -> Models:
    """Load what the settings name, the target's weights in this form. Raises ConfigError or CheckpointError."""
    return load_models(
        run.target,
        run.draft,
        quantization=quantization,
        draft_quantization=run.draft_quantization,
        mesh=parse_mesh(run.mesh, SERVING_AXES),
    )


def measure_losses(
    run: QuantizationRun,
    load: Callable[[Quantization], Models],
    prompts: Sequence[Sequence[int]] | None = None,  # None: the bench's
    on_progress: OnProgress = lambda _what, _done, _total: None,
) -> list[QuantizationLoss]:
    """Measure each quantisation of the settings, one after the other, behind the floats themselves. `load` loads the
    target in a form. Raises ConfigError, DataError, CheckpointError or SpecServeError."""
    floats = _serve(run, load(FLOATS), FLOATS, prompts, None, on_progress)
    losses = []
    for quantization in dict.fromkeys((FLOATS, *run.quantization)):  # the floats once more, as the others
        losses.append(_compare(floats, _serve(run, load(quantization), quantization, prompts, floats, on_progress)))
    return losses


@dataclass(frozen=True)
class _Served:
    """The answers of an engine, its hidden states over the floats' answers, and what makes logits of these."""

    quantization: str
    prompts: Sequence[Sequence[int]]
    answers: Sequence[CompletionOutput]
    states: Sequence[np.ndarray]  # of each of the floats' answers, [position, d_model]: those before its tokens
    log_probs: Callable[[np.ndarray], jax.Array]  # [n, d_model] -> [n, vocab] float32
    is_drafting: bool


def _serve(
    run: QuantizationRun,
    models: Models,
    quantization: str,
    prompts: Sequence[Sequence[int]] | None,
    floats: _Served | None,
    on_progress: OnProgress,
) -> _Served:
    speculation = run.speculation or ("chain:3" if models.head else PLAIN)
    if models.head is None and has_draft(speculation):
        raise ConfigError(f"--speculation {speculation}: there is no head for {models.name}; give one with --draft")
    engine = measured_engine(
        models,
        speculation,
        num_slots=run.concurrency,
        max_model_len=run.max_model_len,
        hidden_states=(0,),
        on_warmup=lambda done, total, name: on_progress(f"{quantization}: compiling {name}", done, total),
    )
    with engine:
        if floats:
            prompts = floats.prompts
        elif prompts is None:
            prompts = _bench_prompts(run, engine)
        params = [SamplingParams(max_tokens=run.max_tokens, temperature=0.0) for _ in prompts]
        answers = _ask(engine, prompts, params, f"{quantization}: answering", on_progress)
        given = floats.answers if floats else answers
        texts = [[*prompt, *answer.token_ids[:-1]] for prompt, answer in zip(prompts, given, strict=True)]
        scored = [SamplingParams(max_tokens=1, temperature=0.0, hidden_states=True) for _ in texts]
        found = _ask(engine, texts, scored, f"{quantization}: reading the floats' answers", on_progress)
    config = engine.runner.config.target
    states = [
        each.hidden_states[-len(answer.token_ids) :, -config.d_model :]  # type: ignore[index]
        for each, answer in zip(found, given, strict=True)
    ]
    head = dataclasses.replace(engine.runner.inputs.layouts.many.target, layers=())
    log_probs = functools.partial(_program(config, models), head)
    return _Served(quantization, prompts, answers, states, log_probs, speculation != PLAIN)


def _bench_prompts(run: QuantizationRun, engine: Engine) -> list[list[int]]:
    rendered = [render(engine.tokenizer, chat) for chat in load_chats(run.bench, run.limit)]
    prompts = [prompt for prompt in rendered if len(prompt) + run.max_tokens <= engine.max_model_len]
    if not prompts:
        raise ConfigError(f"--bench {run.bench}: no prompt leaves room for {run.max_tokens} tokens; lower --max-tokens")
    return prompts


def _ask(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    what: str,
    on_progress: OnProgress,
) -> list[CompletionOutput]:
    ended: list[int] = []

    def on_done(i: int, _found: CompletionOutput) -> None:
        ended.append(i)
        on_progress(what, len(ended), len(prompts))

    slots = engine.runner.shapes.num_slots
    submit = lambda i, listen: engine.submit(prompts[i], params[i], listen)  # noqa: E731
    found = answer_all(submit, len(prompts), on_done, most=slots)
    if failed := [each.error or each.finish_reason for each in found if each.finish_reason not in WHOLE]:
        raise SpecServeError(f"{what}: {len(failed)} answers failed, the first with {failed[0]}")
    return found


def _program(config: ModelConfig, models: Models) -> Callable[[TargetParams, np.ndarray], jax.Array]:
    """Return the compiled program from a target without its layers, and hidden states, to log-probabilities."""

    def log_probs(params: TargetParams, states: jax.Array) -> jax.Array:  # [n, d_model] -> [n, vocab]
        return jax.nn.log_softmax(target_model.logits(params, config, states))

    return jax.jit(on_mesh(models.mesh, native.serving(log_probs)))


@jax.jit
def _differences(
    floats: jax.Array,  # [n, vocab] float32, log-probabilities
    other: jax.Array,
    token_ids: jax.Array,  # [n] int32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the KL divergence, whether the likeliest tokens are the same, and how much likelier each token is."""
    probs = jnp.exp(floats)
    kl = jnp.where(probs > 0, probs * (floats - other), 0).sum(axis=-1)
    own, others = (jnp.take_along_axis(each, token_ids[:, None], axis=1)[:, 0] for each in (floats, other))
    return kl, floats.argmax(axis=-1) == other.argmax(axis=-1), others - own


def _compare(floats: _Served, served: _Served) -> QuantizationLoss:
    token_ids = np.concatenate([np.array(answer.token_ids, np.int32) for answer in floats.answers])
    base, own = np.concatenate(floats.states), np.concatenate(served.states)
    parts = []
    for start in range(0, len(token_ids), ROWS):
        rows = np.minimum(np.arange(start, start + ROWS), len(token_ids) - 1)  # the last ones fill the last block
        found = _differences(floats.log_probs(base[rows]), served.log_probs(own[rows]), token_ids[rows])
        parts.append([np.asarray(each)[: len(token_ids) - start] for each in found])
    kl, is_same_top, gain = map(np.concatenate, zip(*parts, strict=True))
    pairs = [(a.token_ids, b.token_ids) for a, b in zip(floats.answers, served.answers, strict=True)]
    return QuantizationLoss(
        served.quantization,
        kl,
        is_same_top,
        gain,
        tuple(len(given) for given, _ in pairs),
        tuple(_equal_beginning(*pair) for pair in pairs),
        sum(a == b for a, b in pairs),
        tuple(answer.stats for answer in served.answers) if served.is_drafting else None,
    )


def _equal_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
