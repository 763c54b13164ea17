"""The way from the text that a user types after `--target` to a folder: the bundled target, a local folder, a preset
or a hub id."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from specserve import hub
from specserve.errors import CheckpointError, ConfigError, first_line
from specserve.models.presets import PRESETS

BUNDLED = "pydoc"
BUNDLED_FOLDER = Path(__file__).parent.parent / "targets" / "pydoc"
NOTES_FILE = "specserve.json"  # the notes of a head on its training
BUNDLED_HEADS = {notes.parent.name: notes.parent for notes in sorted(BUNDLED_FOLDER.parent.glob(f"*/{NOTES_FILE}"))}

_HUB_ID = re.compile(r"(?!.*(--|\.\.))\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
GGUF = ".gguf"
_WEIGHTS = "*.safetensors"
_FILES = ["*.json", _WEIGHTS, "*.jinja", "*.model", "*.txt"]
_COPIES = ["*/*", "consolidated*"]  # the same weights again, as others lay them out


@dataclass(frozen=True)
class TargetSource:
    """The name of a target, and the folder in which it was found."""

    name: str  # shown by the server and remembered by a head trained for it
    folder: Path


def is_hub_id(text: str) -> bool:
    """Return whether the text is owner/name as the hub allows it, which neither ./name nor ../name is."""
    return _HUB_ID.fullmatch(text) is not None and not text.endswith(".git")


def find_folder(text: str, option: str) -> Path | None:
    """Return the local folder of this name, in which `~` is a home folder, or None where there is none. A file in GGUF
    stands for the folder that shows it. `option` is the option that named it, for errors. Raises ConfigError for a name
    that the system cannot look up, and CheckpointError for a file that is not understood."""
    try:
        path = Path(text).expanduser()
        if path.suffix == GGUF and path.is_file():
            from specserve.checkpoints.gguf.folder import show_as_folder  # imports a library that others need not

            return show_as_folder(path)
        return path if path.is_dir() else None
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        raise ConfigError(f"{option} {text[:100]!r}: the folder cannot be looked up ({first_line(error)})") from error


def resolve_target(text: str, *, needs_weights: bool = True) -> TargetSource:
    """Find or download a target. Without weights it is the files that its config, tokenizer and chat template take.
    Raises ConfigError for a name nobody knows, CheckpointError for an unreachable hub."""
    if text == BUNDLED:
        return TargetSource(BUNDLED, BUNDLED_FOLDER)
    if path := find_folder(text, "--target"):
        return TargetSource(str(Path(text).expanduser().resolve()), path.resolve())
    if text.endswith(GGUF):
        raise ConfigError(f"--target {text!r}: no such file")
    if text in PRESETS:
        return TargetSource(text, download(text, PRESETS[text].hub_id, needs_weights=needs_weights))
    if is_hub_id(text):
        return TargetSource(text, download(text, text, needs_weights=needs_weights))
    hint = "."
    if near := difflib.get_close_matches(text.lower(), [BUNDLED, *PRESETS], n=1):
        hint = f"; did you mean {near[0]!r}?"
    raise ConfigError(
        f"--target {text!r} is no folder here, no hub id (owner/name) and no preset{hint} `specserve targets` lists "
        "the presets"
    )


def download(text: str, hub_id: str, option: str = "--target", *, needs_weights: bool = True) -> Path:
    """Download a model, or find it in the cache. `option` named it, for errors. Raises CheckpointError."""
    from huggingface_hub import snapshot_download  # heavy, and offline users never need it

    left_out, files = _COPIES, f"config.json, {_WEIGHTS}, tokenizer files"
    if not needs_weights:
        left_out, files = [*_COPIES, _WEIGHTS], "config.json, tokenizer files"
    hub.absence()  # where it cannot be asked, the library looks into its cache alone
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_FILES, ignore_patterns=left_out))  # shows a progress bar
    except Exception as error:  # the hub client raises a dozen types for "cannot reach it" and "no such model"
        folder = Path("models") / hub_id.rsplit("/", 1)[-1]
        raise CheckpointError(
            f"{option} {text}: {hub_id} is not in the local cache and the model hub could not serve it "
            f"({hub.why(error)}). Where it can be had, download {hub_id} ({files}) into a folder, "
            f"put that here as {folder} and run again with {option} {folder}"
        ) from error
