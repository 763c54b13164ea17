"""How fast a head learns and what memory that takes, beside the naive formulation (`naive_training`) on the same
conversations and shapes, whose arms take turns in one process; and a step alone, of a preset's shapes with random
weights, for which nothing is downloaded.

Run from the checkout: `python benchmarks/training.py time --rounds 4 --steps 6 --conversations 1500`, or `python
benchmarks/training.py memory --target qwen3-8b`, or `python benchmarks/training.py step --target qwen3-8b --num-layers
4`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import pydantic.dataclasses
import typer
from naive_training import NaiveTrainer, batches_of_every_length, naive_gradient, padded_batches
from rich.table import Table
from steps import random_pair

from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.source import resolve_target
from specserve.checkpoints.tensors import write_json
from specserve.cli.options import command
from specserve.cli.progress import console
from specserve.config import RULES, setting
from specserve.data import sources
from specserve.data.documents import Document, tokenize
from specserve.data.loader import Loader
from specserve.data.packing import PackedRows, pack
from specserve.drafters.learning import Rows
from specserve.drafters.registry import DraftSettings
from specserve.errors import ConfigError
from specserve.eval.report import table
from specserve.mesh import default_dtype, parse_mesh
from specserve.models.config import ModelConfig
from specserve.models.params import abstract
from specserve.models.presets import PRESETS
from specserve.models.target import target_spec
from specserve.provenance import collect
from specserve.speculative.vocab import DraftVocab
from specserve.tokenizer import Tokenizer
from specserve.train.flops import StepShape, step_flops
from specserve.train.head import new_drafter
from specserve.train.learner import Learner, TrainingData
from specserve.train.optimizer import make_optimizer
from specserve.train.settings import TrainSettings
from specserve.train.speed import device_bytes, matmul_peak, this_device
from specserve.train.step import LossConfig, StepMetrics, TrainState, loss_config, make_step


class Arm(Protocol):
    """A way to train that is measured."""

    name: str

    def warm_up(self) -> None:
        """Compile all that `run` may need."""
        ...

    def run(self, num_steps: int) -> tuple[int, int]:
        """Take so many steps and wait for them: how many loss-bearing tokens and how many positions they had."""
        ...


@dataclass
class ArmResult:
    """What one arm reached, one value per round."""

    useful: list[float] = field(default_factory=list)  # loss-bearing tokens per second
    positions: list[float] = field(default_factory=list)  # positions per second, padding included
    peak_share: list[float] = field(default_factory=list)  # useful floating point operations per second over the peak


@dataclass(frozen=True)
class TrainBenchReport:
    """Everything that was measured."""

    arms: dict[str, ArmResult]
    peak_gflops: float  # per second, the median of all rounds
    padding_share: float  # of the packed rows

    @property
    def ratios(self) -> list[float]:
        """Useful tokens per second to those of the naive arm, round by round."""
        return [
            ours / naive for ours, naive in zip(self.arms["specserve"].useful, self.arms["naive"].useful, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratios": self.ratios, "ratio_median": statistics.median(self.ratios)}


class PackedArm:
    """An arm that takes this package's step over packed rows, reading its metrics a step late as the trainer does."""

    name = "specserve"

    def __init__(
        self, config: LossConfig, settings: TrainSettings, target: Target, target_ids: np.ndarray, loader: Loader
    ) -> None:
        optimizer = make_optimizer(settings)
        params: Any = config.drafter.init_params(target, target_ids, settings.seed)
        self._state = TrainState(params, optimizer.init(params), jnp.int32(0))
        self._step, self._target, self._loader = make_step(config, optimizer), target.params, loader
        self._vocab = DraftVocab(jnp.asarray(target_ids))

    def warm_up(self) -> None:
        self.run(2)

    def run(self, num_steps: int) -> tuple[int, int]:
        num_useful = num_positions = 0
        unread: StepMetrics | None = None
        for _ in range(num_steps):
            batch = self._loader.next_batch()
            arrays = batch.token_ids, batch.loss_mask, batch.document_ids, batch.position_ids
            rows = Rows(*jax.device_put(arrays))
            self._state, metrics = self._step(self._state, self._target, self._vocab, rows, jnp.float32(1))
            if unread is not None:
                jax.device_get(unread)
            unread = metrics
            num_useful += int(batch.loss_mask.sum())
            num_positions += batch.loss_mask.size
        jax.block_until_ready((self._state, unread))
        return num_useful, num_positions


class NaiveArm:
    """An arm that takes the naive step over padded rows (`naive_training`)."""

    name = "naive"

    def __init__(
        self,
        config: LossConfig,
        settings: TrainSettings,
        target: Target,
        target_ids: np.ndarray,
        documents: Sequence[Document],
    ) -> None:
        params = config.drafter.init_params(target, target_ids, settings.seed)
        vocab = DraftVocab(jnp.asarray(target_ids))
        self._trainer = NaiveTrainer(config, make_optimizer(settings), params, target.params, vocab)
        self._batches = padded_batches(documents, settings.batch_size, settings.seq_len, settings.seed)
        self._every_length = batches_of_every_length(documents, settings.batch_size, settings.seq_len)

    def warm_up(self) -> None:
        for rows in self._every_length:
            self._trainer.step(rows)
        jax.block_until_ready(self._trainer.params)

    def run(self, num_steps: int) -> tuple[int, int]:
        num_useful = num_positions = 0
        for _ in range(num_steps):
            rows = next(self._batches)
            self._trainer.step(rows)
            num_useful += int(rows.loss_mask.sum())
            num_positions += rows.loss_mask.size
        jax.block_until_ready(self._trainer.params)
        return num_useful, num_positions


def run_bench(
    target: Target,
    documents: Sequence[Document],
    target_ids: np.ndarray,
    settings: TrainSettings,
    draft: DraftSettings,
    *,
    rounds: int,
    steps: int,
    on_round: Callable[[TrainBenchReport], None] = lambda _report: None,
) -> TrainBenchReport:
    """Measure both arms, `steps` steps each in every round, after steps that compile."""
    config = loss_config(settings, target.config, new_drafter("eagle3", draft, target.config, len(target_ids)))
    rows = pack(documents, settings.seq_len)
    loader = Loader(rows, settings.batch_size, settings.seed)
    arms: list[Arm] = [
        PackedArm(config, settings, target, target_ids, loader),
        NaiveArm(config, settings, target, target_ids, documents),
    ]
    for arm in arms:
        arm.warm_up()
    report = TrainBenchReport({arm.name: ArmResult() for arm in arms}, 0.0, rows.padding_share)
    peaks: list[float] = []
    shape = StepShape(config.target, config.drafter, config.rollout, 1, settings.seq_len)
    flops = step_flops(shape, jax.default_backend()).total.useful
    for i in range(rounds):
        for arm in arms if i % 2 == 0 else arms[::-1]:
            peaks.append(matmul_peak(config.target.dtype))
            begin = time.perf_counter()
            num_useful, num_positions = arm.run(steps)
            seconds = time.perf_counter() - begin
            result = report.arms[arm.name]
            result.useful.append(num_useful / seconds)
            result.positions.append(num_positions / seconds)
            result.peak_share.append(flops / settings.seq_len * num_positions / seconds / peaks[-1])
        report = TrainBenchReport(report.arms, statistics.median(peaks) / 1e9, rows.padding_share)
        on_round(report)
    return report


@dataclass(frozen=True)
class Memory:
    """The bytes that a compiled step takes."""

    arguments: int  # target, head and the optimiser's moments
    live: int  # everything else that lives at once

    @property
    def total(self) -> int:
        return self.arguments + self.live


@dataclass(frozen=True)
class MemoryCell:
    """The memory of all three steps for rows of one length."""

    batch: int
    seq: int
    again: Memory  # this package's step, rollout steps computed again in the backward pass
    kept: Memory  # the same, all of them kept
    naive: Memory


def bench_config(settings: TrainSettings, target: ModelConfig, draft_vocab_size: int) -> LossConfig:
    """Make the configuration of a step that trains a plain head for a target of these shapes."""
    drafter = new_drafter("eagle3", DraftSettings(), target, min(draft_vocab_size, target.vocab_size))
    return loss_config(settings, target, drafter)


def memory_cells(
    settings: TrainSettings, target: ModelConfig, draft_vocab_size: int, seqs: Sequence[int]
) -> list[MemoryCell]:
    """Compile all three steps at each sequence length, and say what memory they take."""

    def memory(seq: int, *, remat: bool, is_naive: bool = False) -> Memory:
        own = replace(settings, remat=remat)
        config = bench_config(own, target, draft_vocab_size)
        return step_memory(config, own, batch=settings.batch_size, seq=seq, is_naive=is_naive)

    return [
        MemoryCell(
            settings.batch_size,
            seq,
            memory(seq, remat=True),
            memory(seq, remat=False),
            memory(seq, remat=False, is_naive=True),
        )
        for seq in seqs
    ]


def step_memory(config: LossConfig, settings: TrainSettings, *, batch: int, seq: int, is_naive: bool) -> Memory:
    """Say what memory a step takes by the compiler's own account, without running it. The naive step is its gradient
    alone, without what its optimiser takes."""
    target: Any = abstract(target_spec(config.target), config.target.dtype)
    params: Any = abstract(config.drafter.spec(), config.drafter.dtype)
    ids: Any = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    loss_mask: Any = jax.ShapeDtypeStruct((batch, seq), jnp.bool_)
    rows = Rows(ids, loss_mask, ids, ids)
    vocab = DraftVocab(jax.ShapeDtypeStruct((config.drafter.draft_vocab_size,), jnp.int32))  # type: ignore[arg-type]
    if is_naive:
        lowered = naive_gradient(config).lower(params, target, vocab, rows)
    else:
        optimizer = make_optimizer(settings)
        counter: Any = jax.ShapeDtypeStruct((), jnp.int32)
        state: Any = TrainState(params, jax.eval_shape(optimizer.init, params), counter)
        scale: Any = jax.ShapeDtypeStruct((), jnp.float32)
        step: Any = make_step(config, optimizer)
        lowered = step.lower(state, target, vocab, rows, scale)
    used = lowered.compile().memory_analysis()
    assert used is not None
    live = used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
    return Memory(used.argument_size_in_bytes, live)


@dataclass(frozen=True)
class StepReport:
    """What the steps of a head beside a target of random weights took."""

    making: float  # seconds of the first one, which compiles it
    seconds: list[float]  # of each of the others
    loss: float  # of the last one
    positions: int  # of a step
    flops: float  # useful ones of a step, over all devices
    peak: float  # operations per second of all devices together, as their maker says or else as measured here
    product: float  # the same as a large product reaches
    device_bytes: int | None  # the most that was taken of a device; None: the device reports none

    @property
    def mfu(self) -> float:
        """The share of the peak that the useful operations of a median step reach."""
        return self.flops / statistics.median(self.seconds) / self.peak

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "mfu": self.mfu}


def run_steps(target: str, settings: TrainSettings, *, num_layers: int, mesh: str, steps: int) -> StepReport:
    """Train an EAGLE-3 head beside a preset's target, cut to its first layers (0: whole), on rows of random tokens
    that all bear loss. Both have random weights, so that nothing is learnt; a step takes as long as with others."""
    devices = parse_mesh(mesh)
    models, head = random_pair(target, num_layers, "float32", devices, is_looped=True)
    shape = settings.batch_size, settings.seq_len
    token_ids = np.random.default_rng(settings.seed).integers(0, models.config.vocab_size, shape, dtype=np.int32)
    position_ids = np.broadcast_to(np.arange(settings.seq_len, dtype=np.int32), shape)
    rows = PackedRows(token_ids, np.ones(shape, bool), np.ones(shape, np.int32), position_ids)
    data = TrainingData(Loader(rows, settings.batch_size, settings.seed), head.target_ids, 1.0, head)
    learner, seconds, metrics = Learner(settings, head.drafter, models, data, mesh=devices), [], None
    for _ in range(1 + steps):
        begin = time.perf_counter()
        metrics = jax.block_until_ready(learner.step(1.0))
        jax.block_until_ready(learner.state)
        seconds.append(time.perf_counter() - begin)
    assert metrics is not None
    counted = StepShape.of(settings, models.config, head.drafter, "layers")
    number = devices.size if devices is not None and jax.default_backend() != "cpu" else 1  # those of a CPU share it
    return StepReport(
        *(seconds[0], seconds[1:], float(metrics.loss), token_ids.size),
        step_flops(counted, jax.default_backend(), devices).total.useful,
        number * this_device().peak,
        number * matmul_peak(models.config.dtype),
        device_bytes(),
    )


def training_table(report: TrainBenchReport) -> Table:
    """Make the table of a report, one row per way to train, with medians over the rounds."""
    shown = table("a training step", ("",), ("useful\ntokens/s", "positions/s", "share of\nmatmul peak"))
    for name, arm in report.arms.items():
        values = (statistics.median(rates) for rates in (arm.useful, arm.positions, arm.peak_share))
        useful, positions, share = values
        shown.add_row(name, f"{useful:.0f}", f"{positions:.0f}", f"{share:.0%}")
    return shown


def training_lines(report: TrainBenchReport) -> list[str]:
    """Say what the table does not hold."""
    ratios = sorted(report.ratios)
    return [
        f"useful tokens/s to the naive arm: {statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        f"packed rows have {report.padding_share:.1%} padding; the peak is {report.peak_gflops:.0f} GFLOP/s",
    ]


def step_table(report: StepReport) -> Table:
    """Make the table of a step of random weights."""
    names = "first, s", "step, s", "least, s", "positions/s", "MFU", "of a product", "memory, GB"
    shown, median = table("a training step of random weights", (), names), statistics.median(report.seconds)
    memory = "" if report.device_bytes is None else f"{report.device_bytes / 1e9:.2f}"
    times = f"{report.making:.1f}", f"{median:.4f}", f"{min(report.seconds):.4f}"
    of_product = report.flops / median / report.product
    shown.add_row(*times, f"{report.positions / median:,.0f}", f"{report.mfu:.1%}", f"{of_product:.1%}", memory)
    return shown


def memory_table(cells: Sequence[MemoryCell]) -> Table:
    """Make the table of a compiled step's memory by sequence length: of the arguments, and of the rest with rollout
    steps computed again, with all kept, and of the naive formulation."""
    names = ("weights,\nmoments", "steps\nagain", "of\nnaive", "all\nkept", "of\nnaive", "naive")
    shown = table("memory of a training step, GB", ("rows x tokens",), names)
    for cell in cells:
        shown.add_row(
            f"{cell.batch} x {cell.seq}",
            f"{cell.again.arguments / 1e9:.2f}",
            f"{cell.again.live / 1e9:.2f}",
            f"{cell.again.live / cell.naive.live:.0%}",
            f"{cell.kept.live / 1e9:.2f}",
            f"{cell.kept.live / cell.naive.live:.0%}",
            f"{cell.naive.live / 1e9:.2f}",
        )
    return shown


app = typer.Typer(no_args_is_help=True)


@pydantic.dataclasses.dataclass(frozen=True, config=RULES)
class TimeRun:
    """The settings of `time`."""

    target: str = setting("pydoc", help="preset, Hugging Face folder or hub id")
    source: str = setting("pydoc", help="conversations, as for train")
    conversations: int = setting(2000, help="use so many of them, drawn by the seed", ge=8)
    draft_vocab_size: int = setting(4096, help="draft vocabulary", ge=1)
    rounds: int = setting(5, help="how often the arms take turns", ge=1)
    steps: int = setting(8, help="steps of each arm in a round", ge=1)
    output: str = setting("", help="write the JSON report here")
    train: TrainSettings = pydantic.Field(default_factory=TrainSettings)


@app.command("time")
@command(TimeRun)
def time_arms(run: TimeRun) -> None:
    """Measure a training step against the naive formulation on the same conversations and shapes, in turns."""
    folder = resolve_target(run.target).folder
    target = load_target(folder, dtype=default_dtype())
    chosen = sources.load(run.source, split="train")
    order = np.random.default_rng(run.train.seed).permutation(len(chosen))[: run.conversations]
    documents = tokenize([chosen[i] for i in order], Tokenizer.load(folder), run.train.seq_len).documents
    target_ids = np.arange(min(run.draft_vocab_size, target.config.vocab_size), dtype=np.int32)
    report = run_bench(*(target, documents, target_ids, run.train, DraftSettings()), rounds=run.rounds, steps=run.steps)
    console.print(training_table(report))
    for line in training_lines(report):
        console.print(line, highlight=False)
    if run.output:
        write_json(Path(run.output), {"settings": asdict(run), **report.to_json(), "provenance": collect()})


@pydantic.dataclasses.dataclass(frozen=True, config=RULES)
class MemoryRun:
    """The settings of `memory`."""

    target: str = setting("qwen3-8b", help="preset, whose shapes are taken; nothing is loaded")
    seq_len: tuple[int, ...] = setting((512, 1024, 2048, 4096, 8192), help="tokens per row", ge=64)
    draft_vocab_size: int = setting(32_000, help="draft vocabulary", ge=1)
    num_layers: int = setting(0, help="layers of the target, 5 or more; 0: all, which take minutes to compile", ge=0)
    batch_size: int = setting(1, help="rows per step", ge=1)
    rollout: int = setting(7, help="training-time-test steps", ge=1, le=8)
    output: str = setting("", help="write the JSON report here")


@app.command("memory")
@command(MemoryRun)
def compare_memory(run: MemoryRun) -> None:
    """Compile a training step of a target's shapes, and the naive formulation's, and say what memory they take."""
    _check_preset(run.target)
    if 0 < run.num_layers < 5:
        raise ConfigError(f"--num-layers {run.num_layers}: a head taps three layers, so give 5 or more")
    target = replace(PRESETS[run.target].config(), dtype=default_dtype())
    target = replace(target, num_layers=run.num_layers) if run.num_layers else target
    settings = TrainSettings(batch_size=run.batch_size, rollout=run.rollout)
    cells = memory_cells(settings, target, run.draft_vocab_size, run.seq_len)
    console.print(memory_table(cells))
    if run.output:
        write_json(Path(run.output), {"settings": asdict(run), "memory": [asdict(cell) for cell in cells]})


@pydantic.dataclasses.dataclass(frozen=True, config=RULES)
class StepRun:
    """The settings of `step`."""

    target: str = setting("qwen3-8b", help="preset, whose shapes are taken; nothing is loaded")
    num_layers: int = setting(0, help="the first layers of the target; 0: all", ge=0)
    mesh: str = setting("", help="devices to spread it over, as of train; empty: one device")
    steps: int = setting(5, help="steps that are timed, after one that compiles", ge=1)
    output: str = setting("", help="write the JSON report here")
    train: TrainSettings = pydantic.Field(default_factory=TrainSettings)


OF_STEP = {"train.batch_size": 1, "train.seq_len": 4096, "train.rollout": 7}  # where nothing else is given


@app.command("step")
@command(StepRun, fill=lambda _given: OF_STEP)
def time_step(run: StepRun) -> None:
    """Time a training step of a preset's shapes with random weights, and say what share of the device's peak it
    reaches."""
    _check_preset(run.target)
    report = run_steps(run.target, run.train, num_layers=run.num_layers, mesh=run.mesh, steps=run.steps)
    console.print(step_table(report))
    if run.output:
        write_json(Path(run.output), {"settings": asdict(run), **report.to_json(), "provenance": collect()})


def _check_preset(target: str) -> None:
    if target not in PRESETS:
        raise ConfigError(f"--target {target}: not a preset; `specserve targets` lists them")


if __name__ == "__main__":
    app()
