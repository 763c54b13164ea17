"""The files of a head under examination, and the checks that are alike for all kinds: which tensors there are, of which
shape, and whether their numbers can be weights."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, SINGLE_FILE, TensorFolder, read_json
from specserve.errors import CheckpointError
from specserve.interop.findings import FLOATS, LAYERS, Check, Finding, put, read_checks
from specserve.interop.keys import Stated, is_count, read_rope
from specserve.interop.published import D2T, T2D, stored_scales
from specserve.interop.repairs import write_length, write_rope
from specserve.models.config import ModelConfig
from specserve.models.params import ParamSpec

CHECKS = read_checks("""
[numbers]
quantization error: config.json states a quantisation that no tensor shows, or one that is not read
  who believes config.json reads other numbers than who believes the tensors
  by hand: take it out if the weights are whole, or export the head again
not-finite error: values that are no numbers
  every proposal that they touch is noise
  by hand: go back to an earlier checkpoint, or download the weights again
all-zero error: {name} holds nothing but zeros
  what goes through it is lost: the head proposes without the target's states, or the same tokens always
  by hand: go back to an earlier checkpoint, or export the head again: it looks like one that was never filled
weight-range error: {name} has a size that 16 bits do not hold
  in float16 it is infinite, or zero; in other dtypes what it makes drowns all else, or vanishes
  by hand: undo the scale that it was multiplied with, or export the head again
""")


class ExaminedFiles:
    """The files of a head under examination, and what can be read from them. A kind adds how it reads them."""

    @staticmethod
    def renamer(_names: frozenset[str], /) -> Callable[[str], str]:
        """Return a function from our names of tensors to those of a folder."""
        return str

    def __init__(self, folder: Path, target: Target | None) -> None:
        self.folder, self.target = folder, target
        self.tensors = self.open(folder)
        self.names = self.tensors.names()
        self.rename = self.renamer(self.names)  # from our name of a tensor
        self.raw: Mapping[str, Any] = read_json(folder / CONFIG)

    def open(self, folder: Path) -> TensorFolder:
        """Open the tensors. Raises CheckpointError."""
        return TensorFolder(folder)

    @property
    def target_config(self) -> ModelConfig | None:
        """The target's config; None where there is no target."""
        return self.target.config if self.target else None

    @property
    def dialect(self) -> str:
        """The layout that the files are in."""
        return "specserve"

    @property
    def weights(self) -> frozenset[str]:
        """The names of all tensors but the tables of the vocabulary."""
        return self.names - {self.rename(D2T), self.rename(T2D)}

    def table(self, name: str) -> np.ndarray | None:
        """Read a table of the vocabulary, if it is there."""
        stored = self.rename(name)
        return self.tensors.read(stored) if stored in self.names else None

    def where(self, name: str) -> str:
        """Return the file and the name of a tensor, given by our name for it."""
        stored = self.rename(name)
        return f"{self.tensors.file(stored).name if stored in self.names else SINGLE_FILE}: {stored}"

    def rows(self) -> list[tuple[str, tuple[int, ...], str]]:
        """List the head's tensors: name, shape, dtype."""
        return [(name, self.tensors.shape(name), self.tensors.dtype(name).name) for name in sorted(self.names)]

    def facts(self) -> dict[str, str]:
        """Describe the head in a few lines."""
        return {}


def given(*parts: str) -> Callable[[Callable[..., Iterable[Finding]]], Callable[[Any], Iterable[Finding]]]:
    """Return a decorator for a check that takes these parts of the files too, such as the head's shape or the target,
    and is left out where one of them is not known."""

    def decorate(check: Callable[..., Iterable[Finding]]) -> Callable[[Any], Iterable[Finding]]:
        @functools.wraps(check)
        def checked(files: Any) -> Iterable[Finding]:
            found = [getattr(files, part) for part in parts]
            return () if any(part is None for part in found) else check(files, *found)

        return checked

    return decorate


def check_num_layers(check: Check, stated: object, counted: int) -> Iterator[Finding]:
    """Check that as many layers are stated as there are tensors of."""
    if stated == counted:
        return
    fix = put(LAYERS, num_hidden_layers=counted)
    if type(stated) is int and stated > counted:  # tensors are lost, or the config is of another head
        fix = None
    yield check.found(f"{CONFIG}: num_hidden_layers", str(counted), repr(stated), fix)


def check_of_target(check: Check, key: str, got: int, required: int, target: Target) -> Iterator[Finding]:
    """Check that a size is that of the target."""
    if got != required:
        yield check.found(f"{CONFIG}: {key}", f"{required:,}, as in {target.folder}", f"{got:,}")


def check_length(check: Check, stated: Stated, target: Target) -> Iterator[Finding]:
    """Check that the head can follow sequences as long as the target's."""
    key, required = "max_position_embeddings", target.config.max_len
    length = stated.get(key)
    if is_count(length) and length >= required:
        return
    got = f"{length:,}" if is_count(length) else "nothing" if length is None else repr(length)
    rope, later = read_rope(stated), read_rope(stated.with_values(**{key: required}))
    rest = write_rope(rope, stated.head_dim) if rope and rope != later else None
    expected = f"at least {required:,}, the target's"
    yield check.found(f"{CONFIG}: {key}", expected, got, write_length(required, rest))


def check_specs(
    files: ExaminedFiles,
    specs: Iterable[ParamSpec],
    checks: tuple[Check, Check, Check],  # for a tensor that is missing, of another shape, or none of the head's
    is_harmless: Callable[[str], object],  # of a tensor that is none of the head's
    instead: Callable[[ParamSpec], str] = lambda _: "nothing",  # describes the place of a missing tensor
) -> Iterator[Finding]:
    """Check that the tensors are those that config.json asks for."""
    missing, shape, unknown = checks
    used = {files.rename(name) for name in (D2T, T2D)}
    for spec in specs:
        stored, expected = files.rename(spec.name), f"{list(spec.stored_shape)}"
        used.add(stored)
        if stored not in files.names:
            yield missing.found(SINGLE_FILE, expected, instead(spec), name=stored)
        elif (found := files.tensors.shape(stored)) != spec.stored_shape:
            yield shape.found(files.where(spec.name), expected, f"{list(found)}", name=stored)
    for name in sorted(files.names - used):
        if not is_harmless(name):
            got = f"{list(files.tensors.shape(name))}"
            yield unknown.found(files.tensors.file(name).name, "nothing", got, name=name)


def check_scales(files: ExaminedFiles) -> Iterator[Finding]:
    """Check that a quantisation that is stated is that of the tensors."""
    try:
        stored_scales(files.raw, files.tensors, CONFIG)
    except CheckpointError as error:
        yield CHECKS["quantization"].found(CONFIG, "the quantisation of the tensors", str(error))


def check_values(files: ExaminedFiles) -> Iterator[Finding]:
    """Check that every weight is a finite number, that some of each tensor are not zero, and that none is beyond 16
    bits."""
    half = np.finfo(np.float16)
    for name in sorted(files.weights):
        if files.tensors.dtype(name).name not in FLOATS:
            continue
        where, value = f"{files.tensors.file(name).name}: {name}", files.tensors.read(name).astype(np.float32)
        if count := int((~np.isfinite(value)).sum()):
            got = f"{count:,} of {value.size:,} are NaN or infinite"
            yield CHECKS["not-finite"].found(where, "finite numbers", got)
            continue
        largest = float(np.abs(value).max(initial=0.0))
        if not largest:
            yield CHECKS["all-zero"].found(where, "weights", f"{value.size:,} zeros", name=name)
        elif not float(half.smallest_subnormal) <= largest <= float(half.max):
            expected = f"at most {half.max:g}, and more than {half.smallest_subnormal:.0e}"
            yield CHECKS["weight-range"].found(where, expected, f"at most {largest:.1e}", name=name)
