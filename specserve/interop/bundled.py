"""The way from the text that a user types after `--draft` to a folder; and the heads that ship with the package, by the
targets that they are for."""

from pathlib import Path

from specserve.checkpoints.configs import find_config, is_known_here
from specserve.checkpoints.source import BUNDLED, BUNDLED_FOLDER, BUNDLED_HEADS, GGUF, download, find_folder, is_hub_id
from specserve.errors import ConfigError
from specserve.models.config import ModelConfig
from specserve.models.presets import PRESETS

BUNDLED_HEAD = "pydoc-mtp"  # of those for the bundled target, the one that it is served with


def bundled_head(name: str) -> Path | None:
    """Return the folder of the head that ships for the target of this name: a preset's has its name, and is also found
    by the preset's hub id and for a folder with the preset's config. None where there is none. Raises CheckpointError
    for a folder's config that cannot be read."""
    if name == BUNDLED:
        return BUNDLED_HEADS.get(BUNDLED_HEAD)
    name = next((preset.name for preset in PRESETS.values() if preset.hub_id == name), name)
    of_preset = name in PRESETS or find_folder(name, "--target") is not None or is_hub_id(name)
    if not (of_preset and is_known_here(name)):
        return None
    config, _ = find_config(name)
    return next((folder for head, folder in BUNDLED_HEADS.items() if _is_preset(head, config)), None)


def _is_preset(name: str, config: ModelConfig) -> bool:
    return name in PRESETS and PRESETS[name].config() == config


def find_head(text: str, option: str) -> Path | None:
    """Return the folder of a bundled head by its name, of the bundled target as a draft, of a head in GGUF one that
    shows it, else as `find_folder` does."""
    try:
        path = Path(text).expanduser()
        if path.suffix == GGUF and path.is_file():
            from specserve.interop.gguf import is_head, show_head  # imports a library that others need not

            if is_head(path):
                return show_head(path)
    except (OSError, RuntimeError):
        pass  # `find_folder` says why the name cannot be looked up
    if text == BUNDLED:
        return BUNDLED_FOLDER
    return BUNDLED_HEADS.get(text) or find_folder(text, option)


def resolve_head(text: str, option: str) -> Path:
    """Find or download a head, or a language model that drafts: the bundled target too, and those of presets. `option`
    is the option that named it, for errors. Raises as `resolve_target` does."""
    if path := find_head(text, option):
        return path.resolve()
    if text.endswith(GGUF):
        raise ConfigError(f"{option} {text!r}: no such file")
    if is_downloaded(text):
        return download(text, PRESETS[text].hub_id if text in PRESETS else text, option)
    raise ConfigError(
        f"{option} {text!r} is no folder here, no hub id (owner/name), no preset of a language model and none of the "
        f"bundled heads, {' and '.join(sorted(BUNDLED_HEADS))}; train a head first (specserve train --output {text})"
    )


def is_downloaded(text: str) -> bool:
    """Return whether `resolve_head` looks for this in the hub's cache, and on the hub."""
    return find_head(text, "--draft") is None and (text in PRESETS or is_hub_id(text))
