"""Heads to and from other people's folders: written in any dialect, read from any into our own layout."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specserve.checkpoints.load import Target, end_ids
from specserve.checkpoints.tensors import CONFIG, listed, read_json
from specserve.drafters.interface import Head
from specserve.drafters.registry import CARRIED, check_trained
from specserve.errors import CheckpointError, ConfigError
from specserve.host import take_place
from specserve.interop import doctor
from specserve.interop.findings import Dialect, stored_dtype
from specserve.interop.formats import format_for, format_of
from specserve.interop.head import head_files, load_head, write_head
from specserve.interop.notes import read_notes
from specserve.models.families.table import model_config
from specserve.models.rope import yarn_magnitude
from specserve.models.target import target_spec

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Imported:
    """A head that was imported: the layout that it was in, and what was changed, one line each."""

    head: Head
    dialect: str
    changes: tuple[str, ...]


def describe_target(folder: Path) -> Target:
    """Describe a target as a head's files must fit it: specs stand in the place of its weights, so that its config.json
    is enough. Raises ConfigError or CheckpointError."""
    raw = read_json(folder / CONFIG)
    config = model_config(raw, dtype="float32", where=str(folder / CONFIG))
    return Target(config, target_spec(config), end_ids(config, folder), folder)


def export_head(
    folder: Path,
    output: Path,
    target: Target,
    *,
    target_name: str,
    dialect: Dialect,
    dtype: str = "",  # of the file; empty: as it is stored
    is_forced: bool = False,
    stretch: tuple[float, int] | None = None,  # (factor, length), see `stretched`
) -> Head:
    """Write a head as another engine reads it, beside what was noted of it. Raises ConfigError or CheckpointError."""
    check_trained(format_of(folder).kind, str(folder))
    check_output(folder, output, is_forced=is_forced)
    dtype = dtype or stored_dtype(folder)
    head = load_head(folder, target, dtype=dtype)
    if stretch is not None:
        head = stretched(head, *stretch)
    tensors, raw = head_files(head, target, dtype=dtype, dialect=dialect, target_name=target_name)
    notes = read_notes(folder)
    write_folder(output, lambda partial: write_head(partial, tensors, raw, notes))
    return head


def stretched(head: Head, factor: float, length: int) -> Head:
    """Return a head whose rotary embedding YaRN stretches by a factor (Peng et al. 2023, arXiv 2309.00071), so that it
    follows texts longer than the `length` tokens that it was trained on, as NVIDIA's Model-Optimizer exports heads.
    Raises ConfigError where it is stretched already, or is the target's own layer."""
    rope = head.drafter.shape.rope
    if rope.kind != "default" or head.drafter.name == CARRIED:
        why = f"turns by {rope.kind} already" if rope.kind != "default" else "has the rotary settings of its target"
        raise ConfigError(f"--rope-factor is for a head with plain rotary embeddings, and this one {why}; leave it out")
    yarn = replace(rope, kind="yarn", factor=factor, original_max_len=length, magnitude=yarn_magnitude(factor))
    return Head(head.drafter.with_shape(rope=yarn), head.params, head.target_ids)


def import_head(
    folder: Path, output: Path, target: Target, *, target_name: str, dtype: str = "", is_forced: bool = False
) -> Imported:
    """Read a head from any dialect, repair what can be without guessing, and write it in our own layout. Raises
    CheckpointError that lists what cannot."""
    check_trained(format_of(folder).kind, str(folder))
    check_output(folder, output, is_forced=is_forced)
    found = doctor.examine(folder, target)
    if hopeless := [finding for finding in found.errors if finding.fix is None]:
        named = listed([f"{finding.where}: {finding.what} ({finding.got})" for finding in hopeless])
        raise CheckpointError(f"{folder}: {named}; `specserve inspect {folder}` says how to mend it")
    dtype = dtype or stored_dtype(folder)
    changes = list(found.changes)
    with tempfile.TemporaryDirectory() as scratch:
        write_head(Path(scratch), *found.repaired(), {})
        head = load_head(Path(scratch), target, dtype=dtype)
    head, copies = format_for(head.drafter.name).without_copies(head, target, dtype)
    changes += copies
    tensors, raw = head_files(head, target, dtype=dtype)
    notes = read_notes(folder) | {"target": target_name, "imported": {"dialect": found.dialect, "changes": changes}}
    write_folder(output, lambda partial: write_head(partial, tensors, raw, notes))
    return Imported(head, found.dialect, tuple(changes))


def check_output(folder: Path, output: Path, *, is_forced: bool) -> None:
    """Raises CheckpointError where something would be overwritten without leave."""
    if output.resolve() == folder.resolve():
        raise CheckpointError(f"{output} is the folder that is read; give another folder to write")
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output} is a file; give a folder to write")
    if output.is_dir() and any(output.iterdir()) and not is_forced:
        raise CheckpointError(f"{output} is not empty; give another folder to write, or --force to write into it")


def write_folder(output: Path, write: Callable[[Path], None]) -> None:
    """Write all of a folder or nothing of it: it is written beside, whole file by whole file, then renamed. In a folder
    with other files each file is replaced whole, and what is not written stays. Raises CheckpointError when there is no
    room or no right to write."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            write(partial)
            if output.is_dir() and any(output.iterdir()):
                for file in partial.iterdir():
                    take_place(file, output / file.name)
            else:
                partial.chmod(0o755)
                take_place(partial, output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written ({error})") from error
