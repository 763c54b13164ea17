"""A training run of seconds: a random target, random text, a head of two heads. As a program it is one process of such
a run (see `start`)."""

import dataclasses
import functools
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from quick_compile import compile_quickly
from rounding import tolerance

from specserve import cluster, config, processes
from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.source import TargetSource
from specserve.data.dataset import Prompt
from specserve.data.documents import Document
from specserve.data.loader import Loader
from specserve.data.packing import pack
from specserve.drafters.eagle3.model import Eagle3Params
from specserve.drafters.interface import Head
from specserve.mesh import parse_mesh
from specserve.speculative.acceptance import Acceptance
from specserve.train import learner
from specserve.train.acceptance import Arm, ArmAcceptance
from specserve.train.evaluation import HeldOutEvaluator, Measurement
from specserve.train.features import FeatureSource
from specserve.train.first import Begin, make_begin
from specserve.train.head import new_drafter
from specserve.train.learner import Learner, TrainingData
from specserve.train.optimizer import make_optimizer
from specserve.train.remote.target_service import open_service, prefill_spec
from specserve.train.run.folder import MetricsFile, RunFolder
from specserve.train.settings import DraftSettings, EvalSettings, TrainRun, TrainSettings
from specserve.train.speed import Speed
from specserve.train.step import LossConfig, make_step, place_rows
from specserve.train.trainer import Trainer

JOINING = {"coordinator": "", "num_processes": 1, "process_id": 0, "join_seconds": 300}
MEASURED = {"seconds", *(field.name for field in dataclasses.fields(Speed))}
SETTINGS = TrainSettings(
    max_steps=10,
    max_minutes=0.0,
    batch_size=4,
    seq_len=32,
    rollout=2,
    lr=5e-3,
    log_every=1,
    eval_every=0,
    save_every=3,
)


NUM_STEPS = 1000 << 40  # counts over so many steps make any norm in float32, and any tau of few digits, exactly


class NormEvaluator:
    """Stands for an acceptance: tau is 1 and how long the head's gate is; with `taus`, it is these in turn instead."""

    def __init__(self, taus: Sequence[float] = (), identity: str = "norm") -> None:
        self._taus, self.identity = list(taus), identity

    def measure(self, params: Eagle3Params, *, is_last: bool) -> Measurement:
        norm = float(jnp.linalg.norm(jax.tree.leaves(params)[0]))
        accepted = round((self._taus.pop(0) - 1 if self._taus else norm) * NUM_STEPS)
        found = Acceptance(NUM_STEPS, NUM_STEPS, (accepted,))
        return Measurement((ArmAcceptance(Arm("chain:1"), found, {"a": found}),), 0, self.identity)


# These settings bound a run and watch it, but are no part of its step.
NOT_OF_THE_STEP = ("max_steps", "max_minutes", "log_every", "eval_every", "save_every", "keep", "patience", "resume")

_optimizer = functools.cache(make_optimizer)
_step = functools.cache(make_step)
_begun = functools.cache(make_begin)  # without a mesh, whose places have no hash


def make_learner(run: TrainRun, target: Target, data: TrainingData, **others: Any) -> Learner:
    """A `Learner` whose step is that of earlier ones of the same settings: tracing it takes longer than ten steps."""

    def optimizer(settings: TrainSettings) -> optax.GradientTransformation:
        return _optimizer(dataclasses.replace(settings, **{name: getattr(SETTINGS, name) for name in NOT_OF_THE_STEP}))

    if data.head:
        drafter = data.head.drafter
    else:
        drafter = new_drafter(run.drafter, run.draft, target.config, len(data.target_ids))

    def begin(config: LossConfig, place: Any, mesh: Mesh | None) -> Begin:
        return _begun(config, None) if place is None else make_begin(config, place, mesh)

    with mock.patch.multiple(learner, make_optimizer=optimizer, make_step=_step, make_begin=begin):
        return Learner(run.train, drafter, target, data, **others)


def tiny_run(output: Path, **changes: Any) -> TrainRun:
    names = {field.name for field in dataclasses.fields(TrainRun)}
    train = {name: value for name, value in changes.items() if name not in names}
    sizes = {} if changes.get("drafter") == "mtp" else {"num_heads": 2, "num_kv_heads": 1, "d_ff": 32}
    draft = DraftSettings(**sizes, export_dtype="float32")
    others = {"draft": draft} | {name: value for name, value in changes.items() if name in names}
    return TrainRun(output=str(output), train=dataclasses.replace(SETTINGS, **train), **others)


def tiny_trainer(
    output: Path,
    target: Target,
    *,
    evaluator: Any = None,
    mesh: Mesh | None = None,
    head: Head | None = None,  # to go on from
    features: FeatureSource | None = None,  # in place of the target's layers
    **changes: Any,  # settings of the run or of the training
) -> Trainer:
    """A run over random text of few tokens, so that there is something to learn: which tokens never come."""
    rng = np.random.default_rng(0)
    documents = [Document(rng.integers(0, 64, 30).astype(np.int32), np.ones(30, bool)) for _ in range(16)]
    run = tiny_run(output, **changes)
    shape = run.train.batch_size, run.train.seq_len
    is_whole = run.drafter in ("mtp", "dflash2", "domino")  # they propose all of the target's tokens
    target_ids = np.arange(64, dtype=np.int32) if is_whole else np.arange(8, 56, dtype=np.int32)
    shard = processes.shard_of(place_rows(mesh, shape), shape)
    data = TrainingData(
        loader=Loader(pack(documents, run.train.seq_len), run.train.batch_size, run.train.seed, shard),
        target_ids=head.target_ids if head else target_ids,
        coverage=0.75,
        head=head,
    )
    if run.service.target_service:
        drafter = new_drafter(run.drafter, run.draft, target.config, len(data.target_ids))
        source = TargetSource(str(target.folder), target.folder)
        spec = prefill_spec(
            run.service,
            source,
            target.config,
            drafter,
            quantization=run.quantization,
            is_checked=run.check_weights,
            accumulate=run.train.accumulate,
        )
        features = open_service(cluster.connect(run.ray_address), run.service, spec, target.config, data.loader)
    folder, notes = RunFolder(run, is_first=processes.is_first()), {"target": "tiny"}
    made = make_learner(run, target, data, features=features, mesh=mesh)
    return Trainer(run, made, notes, folder, evaluator=evaluator)


def tiny_evaluator(of: Trainer, mesh: Mesh | None) -> HeldOutEvaluator:
    """The real one, for the run's head."""
    prompts = [Prompt("a", (1, 2, 3)), Prompt("b", (4,) * 9)]
    settings = EvalSettings(speculation=("chain:2",), eval_tokens=8)
    own = of.learner
    return HeldOutEvaluator(own.target, own.drafter, own.data.target_ids, prompts, settings, seed=0, mesh=mesh)


def resolved(command: str) -> TrainRun:
    """The run that this `specserve train` would be."""
    flags = {leaf.flag: leaf.name for leaf in config.leaves(TrainRun)}
    file, overrides, words = None, [], iter(shlex.split(command)[2:])
    for word in words:
        if word == "--config":
            file = Path(next(words))
        else:
            overrides.append(f"{flags[word]}={'true' if word == '--resume' else next(words)}")
    return config.resolve(TrainRun, file=file, overrides=overrides)


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def noise_of(run: Callable[[Target, Path], Any], target: Target, folder: Path) -> Any:
    """What rounding may do to the numbers that such a run gives: how far they move with the target's weights (see
    `rounding.tolerance`), whose noise goes through every step's gradient into the head. Each run has a folder of its
    own in this one."""
    number = itertools.count()
    return tolerance(
        lambda params: run(dataclasses.replace(target, params=params), folder / f"moved{next(number)}"), target.params
    )


def numbers(output: Path) -> dict[str, np.ndarray]:
    """The losses of a run, [step, rollout step], and its taus."""
    rows = metrics(output)
    return {
        "losses": np.array([row["rollout_loss"] for row in rows if row["loss"]]),
        "taus": np.array([row["tau"] for row in rows if not row["loss"]]),
    }


def curve(output: Path) -> list[tuple[Any, ...]]:
    """What must be equal between two runs: all but the time and the memory."""
    return [tuple(value for key, value in sorted(row.items()) if key not in MEASURED) for row in metrics(output)]


def start(
    target: Target, output: Path, *, death: str = "", environment: Any = None, is_measured: bool = False, **changes: Any
) -> subprocess.Popen:
    """The run as a process of its own, measured by the real evaluator or not. `death` says where it kills itself:
    `line 4` within the writing of step 4's metrics, `save 6` before the state of step 6 is whole, `export 1` before the
    first head is, `step 5` after step 5."""
    arguments = {"target": str(target.folder), "output": str(output), "death": death, "is_measured": is_measured}
    arguments["changes"] = changes
    # in a cache of its own: eviction from the tests' reads each entry's time of access, which a process that knows no
    # bound, or is killed while it writes, does not leave
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    kept = {"JAX_COMPILATION_CACHE_DIR": f"{cache}-runs", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    kept = kept if cache else {}
    kept["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(jax.config.read("jax_disable_most_optimizations"))
    return subprocess.Popen(
        [sys.executable, __file__, json.dumps(arguments)],
        env={**os.environ, **kept, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arrange(death: str) -> None:
    """Let the process kill itself where `start` says."""
    where, _, step = death.partition(" ")
    if where == "line":
        write = MetricsFile.write

        def write_half(self: MetricsFile, row: dict[str, Any]) -> None:
            if row["step"] != int(step):
                return write(self, row)
            assert self._file
            self._file.write(json.dumps(row)[:40])
            self._file.flush()
            return _die()

        MetricsFile.write = write_half  # type: ignore[method-assign]
    if where == "step":
        look = Trainer._look_around

        def look_last(self: Trainer) -> None:
            look(self)
            if self.step == int(step):
                _die()

        Trainer._look_around = look_last  # type: ignore[method-assign]
    if where in ("save", "export"):
        names = {"save": step, "export": "model.safetensors"}
        for name in ("rename", "replace"):
            setattr(os, name, _dying(getattr(os, name), names[where]))


def _dying(move: Callable[..., None], last: str) -> Callable[..., None]:
    def moved(source: Any, to: Any, **places: Any) -> None:
        if Path(to).name == last:
            _die()
        move(source, to, **places)

    return moved


def main() -> None:
    compile_quickly()
    arguments = json.loads(sys.argv[1])
    changes = arguments["changes"]
    processes.join(*(changes.get(name, other) for name, other in JOINING.items()))
    _arrange(arguments["death"])
    mesh = parse_mesh(changes.pop("mesh", ""))
    target = load_target(Path(arguments["target"]), dtype="float32", mesh=mesh)
    run = tiny_trainer(Path(arguments["output"]), target, evaluator=NormEvaluator(), mesh=mesh, **changes)
    if arguments["is_measured"]:
        run.evaluator = tiny_evaluator(run, mesh)
    try:
        print(run.train().ending, flush=True)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(processes.exit_status(error))


if __name__ == "__main__":
    main()
