"""The settings that a target brings along, so that `specserve train --target NAME` alone is a whole job.

There is one order, weakest first: the defaults of the schema, the target's recipe, what suits the kind of drafter, the
settings file (`--config`), `--set`, the flags. A resumed run takes its own settings (`run.yaml`) in place of a recipe.
The recipe of a preset is how published heads were trained; any other target gets the same by its size. Both are scaled
to the device found and to the budget (`fit`). The bundled target brings nothing: the schema's defaults are its own.
"""

import functools
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import yaml

from specserve import config, hub
from specserve.checkpoints.configs import find_config, is_known_here
from specserve.checkpoints.source import BUNDLED, resolve_target
from specserve.data import sources
from specserve.data.sources import PYDOC, SELF, SUFFIXES, parse_entry
from specserve.devices import REFERENCE, Device
from specserve.drafters.registry import DEFAULT_KIND, load_kind
from specserve.errors import ConfigError
from specserve.mesh import mesh_sizes
from specserve.models.config import ModelConfig
from specserve.models.presets import PRESETS, Preset, target_size
from specserve.train.run.budget import seconds_of
from specserve.train.run.fit import LADDER, RunFit, fit, time_for_training
from specserve.train.run.folder import SETTINGS_FILE
from specserve.train.settings import TrainRun
from specserve.train.speed import this_device

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parents[2] / "targets" / "recipes"  # of runs that do not follow the one below
MIXTURE, CONVERSATIONS, BENCH = "perfectblend", 200_000, "mt-bench"
ANSWER_SLOTS, CPU_SLOTS = 64, 16  # on accelerators a step of many sequences takes as long as one of few
MAX_STEPS, EVERY = 40_000, 2000
DEFAULT_BUDGET = "1h"  # on a device that is not in the table, where nothing bounds the run
LOG_SECONDS, SAVE_SECONDS = 10.0, 60.0  # between logged steps and saved states there, about
# Less is measured there, which takes about a tenth of the time.
MEASURED_THERE = {"data.eval_prompts": 16, "eval.eval_tokens": 64, "eval.bench_limit": 8}
VOCABULARY = "draft.vocab_size"
DEVICE_BYTES = 40e9  # of weights on one device of 80 GB, where a target has no preset
# Learning rates: published heads for targets of width 4096 were trained at 1e-4, ours for width 512 at 8e-4. Between
# the two the rate falls as one over the width.
WIDTH, LEARNING_RATE, HIGHEST_RATE = 4096, 1e-4, 8e-4


def fill(given: Mapping[str, Any], device: Device | None = None) -> dict[str, Any]:
    """The settings of a run that the user has not given, by dotted name, from those that were, for a device or else for
    the one found here. Raises ConfigError or CheckpointError where the target is not to be found."""
    if given.get("train.resume"):
        return _earlier(given)
    if not given.get("init_from"):
        return _fill(given, device)
    shape = {name: value for name, value in config.defaults(TrainRun).items() if name.startswith("draft.")}
    # the earlier head has a shape and a draft vocabulary already: none is brought, and the sizes of a step fit those
    found = _fill({**shape, **given}, device)
    return {name: value for name, value in found.items() if name not in shape}


def _fill(given: Mapping[str, Any], device: Device | None) -> dict[str, Any]:
    """Return the settings of a run whose head is new, or has the shape that is given."""
    kind = dict(load_kind(given.get("drafter", DEFAULT_KIND)).suits(given))
    name, asked = given.get("target", BUNDLED), given.get("data.source", ())
    if name == BUNDLED:
        return kind | ({"data.regenerate": True} if any(map(_is_unanswered, asked)) else {})
    is_dry = given.get("dry_run", False)
    if not is_dry and not is_known_here(name):
        name = str(resolve_target(name, needs_weights=False).folder)
    target, _ = find_config(name)
    settings = _of_target(target, PRESETS.get(name) or _preset_of(target))
    if "data.source" in given:
        settings["data.regenerate"] = any(map(_is_published, asked))
        del settings["data.max_conversations"]
    elif not is_dry and (reason := hub.absence()) and not sources.is_kept(MIXTURE):
        logger.warning("no data set can be had (%s): the target asks its own questions (--source self)", reason)
        settings["data.source"] = (SELF,)
    settings |= kind
    steps = given.get("train.max_steps") or MAX_STEPS
    settings |= dict.fromkeys(("train.eval_every", "train.save_every"), min(EVERY, max(1, steps // 10)))
    if given.get("coordinator") or given.get("ray"):  # their devices are known only when all processes have joined
        return settings
    device = device or this_device()
    bounds = _bounds(given, device)
    sizes = LADDER[0].settings(target)
    of_head = (VOCABULARY,) if given.get("init_from") else ()
    free = {name: value for name, value in given.items() if name not in sizes or name in of_head}
    if is_dry and not _fit(device, target, settings, bounds | free).is_possible:
        device, bounds = REFERENCE, {}  # it is planned for such devices as it needs
    found = _fit(device, target, settings, {**bounds, **given})
    settings |= bounds | found.sizes.settings(target) | kind
    if device.is_measured:
        settings |= _often_enough(settings, given, found)
    return settings | _of_devices(settings, given, device, found.sizes.rows)


def recipe(name: str) -> str:
    """A target's recipe as YAML. Raises ConfigError for a name that has none."""
    own = FOLDER / f"{name}.yaml"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    if name not in PRESETS:
        raise ConfigError(f"{name!r} has no recipe; `specserve targets` lists the names that have one")
    defaults = config.defaults(TrainRun)
    nested: dict[str, Any] = {"target": name}
    for setting, value in _of_target(PRESETS[name].config(), PRESETS[name]).items():
        if value != defaults[setting]:
            *sections, last = setting.split(".")
            inner = functools.reduce(lambda inside, section: inside.setdefault(section, {}), sections, nested)
            inner[last] = list(value) if isinstance(value, tuple) else value
    title = f"# what `specserve train --target {name}` does by itself, on one device or on those of the mesh\n"
    return title + yaml.safe_dump(nested, sort_keys=False)


def _of_target(target: ModelConfig, preset: Preset | None) -> dict[str, Any]:
    """Return the settings by which the published heads were trained: answers of the target's own, the sizes of the
    highest rung."""
    rate = min(max(LEARNING_RATE * WIDTH / target.d_model, LEARNING_RATE), HIGHEST_RATE)
    draft = preset.draft if preset else _draft_of(target)
    return {
        "mesh": preset.mesh if preset else _least_mesh(target),
        "data.source": (MIXTURE,),
        "data.regenerate": True,
        "data.max_conversations": CONVERSATIONS,
        "data.self_questions": CONVERSATIONS,
        "data.answer_slots": ANSWER_SLOTS,
        **LADDER[0].settings(target),
        **{f"draft.{key}": value for key, value in draft.items()},
        "train.max_steps": MAX_STEPS,
        "train.max_minutes": 0.0,
        "train.lr": float(f"{rate:.1e}"),
        "train.eval_every": EVERY,
        "train.save_every": EVERY,
        "eval.bench": (BENCH,),
    }


def _preset_of(target: ModelConfig) -> Preset | None:
    """The preset with this very config: a folder may hold a target that has a name."""
    return next((preset for preset in PRESETS.values() if preset.config() == target), None)


def _draft_of(target: ModelConfig) -> dict[str, Any]:
    """The sizes of a head where the target's own do not suit one: an MLP as narrow as one expert, more heads than its
    width has room for, or layers so few that the usual ones cannot be tapped."""
    sizes: dict[str, Any] = {}
    if target.num_layers < 5:
        sizes["aux_layers"] = tuple(sorted({0, target.num_layers // 2, target.num_layers - 1}))
    if target.experts and target.d_ff < 2 * target.d_model:
        sizes["d_ff"] = 3 * target.d_model
    if target.latent and target.num_heads > target.d_model // 128 >= 8:
        sizes |= {"num_heads": target.d_model // 128, "num_kv_heads": 8}
    return sizes


def _least_mesh(target: ModelConfig) -> str:
    """The fewest devices of 80 GB that hold the target's weights and leave room for training, by powers of two."""
    number = 2 ** max(0, math.ceil(math.log2(target_size(target).bf16_bytes / DEVICE_BYTES)))
    tensor = math.gcd(min(number, 8), target.num_heads)
    expert = number // tensor if target.experts else 1
    return ",".join(f"{axis}={size}" for axis, size in (("tensor", tensor), ("expert", expert)) if size > 1)


def _bounds(given: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """The bound of a run that has none on a device that is not in the table, for which 40,000 steps may be years. A
    budget measures steps with the target in memory; without it training alone is bounded."""
    names = ("budget", "train.max_steps", "train.max_minutes")
    if not device.is_measured or any(given.get(name) for name in names):
        return {}
    if given.get("features.capture") or given.get("service.target_service"):
        return {"train.max_minutes": seconds_of(DEFAULT_BUDGET) / 60}
    return {"budget": DEFAULT_BUDGET}


def _fit(device: Device, target: ModelConfig, settings: Mapping[str, Any], given: Mapping[str, Any]) -> RunFit:
    """RunFit the sizes to the device and to the time that the run has."""
    seconds = time_for_training({**settings, **given})
    number = 1 if device.is_measured else math.prod(mesh_sizes(given.get("mesh", settings["mesh"])).values())
    fixed = {name: value for name, value in settings.items() if name.startswith("draft.") and name != VOCABULARY}
    return fit(device, target, {**fixed, **given}, seconds=seconds, num_devices=number)


def _often_enough(settings: Mapping[str, Any], given: Mapping[str, Any], found: RunFit) -> dict[str, Any]:
    """Return the settings of a run on a device that is not in the table: how often it reports and saves, and how much
    it measures. Without a budget no more is answered than the steps read that there is time for."""

    def steps_in(seconds: float) -> int:
        return max(1, int(seconds / found.step_seconds))

    brought = MEASURED_THERE | {
        "train.log_every": min(10, steps_in(LOG_SECONDS)),
        "train.save_every": min(settings["train.save_every"], steps_in(SAVE_SECONDS)),
    }
    steps = given.get("train.max_steps") or found.num_steps
    if "data.max_conversations" in settings and not {**settings, **given}.get("budget") and steps < math.inf:
        most = math.ceil(steps * found.sizes.positions / (found.sizes.answer_tokens or found.sizes.seq_len))
        brought["data.max_conversations"] = min(settings["data.max_conversations"], most)
        brought["data.self_questions"] = brought["data.max_conversations"]
    return brought


def usual_answer_slots(platform: str) -> int:
    """Return how many answers each data rank makes at once where nobody says: as many as a step of such devices makes
    faster than fewer."""
    return CPU_SLOTS if platform == "cpu" else ANSWER_SLOTS


def _of_devices(settings: Mapping[str, Any], given: Mapping[str, Any], device: Device, rows: int) -> dict[str, Any]:
    """The mesh and the batch for the devices found: those that the target needs, and batches of so many rows or more,
    cut over as many times that as there are. A CPU is one device, however its host counts; a dry run there for other
    devices is for the recipe's own mesh."""
    is_cpu = jax.default_backend() == "cpu"
    if device.kind == "cpu":
        settings = {**settings, "mesh": ""}
    mesh = given.get("mesh", settings["mesh"])
    sizes = mesh_sizes(mesh)
    # rows of a batch, for each part along data
    least = sizes.get("fsdp", 1) * sizes.get("expert", 1) * given.get("train.accumulate", 1)
    parts = sizes.get("data", 1)
    if not is_cpu and "mesh" not in given:
        parts = max(1, jax.device_count() // math.prod(sizes.values()))
        if "train.batch_size" in given:
            parts = max(
                (part for part in range(1, parts + 1) if given["train.batch_size"] % (part * least) == 0), default=1
            )
        mesh = ",".join(filter(None, (f"data={parts}" if parts > 1 else "", mesh)))
    batch_size = parts * least * -(-rows // (parts * least))
    return {"mesh": mesh, "data.answer_slots": usual_answer_slots(device.kind), "train.batch_size": batch_size}


def _is_published(entry: str) -> bool:
    """Return whether a source's answers are other people's, by its name: a data set's are, a file's are not."""
    name, _ = parse_entry(entry)
    return name != PYDOC and not name.endswith(SUFFIXES)


def _is_unanswered(entry: str) -> bool:
    """Return whether a source has questions alone."""
    return parse_entry(entry)[0] == SELF


def _earlier(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read all settings of the run in the output folder, so that a resumed run depends on nothing that is
    found today."""
    file = Path(given.get("output", config.defaults(TrainRun)["output"])) / SETTINGS_FILE
    if not file.is_file():
        return {}
    earlier = config.values(config.resolve(TrainRun, file=file))
    return {name: value for name, value in earlier.items() if name not in ("output", "train.resume", "dry_run")}
