"""The files of a head under examination, and the checks that are alike for all kinds: which tensors there are, of which
shape, whether their numbers can be weights, what the tables of the vocabulary say, and the fit to the target."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specserve.checkpoints.load import Target, shapes_in
from specserve.checkpoints.tensors import CONFIG, SINGLE_FILE, TensorFolder, read_json
from specserve.errors import SpecServeError
from specserve.interop.findings import FAULTS, FLOATS, LAYERS, Copy, Finding, describe, put
from specserve.interop.keys import ROTARY, SCALING, Stated, is_count, read_rope
from specserve.interop.published import D2T, OUTPUT, T2D, as_floats, read_vocab, vocab_to_tensors
from specserve.interop.repairs import write_length, write_rope
from specserve.models.config import ModelConfig
from specserve.models.params import ParamSpec
from specserve.models.rope import Rope

CHECKS = FAULTS["all"]


class ExaminedFiles:
    """The files of a head under examination, and what can be read from them. A kind adds how it reads them."""

    @staticmethod
    def renamer(_names: frozenset[str], /) -> Callable[[str], str]:
        """Return a function from our names of tensors to those of a folder."""
        return str

    def __init__(self, folder: Path, target: Target | None) -> None:
        self.folder, self.target = folder, target
        self.raw: Mapping[str, Any] = read_json(folder / CONFIG)
        self.tensors, self.unread = as_floats(self.open(folder), self.raw, CONFIG)
        self.names = self.tensors.names()
        self.rename = self.renamer(self.names)  # from our name of a tensor

    @staticmethod
    def open(folder: Path, /) -> TensorFolder:
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
    def own_names(self) -> frozenset[str]:
        """The names of the head's tensors."""
        return self.names

    @property
    def weights(self) -> frozenset[str]:
        """The names of the head's tensors but the tables of the vocabulary."""
        return self.own_names - {self.rename(D2T), self.rename(T2D)}

    def table(self, name: str) -> np.ndarray | None:
        """Read a table of the vocabulary, if it is there."""
        stored = self.rename(name)
        return self.tensors.read(stored) if stored in self.names else None

    @property
    def tables(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The tables of the vocabulary, d2t and t2d, as far as they are there."""
        return self.table(D2T), self.table(T2D)

    def where(self, name: str) -> str:
        """Return the file and the name of a tensor, given by our name for it."""
        stored = self.rename(name)
        return f"{self.tensors.file(stored).name if stored in self.names else SINGLE_FILE}: {stored}"

    def make(self) -> Any:
        """Return the head's shape. Raises SpecServeError where it cannot be read."""

    @functools.cached_property
    def read(self) -> Any:
        """The head's shape, or the error of reading it."""
        try:
            return self.make()
        except SpecServeError as error:
            return error

    @property
    def config(self) -> Any:
        """The head's shape; None where it cannot be read."""
        return None if isinstance(self.read, SpecServeError) else self.read

    def rows(self) -> list[tuple[str, tuple[int, ...], str]]:
        """List the head's tensors: name, shape, dtype."""
        return [(name, self.tensors.shape(name), self.tensors.dtype(name).name) for name in sorted(self.own_names)]

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


def describe_layers(config: ModelConfig, **own: object) -> dict[str, str]:
    """Describe a head's layers by their sizes, and which tables are its `own`."""
    heads = f"{config.num_heads} heads of {config.head_dim} ({config.num_kv_heads} KV)"
    tables = {name.replace("_", " "): "its own" if has_own else "the target's" for name, has_own in own.items()}
    return {"width": f"{config.d_model}, MLP {config.d_ff}, {heads}", **tables}


def check_num_layers(stated: object, counted: int) -> Iterator[Finding]:
    """Check that as many layers are stated as there are tensors of."""
    if stated == counted:
        return
    fix = put(LAYERS, num_hidden_layers=counted)
    if type(stated) is int and stated > counted:  # tensors are lost, or the config is of another head
        fix = None
    yield CHECKS["layers"].found(f"{CONFIG}: num_hidden_layers", str(counted), repr(stated), fix)


def check_of_target(key: str, got: int, required: int, target: Target) -> Iterator[Finding]:
    """Check that a size is that of the target."""
    if got != required:
        yield CHECKS["other-target"].found(f"{CONFIG}: {key}", f"{required:,}, as in {target.folder}", f"{got:,}")


def check_length(stated: Stated, target: Target) -> Iterator[Finding]:
    """Check that the head can follow sequences as long as the target's."""
    key, required = "max_position_embeddings", target.config.max_len
    length = stated.get(key)
    if is_count(length) and length >= required:
        return
    got = f"{length:,}" if is_count(length) else "nothing" if length is None else repr(length)
    rope, later = read_rope(stated), read_rope(stated.with_values(**{key: required}))
    rest = write_rope(rope, stated.head_dim) if rope and rope != later else None
    expected = f"at least {required:,}, the target's"
    yield CHECKS["max-positions"].found(f"{CONFIG}: {key}", expected, got, write_length(required, rest))


def check_rope_stated(stated: Stated, required: Rope | None) -> Iterator[Finding]:
    """Check that rotary settings are stated. `required` are the target's, if it is known."""
    if any(stated.get(name) is not None for name in (*ROTARY, *SCALING)):
        return
    fix = write_rope(required) if required else None
    expected = f"the target's, {required.kind} with theta {required.theta:g}" if required else "rope_theta"
    yield CHECKS["rope-missing"].found(f"{CONFIG}: rope_parameters", expected, "nothing", fix)


def check_specs(
    files: ExaminedFiles,
    specs: Iterable[ParamSpec],
    is_harmless: Callable[[str], object],  # of a tensor that is none of the head's
    instead: Callable[[ParamSpec], str] = lambda _: "nothing",  # describes the place of a missing tensor
) -> Iterator[Finding]:
    """Check that the tensors are those that config.json asks for."""
    used = {files.rename(name) for name in (D2T, T2D)}
    shape_of = shapes_in(files.tensors, files.rename)
    for spec, name in ((each, name) for each in (spec.stored_in(shape_of) for spec in specs) for name in each.names):
        stored, expected = files.rename(name), f"{list(spec.stored_shape)}"
        used.add(stored)
        if stored not in files.names:
            yield CHECKS["missing-tensor"].found(SINGLE_FILE, expected, instead(spec), name=stored)
        elif (found := files.tensors.shape(stored)) != spec.stored_shape:
            yield CHECKS["shape"].found(files.where(name), expected, f"{list(found)}", name=stored)
    for name in sorted(files.own_names - used):
        if not is_harmless(name):
            got = f"{list(files.tensors.shape(name))}"
            yield CHECKS["unknown-tensor"].found(files.tensors.file(name).name, "nothing", got, name=name)


def check_read(files: ExaminedFiles) -> Iterator[Finding]:
    """Check that the head can be read at all."""
    if isinstance(files.read, SpecServeError):
        yield CHECKS["unreadable"].found(str(files.folder), "a head that can be made", str(files.read))


def check_tables(files: ExaminedFiles, rows: int, vocab_size: int) -> Iterator[Finding]:
    """Check that d2t and t2d say which tokens the draft's rows stand for, as they should be written."""
    d2t, t2d = files.tables
    vocab = read_vocab(d2t, t2d, rows, vocab_size)
    where, ids = files.where(D2T), vocab.target_ids
    if ids is None:
        expected = f"{rows:,} offsets (target id = i + d2t[i]) to unique ids below {vocab_size:,}"
        yield CHECKS["vocabulary"].found(where, expected, describe(d2t))
        return
    right = vocab_to_tensors(np.sort(ids), vocab_size)

    def set_table(name: str, repaired: Copy) -> None:
        repaired.tensors.pop(files.rename(name), None)
        repaired.tensors[name] = right[name]

    set_d2t, set_t2d = (functools.partial(set_table, name) for name in (D2T, T2D))

    def sort_rows(repaired: Copy) -> None:
        set_d2t(repaired)
        output = files.rename(OUTPUT)
        repaired.tensors[output] = repaired.tensors[output][np.argsort(ids)]

    offsets = f"offsets (target id = i + d2t[i]), {describe(right[D2T])}"
    if vocab.reading == "mask":
        got = "nothing, but t2d names as many tokens as the head has rows"
        yield CHECKS["d2t-missing"].found(where, offsets, got, set_d2t)
    elif vocab.reading == "absolute":
        yield CHECKS["absolute-d2t"].found(where, offsets, describe(d2t), set_d2t)
    if not vocab.is_sorted:
        output = files.rename(OUTPUT)
        is_whole = output in files.names and files.tensors.shape(output)[0] == len(ids)
        got = f"{int((np.diff(ids) < 0).sum()):,} steps down"
        yield CHECKS["unsorted-d2t"].found(where, "ascending target ids", got, sort_rows if is_whole else None)
    elif d2t is not None and d2t.dtype != np.int64:
        yield CHECKS["d2t-dtype"].found(where, "int64", d2t.dtype.name, set_d2t)
    where, mask = files.where(T2D), f"a mask of {vocab_size:,}"
    if t2d is None and rows != vocab_size:
        yield CHECKS["t2d-missing"].found(where, f"{mask} with {rows:,} set", "nothing", set_t2d)
    elif t2d is not None and not vocab.agrees:
        is_blank = d2t is not None and not d2t.any()
        got = describe(t2d) + (", and a d2t of zeros, as if it was never filled" if is_blank else "")
        yield CHECKS["t2d-disagrees"].found(where, f"{mask}, set where d2t points", got)
    elif t2d is not None and t2d.dtype != np.bool_:
        yield CHECKS["t2d-dtype"].found(where, "bool", t2d.dtype.name, set_t2d)


def check_scales(files: ExaminedFiles) -> Iterator[Finding]:
    """Check that a quantisation that is stated is that of the tensors, and that their numbers can be read."""
    for error in files.unread:
        yield CHECKS["quantization"].found(CONFIG, "the quantisation of the tensors", error)


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
