"""The way from the settings of a run to a trainer: target, tokenised data, draft vocabulary, held-out prompts."""

import functools
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specserve import cluster, processes, provenance
from specserve.checkpoints.configs import find_config
from specserve.checkpoints.load import Quantization, Target, load_target
from specserve.checkpoints.lora import Merging, read_adapter
from specserve.checkpoints.source import BUNDLED, TargetSource, resolve_target
from specserve.data import dataset, pydoc, sources
from specserve.data.conversations import Columns, parse_template_kwargs
from specserve.data.dataset import Dataset, Prompt
from specserve.data.loader import Loader
from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.settings import draft_vocab_size
from specserve.errors import ConfigError
from specserve.mesh import default_dtype, parse_mesh, use_compilation_cache
from specserve.speculative.vocab import choose_draft_vocab, coverage
from specserve.tokenizer import Tokenizer
from specserve.train import capture
from specserve.train.capture import Capturer, FeatureFolder, OnRows
from specserve.train.evaluation import HeldOutEvaluator
from specserve.train.flops import StepShape
from specserve.train.head import adapter_notes, earlier_head, new_drafter
from specserve.train.learner import Learner, TrainingData
from specserve.train.remote.target_service import open_service, prefill_spec
from specserve.train.run.checks import plan_drafter
from specserve.train.run.folder import RunFolder
from specserve.train.run.report import summarize
from specserve.train.settings import CaptureSettings, DataSettings, TrainRun, TrainSettings
from specserve.train.speed import make_stopwatch
from specserve.train.step import place_rows
from specserve.train.target_states import KeptStates
from specserve.train.trainer import Trainer

logger = logging.getLogger(__name__)

Mixture = tuple[sources.SourceRows, ...]


@dataclass(frozen=True)
class Materials:
    """The materials of a run, whatever it computes: target, data, prompts and drafter."""

    source: TargetSource
    target: Target  # without its layers, where their states come from elsewhere
    quantization: Quantization  # of the target's weights
    is_checked: bool  # every weight of the target must be a number
    loaded: Dataset
    prompts: list[Prompt]
    data: TrainingData
    drafter: TrainedDrafter

    def features(self, settings: CaptureSettings) -> FeatureFolder:
        """Open the captured states of the run, complete or not. Raises ConfigError or CheckpointError."""
        return capture.open_features(
            settings,
            self.target,
            self.quantization,
            self.drafter,
            self.loaded.rows,
            self.data.loader.state()["rows_digest"],
            self.data.target_ids,
        )

    def capture(
        self, settings: CaptureSettings, mesh: Mesh | None, on_rows: OnRows = lambda _done, _total: None
    ) -> FeatureFolder:
        """Open the captured states of the run, and capture those that are missing. Raises ConfigError or
        CheckpointError."""
        features = self.features(settings)
        make = functools.partial(
            Capturer,
            features,
            self.source.folder,
            self.loaded.rows,
            self.data.target_ids,
            batch_size=self.data.loader.batch_size,
            is_checked=self.is_checked,
            mesh=mesh,
        )
        capture.capture(features, make, on_rows)
        return features


def prepare(
    run: TrainRun,
    folder: RunFolder,
    mixture: Mixture | None = None,
    on_captured: OnRows = lambda _done, _total: None,
) -> Trainer:
    """Load everything a run needs, and capture the target's states where the run asks for it. The mixture is read here
    where it is not given, as one with the target's own answers is. Raises ConfigError, CheckpointError or DataError."""
    if run.service.target_service:
        cluster.connect(run.ray_address)  # before JAX has threads, which are not for a process that forks
    mesh = parse_mesh(run.mesh)
    if mesh is None and jax.process_count() > 1:
        raise ConfigError(f"{jax.process_count()} processes need a mesh over their devices, such as --mesh data=N")
    materials = load_materials(run, mesh, mixture)
    target, data = materials.target, materials.data
    evaluator = features = None
    if run.features.capture:
        features = materials.capture(run.features, mesh, on_captured)
    elif run.service.target_service:
        spec = prefill_spec(
            run.service,
            materials.source,
            target.config,
            materials.drafter,
            quantization=run.quantization,
            is_checked=run.check_weights,
            accumulate=run.train.accumulate,
        )
        features = open_service(cluster.connect(run.ray_address), run.service, spec, target.config, data.loader)
    if features:
        logger.warning(
            "training from states that come from elsewhere: tau is not measured; afterwards run specserve eval "
            f"--target {run.target} --draft {run.output}"
        )
    elif materials.prompts:
        evaluator = HeldOutEvaluator(
            target,
            materials.drafter,
            data.target_ids,
            materials.prompts,
            run.eval,
            quantization=run.draft_quantization,
            seed=run.train.seed,
            mesh=mesh,
        )
    keeps_states = _keeps_states(run, data.loader.num_new_steps)
    if keeps_states:
        layers, rows = materials.drafter.aux_layers, materials.loaded.rows
        features = KeptStates(folder.path, target, layers, data.target_ids, rows, mesh)
    learner = Learner(run.train, materials.drafter, target, data, features=features, mesh=mesh)
    notes = _notes(run, materials.source, materials.loaded, data.target_ids)
    states_from = "capture" if keeps_states else run.states_from  # of most epochs
    stopwatch = make_stopwatch(StepShape.of(run.train, target.config, materials.drafter, states_from), mesh)
    return Trainer(run, learner, notes, folder, evaluator=evaluator, stopwatch=stopwatch)


def _keeps_states(run: TrainRun, num_new_steps: int) -> bool:
    """Return whether the run keeps the target's states, where so many steps read every row once. It follows from
    settings and data alone, so a run that is resumed does as before."""
    if run.features.keep_states != "auto":
        return run.features.keep_states == "true"
    if run.states_from != "layers" or run.is_of_several or jax.default_backend() != "cpu":
        return False
    return bool(run.budget) or run.train.max_steps > num_new_steps


def load_materials(run: TrainRun, mesh: Mesh | None, mixture: Mixture | None = None) -> Materials:
    """Load target, data and draft vocabulary. Raises ConfigError, CheckpointError or DataError."""
    use_compilation_cache()
    source = resolve_target(run.target)
    config, _ = find_config(str(source.folder))
    plan_drafter(run, config)
    shape = run.train.batch_size, run.train.seq_len
    shard = processes.shard_of(place_rows(mesh, shape), shape)
    target = load_target(
        source.folder,
        dtype=default_dtype(),
        quantization=run.quantization,
        mesh=mesh,
        is_checked=run.check_weights,
        has_layers=run.states_from == "layers",
        is_looped=True,
        merging=read_merging(run.lora),
    )
    tokenizer = Tokenizer.load(source.folder, parse_template_kwargs(run.data.template_kwargs))
    vocab_size = target.config.vocab_size
    mixture = mixture or load_mixture(run.target, run.data, vocab_size)
    loaded, prompts = load_data(run.target, run.data, run.train, mixture, tokenizer, source.folder, vocab_size)
    rows, counts = loaded.rows, loaded.counts
    head = earlier_head(run.init_from, run.draft, target, run.lora) if run.init_from else None
    target_ids = head.target_ids if head else draft_vocab(counts, tokenizer, target.eos_ids, run.draft.vocab_size)
    data = TrainingData(
        loader=Loader(rows, run.train.batch_size, run.train.seed, shard),
        target_ids=target_ids,
        coverage=coverage(counts, target_ids),
        head=head,
    )
    logger.info(
        "%d rows of %d tokens, %.1f%% padding; draft vocabulary of %d covers %.2f%% of the tokens to predict",
        len(rows),
        run.train.seq_len,
        100 * rows.padding_share,
        len(target_ids),
        100 * data.coverage,
    )
    drafter = head.drafter if head else new_drafter(run.drafter, run.draft, target.config, len(target_ids))
    return Materials(source, target, run.quantization, run.check_weights, loaded, prompts, data, drafter)


def read_merging(lora: str) -> Merging | None:
    """Return the adapter in the PEFT folder that a run names, to be merged into its target; None where it names none.
    Raises CheckpointError."""
    return Merging(read_adapter(Path(lora))) if lora else None


def _notes(run: TrainRun, source: TargetSource, loaded: Dataset, target_ids: np.ndarray) -> dict[str, Any]:
    """Return the notes that a head carries about the run that trained it, as far as they are known before its first
    step."""
    return {
        "target": source.name,
        "target_fingerprint": provenance.fingerprint(source.folder),
        "quantization": run.quantization,
        "draft_quantization": run.draft_quantization,
        **adapter_notes(run.lora),
        **({"init_from": run.init_from} if run.init_from else {}),
        "data": list(run.data.source),
        **({"answers": "of the target"} if run.data.regenerate else {}),
        "data_summary": summarize(loaded, target_ids),
    }


def draft_vocab(
    counts: np.ndarray,  # [vocab] how often each token bears loss
    tokenizer: Tokenizer,
    eos_ids: Collection[int],
    size: int,  # as `DraftSettings.vocab_size` has it
) -> np.ndarray:  # [draft_vocab] int32, sorted
    """The target's tokens that the head can propose: the most frequent, and always the template's and every EOS. The
    single bytes, of which rare characters are made, are always among them where they leave half of the room."""
    needed = tokenizer.template_token_ids() | frozenset(eos_ids)
    size = draft_vocab_size(size, len(counts))
    with_bytes = needed | tokenizer.byte_token_ids()
    pinned = with_bytes if 2 * len(with_bytes) <= size else needed
    return choose_draft_vocab(counts, frozenset(i for i in pinned if i < len(counts)), size)


def load_mixture(target: str, data: DataSettings, vocab_size: int, *, needs_answers: bool = True) -> Mixture:
    """Read the sources of a run for the target of this name. Where the target answers the questions itself, the answers
    of the sources are not needed. Raises ConfigError or DataError."""
    # the bundled target is measured on the bundled questions, whatever it is trained on
    measured = pydoc.build("held-out") if target == BUNDLED else ()
    if target != BUNDLED and any(sources.parse_entry(entry)[0] == sources.PYDOC for entry in data.source):
        logger.warning(
            "--source pydoc is data for the bundled target: a head for %s learns more from other data", target
        )
    return sources.load_mixture(
        data.source,
        Columns.parse(data.columns),
        vocab_size=vocab_size,
        withheld={conversation.key for conversation in measured},
        needs_answers=needs_answers,
    )


def load_data(
    target: str,  # its name
    data: DataSettings,
    train: TrainSettings,
    mixture: Mixture,
    tokenizer: Tokenizer,
    folder: Path,  # of the tokenizer
    vocab_size: int,
) -> tuple[Dataset, list[Prompt]]:
    """Load the packed training rows, and the held-out prompts to measure on, which are not trained on."""
    drawn = dataset.draw(mixture, data.max_conversations, train.seed)
    max_len, workers = train.seq_len, data.workers
    tokens = [dataset.tokenize_source(part, tokenizer, folder, max_len=max_len, workers=workers) for part in drawn]
    questions = (sources.SourceRows(sources.PYDOC, 1.0, (), ()),) if target == BUNDLED else mixture
    prompts = dataset.held_out_prompts(questions, tokenizer, data.eval_prompts, max_len=max_len)
    if data.eval_prompts and not prompts:
        lack = f"no held-out question of at most {max_len} tokens: acceptance cannot be measured"
        if train.patience:
            raise ConfigError(f"{lack}, which --patience needs; raise --seq-len, give a larger source, or --patience 0")
        logger.warning(lack)
    return dataset.build(tokens, seq_len=max_len, vocab_size=vocab_size), prompts
