"""Train a small chat target like the bundled `pydoc` from nothing: tokenizer, model, Hugging Face folder.

    python tools/train_target.py --output pydoc-2 --minutes 240

It runs the package's own data, forward, optimiser and checkpoint code, on any device that JAX has; this file owns only
the tokenizer's recipe and the loop. Ctrl-C saves and exports; `--resume` goes on exactly where the state was saved.
"""

import json
import logging
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from pydantic.dataclasses import dataclass
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specserve import mesh, provenance
from specserve.checkpoints.load import to_numpy
from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.checkpoints.tensors import SINGLE_FILE, read_json, write_json, write_tensors
from specserve.checkpoints.train_state import StateStore
from specserve.cli.options import command
from specserve.config import RULES, setting
from specserve.data.conversations import Conversation
from specserve.data.documents import Document, tokenize
from specserve.data.loader import Loader
from specserve.data.packing import PackedRows, pack
from specserve.data.sources import load
from specserve.errors import CheckpointError, ConfigError, SpecServeError
from specserve.kernels.rows import Documents
from specserve.models.config import ModelConfig
from specserve.models.families.table import model_config
from specserve.models.params import init_params, num_params
from specserve.models.target import TargetParams, forward, logits, target_spec
from specserve.pytree import pytree
from specserve.tokenizer import Tokenizer
from specserve.train.optimizer import learning_rate_scale, make_optimizer
from specserve.train.settings import TrainSettings

logger = logging.getLogger("specserve.tools.train_target")

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
# Words, single digits, runs of punctuation, and indentation as one piece: the split of Qwen's tokenizers.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
STATE_FOLDER, METRICS_FILE, NOTES_FILE = "state", "metrics.jsonl", "specserve.json"


@dataclass(frozen=True, config=RULES)
class TargetRun:
    """The settings of a run. The defaults are the bundled target's."""

    output: str = setting(help="folder for the model, its state and its metrics")
    data: str = setting("pydoc", help="pydoc, or a .jsonl of conversations")
    steps: int = setting(0, help="stop after this many steps; 0: no limit but minutes", ge=0)
    minutes: float = setting(0.0, help="stop after this much time, over all sessions; 0: no limit but steps", ge=0)
    resume: bool = setting(False, help="go on from the state in the output folder")
    vocab_size: int = setting(8192, help="of tokenizer and model; 256 bytes and 3 special tokens at least", ge=259)
    layers: int = setting(8, help="decoder layers", ge=1)
    d_model: int = setting(512, help="width", ge=8)
    d_ff: int = setting(1536, help="width of the MLP", ge=8)
    heads: int = setting(8, help="attention heads", ge=1)
    kv_heads: int = setting(4, help="key/value heads", ge=1)
    head_dim: int = setting(64, help="width of a head, even", ge=2)
    context: int = setting(4096, help="max_position_embeddings of the written model", ge=16)
    rope_theta: float = setting(10_000.0, help="base of the rotary embedding", gt=0)
    batch_size: int = setting(32, help="rows per step", ge=1)
    seq_len: int = setting(256, help="tokens per row", ge=8)
    lr: float = setting(3e-3, help="peak learning rate of AdamW: embedding and norms", gt=0)
    muon_lr: float = setting(0.02, help="peak learning rate of Muon: the layers' matrices", gt=0)
    weight_decay: float = setting(0.0, help="decoupled weight decay", ge=0)
    clip: float = setting(1.0, help="gradient norm limit", gt=0)
    warmup_share: float = setting(0.03, help="share of the run spent warming up", ge=0, lt=1)
    eval_every: int = setting(500, help="steps between held-out losses; 0: only at the end", ge=0)
    eval_rows: int = setting(128, help="held-out rows that the loss is measured on", ge=1)
    save_every: int = setting(500, help="steps between saved states; 0: only at the end", ge=0)
    seed: int = setting(0, help="of initialisation and data order", ge=0)


@pytree
class Batch:
    token_ids: jax.Array  # [batch, seq] int32
    document_ids: jax.Array  # [batch, seq] int32, 0 is padding
    position_ids: jax.Array  # [batch, seq] int32, restarting with each document


@pytree
class State:
    """What a step changes; masters are float32 whatever the compute dtype."""

    params: TargetParams
    optimizer: optax.OptState
    step: jax.Array  # [] int32


def train_tokenizer(conversations: Sequence[Conversation], vocab_size: int, folder: Path) -> Tokenizer:
    """Byte-level BPE on the messages' text, written with the bundled chat template. A corpus too small for
    `vocab_size` gives fewer tokens; the model's embedding is then padded."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts: Iterator[str] = (message.content for c in conversations for message in c.messages)
    backend.train_from_iterator(texts, trainer)
    backend.save(str(folder / "tokenizer.json"))
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copyfile(BUNDLED_FOLDER / name, folder / name)
    return Tokenizer.load(folder)


def hf_config(run: TargetRun) -> dict[str, Any]:
    """config.json: the bundled target's with this run's sizes."""
    if run.heads % run.kv_heads or run.head_dim % 2:
        raise ConfigError(
            f"--heads {run.heads} must be a multiple of --kv-heads {run.kv_heads}, and --head-dim {run.head_dim} even"
        )
    raw = read_json(BUNDLED_FOLDER / "config.json")
    raw.pop("transformers_version", None)  # not written by it
    return raw | {
        "vocab_size": run.vocab_size,
        "hidden_size": run.d_model,
        "intermediate_size": run.d_ff,
        "num_hidden_layers": run.layers,
        "layer_types": ["full_attention"] * run.layers,
        "num_attention_heads": run.heads,
        "num_key_value_heads": run.kv_heads,
        "head_dim": run.head_dim,
        "max_position_embeddings": run.context,
        "rope_parameters": {"rope_theta": run.rope_theta, "rope_type": "default"},
    }


def windows(conversations: Sequence[Conversation], tokenizer: Tokenizer, seq_len: int) -> PackedRows:
    """Packed rows of whole conversations; one longer than a row goes on in another piece, so nothing is cut off."""
    documents = tokenize(conversations, tokenizer, max_len=2**31 - 1).documents
    pieces = [
        Document(document.token_ids[at : at + seq_len], document.loss_mask[at : at + seq_len])
        for document in documents
        for at in range(0, len(document), seq_len)
    ]
    return pack([piece for piece in pieces if len(piece) > 1], seq_len)


def sum_loss(
    params: TargetParams, model: ModelConfig, dtype: str, batch: Batch
) -> tuple[jax.Array, jax.Array]:  # summed nats and the number of predicted tokens, both [] float32
    """Next-token cross-entropy of every token that follows another one of its document, questions included."""
    compute = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    out = forward(compute, model, batch.token_ids, batch.position_ids, Documents(batch.document_ids))
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits(compute, model, out.hidden_states[:, :-1]), batch.token_ids[:, 1:]
    )
    same = (batch.document_ids[:, 1:] == batch.document_ids[:, :-1]) & (batch.document_ids[:, 1:] > 0)
    weights = same.astype(jnp.float32)
    return jnp.sum(losses * weights), jnp.sum(weights)


StepFunction = Callable[[State, Batch, jax.Array], tuple[State, jax.Array]]


def make_step(model: ModelConfig, dtype: str, optimizer: optax.GradientTransformation) -> StepFunction:
    """The jitted step, its state donated: (state, batch, learning-rate scale) -> (state, mean loss)."""

    def step(state: State, batch: Batch, lr_scale: jax.Array) -> tuple[State, jax.Array]:
        def loss_of(params: TargetParams) -> jax.Array:
            total, count = sum_loss(params, model, dtype, batch)
            return total / jnp.maximum(count, 1.0)

        loss, gradient = jax.value_and_grad(loss_of)(state.params)
        params: Any = state.params  # optax's types know no dataclass trees
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, params)
        params = optax.apply_updates(params, jax.tree.map(lambda update: update * lr_scale, updates))
        return State(params, optimizer_state, state.step + 1), loss

    return jax.jit(step, donate_argnums=0)


class Run:
    """One session of a run."""

    def __init__(self, run: TargetRun) -> None:
        if not run.steps and not run.minutes:
            raise ConfigError("give --steps or --minutes")
        self.run, self.output = run, Path(run.output)
        raw = hf_config(run)
        model = model_config(raw, dtype="float32")
        self.output.mkdir(parents=True, exist_ok=True)
        self.store = StateStore(self.output / STATE_FOLDER)
        if not run.resume and self.store.latest_step is not None:
            raise CheckpointError(f"{run.output} holds a run; go on with it (--resume) or give another --output")
        conversations = load(run.data, split="train")
        self.tokenizer = self._tokenizer(conversations)
        rows = windows(conversations, self.tokenizer, run.seq_len)
        self.loader = Loader(rows, run.batch_size, run.seed)
        self.held_out = self._held_out()
        self.spec = target_spec(model)
        dtype = mesh.default_dtype()
        optimizer = make_optimizer(
            TrainSettings(
                optimizer="muon", lr=run.lr, muon_lr=run.muon_lr, weight_decay=run.weight_decay, clip=run.clip
            )
        )
        self._step = make_step(model, dtype, optimizer)
        self._sum_loss = jax.jit(lambda params, batch: sum_loss(params, model, dtype, batch))
        params: Any = init_params(self.spec, jax.random.key(run.seed), "float32")
        self.state = State(params, optimizer.init(params), jnp.int32(0))
        self.step, self._seconds = 0, 0.0
        self.is_stopping = False
        if run.resume:
            self._restore()
        write_json(self.output / "config.json", raw)
        generation = read_json(BUNDLED_FOLDER / "generation_config.json")
        generation.pop("transformers_version", None)
        write_json(self.output / "generation_config.json", generation)
        logger.info(
            "%.1fM parameters in %s on %s; %d rows of %d tokens, %.1f%% padding",
            *(num_params(self.spec) / 1e6, dtype, jax.devices()[0].device_kind),
            *(len(rows), run.seq_len, 100 * rows.padding_share),
        )
        self._start = time.monotonic() - self._seconds

    def _tokenizer(self, conversations: Sequence[Conversation]) -> Tokenizer:
        if self.run.resume:  # the model's ids are those of the tokenizer it began with
            return Tokenizer.load(self.output)
        return train_tokenizer(conversations, self.run.vocab_size, self.output)

    def _held_out(self) -> list[Batch]:
        rows = windows(load(self.run.data, split="held-out"), self.tokenizer, self.run.seq_len)
        size = min(self.run.batch_size, len(rows))
        loader = Loader(rows, size, seed=0)
        num_batches = max(1, min(self.run.eval_rows, len(rows)) // size)
        return [next_batch(loader) for _ in range(num_batches)]

    def _restore(self) -> None:
        self.state, extra = self.store.restore(self.state)
        self.loader.restore({key: extra[key] for key in self.loader.state()})
        self.step, self._seconds = int(self.state.step), extra["milliseconds"] / 1000

    def elapsed(self) -> float:
        """Seconds of training, earlier sessions included."""
        return time.monotonic() - self._start

    def share(self) -> float:
        """How much of the run is over, by the nearer bound."""
        by_steps = self.step / self.run.steps if self.run.steps else 0.0
        by_time = self.elapsed() / 60 / self.run.minutes if self.run.minutes else 0.0
        return max(by_steps, by_time)

    def train(self, on_progress: Callable[[str], None] = lambda _text: None) -> float:
        """Run to the bound or until `is_stopping`; save, export, and return the held-out loss in nats per token."""
        run, tokens_per_step = self.run, self.run.batch_size * self.run.seq_len
        held_out, unread, begin, begin_step = math.nan, None, time.monotonic(), self.step
        while (share := self.share()) < 1 and not self.is_stopping:
            scale = jnp.float32(learning_rate_scale(share, run.warmup_share, "cosine"))
            self.state, loss = self._step(self.state, next_batch(self.loader), scale)
            self.step += 1
            if unread is not None:  # read a step late, so that the device never waits for the host
                self._check(value := float(unread))
                speed = (self.step - begin_step) * tokens_per_step / (time.monotonic() - begin)
                on_progress(f"step {self.step}  loss {value:.3f}  held-out {held_out:.3f}  {speed:,.0f} tokens/s")
            unread = loss
            if run.eval_every and self.step % run.eval_every == 0:
                held_out = self.evaluate()
            if run.save_every and self.step % run.save_every == 0:
                self.save()
        held_out = self.evaluate()
        self._check(held_out)
        self.save()
        self.store.close()
        self.export(held_out)
        return held_out

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise ConfigError(f"the loss is {loss} at step {self.step}; lower --lr or --muon-lr and --resume")

    def evaluate(self) -> float:
        """Mean loss on held-out rows, nats per token; also logged."""
        sums = np.array([jax.device_get(self._sum_loss(self.state.params, batch)) for batch in self.held_out])
        loss = float(sums[:, 0].sum() / max(1.0, sums[:, 1].sum()))
        row = {"step": self.step, "seconds": round(self.elapsed(), 1), "held_out_loss": loss}
        with (self.output / METRICS_FILE).open("a") as file:
            file.write(json.dumps(row) + "\n")
        logger.info("step %d: %.4f nats per held-out token", self.step, loss)
        return loss

    def save(self) -> None:
        if self.store.latest_step != self.step:
            extra = {"milliseconds": round(self.elapsed() * 1000)}
            self.store.save(self.step, self.state, {**self.loader.state(), **extra})

    def export(self, held_out_loss: float) -> None:
        """Write model.safetensors and a note of how it was made."""
        write_tensors(self.output / SINGLE_FILE, to_numpy(self.state.params, self.spec, "bfloat16"))
        notes = {
            "steps": self.step,
            "tokens": self.step * self.run.batch_size * self.run.seq_len,
            "held_out_loss": round(held_out_loss, 4),
            "provenance": provenance.collect(),
        }
        write_json(self.output / NOTES_FILE, notes)


def next_batch(loader: Loader) -> Batch:
    rows = loader.next_batch()
    return Batch(jnp.asarray(rows.token_ids), jnp.asarray(rows.document_ids), jnp.asarray(rows.position_ids))


def train(run: TargetRun) -> float:
    """A whole session with a progress bar; the first Ctrl-C ends it in order, the second at once."""
    session = Run(run)

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        # A flag and no exception: between a donated state and its successor there is nothing to save.
        session.is_stopping = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, on_interrupt)
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    try:
        with Progress(*columns) as bar:
            task = bar.add_task("compiling", total=1.0)
            return session.train(lambda text: bar.update(task, completed=session.share(), description=text))
    finally:
        signal.signal(signal.SIGINT, previous)


@command(TargetRun)
def main(run: TargetRun) -> None:
    """Train a chat target from nothing on the pydoc data set, or on your own."""
    loss = train(run)
    typer.echo(f"{run.output}: {loss:.4f} nats per held-out token; next: specserve train --target {run.output}")


if __name__ == "__main__":
    try:
        typer.run(main)
    except SpecServeError as error:
        sys.exit(f"error: {error}")
