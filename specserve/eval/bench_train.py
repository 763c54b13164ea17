"""How fast a head learns and what memory that takes, beside the naive formulation (`naive_training`) on the same
conversations and shapes. The arms take turns in one process."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.load import Target
from specserve.data.documents import Document
from specserve.data.loader import Loader
from specserve.data.packing import pack
from specserve.eval.naive_training import NaiveTrainer, batches_of_every_length, naive_loss, padded_batches
from specserve.models.config import DraftConfig, ModelConfig
from specserve.models.draft import draft_spec
from specserve.models.params import is_spec
from specserve.models.target import target_spec
from specserve.speculative.vocab import DraftVocab
from specserve.train.flops import step_flops
from specserve.train.head import draft_config, init_head
from specserve.train.optimizer import make_optimizer
from specserve.train.settings import DraftSettings, TrainSettings
from specserve.train.speed import matmul_peak
from specserve.train.step import LossConfig, StepMetrics, TrainState, loss_config, make_step
from specserve.train.unroll import Rows


class Arm(Protocol):
    """One way to train."""

    name: str

    def warm_up(self) -> None:
        """Compile all that `run` may need."""
        ...

    def run(self, num_steps: int) -> tuple[int, int]:
        """Take so many steps and wait for them: how many loss-bearing tokens and how many slots they had."""
        ...


@dataclass
class ArmResult:
    """One value per round."""

    useful: list[float] = field(default_factory=list)  # loss-bearing tokens per second
    slots: list[float] = field(default_factory=list)  # slots per second, padding included
    peak_share: list[float] = field(default_factory=list)  # useful floating point operations per second over the peak


@dataclass(frozen=True)
class TrainBenchReport:
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
    """This package's step over packed rows, its metrics read a step late as the trainer reads them."""

    name = "specserve"

    def __init__(
        self, config: LossConfig, settings: TrainSettings, target: Target, target_ids: np.ndarray, loader: Loader
    ) -> None:
        optimizer = make_optimizer(settings)
        params: Any = init_head(config.draft, target, target_ids, settings.seed)
        self._state = TrainState(params, optimizer.init(params), jnp.int32(0))
        self._step, self._target, self._loader = make_step(config, optimizer), target.params, loader
        self._vocab = DraftVocab(jnp.asarray(target_ids))

    def warm_up(self) -> None:
        self.run(2)

    def run(self, num_steps: int) -> tuple[int, int]:
        num_useful = num_slots = 0
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
            num_slots += batch.loss_mask.size
        jax.block_until_ready((self._state, unread))
        return num_useful, num_slots


class NaiveArm:
    name = "naive"

    def __init__(
        self,
        config: LossConfig,
        settings: TrainSettings,
        target: Target,
        target_ids: np.ndarray,
        documents: Sequence[Document],
    ) -> None:
        params = init_head(config.draft, target, target_ids, settings.seed)
        vocab = DraftVocab(jnp.asarray(target_ids))
        self._trainer = NaiveTrainer(config, make_optimizer(settings), params, target.params, vocab)
        self._batches = padded_batches(documents, settings.batch_size, settings.seq_len, settings.seed)
        self._every_length = batches_of_every_length(documents, settings.batch_size, settings.seq_len)

    def warm_up(self) -> None:
        for rows in self._every_length:
            self._trainer.step(rows)
        jax.block_until_ready(self._trainer.params)

    def run(self, num_steps: int) -> tuple[int, int]:
        num_useful = num_slots = 0
        for _ in range(num_steps):
            rows = next(self._batches)
            self._trainer.step(rows)
            num_useful += int(rows.loss_mask.sum())
            num_slots += rows.loss_mask.size
        jax.block_until_ready(self._trainer.params)
        return num_useful, num_slots


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
    """Both arms, `steps` steps each in every round, after steps that compile."""
    config = loss_config(settings, target.config, draft_config(draft, target.config, len(target_ids)))
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
    flops = step_flops(config.target, config.draft, config.rollout, batch=1, seq=settings.seq_len).total.useful
    for i in range(rounds):
        for arm in arms if i % 2 == 0 else arms[::-1]:
            peaks.append(matmul_peak(config.target.dtype))
            begin = time.perf_counter()
            num_useful, num_slots = arm.run(steps)
            seconds = time.perf_counter() - begin
            result = report.arms[arm.name]
            result.useful.append(num_useful / seconds)
            result.slots.append(num_slots / seconds)
            result.peak_share.append(flops / settings.seq_len * num_slots / seconds / peaks[-1])
        report = TrainBenchReport(report.arms, statistics.median(peaks) / 1e9, rows.padding_share)
        on_round(report)
    return report


@dataclass(frozen=True)
class Memory:
    """Bytes that a compiled step takes."""

    arguments: int  # target, head and the optimiser's moments
    live: int  # everything else that lives at once

    @property
    def total(self) -> int:
        return self.arguments + self.live


@dataclass(frozen=True)
class MemoryCell:
    batch: int
    seq: int
    again: Memory  # this package's step, rollout steps computed again in the backward pass
    kept: Memory  # the same, all of them kept
    naive: Memory


def bench_config(settings: TrainSettings, target: ModelConfig, draft_vocab_size: int) -> LossConfig:
    """A plain head for a target of these shapes."""
    draft = draft_config(DraftSettings(), target, min(draft_vocab_size, target.vocab_size))
    return loss_config(settings, target, draft)


def memory_cells(
    settings: TrainSettings, target: ModelConfig, draft_vocab_size: int, seqs: Sequence[int]
) -> list[MemoryCell]:
    """All three steps at each sequence length."""

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
    """By the compiler's own account, without running it. The naive step is its gradient alone, without what its
    optimiser takes."""
    target: Any = _abstract(target_spec(config.target), config.target)
    params: Any = _abstract(draft_spec(config.draft), config.draft)
    ids: Any = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    loss_mask: Any = jax.ShapeDtypeStruct((batch, seq), jnp.bool_)
    rows = Rows(ids, loss_mask, ids, ids)
    vocab = DraftVocab(jax.ShapeDtypeStruct((config.draft.draft_vocab_size,), jnp.int32))  # type: ignore[arg-type]
    if is_naive:

        def gradient(params: Any, target: Any, vocab: DraftVocab, rows: Rows) -> Any:
            return jax.value_and_grad(naive_loss, has_aux=True)(params, config, target, vocab, rows)

        lowered = jax.jit(gradient).lower(params, target, vocab, rows)
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


def _abstract(spec: Any, config: ModelConfig | DraftConfig) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype(config.dtype)), spec, is_leaf=is_spec)
