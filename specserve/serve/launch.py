"""The way from the settings of a server to an engine: which target, which head, how large a cache."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from jax.sharding import Mesh

from specserve import host
from specserve.checkpoints.form import own_form
from specserve.checkpoints.load import Quantization, Target, in_few_bits, load_target
from specserve.checkpoints.source import BUNDLED, resolve_target
from specserve.checkpoints.tensors import is_file
from specserve.drafters.interface import Head, other_head
from specserve.drafters.registry import CARRIED
from specserve.drafters.speculation import parse_speculation, with_head, within_reach
from specserve.drafters.words import ALL_TEXT
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.bundled import bundled_head, find_head, is_downloaded, resolve_head
from specserve.interop.head import load_head, sent_params
from specserve.interop.notes import draft_quantization, log_training, plain_acceptance, read_notes
from specserve.mesh import default_dtype, program_platform
from specserve.provenance import fingerprint
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.engine.late import LateWork
from specserve.serve.engine.options import EngineOptions
from specserve.serve.engine.pages import Watcher
from specserve.serve.engine.swap import DraftWeights, HeadForm, LoadedHead, ServedWeights, TargetWeights, WeightsReader
from specserve.serve.fleet.ranks import Follower, Leader, LeadingRunner
from specserve.serve.programs import program_list
from specserve.serve.programs.calibrate import Between, cost_file, describe_costs, finish, first_costs, step_costs
from specserve.serve.programs.compile_queue import ProgressLog, compile_all
from specserve.serve.programs.compiling_process import CompilingProcess
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import DETERMINISTIC_DEPTH
from specserve.serve.settings import ServeRun, check_unset
from specserve.serve.sizes import Served, ServerSizes, choose_sizes, is_filled, largest_programs
from specserve.serve.startup import check_numbers, check_state_fits
from specserve.speculative.controller import Controller
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import DynamicTree, Tree, chain
from specserve.tokenizer import Tokenizer, check_files

if TYPE_CHECKING:
    from specserve.checkpoints.lora import Merging
    from specserve.serve.engine.adapters import ServedLoras

logger = logging.getLogger(__name__)

CACHE_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}
AUTO_CHAINS = (1, 2, 3, 5, 7)  # 4 and 6 are left out: each chain costs seconds of compiling
AUTO_TREES_CPU = (DynamicTree(4, 2, 7),)
AUTO_TREES = (DynamicTree(4, 3, 15), DynamicTree(6, 4, 31), DynamicTree(7, 8, 63))


@dataclass(frozen=True)
class Models:
    """The models that a server runs. `head` is None where there is nothing to speculate with. The target has the form
    that steps multiply by (`models.served`); an engine packs the head anew. A caller that makes only one engine drops
    the models then, and with them the memory of what was loaded."""

    name: str
    target: Target
    head: Head | None
    read_tokenizer: Callable[[], Tokenizer] | None  # importing what reads it takes a second; None: token ids alone
    fingerprint: str = ""  # of the target's weights
    head_fingerprint: str = ""
    head_acceptance: Sequence[float] = ()  # by depth, from the head's own evaluation; unknown where empty
    mesh: Mesh | None = None  # the mesh that both are spread over; None: one device
    draft: DraftInfo | None = None  # the head's name and promise
    quantization: str = "none"  # of the target's weights, as `load_target` takes it
    draft_quantization: Quantization | Literal[""] = ""  # asked for; empty: as a head's notes say
    head_quantization: Quantization = "none"  # of the head
    version: str = "0"  # of the weights

    @property
    def head_form(self) -> HeadForm | None:
        return self.head and HeadForm(dataclasses.replace(self.head, params=None), self.head_quantization)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, which is read at the first use. Raises CheckpointError."""
        return self.read_tokenizer and self.read_tokenizer()


def load_models(
    target: str,
    draft: str,
    *,
    has_tokenizer: bool = True,
    quantization: Quantization | Literal[""] = "",  # of the target; empty: `own_form`
    draft_quantization: Quantization | Literal[""] = "",  # of the head; empty: as its notes say
    is_checked: bool = False,  # every weight must be a number
    mesh: Mesh | None = None,  # the mesh to spread both over
    merging: "Merging | None" = None,  # an adapter that is merged into the target
) -> Models:
    """Find and load target and head; the head's notes know its target. Raises ConfigError or CheckpointError."""
    is_carried = draft == CARRIED
    name, folder = find_names(target, draft)
    notes = read_notes(folder) if folder else {}
    source = resolve_target(name)
    if has_tokenizer:
        check_files(source.folder)
    own_quantization = quantization or own_form(notes.get("quantization", "none"), source.folder, mesh)
    how: dict[str, Any] = {"quantization": own_quantization, "mesh": mesh, "merging": merging, "is_served": True}
    reading = functools.partial(load_target, source.folder, dtype=default_dtype(), is_arranged=True, **how)
    loaded = dataclasses.replace(reading(is_checked=is_checked), reread=functools.partial(reading, is_checked=True))
    read = functools.partial(Tokenizer.load, source.folder) if has_tokenizer else None
    models = Models(
        source.name,
        loaded,
        None,
        read,
        fingerprint(source.folder),
        mesh=mesh,
        quantization=own_quantization,
        draft_quantization=draft_quantization,
    )
    if is_carried:
        folder = source.folder
    if folder is None and draft_quantization not in ("", "none"):
        logger.warning(
            "--draft-quantization %s, and there is no draft head yet; give one with --draft", draft_quantization
        )
    return load_beside(models, draft, folder) if folder else models


def load_beside(models: Models, draft: str, folder: Path) -> Models:
    """The same loaded target with the head in a folder, which is the target's own where `draft` says that it carries
    one. A head that was trained on other weights, or against others of their bits, is warned of. Raises ConfigError or
    CheckpointError."""
    is_carried = draft == CARRIED
    try:
        kind, notes = (CARRIED, {}) if is_carried else (None, read_notes(folder))
        target = dataclasses.replace(models.target, config=models.target.config.stored)
        how = models.draft_quantization or draft_quantization(notes, folder)
        stored: Quantization = "stored" if how == "stored" else "none"
        head = load_head(folder, target, dtype=default_dtype(), mesh=models.mesh, kind=kind, quantization=stored)
        head_fingerprint = fingerprint(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: the head cannot be read ({error})") from error
    if how not in ("none", "stored"):  # drafts decide about speed and never about tokens: it can cost acceptance
        head = dataclasses.replace(head, params=in_few_bits(head.params, how))
    if how != "none":
        head_fingerprint = f"{head_fingerprint} {how}"  # another acceptance, and steps of other costs
    if not is_carried:
        log_training(notes, folder, models.target.folder, models.fingerprint, models.quantization)
    name = draft if is_carried or is_downloaded(draft) else folder.name
    follows = {key: str(notes[key]) for key in ("lora", "lora_fingerprint") if key in notes}
    return dataclasses.replace(
        models,
        head=head,
        head_fingerprint=head_fingerprint,
        head_acceptance=plain_acceptance(notes).get("accept_rate", ()),
        head_quantization=how,
        draft=DraftInfo(name, notes.get("acceptance", {}).get("tau"), **follows),
    )


def with_version(models: Models, name: str, target: str, draft: str) -> Models:
    """The models with another version's weights, in folders or files (empty: these stay). Raises as `load_beside`."""
    is_sent = is_file(draft)  # and of the head that the command names; a folder may have another kind
    other, head, _ = _weights_reader(models)(models.head_form, target or None, draft if is_sent else None)
    models = dataclasses.replace(models, target=other or models.target, head=head or models.head, version=name)
    if draft and not is_sent:
        named, models = models.draft, load_beside(models, draft, Path(draft))
        if named and models.draft:  # another version of a head has its name
            models = dataclasses.replace(models, draft=dataclasses.replace(models.draft, name=named.name))
    if other or head:  # both were measured with another target, or for another head
        info = dataclasses.replace(models.draft, tau=None) if models.draft else None
        models = dataclasses.replace(models, draft=info, head_acceptance=())
    return models


def find_names(target: str, draft: str) -> tuple[str, Path | None]:
    """Return the target that is meant, as `resolve_target` takes it, and the folder of the head. That is None where
    there is no head, or where the target carries it. Raises ConfigError or CheckpointError."""
    folder = None if draft == CARRIED else _head_folder(target, draft)
    if target or not folder:
        return target or BUNDLED, folder
    notes = read_notes(folder)
    if "target" not in notes:
        raise ConfigError(f"{folder} does not say which target it was trained for; give it with --target")
    return str(notes["target"]), folder


def read_tokenizer(target: str, draft: str) -> Tokenizer:
    """Read only the tokenizer of what `load_models` would load. Raises ConfigError or CheckpointError."""
    folder = resolve_target(find_names(target, draft)[0], needs_weights=False).folder
    check_files(folder)
    return Tokenizer.load(folder)


def _head_folder(target: str, draft: str) -> Path | None:
    return resolve_head(draft, "--draft") if draft else bundled_head(target or BUNDLED)


def make_engine(
    models: Models,
    run: ServeRun,
    on_warmup: Callable[[int, int, str], None],
    *,
    is_coupled: bool = True,
    has_scoring: bool = True,  # compile what requests for log-probabilities of their prompts need
    leader: Leader | None = None,  # of several processes, this is the first
    watcher: Watcher | None = None,  # hears what the prefix cache gains and loses
) -> Engine:
    """Compile every program and build the engine (not started). `on_warmup(done, total, name)` reports, from several
    threads. With `early_ready` only what plain decoding needs is compiled here; the engine compiles the rest while it
    serves, and what token masks alone need once a request has one.

    A measurement can have the draft rank without the target's noise, to see what that brings."""
    if watcher is not None and models.target.config.is_recurrent:
        raise ConfigError(
            f"--kv-events-endpoint tells which pages can be hit, and those of {models.name} need the state of its "
            "recurrent layers besides"
        )
    loras, run = _read_loras(models, run, leader)
    runner = _make_runner(models, run, leader, is_coupled=is_coupled)
    if loras is not None:
        runner.use(runner.with_adapters([*loras.adapters, *[None] * (run.max_loras - len(loras.adapters))]))
    programs = program_list.list_programs(runner, has_scoring=has_scoring)
    first = program_list.first_programs(runner, programs) if _is_early(run) else programs
    left = [program for program in programs if program not in first]
    late, for_masks = ([each for each in left if each.is_for_masks == is_for_masks] for is_for_masks in (False, True))
    done, log = itertools.count(1), ProgressLog(len(first), "before serving")

    def report(program: StepProgram) -> None:
        label = runner.shapes.label(program)
        on_warmup(next(done), len(programs), label)
        log(label)

    logger.info("compiling %d programs before serving, and %d while serving", len(first), len(late))
    with CompilingProcess.begun(runner, late) as process:
        compile_all(runner.compile, first, on_compiled=report, meanwhile=lambda: models.tokenizer)
        check_numbers(runner, models.target)
    make_controller = _controller_maker(run, models.fingerprint, models.head_fingerprint, models.head_acceptance)
    begin = _first_controller_maker(run, models.head_acceptance)
    controller = Controller({}) if run.speculation == "auto" else None
    if not late:
        on_warmup(len(programs), len(programs), "timing the steps")
        controller = finish(make_controller(runner))
    served = ServedWeights(models.version, models.draft, str(models.target.folder), form=models.head_form)
    if leader is None:  # else the other processes would need them as well
        served = dataclasses.replace(served, load_head=_head_loader(models, run), read=_weights_reader(models))
    return Engine(
        runner,
        models.tokenizer,
        model_name=run.served_model_name or _public(models.name),
        weights=served,
        eos_ids=models.target.eos_ids,
        controller=controller,
        options=_options(run, watcher),
        late=LateWork(late, for_masks, make_controller, first if late else (), begin, process),
        loras=loras,
    )


def _read_loras(models: Models, run: ServeRun, leader: Leader | None) -> "tuple[ServedLoras | None, ServeRun]":
    """Read the adapters that the settings name, and return the settings with the room that these have. Raises
    ConfigError or CheckpointError."""
    if not (run.lora or run.max_loras):
        check_unset(run, ("max_lora_rank", "allow_load_lora"), "needs room for adapters: give --max-loras or --lora")
        return None, run
    if leader is not None:
        raise ConfigError("--lora and --max-loras: not with several processes yet; merge the adapter into the target")
    from specserve.serve.loras import read_loras  # no other server needs it

    return read_loras(models.target.config, run)


def _controller_maker(
    run: ServeRun, target_fingerprint: str, head_fingerprint: str, acceptance: Sequence[float]
) -> Callable[[Runner], Generator[Between, None, Controller | None]]:
    """Return a function that makes the controller of a runner whose programs are compiled, where the settings leave it
    a choice. It keeps no reference to the models."""

    def make_controller(runner: Runner) -> Generator[Between, None, Controller | None]:
        """Make a controller from the costs of each step on this machine, and from the acceptance of the head's own
        evaluation."""
        if run.speculation != "auto":
            return None
        costs = yield from step_costs(runner, cost_file(f"{target_fingerprint} {head_fingerprint}", runner))
        logger.info("milliseconds per step: %s", describe_costs(costs))
        return Controller(costs, acceptance, most_steps=runner.shapes.most_steps)

    return make_controller


def _first_controller_maker(
    run: ServeRun, acceptance: Sequence[float]
) -> Callable[[Runner], Generator[Between, None, Controller | None]]:
    """Return a function as `_controller_maker` does, for the programs that a server begins with."""

    def make_controller(runner: Runner) -> Generator[Between, None, Controller | None]:
        if run.speculation != "auto":
            return None
        return Controller((yield from first_costs(runner)), acceptance, most_steps=runner.shapes.most_steps)

    return make_controller


def make_follower(models: Models, run: ServeRun, follower: Follower) -> Runner:
    """Make the runner of a process that is not the first one, compiled. `ranks.follow` runs it."""
    runner = _make_runner(models, run, follower)
    compile_all(runner.compile, program_list.list_programs(runner))
    return runner


def _make_runner(models: Models, run: ServeRun, rank: Leader | Follower | None, *, is_coupled: bool = True) -> Runner:
    """A runner for the ways to speculate that the settings name, the same one in all processes. Raises ConfigError."""
    if rank is not None:
        rank.agree({"the target's fingerprint": models.fingerprint, "the head's": models.head_fingerprint})
    runner = make_runner(models, run, choose_trees(models, run), is_coupled=is_coupled, rank=rank)
    if rank is not None:
        rank.agree({"the models' config": runner.config, "the shapes of steps": runner.shapes})
    return runner


def _options(run: ServeRun, watcher: Watcher | None) -> EngineOptions:
    return EngineOptions(
        max_queue=run.max_queue,
        prefill_tokens=run.prefill_tokens,
        is_caching=run.prefix_cache,
        prefers_cached=run.schedule == "longest-prefix",
        watchdog_seconds=run.watchdog_seconds,
        watcher=watcher,
    )


def _head_loader(models: Models, run: ServeRun) -> Callable[[str], LoadedHead]:
    """Return a function that reads another head for the same target: from a folder or, by the name that `--draft`
    knows, from the target's own checkpoint. It does not keep the target's parameters."""
    target = dataclasses.replace(models.target, params=cast(Any, None))
    kept = dataclasses.replace(models, target=target, head=None)

    def load(draft: str) -> LoadedHead:
        folder = target.folder if draft == CARRIED else find_head(draft, "draft")
        if folder is None:
            raise ConfigError(
                f"{draft[:200]}: no such folder on the server; give one that `specserve train` has written"
            )
        found = load_beside(kept, draft, folder)
        assert found.head is not None
        assert found.draft is not None
        return LoadedHead(
            found.head,
            found.head_acceptance,
            found.draft,
            choose_trees(found, run),
            _controller_maker(run, found.fingerprint, found.head_fingerprint, found.head_acceptance),
            found.head_quantization,
        )

    return load


def _weights_reader(models: Models) -> WeightsReader:
    """Return a function that reads other weights of the target, and of the head that is served. It keeps no
    parameters."""
    served = dataclasses.replace(models.target, params=cast(Any, None))
    kept, mesh, began = dataclasses.replace(models, target=served, head=None), models.mesh, models.head_form
    quantization = cast(Quantization, models.quantization)

    def read(
        form: HeadForm | None, target: TargetWeights | None, draft: DraftWeights | None
    ) -> tuple[Target | None, Head | None, DraftInfo | None]:
        other = None
        if target is not None:
            from specserve.checkpoints.update import other_target  # needed where weights change alone

            other = other_target(served, target, quantization=quantization, mesh=mesh)
        if draft is None:
            return other, None, None
        if form is None:
            raise ConfigError("this server speculates without a head, so there is none to update")
        if is_file(draft):
            if began is None or not began.fits(form.head):
                raise ConfigError(f"{draft}: load_draft has loaded the head that is served; give a folder of it")
            draft = sent_params(form.head, Path(draft), mesh=mesh)
        if not isinstance(draft, str | Path):
            return other, other_head(form.head, draft, quantization=form.quantization, mesh=mesh), None
        found = load_beside(kept, str(draft), Path(draft))
        head = found.head
        assert head is not None
        if not form.fits(head):
            raise ConfigError(f"{draft}: another head than the one that is served; load_draft changes to another")
        return other, head, found.draft

    return read


def make_runner(
    models: Models,
    run: ServeRun,
    trees: Sequence[Tree | None],
    *,
    is_coupled: bool = True,
    rank: Leader | Follower | None = None,  # of several processes, whose caches are as large as the smallest
) -> Runner:
    """Give the device the models, and slots and a cache as the settings say, for steps over these trees. Nothing is
    compiled yet, but the largest programs where the cache takes all memory that they leave."""
    models = with_cache_dtype(models, run)
    _check_kept(models, run)
    served = Served(models.target.config, models.head.drafter if models.head else None, trees, models.mesh)
    make = functools.partial(LeadingRunner, rank) if isinstance(rank, Leader) else Runner

    def agreed(sizes: ServerSizes) -> ServerSizes:
        return ServerSizes(*map(rank.least, dataclasses.astuple(sizes))) if rank else sizes

    def make_for(sizes: ServerSizes) -> Runner:
        return make(
            models.target,
            models.head,
            served.shapes(run, sizes),
            is_coupled=is_coupled,
            has_constrained=run.constrained,
            mesh=models.mesh,
            folder=host.cache_folder() / "programs",
            check=functools.partial(check_state_fits, mesh=models.mesh),
        )

    runner = make_for(sizes := agreed(choose_sizes(served, run)))
    if not is_filled(run):
        return runner
    needed = max(map(runner.temporary_bytes, largest_programs(runner.shapes)))
    logger.info("programs take %.2f GB beside the state, %.2f GB are set aside", needed / 1e9, sizes.set_aside / 1e9)
    if needed > sizes.set_aside:
        runner.state = None  # two states are never there at once
        runner = make_for(agreed(choose_sizes(served, run, needed)))
    return runner


def _check_kept(models: Models, run: ServeRun) -> None:
    """Check that the target has what the settings keep of it. Raises ConfigError."""
    num_layers, is_recurrent = models.target.config.num_layers, models.target.config.is_recurrent
    if wrong := [layer for layer in run.hidden_states if not 0 <= layer < num_layers]:
        raise ConfigError(f"--hidden-states {wrong[0]}: {models.name} has the layers 0 to {num_layers - 1}")
    if run.kept_states and not (is_recurrent and run.prefix_cache):
        why = "prefixes are not cached" if is_recurrent else f"{models.name} has no recurrent layers"
        raise ConfigError(f"--kept-states {run.kept_states}: {why}; leave the flag out")


def with_cache_dtype(models: Models, run: ServeRun) -> Models:
    """Return the models with a target that keeps its keys and values in the dtype asked for. Raises ConfigError where
    the target keeps none."""
    if run.kv_cache_dtype == "auto":
        return models
    config = models.target.config
    if not {config.kind(i).mixer for i in range(config.num_layers)} & {"attention", "latent", "compressed"}:
        raise ConfigError(
            f"--kv-cache-dtype {run.kv_cache_dtype}: all layers of {models.name} are recurrent, so it keeps no keys "
            "and values; leave the flag out"
        )
    config = dataclasses.replace(config, cache_dtype=CACHE_DTYPES[run.kv_cache_dtype])
    return dataclasses.replace(models, target=dataclasses.replace(models.target, config=config))


def choose_trees(models: Models, run: ServeRun) -> tuple[Tree | None, ...]:
    """Return the ways to make a step: the one asked for, or all that `auto` may choose from. Where the way asked for
    needs a head and there is none, plain decoding is returned, and the log says so."""
    has_head = models.head is not None
    if run.deterministic and models.target.config.is_recurrent:
        raise ConfigError(
            f"--deterministic: {models.name} has recurrent layers, whose sums depend on how a prompt is cut into chunks"
        )
    if run.speculation == "auto" and run.deterministic:
        raise ConfigError("--deterministic makes every step of one shape: give --speculation chain:K, or off")
    if run.speculation == "auto":
        source = with_head(ALL_TEXT) if has_head else ALL_TEXT
        trees: list[Tree | None] = [None, *[chain(depth, source) for depth in AUTO_CHAINS]]
        if has_head:
            trees += AUTO_TREES_CPU if program_platform() == "cpu" else AUTO_TREES
        return tuple(within_reach(trees, models.head.drafter) if models.head else trees)
    tree = parse_speculation(run.speculation)
    if tree is not None and tree.uses_head and not has_head:
        logger.warning("no draft head for %s: decoding plainly. Train one, or give it with --draft", models.name)
        tree = None
    if run.deterministic and tree is not None and (tree.top_k > 1 or tree.depth > DETERMINISTIC_DEPTH):
        raise ConfigError(f"--deterministic speculates with chains of at most {DETERMINISTIC_DEPTH}")
    return (tree, None) if _is_early(run) and tree is not None else (tree,)


def _public(name: str) -> str:
    """Return the name of a model as clients see it, without any path of this machine."""
    return (Path(name).name or "model") if Path(name).is_absolute() else name


def _is_early(run: ServeRun) -> bool:
    """Return whether to serve before all programs are compiled. Deterministic steps have one shape, so there is no
    smaller set of programs to begin with. A GPU's compiler times kernels on the device, which would hold up what is
    served, and serving would falsify its times."""
    return run.early_ready and not run.deterministic and program_platform() != "gpu"
