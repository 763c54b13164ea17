"""GRPO in plain optax on a small policy, whose rollouts are sampled with a draft head that learns beside it.

    python examples/grpo.py --steps 40

The policy is the bundled target, which writes docstrings. It is rewarded for different words that begin with one
letter, by a rule that anybody can check. A step is: answers from the engine with their log-probabilities, the policy's
update, a step of the head on some of these answers, and both to the engine as one version. `--arms` samples the same
answers without a head, with one that stays, and with one that follows but is seldom sent, every few steps: speculation
changes no token, so all arms see one policy. Copy what you need: `policy_step` for another loss, `reward` for another
task, `Follower` for your own trainer.
"""

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import Mesh

from specserve import LLM, RequestOutput, SamplingParams
from specserve.checkpoints.load import Target, load_target, to_numpy
from specserve.checkpoints.source import resolve_target
from specserve.checkpoints.tensors import write_tensors
from specserve.drafters.interface import Head
from specserve.drafters.learning import Rows
from specserve.drafters.speculation import parse_speculation
from specserve.interop.bundled import resolve_head
from specserve.interop.head import load_head, save_head
from specserve.kernels.rows import Documents
from specserve.mesh import default_dtype, fitting, on_mesh, parse_mesh, whole
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams, forward, logits, target_spec
from specserve.pytree import pytree
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.vocab import DraftVocab
from specserve.tokenizer import Tokenizer
from specserve.train.chunked_loss import HiddenStates
from specserve.train.optimizer import make_optimizer
from specserve.train.settings import TrainSettings
from specserve.train.step import TrainState, loss_config, make_step, place_state
from specserve.train.target_states import Outputs

NAMES = """json.dumps json.load os.path.join os.walk re.sub re.compile shutil.copyfile random.choice math.gcd ast.parse
itertools.chain functools.partial copy.deepcopy glob.glob csv.reader heapq.merge bisect.insort textwrap.wrap
time.sleep socket.create_connection logging.getLogger pickle.loads struct.unpack hashlib.new tempfile.mkdtemp
urllib.parse.quote string.capwords statistics.mean calendar.monthrange fractions.gcd inspect.signature numpy.sum"""
QUESTIONS = [f"What does `{name}` do?" for name in NAMES.split()]
LETTER = "s"
CLIP = 0.2  # of the importance ratio, to either side
# nats that sampler and trainer may differ by at a token, by what both compute in; more is another version, not rounding
MOST_APART = {"float32": 0.02, "bfloat16": 0.5}

app = typer.Typer(add_completion=False)


def reward(text: str) -> float:
    """The number of different words that begin with the letter."""
    return float(len({word for word in re.findall(r"[a-z]+", text.lower()) if word.startswith(LETTER)}))


@pytree
class Rollouts:
    """Answers to learn from, each in a row of its own behind its prompt."""

    rows: Rows  # [answer, seq]; the loss mask is on the answers' tokens
    logprobs: jax.Array  # [answer, seq] float32, of each token of an answer, as the sampler returned them; else 0
    advantages: jax.Array  # [answer] float32


@pytree
class PolicyState:
    params: TargetParams  # float32 masters
    optimizer: optax.OptState


def in_bfloat16(params: Any, dtype: str) -> Any:
    """A version of the weights: new arrays of a dtype, whose numbers are bfloat16's. A CPU's engine packs these in half
    of the memory, as it does a checkpoint's, so an update compiles nothing. The trainer computes with them too, so both
    sides have one distribution."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(dtype), params)


def token_logprobs(params: TargetParams, config: ModelConfig, rows: Rows, taps: tuple[int, ...]) -> tuple[Any, Any]:
    """The log-probability of each token given those before it in its row, [answer, seq] float32, 0 of the first: what
    the engine returns. Also the hidden states that the head with these taps learns from."""
    places = rows.position_ids, Documents(rows.document_ids)
    out = forward(params, config, rows.token_ids, *places, aux_layers=taps)
    scores = jax.nn.log_softmax(logits(params, config, out.hidden_states[:, :-1]))  # of a large vocabulary: in chunks
    own = jnp.take_along_axis(scores, rows.token_ids[:, 1:, None], axis=-1)[..., 0]
    assert out.aux_hidden_states is not None
    return jnp.pad(own, ((0, 0), (1, 0))), Outputs(out.aux_hidden_states, HiddenStates(out.hidden_states))


def grpo_loss(
    params: TargetParams, config: ModelConfig, given: Rollouts, taps: tuple[int, ...]
) -> tuple[jax.Array, tuple[jax.Array, Outputs]]:
    """The clipped surrogate, a mean over the answers' tokens (GRPO, arXiv 2402.03300, without its KL term); the most
    that a log-probability differs from the sampler's; and the hidden states."""
    mask = given.rows.loss_mask  # [answer, seq]
    own, states = token_logprobs(params, config, given.rows, taps)
    apart = jnp.where(mask, own - given.logprobs, 0.0)
    ratio, advantages = jnp.exp(apart), given.advantages[:, None]
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    loss = -jnp.sum(jnp.where(mask, gain, 0.0)) / jnp.sum(mask, dtype=jnp.float32)
    return loss, (jnp.max(jnp.abs(apart)), states)


def make_policy_step(
    config: ModelConfig, optimizer: optax.GradientTransformation, taps: tuple[int, ...], mesh: Mesh | None
) -> Any:
    """Make the jitted step: (state, version, rollouts) -> state, version, metrics, hidden states. The state is donated;
    a version is not, because the engine may hold its arrays."""

    def step(state: PolicyState, version: TargetParams, given: Rollouts) -> tuple[Any, ...]:
        (loss, (apart, states)), gradient = jax.value_and_grad(grpo_loss, has_aux=True)(version, config, given, taps)
        gradient = jax.tree.map(lambda x: x.astype(jnp.float32), gradient)
        params: Any = state.params
        updates, moments = optimizer.update(gradient, state.optimizer, params)
        params = optax.apply_updates(params, updates)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradient), "most_apart": apart}
        return PolicyState(params, moments), in_bfloat16(params, config.dtype), metrics, states

    return jax.jit(on_mesh(mesh, step), donate_argnums=0)


class Follower:
    """A head that learns beside the policy, on some of its rollouts. Their hidden states are those that the policy's
    own step has computed, so the target runs no second time."""

    def __init__(self, head: Head, target: Target, settings: TrainSettings, mesh: Mesh | None, warmup: int = 1) -> None:
        self.head, self._warmup, self._num_steps, optimizer = head, warmup, 0, make_optimizer(settings)
        self._vocab = jax.device_put(DraftVocab(jnp.asarray(head.target_ids)), whole(mesh))
        self._step = make_step(loss_config(settings, target.config, head.drafter), optimizer, mesh)
        params: Any = jax.tree.map(lambda x: jnp.array(x, jnp.float32), head.params)
        state = TrainState(params, optimizer.init(params), jnp.int32(0))
        self.state = jax.device_put(state, place_state(head.drafter, optimizer, mesh))

    def learn(self, version: TargetParams, rows: Rows, states: Outputs) -> None:
        """Make a step on rows and their hidden states, which are of this version of the policy. Adam's first steps are
        as long as its rate allows, whatever the gradient, and the head would forget what it has learnt before: so the
        rate rises to its value."""
        rows = dataclasses.replace(rows, features=states)
        self._num_steps += 1
        scale = min(1.0, self._num_steps / self._warmup)
        self.state, _ = self._step(self.state, version, self._vocab, rows, jnp.float32(scale))

    def version(self) -> Any:
        """Parameters for the engine; those of the state are donated at the next step."""
        return in_bfloat16(self.state.params, self.head.drafter.dtype)


@jax.jit
def take_rows(of_rows: Any, places: np.ndarray) -> Any:
    """Some rows of each array. Places are an argument: slices would compile anew in each step, which has others."""
    return jax.tree.map(lambda x: jnp.take(x, places, axis=0), of_rows)


class Trainer:
    """The policy with its optimiser, and the head that follows it, or none."""

    def __init__(self, target: Target, follower: Follower | None, taps: tuple[int, ...], lr: float, mesh: Any) -> None:
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr, b2=0.95, weight_decay=0.0))
        params: Any = jax.tree.map(lambda x: jnp.array(x, jnp.float32), target.params)
        self.version, self.follower, self._mesh = target.params, follower, mesh
        self._most_apart = MOST_APART[target.config.dtype]
        self._state = PolicyState(params, optimizer.init(params))
        self._step = make_policy_step(target.config, optimizer, taps, mesh)

    def update(self, rollouts: Rollouts, inner_steps: int) -> dict[str, float]:
        """Update the policy so many times on answers of its present version."""
        rollouts = jax.tree.map(self._place, rollouts)
        sampled = self.version
        self._state, self.version, metrics, states = self._step(self._state, sampled, rollouts)
        if (apart := float(metrics["most_apart"])) > self._most_apart:
            raise RuntimeError(f"a token's log-probability is {apart:.3g} nats from the sampler's: another version?")
        for _ in range(inner_steps - 1):
            self._state, self.version, *_ = self._step(self._state, self.version, rollouts)
        jax.block_until_ready(self.version)
        self._seen = sampled, rollouts.rows, states
        return {name: float(value) for name, value in metrics.items()}

    def follow(self, number: int, offset: int) -> Any:
        """Have the head learn from so many of these answers, spread over the groups; return its parameters."""
        if self.follower is None:
            return None
        sampled, rows, states = self._seen
        every = max(1, len(rows.token_ids) // number)
        places = np.arange(offset % every, len(rows.token_ids), every)[:number]
        self.follower.learn(sampled, *take_rows((rows, states), places))
        return jax.block_until_ready(self.follower.version())

    def _place(self, x: jax.Array) -> jax.Array:
        return x if self._mesh is None else jax.device_put(x, fitting(self._mesh, ("batch", None)[: x.ndim], x.shape))


@dataclass(frozen=True)
class Sampled:
    """The answers of one arm, and their cost."""

    outputs: list[RequestOutput]
    seconds: float
    processor_seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def acceptance(self) -> Acceptance:
        return sum((answer.stats for output in self.outputs for answer in output.outputs), Acceptance())

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        return [answer.token_ids for output in self.outputs for answer in output.outputs]

    def row(self, own: "Sampled") -> dict[str, float]:
        """What is logged, with the number of answers that differ from those of another arm."""
        return {
            "differ": sum(a != b for a, b in zip(self.token_ids, own.token_ids, strict=True)),
            "tau": round(self.acceptance.tau, 3),
            "tokens_per_second": round(self.num_tokens / self.seconds, 1),
            "processor_milliseconds_per_token": round(1000 * self.processor_seconds / self.num_tokens, 3),
        }


def sample(llm: LLM, questions: Sequence[str], group: int, max_tokens: int, seed: int) -> Sampled:
    """A group of answers to each question. An answer is a function of the policy, its prompt and its seed alone."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = [
        SamplingParams(n=group, temperature=1.0, max_tokens=max_tokens, logprobs=0, seed=seed + i * group)
        for i in range(len(chats))
    ]
    begin, processor = time.perf_counter(), time.process_time()
    outputs = llm.chat(chats, params, progress=False)
    return Sampled(outputs, time.perf_counter() - begin, time.process_time() - processor)


def to_rollouts(outputs: Sequence[RequestOutput], rewards: np.ndarray, seq_len: int) -> Rollouts:
    """Rows for the trainer. `rewards` is [question, answer]; an advantage is normalised within its group."""
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
    answers = [(output.prompt_token_ids, answer) for output in outputs for answer in output.outputs]
    token_ids = np.zeros((len(answers), seq_len), np.int32)
    mask, logprobs = np.zeros(token_ids.shape, bool), np.zeros(token_ids.shape, np.float32)
    documents = np.zeros_like(token_ids)
    for i, (prompt, answer) in enumerate(answers):
        start, end = len(prompt), len(prompt) + len(answer.token_ids)
        token_ids[i, :end], documents[i, :end], mask[i, start:end] = (*prompt, *answer.token_ids), 1, True
        logprobs[i, start:end] = [each.logprob for each in answer.logprobs or ()]
    positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), token_ids.shape)
    rows = Rows(*map(jnp.asarray, (token_ids, mask, documents, positions)))
    return Rollouts(rows, jnp.asarray(logprobs), jnp.asarray(advantages.ravel(), jnp.float32))


def save(folder: Path, target: Target, version: TargetParams, head: Head) -> None:
    """Write both as `specserve serve --target FOLDER/policy --draft FOLDER/head` reads them."""
    ignored = shutil.ignore_patterns("*.safetensors*")
    shutil.copytree(target.folder, folder / "policy", ignore=ignored, dirs_exist_ok=True)
    tensors = to_numpy(version, target_spec(target.config), "bfloat16")
    write_tensors(folder / "policy" / "model.safetensors", tensors)
    save_head(folder / "head", head, target, dtype="bfloat16", notes={})


@app.command()
def main(
    target: str = "pydoc",
    draft: str = "pydoc-eagle3",
    arms: str = "plain,frozen,stale,co-trained",  # the last one's answers train the policy
    compare_every: int = 5,  # steps between samples of the other arms
    stale_every: Annotated[int, typer.Option(min=1)] = 10,  # steps between heads of the arm "stale"
    steps: int = 40,
    questions: int = 8,  # of a step
    group: int = 8,  # answers to each
    max_tokens: int = 48,
    inner_steps: int = 1,  # updates of the policy on one step's answers
    lr: float = 3e-4,
    head_lr: float = 1e-3,
    head_warmup: Annotated[int, typer.Option(min=1)] = 10,  # steps in which the head's learning rate rises to that
    head_rows: int = 8,  # answers of a step that the head learns from
    speculation: str = "chain:3",
    slots: int = 4,  # answers at once
    mesh: str = "",  # of the trainer, such as data=4,tensor=2
    sampler_mesh: str = "",
    save_every: int = 10,
    output: Path = Path("rl"),
    seed: int = 0,
) -> None:
    """Train, print a line for each step, and write OUTPUT/metrics.jsonl and the versions that are saved."""
    on = parse_mesh(mesh)
    policy = load_target(resolve_target(target).folder, dtype=default_dtype(), mesh=on)
    head = load_head(resolve_head(draft, "--draft"), policy, dtype=default_dtype(), mesh=on)
    tree = parse_speculation(speculation)
    assert tree is not None
    *_, chosen = names = arms.split(",")
    settings = TrainSettings(rollout=tree.depth, lr=head_lr)
    follows = Follower(head, policy, settings, on, head_warmup) if chosen == "co-trained" else None
    trainer = Trainer(policy, follows, head.drafter.aux_layers, lr, on)
    tokenizer = Tokenizer.load(policy.folder)
    prompts = [tokenizer.render_chat([{"role": "user", "content": each}]) for each in QUESTIONS]
    seq_len = max(map(len, prompts)) + max_tokens
    shape: Any = {"max_slots": slots, "max_model_len": seq_len + 16, "mesh": sampler_mesh, "progress": False}
    if policy.config.dtype == "float32":  # a CPU's pages, which the training forward would not know to round
        shape["kv_cache_dtype"] = "float32"
    engines = {
        name: LLM(target, draft, speculation="off" if name == "plain" else speculation, **shape) for name in names
    }
    output.mkdir(parents=True, exist_ok=True)
    rng, sent = np.random.default_rng(seed), None
    for step in range(steps):
        asked = [QUESTIONS[i] for i in rng.choice(len(QUESTIONS), questions, replace=False)]
        found: dict[str, Sampled] = {}
        for name in names if step % compare_every == 0 else [chosen]:
            if name != chosen and step:
                engines[name].update_weights(target=trainer.version, draft=sent if name == "stale" else None)
            found[name] = sample(engines[name], asked, group, max_tokens, seed + step * questions * group)
        own = found[chosen]
        rewards = np.array([[reward(answer.text) for answer in output.outputs] for output in own.outputs])
        rollouts = to_rollouts(own.outputs, rewards, seq_len)
        clock = [time.perf_counter()]
        metrics = trainer.update(rollouts, inner_steps)
        clock.append(time.perf_counter())
        draft_params = trainer.follow(head_rows, step)
        clock.append(time.perf_counter())
        if (step + 1) % stale_every == 0:
            sent = draft_params
        engines[chosen].update_weights(target=trainer.version, draft=draft_params, version=f"step-{step + 1}")
        clock.append(time.perf_counter())
        parts = dict(zip(("policy", "head", "update"), np.diff(clock).round(3).tolist(), strict=True))
        row = {
            "step": step,
            "version": own.outputs[0].outputs[0].weight_versions[-1],
            "reward": float(rewards.mean()),
            "tokens": own.num_tokens,
            **metrics,
            "seconds": {"rollouts": round(own.seconds, 3), **parts},
            "arms": {name: each.row(own) for name, each in found.items()},
        }
        print(json.dumps(row), flush=True)
        with (output / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if follows and save_every and (step + 1) % save_every == 0:
            learnt = dataclasses.replace(head, params=draft_params)
            save(output / f"step-{step + 1}", policy, trainer.version, learnt)
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    app()
