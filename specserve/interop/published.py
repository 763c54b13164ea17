"""The common parts of the published layouts of draft heads: the tables of the draft vocabulary, rotary settings in both
spellings, and copies of the target's tensors. It is the only file that knows how `d2t` and `t2d` are meant."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.quantized import PLAIN, STORED_BITS, Storing, read_storing, restored
from specserve.checkpoints.tensors import TensorFolder, listed
from specserve.errors import CheckpointError
from specserve.interop.keys import QUANTIZATIONS, find
from specserve.models.rope import Rope, rope_to_hf

D2T, T2D = "d2t", "t2d"
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"


def rope_keys(rope: Rope, head_dim: int) -> dict[str, Any]:
    """Write both spellings of the rotary settings: what older readers look for, and newer ones."""
    scaling, partial = rope_to_hf(rope), {}
    if rope.rotary_dim:
        share = rope.rotary_dim / head_dim
        if int(head_dim * share) < rope.rotary_dim:  # readers round down
            share = math.nextafter(share, 1)
        partial = {"partial_rotary_factor": share}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": rope.theta, **partial},
        **partial,
    }


def count_layers(names: frozenset[str]) -> int:
    """Count the layers of a head that there are tensors of, by their names; the first may be `midlayer`."""
    found = [re.match(r"(?:model\.)?(?:layers\.(\d+)|midlayer)\.", name) for name in names]
    return max((1 + int(match[1] or 0) for match in found if match), default=0)


def speculators_config(
    algorithm: str, num_tokens: int, target_name: str, target: Mapping[str, Any], **more: object
) -> dict[str, Any]:
    """Write what vLLM reads in the layout of speculators: how many tokens a head proposes, and for which target, whose
    config.json is given."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens, **more}],
        "verifier": {"name_or_path": target_name, "architectures": target.get("architectures") or []},
    }


def vocab_to_tensors(target_ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """Make `d2t` as offsets (target_id = i + d2t[i]) in int64, which JAX without x64 could not write, and `t2d`."""
    draft_ids = np.arange(len(target_ids), dtype=np.int64)
    is_drafted = np.zeros(vocab_size, bool)
    is_drafted[target_ids] = True
    return {D2T: target_ids.astype(np.int64) - draft_ids, T2D: is_drafted}


Reading = Literal["offset", "absolute", "identity", "mask", "unsound"]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a head's draft rows stand for, according to its tables as they were found."""

    reading: Reading  # of d2t; without one: of all tokens, or of t2d
    target_ids: np.ndarray | None  # [draft_vocab] int64, in the order of the rows; None: they name none
    agrees: bool  # t2d is there and names the same tokens

    @property
    def is_sorted(self) -> bool:
        return self.target_ids is not None and bool((np.diff(self.target_ids) > 0).all())


def read_vocab(d2t: np.ndarray | None, t2d: np.ndarray | None, draft_vocab_size: int, vocab_size: int) -> Vocabulary:
    """Make sense of tables that may be wrong. The format has offsets: they are read as ids only where they
    cannot be offsets, or where t2d agrees."""
    masked = np.flatnonzero(t2d) if t2d is not None and t2d.shape == (vocab_size,) else None

    def found(reading: Reading, target_ids: np.ndarray | None) -> Vocabulary:
        agrees = masked is not None and target_ids is not None and np.array_equal(masked, np.sort(target_ids))
        return Vocabulary(reading, target_ids, agrees)

    if d2t is None:
        if draft_vocab_size == vocab_size:
            return found("identity", np.arange(vocab_size, dtype=np.int64))
        if masked is not None and len(masked) == draft_vocab_size:
            return found("mask", masked)
        return found("unsound", None)
    stored = whole_numbers(d2t, is_checked=masked is not None)
    if stored is None or stored.shape != (draft_vocab_size,):
        return found("unsound", None)
    readings = [found("offset", stored + np.arange(draft_vocab_size)), found("absolute", stored)]
    for in_order in (True, False):
        fitting = [
            each
            for each in readings
            if each.target_ids is not None
            and is_sound(each.target_ids if in_order else np.sort(each.target_ids), draft_vocab_size, vocab_size)
        ]
        chosen = [each for each in fitting if each.agrees] or fitting
        if chosen and (in_order or len(chosen) == 1):
            return chosen[0]
    return found("unsound", None)


def whole_numbers(table: np.ndarray, *, is_checked: bool) -> np.ndarray | None:  # int64
    """Return the values of d2t; None where some are no whole numbers, or so large that the table's dtype rounds whole
    numbers of their size, unless the result `is_checked` against t2d."""
    if table.dtype.kind in "iu":
        return table.astype(np.int64)
    if table.dtype.kind == "b":
        return None
    values = table.astype(np.float64)
    digits = 53 if is_checked else ml_dtypes.finfo(table.dtype).nmant + 1  # binary ones that no number is rounded to
    is_whole = np.isfinite(values) & (values == np.rint(values)) & (np.abs(values) < 2.0**digits)
    return values.astype(np.int64) if is_whole.all() else None


def is_sound(target_ids: np.ndarray, draft_vocab_size: int, vocab_size: int) -> bool:
    """Return whether these can be the target ids of the draft rows: as many, sorted, unique and in range."""
    return (
        target_ids.shape == (draft_vocab_size,)
        and draft_vocab_size > 0
        and bool((np.diff(target_ids) > 0).all())
        and target_ids[0] >= 0
        and target_ids[-1] < vocab_size
    )


def vocab_from_tensors(
    d2t: np.ndarray | None, t2d: np.ndarray | None, draft_vocab_size: int, vocab_size: int, where: str
) -> np.ndarray:  # [draft_vocab] int32
    """Read the target ids of the draft rows. Raises CheckpointError unless they are sorted, unique, in range, and
    agree."""
    vocab = read_vocab(d2t, t2d, draft_vocab_size, vocab_size)
    is_right = vocab.reading in ("offset", "identity") and vocab.is_sorted
    if is_right and (d2t is None or t2d is None or vocab.agrees):
        return np.asarray(vocab.target_ids, np.int32)
    if is_right:
        raise CheckpointError(f"{where}: t2d and d2t name different tokens; nonzero(t2d) must be i + d2t[i]")
    if d2t is None:
        raise CheckpointError(f"{where}: d2t is missing and the draft vocabulary is not the target's")
    if whole_numbers(d2t, is_checked=t2d is not None) is None:
        raise CheckpointError(
            f"{where}: d2t is {d2t.dtype} with values that are no whole numbers, or so large that {d2t.dtype} may have "
            "rounded them; take int64 from the checkpoint that the head was trained with"
        )
    raise CheckpointError(
        f"{where}: d2t does not hold {draft_vocab_size} offsets to sorted, unique target ids below {vocab_size}; it "
        f"may hold absolute ids instead of offsets (target_id = i + d2t[i]). `specserve inspect {where}` says which, "
        "and mends it"
    )


def stored_scales(raw: Mapping[str, Any], tensors: TensorFolder, where: str) -> Storing:
    """Return how a head's weights are stored, where they are in 8 bits. Raises
    CheckpointError for a quantisation that is not read, and for one of which no tensor shows anything, because engines
    that go by config.json read other numbers then than those that go by the tensors."""
    stated = {path: value for path, value in find(raw, QUANTIZATIONS) if value}
    if odd := [path for path, value in stated.items() if not isinstance(value, Mapping)]:
        raise CheckpointError(f"{where}: {odd[0]} must be an object, got {stated[odd[0]]!r}")
    found_ways = {read_storing({"quantization_config": value}, f"{where}: {path}") for path, value in stated.items()}
    if len(found_ways) > 1:
        raise CheckpointError(f"{where}: {' and '.join(stated)} disagree; keep the one that the weights are in")
    dtypes = {tensors.dtype(name) for name in tensors.names() if not name.endswith((D2T, T2D))}
    if stated and not dtypes & STORED_BITS:
        found = listed(sorted(dtype.name for dtype in dtypes), 3)
        raise CheckpointError(
            f"{where}: {', '.join(stated)} is stated, and no tensor is in 8 bits or packed, but {found}; take it out "
            "if the weights are whole, or download them again"
        )
    return found_ways.pop() if found_ways else PLAIN


def as_floats(
    tensors: TensorFolder, raw: Mapping[str, Any], where: str
) -> tuple[TensorFolder, list[str]]:  # and what cannot be read, a line each
    """Return a head's tensors, its weights of few bits as floats (`quantized.restored`)."""
    try:
        return restored(tensors, stored_scales(raw, tensors, where))
    except CheckpointError as error:
        return tensors, [str(error)]


def target_table(target: Target, dtype: str, name: str) -> np.ndarray | None:  # [vocab, d_model]
    """Read a target's table of that name, or of the names that heads have, as a head in `dtype` would store it; None
    where its weights are not there."""
    try:
        tensors = TensorFolder(target.folder)
    except CheckpointError:
        return None
    names = target.config.names
    is_embedding = name == EMBEDDING or (name == OUTPUT and target.config.tie_embeddings)
    own = names.embedding if is_embedding else names.head if name == OUTPUT else name
    ending = own.removeprefix("model.")
    shape = (target.config.vocab_size, target.config.d_model)
    matches = [name for name in sorted(tensors.names()) if f".{name}".endswith(f".{ending}")]
    return next((tensors.read(name).astype(dtype) for name in matches if tensors.shape(name) == shape), None)


def present(found: Mapping[str, object]) -> list[str]:
    """Return the properties that are there, of some by name."""
    return [what for what, is_there in found.items() if is_there]
