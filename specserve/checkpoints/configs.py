"""The config of a target: by its name, without its weights and without the network, and as a checkpoint loads it."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specserve.checkpoints.source import BUNDLED, BUNDLED_FOLDER, find_folder, is_hub_id
from specserve.checkpoints.tensors import CONFIG, read_json
from specserve.errors import ConfigError
from specserve.mesh import program_platform
from specserve.models.config import ModelConfig
from specserve.models.families.table import model_config
from specserve.models.presets import PRESETS

DTYPE = "bfloat16"  # configs are read for plans, and plans are for accelerators, wherever they are made


def is_known_here(name: str) -> bool:
    """Return whether `find_config` can find this target."""
    return name in (BUNDLED, *PRESETS) or find_folder(name, "--target") is not None or _cached_config(name) is not None


def find_config(name: str, option: str = "--target") -> tuple[ModelConfig, str]:
    """Find a target's config, and where it stands, without the network: in a folder's config.json, in a preset's facts,
    or in what the hub's cache on this machine has. `option` named it, for errors. Raises ConfigError or
    CheckpointError."""
    raw, where = _find_raw(name, option)
    return model_config(raw, dtype=DTYPE, where=where), where


def find_stored_dtype(name: str) -> str:
    """Return the dtype of the weights of a target that `find_config` finds, as `stored_dtype`; those of presets are
    published in bfloat16. Raises ConfigError or CheckpointError."""
    return stored_dtype(_find_raw(name, "--target")[0])


def _find_raw(name: str, option: str) -> tuple[Mapping[str, Any], str]:
    """Find a target's config.json, or a preset's facts of it, and where that stands, as `find_config`."""
    if folder := BUNDLED_FOLDER if name == BUNDLED else find_folder(name, option):
        file = folder / CONFIG
        return read_json(file), str(file)
    if name in PRESETS:
        return {"dtype": DTYPE} | dict(PRESETS[name].facts), f"preset {name} ({PRESETS[name].hub_id})"
    cached = _cached_config(name)
    if cached is not None:
        return read_json(Path(cached)), cached
    raise ConfigError(
        f"{option} {name!r}: a dry run asks no hub, and there is no such folder or preset, nor a config.json of it in "
        "the hub's cache; give a folder that holds its config.json"
    )


def loaded_config(raw: Mapping[str, Any], *, dtype: str, where: str) -> ModelConfig:
    """Return the config of a target that is loaded from a checkpoint with this config.json, and computed here in
    `dtype`. Raises ConfigError."""
    config = model_config(raw, dtype=dtype, where=where)
    return dataclasses.replace(config, cache_dtype=auto_cache_dtype(stored_dtype(raw), dtype))


def stored_dtype(raw: Mapping[str, Any]) -> str:
    """Return the dtype of a checkpoint's weights as its config.json states it, of its text model where that has its
    own. An empty string where it states none, or none that there is, such as `auto`."""
    text = raw.get("text_config")
    places = (text, raw) if isinstance(text, Mapping) else (raw,)
    stated = [place.get(key) for place in places for key in ("dtype", "torch_dtype")]
    named = next((str(each).removeprefix("torch.") for each in stated if each), "")
    with contextlib.suppress(TypeError):
        return jnp.dtype(named).name
    return ""


def auto_cache_dtype(stored: str, computed: str) -> str:
    """Return the dtype of committed keys and values (`ModelConfig.cache_dtype`) of a target that is stored in one dtype
    and computed in another, where nobody asks for any. CPUs compute in float32 what accelerators, and the engines that
    a checkpoint was published for, compute and keep in bfloat16. float16 has more bits than that, so its keys and
    values stay as they are computed."""
    is_rounded = (stored, computed, program_platform()) == ("bfloat16", "float32", "cpu")
    return "bfloat16" if is_rounded else ""


def _cached_config(name: str) -> str | None:
    """A hub id's config.json in the hub's cache on this machine."""
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_id(name):
        return None
    cached = try_to_load_from_cache(name, CONFIG)
    if not isinstance(cached, str):  # the library has a marker for a file known to be missing
        return None
    return cached
