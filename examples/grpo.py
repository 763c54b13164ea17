"""GRPO in plain optax on a small policy, whose rollouts are sampled with a draft head that learns beside it.

    python examples/grpo.py --steps 60

The policy is the bundled target, which writes docstrings. It is rewarded for different words that begin with one
letter, by a rule that anybody can check. A step is: answers from the engine with their log-probabilities, the policy's
update, a step of the head on some of these answers, and both to the engine as one version. `--arms` samples the same
answers without a head and with one that stays, every few steps: speculation changes no token, so all arms see one
policy. Copy what you need: `policy_step` for another loss, `reward` for another task, `Follower` for your own trainer.
"""

import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from specserve.interop.bundled import resolve_head
from specserve.interop.head import load_head, save_head
from specserve.kernels.rows import Documents
from specserve.mesh import default_dtype, on_mesh, parse_mesh, whole
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams, forward, logits, target_spec
from specserve.pytree import pytree
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.vocab import DraftVocab
from specserve.train.optimizer import make_optimizer
from specserve.train.settings import TrainSettings
from specserve.train.step import TrainState, loss_config, make_step, place_state

NAMES = """json.dumps json.load os.path.join os.walk re.sub re.compile shutil.copyfile random.choice math.gcd ast.parse
itertools.chain functools.partial copy.deepcopy glob.glob csv.reader heapq.merge bisect.insort textwrap.wrap
time.sleep socket.create_connection logging.getLogger pickle.loads struct.unpack hashlib.new tempfile.mkdtemp
urllib.parse.quote string.capwords statistics.mean calendar.monthrange fractions.gcd inspect.signature numpy.sum"""
QUESTIONS = [f"What does `{name}` do?" for name in NAMES.split()]
LETTER = "s"
CLIP = 0.2  # of the importance ratio, to either side
MOST_APART = 0.02  # nats that sampler and trainer may differ by at a token; more is another version, not rounding

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
    """A version of the weights: new arrays of a dtype whose numbers are bfloat16's. A CPU's engine packs these into half
    of the memory as it does a checkpoint's, so an update compiles nothing; the trainer computes with them too, so that
    both sides have one distribution."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(dtype), params)


def token_logprobs(params: TargetParams, config: ModelConfig, rows: Rows) -> jax.Array:  # [answer, seq] float32
    """The log-probability of each token given those before it in its row, 0 of the first: what the engine returns."""
    out = forward(params, config, rows.token_ids, rows.position_ids, Documents(rows.document_ids))
    scores = jax.nn.log_softmax(logits(params, config, out.hidden_states[:, :-1]))  # of a large vocabulary: in chunks
    own = jnp.take_along_axis(scores, rows.token_ids[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(own, ((0, 0), (1, 0)))


def grpo_loss(params: TargetParams, config: ModelConfig, given: Rollouts) -> tuple[jax.Array, jax.Array]:
    """The clipped surrogate, a mean over the answers' tokens (GRPO, arXiv 2402.03300, without its KL term), and the most
    that a log-probability differs from the sampler's."""
    mask = given.rows.loss_mask
    apart = jnp.where(mask, token_logprobs(params, config, given.rows) - given.logprobs, 0.0)
    ratio, advantages = jnp.exp(apart), given.advantages[:, None]
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    return -jnp.sum(jnp.where(mask, gain, 0.0)) / jnp.sum(mask), jnp.max(jnp.abs(apart))


def make_policy_step(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None) -> Any:
    """Make the jitted step: (state, version, rollouts) -> state, version, loss, greatest difference. The state is
    donated; a version is not, because the engine may hold its arrays."""

    def step(state: PolicyState, version: TargetParams, given: Rollouts) -> tuple[Any, ...]:
        (loss, apart), gradient = jax.value_and_grad(grpo_loss, has_aux=True)(version, config, given)
        gradient = jax.tree.map(lambda x: x.astype(jnp.float32), gradient)
        params: Any = state.params
        updates, moments = optimizer.update(gradient, state.optimizer, params)
        params = optax.apply_updates(params, updates)
        return PolicyState(params, moments), in_bfloat16(params, config.dtype), loss, apart

    return jax.jit(on_mesh(mesh, step), donate_argnums=0)


class Follower:
    """A head that learns beside the policy, on rows of its rollouts: the hidden states are those of the version that
    the head will be served with."""

    def __init__(self, head: Head, target: Target, settings: TrainSettings, mesh: Mesh | None) -> None:
        self.head, optimizer = head, make_optimizer(settings)
        self._vocab = jax.device_put(DraftVocab(jnp.asarray(head.target_ids)), whole(mesh))
        self._step = make_step(loss_config(settings, target.config, head.drafter), optimizer, mesh)
        params: Any = jax.tree.map(lambda x: jnp.array(x, jnp.float32), head.params)
        state = TrainState(params, optimizer.init(params), jnp.int32(0))
        self.state = jax.device_put(state, place_state(head.drafter, optimizer, mesh))

    def learn(self, version: TargetParams, rows: Rows) -> None:
        self.state, _ = self._step(self.state, version, self._vocab, rows, jnp.float32(1.0))

    def version(self) -> Any:
        """Parameters for the engine; those of the state are donated at the next step."""
        return in_bfloat16(self.state.params, self.head.drafter.dtype)


@dataclass(frozen=True)
class Sampled:
    """The answers of one arm, and their cost."""

    outputs: list[RequestOutput]
    seconds: float
    processor_seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for output in self.outputs for answer in output.outputs)

    @property
    def acceptance(self) -> Acceptance:
        return sum((answer.stats for output in self.outputs for answer in output.outputs), Acceptance())

    def row(self) -> dict[str, float]:
        return {
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
    """Write both as `specserve serve --target folder/policy --draft folder/head` reads them."""
    shutil.copytree(
        target.folder, folder / "policy", ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True
    )
    tensors = to_numpy(version, target_spec(target.config), "bfloat16")
    write_tensors(folder / "policy" / "model.safetensors", tensors)
    save_head(folder / "head", head, target, dtype="bfloat16", notes={})


def same_answers(one: Sampled, other: Sampled) -> int:
    pairs = zip(one.outputs, other.outputs, strict=True)
    return sum(a.token_ids == b.token_ids for x, y in pairs for a, b in zip(x.outputs, y.outputs, strict=True))


@app.command()
def main(
    target: str = "pydoc",
    draft: str = "pydoc-eagle3",
    arms: str = "plain,frozen,co-trained",  # the last one's answers train the policy
    compare_every: int = 5,  # steps between samples of the other arms
    steps: int = 60,
    questions: int = 8,  # of a step
    group: int = 8,  # answers to each
    max_tokens: int = 48,
    inner_steps: int = 1,  # updates of the policy on one step's answers
    lr: float = 1e-4,
    head_lr: float = 1e-3,
    head_rows: int = 8,  # answers of a step that the head learns from
    speculation: str = "chain:3",
    slots: int = 4,  # answers at once
    mesh: str = "",  # of the trainer, such as data=4,tensor=2
    sampler_mesh: str = "",
    save_every: int = 20,
    output: Path = Path("rl"),
    seed: int = 0,
) -> None:
    """Train, print a line for each step, and write OUTPUT/metrics.jsonl and saved versions."""
    on = parse_mesh(mesh)
    policy = load_target(resolve_target(target).folder, dtype=default_dtype(), mesh=on)
    head = load_head(resolve_head(draft, "--draft"), policy, dtype=default_dtype(), mesh=on)
    depth = int(speculation.partition(":")[2][:1] or 3)
    follower = Follower(head, policy, TrainSettings(rollout=depth, lr=head_lr), on)
    ways = {name: "off" if name == "plain" else speculation for name in arms.split(",")}
    shape = {"max_slots": slots, "max_model_len": 512, "mesh": sampler_mesh, "progress": False}
    engines = {name: LLM(target, draft, speculation=way, **shape) for name, way in ways.items()}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr, b2=0.95, weight_decay=0.0))
    params: Any = jax.tree.map(lambda x: jnp.array(x, jnp.float32), policy.params)
    state, version = PolicyState(params, optimizer.init(params)), policy.params
    policy_step = make_policy_step(policy.config, optimizer, on)
    chosen, rng = list(engines)[-1], np.random.default_rng(seed)
    read = engines[chosen].tokenizer.render_chat
    seq_len = max(len(read([{"role": "user", "content": each}])) for each in QUESTIONS) + max_tokens
    output.mkdir(parents=True, exist_ok=True)
    for step in range(steps):
        asked = [QUESTIONS[i] for i in rng.choice(len(QUESTIONS), questions, replace=False)]
        own_seed = seed + step * questions * group
        found: dict[str, Sampled] = {}
        for name, llm in engines.items():
            if name != chosen and step % compare_every:
                continue
            if name != chosen and step:
                llm.update_weights(target=version)  # with the head as it was
            found[name] = sample(llm, asked, group, max_tokens, own_seed)
        own = found[chosen]
        rewards = np.array([[reward(answer.text) for answer in output.outputs] for output in own.outputs])
        rollouts = to_rollouts(own.outputs, rewards, seq_len)

        clock = [time.perf_counter()]
        trained = version
        for inner in range(inner_steps):
            state, trained, loss, apart = policy_step(state, trained, rollouts)
            if not inner and (difference := float(apart)) > MOST_APART:
                raise RuntimeError(f"step {step}: a token's log-probability differs by {difference:.3g} nats")
        version = jax.block_until_ready(trained)
        clock.append(time.perf_counter())
        every = max(1, len(rollouts.advantages) // head_rows)
        new_head = None
        if chosen == "co-trained":
            follower.learn(version, jax.tree.map(lambda x: x[step % every :: every][:head_rows], rollouts.rows))
            new_head = jax.block_until_ready(follower.version())
        clock.append(time.perf_counter())
        engines[chosen].update_weights(target=version, draft=new_head)
        clock.append(time.perf_counter())

        policy_seconds, head_seconds, update_seconds = np.diff(clock).tolist()
        total = own.seconds + clock[-1] - clock[0]
        row = {
            "step": step,
            "reward": round(float(rewards.mean()), 3),
            "tokens": own.num_tokens,
            "most_apart": difference,
            "loss": float(loss),
            "seconds": {
                "rollouts": round(own.seconds, 2),
                "policy": round(policy_seconds, 2),
                "head": round(head_seconds, 3),
                "update": round(update_seconds, 3),
            },
            "head_share": round(head_seconds / total, 4),
            "arms": {name: each.row() | {"same": same_answers(own, each)} for name, each in found.items()},
        }
        print(json.dumps(row), flush=True)
        with (output / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if save_every and (step + 1) % save_every == 0:
            learnt = Head(head.drafter, follower.version(), head.target_ids, head.draft_ids)
            save(output / f"step-{step + 1}", policy, version, learnt)
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    app()
