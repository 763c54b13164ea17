"""The draft doctor: what is wrong with a head's files, what it would cost, and how to mend it.

Engines load a faulty head without a word, and then accept less than they could: this looks at everything that they do
not. It reads files only, never runs the head, and mends nothing that it would have to guess.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specserve.checkpoints import dialects
from specserve.checkpoints.dialects import D2T, T2D, Dialect, Vocabulary
from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import SINGLE_FILE, TensorFolder, listed, read_json
from specserve.errors import ConfigError
from specserve.models.config import DraftConfig
from specserve.models.draft import draft_spec
from specserve.models.params import specs
from specserve.models.rope import Rope, plain_rope, rope_from_hf
from specserve.tokenizer import Tokenizer

Level = Literal["error", "warning"]
CONFIG = "config.json"
FLOATS = ("float32", "bfloat16", "float16")
KNOWN_ARCHITECTURES = frozenset(
    (*dialects.ARCHITECTURES.values(), "Eagle3LlamaForCausalLM", "Eagle3Speculator")  # the last of old speculators
)
_FLAG_TENSORS = {"fc_norm": r"fc_norm\.\d+\.weight", "norm_before_fc": r"input_norm\.weight"}
_BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


@dataclass
class Copy:
    """A head's files in memory, while they are being mended."""

    raw: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def layer(self) -> dict[str, Any]:
        """Where the settings of the layer stand: speculators nests them."""
        return self.raw.get("transformer_layer_config") or self.raw


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or likely to be."""

    code: str
    level: Level  # an error breaks a loader or the acceptance; a warning costs something, or might
    what: str
    where: str
    expected: str
    got: str
    consequence: str
    mend: str
    fix: Callable[[Copy], None] | None = field(default=None, repr=False, compare=False)  # None: it would be a guess

    def to_json(self) -> dict[str, Any]:
        names = ("code", "level", "what", "where", "expected", "got", "consequence", "mend")
        return {name: getattr(self, name) for name in names} | {"is_fixable": self.fix is not None}


@dataclass(frozen=True)
class Report:
    """What was found in a folder."""

    folder: Path
    dialect: Dialect
    facts: dict[str, str]  # the head in a few lines
    tensors: list[tuple[str, tuple[int, ...], str]]  # name, shape, dtype
    findings: list[Finding]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def changes(self) -> list[str]:
        """What mending changes, one line each."""
        return [f"{each.where}: {each.what}; now {each.expected}" for each in self.findings if each.fix]

    def mended(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The tensors and the config.json with everything mended that can be without guessing."""
        tensors = TensorFolder(self.folder)
        mended = Copy(
            copy.deepcopy(read_json(self.folder / CONFIG)), {name: tensors.read(name) for name in tensors.names()}
        )
        for finding in self.findings:
            if finding.fix:
                finding.fix(mended)
        return mended.tensors, mended.raw

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "dialect": self.dialect,
            "facts": self.facts,
            "tensors": [{"name": name, "shape": list(shape), "dtype": dtype} for name, shape, dtype in self.tensors],
            "findings": [finding.to_json() for finding in self.findings],
        }


def stored_dtype(tensors: TensorFolder) -> str:
    """The dtype of the weights; float32, which holds both of the others, where they are of several."""
    found = {tensors.dtype(name).name for name in tensors.names()} & set(FLOATS)
    return found.pop() if len(found) == 1 else "float32"


def examine(folder: Path, target: Target | None) -> Report:
    """Look at everything. Without a target, what only it can say is left out. Raises CheckpointError where there is
    nothing to look at: no config.json, no whole safetensors file."""
    patient = _Patient(folder, target)
    findings = [finding for check in _CHECKS for finding in check(patient)]
    tensors = patient.tensors
    rows = [(name, tensors.shape(name), tensors.dtype(name).name) for name in sorted(tensors.names())]
    return Report(folder, patient.dialect, patient.facts(), rows, findings)


class _Patient:
    """A head's files with what can be made out of them."""

    def __init__(self, folder: Path, target: Target | None) -> None:
        self.target = target
        self.tensors = TensorFolder(folder)
        self.names = self.tensors.names()
        self.raw: Mapping[str, Any] = read_json(folder / CONFIG)
        self.flat = dialects.flat_config(self.raw)
        self.dialect: Dialect = dialects.dialect_of(self.raw, self.names)
        self.rename = dialects.renamer(self.names)

    @cached_property
    def head_rows(self) -> int | None:
        name = self.rename("lm_head.weight")
        return self.tensors.shape(name)[0] if name in self.names and self.tensors.shape(name) else None

    @cached_property
    def bad_keys(self) -> list[str]:
        """Keys that the shapes follow from, and that are missing or no counts."""
        given = {**self.flat, "draft_vocab_size": self.flat.get("draft_vocab_size") or self.head_rows}
        return [key for key in dialects.REQUIRED if type(given.get(key)) is not int or given[key] < 1]

    @cached_property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs the written ids mean; empty where they are the default."""
        shift = 0 if self.dialect == "sglang" else 1
        return tuple(i - shift for i in dialects.tap_ids(self.raw))

    @cached_property
    def config(self) -> DraftConfig | None:
        """The head's shape, with what is wrong set aside so that the rest can be checked; None: keys are lacking."""
        if self.bad_keys:
            return None
        raw = {**self.flat, "num_hidden_layers": 1}
        raw["draft_vocab_size"] = raw.get("draft_vocab_size") or self.head_rows
        if self.rope is None:
            raw |= {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 10_000.0}}
        target = self.target.config if self.target else None
        if target and (any(not 0 <= i < target.num_layers for i in self.taps) or target.num_layers < 5):
            target = None
        return dialects.draft_config_from_hf(raw, target, self.names, dtype="float32", where=CONFIG)

    @cached_property
    def ropes(self) -> dict[str, Rope | None]:
        """What each spelling that is there says; None: nothing that can be read."""
        spellings = {"rope_parameters": ("rope_parameters",), "rope_theta": ("rope_theta", "rope_scaling")}
        other = {"rope_parameters": "rope_scaling", "rope_theta": "rope_parameters"}
        return {
            name: _read_rope({key: value for key, value in self.flat.items() if key != other[name]})
            for name, keys in spellings.items()
            if any(self.flat.get(key) is not None for key in keys)
        }

    @cached_property
    def rope(self) -> Rope | None:
        """What our own loader reads."""
        return _read_rope(self.flat)

    @cached_property
    def vocab(self) -> Vocabulary | None:
        if self.config is None:
            return None
        return dialects.read_vocab(
            self.table(D2T), self.table(T2D), self.config.draft_vocab_size, self.config.vocab_size
        )

    def table(self, name: str) -> np.ndarray | None:
        stored = self.rename(name)
        return self.tensors.read(stored) if stored in self.names else None

    def where(self, name: str) -> str:
        """File and tensor, by our name for it."""
        stored = self.rename(name)
        return f"{self.tensors.file(stored).name if stored in self.names else SINGLE_FILE}: {stored}"

    def facts(self) -> dict[str, str]:
        facts = {"layout": self.dialect + (" (sglang-jax reads the same)" if self.dialect == "sglang" else "")}
        if self.config is None:
            return facts
        config, vocab = self.config, self.vocab
        ids = dialects.tap_ids(self.raw)
        named = "inputs of layers" if self.dialect != "sglang" else "outputs of layers"
        known = self.target is not None and self.target.config.num_layers >= 5
        default = f"the default: outputs of layers {config.aux_layers}" if known else "the default"
        reading = {
            "offset": "d2t holds offsets",
            "absolute": "d2t holds absolute ids",
            "identity": "no d2t: every token",
            "mask": "no d2t: as t2d says",
            "unsound": "d2t makes no sense",
        }
        flags = [flag for flag in dialects.FLAGS if getattr(config, flag)]
        return facts | {
            "width": f"{config.d_model}, MLP {config.d_ff}, {config.num_heads} heads of {config.head_dim} "
            f"({config.num_kv_heads} KV), target {config.target_d_model}",
            "vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,}"
            + (f"; {reading[vocab.reading]}" if vocab else ""),
            "taps": f"{named} {tuple(ids)}" if ids else default,
            "flags": ", ".join(flags) or "none: plain EAGLE-3",
            "rope": f"{config.rope.kind}, theta {config.rope.theta:g}, up to {config.max_len:,} positions",
            "embedding": "its own" if config.has_embedding else "the target's",
        }


def _read_rope(raw: Mapping[str, Any]) -> Rope | None:
    try:
        return rope_from_hf(raw, CONFIG)
    except (ConfigError, AttributeError, TypeError, ValueError):
        return None


def _set(key: str, value: Any, *, in_layer: bool = False, everywhere: bool = False) -> Callable[[Copy], None]:
    def fix(mended: Copy) -> None:
        (mended.layer if in_layer else mended.raw)[key] = value
        if everywhere:
            mended.layer[key] = value

    return fix


def _check_keys(patient: _Patient) -> Iterator[Finding]:
    flat = patient.flat
    if patient.bad_keys:
        yield Finding(
            "config-keys",
            "error",
            "the shape is not stated",
            CONFIG,
            "positive whole numbers",
            ", ".join(f"{key}: {flat.get(key)!r}" for key in patient.bad_keys),
            "no loader can build the head",
            "copy them from the config that the head was trained with",
        )
    elif flat.get("draft_vocab_size") is None or "draft_vocab_size" not in patient.raw:
        rows = patient.head_rows
        stated = flat.get("draft_vocab_size")
        yield Finding(
            "draft-vocab-size",
            "error",
            "draft_vocab_size is not stated",
            CONFIG,
            f"{stated or rows}",
            "nothing" if stated is None else "truncated_vocab_size",
            "loaders take the head's rows for the target's whole vocabulary",
            "write the number of rows of lm_head.weight",
            _set("draft_vocab_size", stated or rows),
        )
    if flat.get("num_hidden_layers", 1) != 1:
        yield Finding(
            "layers",
            "error",
            "more than one layer",
            f"{CONFIG}: num_hidden_layers",
            "1",
            repr(flat["num_hidden_layers"]),
            "EAGLE-3 loaders build one layer and leave the others out",
            "only the engine that trained it can serve it",
        )
    own = dialects.ARCHITECTURES[patient.dialect]
    stated = flat.get("architectures")
    if not isinstance(stated, list) or not KNOWN_ARCHITECTURES.intersection(map(str, stated)):
        yield Finding(
            "architecture",
            "error" if not stated else "warning",
            "not named as an EAGLE-3 head",
            f"{CONFIG}: architectures",
            f"{own}",
            repr(stated),
            "engines pick the model class by this name: they refuse it, or build a whole language model",
            "name it",
            _set("architectures", [own]),
        )
    place = "transformer_layer_config" if patient.dialect == "speculators" else CONFIG
    if not flat.get("model_type"):
        yield Finding(
            "model-type",
            "error",
            "model_type is missing",
            place,
            "llama",
            "nothing",
            "transformers cannot tell which config class to read it with",
            "write it",
            _set("model_type", "llama", in_layer=True),
        )
    if (
        flat.get("tie_word_embeddings") is True
        or (patient.raw.get("transformer_layer_config") or {}).get("tie_word_embeddings") is True
    ):
        yield Finding(
            "tied",
            "error",
            "tie_word_embeddings is true",
            CONFIG,
            "false",
            "true",
            "loaders ignore lm_head.weight and the draft vocabulary, and propose from the embedding",
            "write false",
            _set("tie_word_embeddings", False, everywhere=True),
        )


def _check_speculators(patient: _Patient) -> Iterator[Finding]:
    if patient.dialect != "speculators":
        return
    if "norm_before_residual" not in patient.flat:
        yield Finding(
            "implicit-flag",
            "warning",
            "norm_before_residual is not stated",
            CONFIG,
            "true or false",
            "nothing",
            "vLLM then assumes true, the speculators package and we assume false: one of them computes another head",
            "write what the head was trained with",
        )
    stated = patient.raw.get("speculators_config")
    methods = stated.get("proposal_methods") if isinstance(stated, dict) else None
    verifier = stated.get("verifier") if isinstance(stated, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    has_method = isinstance(first, dict) and "speculative_tokens" in first
    if not has_method or not isinstance(verifier, dict) or "name_or_path" not in verifier:
        yield Finding(
            "speculators-config",
            "error",
            "speculators_config is not whole",
            CONFIG,
            "proposal_methods with speculative_tokens, and a verifier with name_or_path",
            "nothing" if stated is None else "less",
            "vLLM refuses the head",
            "import it and export it again: `specserve export --to speculators` writes all of it",
        )


def _check_names(patient: _Patient) -> Iterator[Finding]:
    odd = {name: name.removeprefix("model.") for name in patient.names if name.startswith("model.")}
    if (stored := patient.rename(D2T)) in patient.names and stored != D2T:
        odd[stored] = D2T

    def strip(mended: Copy) -> None:
        mended.tensors = {odd.get(name, name): value for name, value in mended.tensors.items()}

    if odd:
        yield Finding(
            "names",
            "error",
            f"{len(odd)} tensors have another engine's names",
            patient.tensors.file(next(iter(sorted(odd)))).name,
            f"{min(odd.values())}, and so on",
            f"{min(odd)}, and so on",
            "SGLang leaves out what it does not know, vLLM refuses it",
            "rename them",
            strip,
        )


def _check_tensors(patient: _Patient) -> Iterator[Finding]:
    if patient.config is None:
        return
    config, names = patient.config, patient.names
    implied = {
        flag: any(re.fullmatch(pattern, n.removeprefix("model.")) for n in names)
        for flag, pattern in _FLAG_TENSORS.items()
    }
    unstated = [flag for flag, has_tensors in implied.items() if has_tensors and not getattr(config, flag)]
    for flag in unstated:
        yield Finding(
            "norm-flag",
            "error",
            f"the tensors of {flag} are there, the flag is not",
            f"{CONFIG}: {flag}",
            "true",
            repr(patient.flat.get(flag)),
            "the head is computed without norms that it was trained with: nearly nothing is accepted",
            f"write {flag}: true",
            _set(flag, True),
        )
    config = replace(config, **dict.fromkeys(unstated, True))
    used = {patient.rename(name) for name in (D2T, T2D)}
    for spec in specs(draft_spec(config)):
        stored = patient.rename(spec.name)
        used.add(stored)
        if stored not in names:
            flag = next((flag for flag, pattern in _FLAG_TENSORS.items() if re.fullmatch(pattern, spec.name)), "")
            yield Finding(
                "missing-tensor",
                "error",
                f"{stored} is missing",
                SINGLE_FILE,
                f"{list(spec.stored_shape)}",
                "nothing" + (f", though {flag} is true" if flag else ""),
                "SGLang goes on with whatever is in memory there, vLLM with ones or an error",
                f"write {flag}: false, if it was trained so" if flag else "download or export it again",
            )
        elif patient.tensors.shape(stored) != spec.stored_shape:
            yield Finding(
                "shape",
                "error",
                f"{stored} has another shape than config.json says",
                patient.where(spec.name),
                f"{list(spec.stored_shape)}",
                f"{list(patient.tensors.shape(stored))}",
                "it cannot be loaded",
                "find out which is wrong: config.json may be that of another head",
            )
    for name in sorted(names - used):
        if not _BUFFERS.fullmatch(name):
            yield Finding(
                "unknown-tensor",
                "error",
                f"{name} is no part of an EAGLE-3 head",
                patient.tensors.file(name).name,
                "nothing",
                f"{list(patient.tensors.shape(name))}",
                "SGLang leaves it out, vLLM refuses the head; what it was trained for is lost",
                "remove it, if the head was trained without",
            )


def _check_dtypes(patient: _Patient) -> Iterator[Finding]:
    tensors = patient.tensors
    weights = sorted(patient.names - {patient.rename(D2T), patient.rename(T2D)})
    odd = [f"{name} {tensors.dtype(name).name}" for name in weights if tensors.dtype(name).name not in FLOATS]
    if odd:
        yield Finding(
            "weight-dtype",
            "error",
            "weights that are no 16 or 32 bit floats",
            SINGLE_FILE,
            " or ".join(FLOATS),
            listed(odd, 3),
            "EAGLE-3 loaders would read the numbers as they stand, without scales",
            "export the head again in bfloat16",
        )
        return
    found = sorted({tensors.dtype(name).name for name in weights})
    if len(found) > 1:
        yield Finding(
            "mixed-dtypes",
            "warning",
            "weights of several dtypes",
            SINGLE_FILE,
            "one",
            ", ".join(found),
            "engines cast all to one of them, and not to the same",
            "`specserve import --dtype` writes all in one",
        )
    stated = str(patient.flat.get("torch_dtype") or patient.flat.get("dtype") or "").removeprefix("torch.")
    if stated not in found and len(found) == 1:
        yield Finding(
            "dtype",
            "warning",
            "the dtype is not stated" if not stated else "another dtype is stated than the weights have",
            f"{CONFIG}: torch_dtype",
            found[0],
            stated or "nothing",
            "engines then load the head in float32 or in the target's dtype",
            "state that of the weights",
            _set("torch_dtype", found[0], everywhere=True),
        )


def _check_values(patient: _Patient) -> Iterator[Finding]:
    for name in sorted(patient.names - {patient.rename(D2T), patient.rename(T2D)}):
        if patient.tensors.dtype(name).name in FLOATS:
            value = patient.tensors.read(name).astype(np.float32)
            if count := int((~np.isfinite(value)).sum()):
                yield Finding(
                    "not-finite",
                    "error",
                    "values that are no numbers",
                    f"{patient.tensors.file(name).name}: {name}",
                    "finite numbers",
                    f"{count:,} of {value.size:,} are NaN or infinite",
                    "every proposal that they touch is noise",
                    "go back to an earlier checkpoint, or download the weights again",
                )


def _check_vocab(patient: _Patient) -> Iterator[Finding]:
    config, vocab = patient.config, patient.vocab
    if config is None or vocab is None:
        return
    d2t, t2d = patient.table(D2T), patient.table(T2D)
    rows, where = config.draft_vocab_size, patient.where(D2T)
    if vocab.target_ids is None:
        yield Finding(
            "vocabulary",
            "error",
            "d2t is missing" if d2t is None else "d2t does not say what the draft's rows stand for",
            where,
            f"{rows:,} offsets (target id = i + d2t[i]) to unique ids below {config.vocab_size:,}",
            "nothing" if d2t is None else _describe(d2t),
            "proposals are other tokens than the head means: nothing is accepted",
            "take d2t from the checkpoint that the head was trained with",
        )
        return
    right = dialects.vocab_to_tensors(np.sort(vocab.target_ids), config.vocab_size)
    order = np.argsort(vocab.target_ids)

    def set_d2t(mended: Copy) -> None:
        mended.tensors[D2T] = right[D2T]

    def sort_rows(mended: Copy) -> None:
        set_d2t(mended)
        mended.tensors["lm_head.weight"] = mended.tensors["lm_head.weight"][order]

    def set_t2d(mended: Copy) -> None:
        mended.tensors[T2D] = right[T2D]

    offsets = f"offsets (target id = i + d2t[i]), {_describe(right[D2T])}"
    if vocab.reading == "mask":
        yield Finding(
            "d2t-missing",
            "error",
            "d2t is missing",
            where,
            offsets,
            "nothing, but t2d names as many tokens as the head has rows",
            "engines take the draft's rows for the first tokens of the vocabulary: nothing is accepted",
            "derive it from t2d",
            set_d2t,
        )
    elif vocab.reading == "absolute":
        yield Finding(
            "absolute-d2t",
            "error",
            "d2t holds absolute token ids",
            where,
            offsets,
            _describe(d2t),
            "engines add i to each: proposals are other tokens than the head means, and nothing is accepted",
            "subtract i from each",
            set_d2t,
        )
    if not vocab.is_sorted:
        yield Finding(
            "unsorted-d2t",
            "error",
            "the draft's rows are not in the order of their tokens",
            where,
            "ascending target ids",
            f"{int((np.diff(vocab.target_ids) < 0).sum()):,} steps down",
            "code that pairs the rows with nonzero(t2d), trainers above all, takes them for other tokens",
            "sort d2t, and the rows of lm_head.weight with it",
            sort_rows,
        )
    elif d2t is not None and d2t.dtype != np.int64:
        yield Finding(
            "d2t-dtype",
            "warning",
            "d2t is not in int64",
            where,
            "int64",
            d2t.dtype.name,
            "torch refuses to index with most other dtypes",
            "cast it",
            set_d2t,
        )
    if t2d is None and rows != config.vocab_size:
        yield Finding(
            "t2d-missing",
            "warning",
            "t2d is missing",
            patient.where(T2D),
            f"a mask of {config.vocab_size:,} with {rows:,} set",
            "nothing",
            "engines that serve do without, trainers cannot continue from it",
            "derive it from d2t",
            set_t2d,
        )
    elif t2d is not None and not vocab.agrees:
        is_blank = d2t is not None and not d2t.any()
        yield Finding(
            "t2d-disagrees",
            "error",
            "t2d and d2t name different tokens",
            patient.where(T2D),
            f"a mask of {config.vocab_size:,}, set where d2t points",
            _describe(t2d) + (", and a d2t of zeros, as if it was never filled" if is_blank else ""),
            "one of them is of another head: engines go by d2t, trainers by t2d",
            "take both from the checkpoint that the head was trained with; if d2t is right, delete t2d and mend that",
        )
    elif t2d is not None and t2d.dtype != np.bool_:
        yield Finding(
            "t2d-dtype",
            "warning",
            "t2d is not a mask of bools",
            patient.where(T2D),
            "bool",
            t2d.dtype.name,
            "code that indexes with it picks rows 0 and 1 again and again",
            "cast it",
            set_t2d,
        )
    yield from _check_special_tokens(patient, vocab.target_ids)


def _check_special_tokens(patient: _Patient, target_ids: np.ndarray) -> Iterator[Finding]:
    drafted = {int(i) for i in target_ids}
    stated = patient.flat.get("eos_token_id")
    own = stated if isinstance(stated, list) else [stated] if isinstance(stated, int) else []
    ends = list(patient.target.eos_ids) if patient.target else own
    tokenizer = _tokenizer(patient.target)
    template = tokenizer.template_token_ids() if tokenizer else frozenset[int]()

    def told(missing: list[int]) -> str:
        return listed(
            [f"{i} {tokenizer.decode([i], skip_special_tokens=False)!r}" if tokenizer else str(i) for i in missing], 6
        )

    groups = (
        ("eos", "EOS ids", ends, "the end of an answer can never be proposed: its last step drafts in vain"),
        (
            "template-tokens",
            "tokens of the chat template, or special ones,",
            sorted(template - set(ends)),
            "turns, tool calls and thinking that they open or close are drafted in vain",
        ),
    )
    for code, what, wanted, consequence in groups:
        missing = [i for i in wanted if i not in drafted and i < patient.flat["vocab_size"]]
        if missing:
            yield Finding(
                code,
                "warning",
                f"{what} are not in the draft vocabulary",
                patient.where(D2T),
                "all of them",
                f"{len(missing)} missing: {told(missing)}",
                consequence,
                "train with them in the draft vocabulary, as `specserve train` does",
            )


def _tokenizer(target: Target | None) -> Tokenizer | None:
    names = ("tokenizer.json", "tokenizer_config.json")
    if target is None or not any((target.folder / name).is_file() for name in names):
        return None
    return Tokenizer.load(target.folder)


def _check_taps(patient: _Patient) -> Iterator[Finding]:
    ids, target = dialects.tap_ids(patient.raw), patient.target
    named, other = ("outputs", "inputs") if patient.dialect == "sglang" else ("inputs", "outputs")
    where = f"{CONFIG}: {dialects.TAP_IDS}"
    got = f"{ids}, {named} of layers in this layout"
    if not ids or target is None:
        return
    num_layers = target.config.num_layers
    if any(not 0 <= i < num_layers for i in patient.taps):
        yield Finding(
            "taps-range",
            "error",
            "taps that the target does not have",
            where,
            f"{named} of layers within 0..{num_layers - 1}",
            got,
            "the head cannot be fed",
            "give the target that it was trained for, or count its layers again",
        )
        return
    if list(patient.taps) != sorted(set(patient.taps)):
        yield Finding(
            "taps-order",
            "warning",
            "taps out of order",
            where,
            "ascending layers",
            got,
            "fc.weight expects low, middle, high: engines that collect them on the way up feed it otherwise",
            "write them in the order that the head was trained with",
        )
    if num_layers < 5:
        return
    default = list(target.config.default_aux_layers)
    if patient.dialect != "sglang":
        default = [i + 1 for i in default]
    slips = {1: [i + 1 for i in default], -1: [i - 1 for i in default]}
    # what this flavour would call the taps next to the usual ones is what the other one calls the usual ones
    if ids == slips[1 if patient.dialect == "sglang" else -1]:
        yield Finding(
            "taps-off-by-one",
            "warning",
            "tap ids look as if they were counted in another layout",
            where,
            f"{default} for the usual taps",
            got,
            f"if they name {other}, every tap is one layer off: acceptance falls to a quarter, and nothing else shows",
            "compare the acceptance with both, and keep the better; leave the key out for the usual taps",
        )


def _check_rope(patient: _Patient) -> Iterator[Finding]:
    if patient.config is None:
        return
    wanted = plain_rope(patient.target.config.rope) if patient.target else None
    ropes, where = patient.ropes, f"{CONFIG}: rope_theta, rope_scaling, rope_parameters"
    readable = [rope for rope in ropes.values() if rope is not None]
    stated = "; ".join(f"{name}: {_describe_rope(rope)}" for name, rope in ropes.items()) or "nothing"
    both = "both spellings, alike" + (f": {_describe_rope(wanted)}" if wanted else "")
    if not ropes:
        yield Finding(
            "rope-missing",
            "warning",
            "nothing is said about rotary embeddings",
            where,
            both,
            "nothing",
            "every engine turns by its own default, mostly theta 10,000",
            "write the target's" if wanted else "give --target",
            _write_rope(patient.config, wanted) if wanted else None,
        )
        return
    if len(set(readable)) != 1 or len(readable) < len(ropes):
        chosen = wanted if wanted in readable else None
        yield Finding(
            "rope-spellings",
            "error",
            "the spellings of the rotary settings disagree, or cannot be read",
            where,
            both,
            stated,
            "older and newer engines turn by different angles: acceptance falls with the position",
            "write the one that is the target's in both spellings" if chosen else "write what it was trained with",
            _write_rope(patient.config, chosen) if chosen else None,
        )
        return
    rope = readable[0]
    if len(ropes) == 1 and rope != Rope():
        yield Finding(
            "rope-one-spelling",
            "warning",
            "the rotary settings are spelled in one way only",
            where,
            "both spellings, alike",
            stated,
            "engines that know only the other one turn by theta 10,000",
            "write both",
            _write_rope(patient.config, rope),
        )
    if wanted and rope != wanted:
        yield Finding(
            "rope-differs",
            "warning",
            "other rotary settings than the target's",
            where,
            _describe_rope(wanted),
            _describe_rope(rope),
            "right only if the head was trained so; if not, acceptance falls with the position",
            "compare with the settings that it was trained with",
        )


def _write_rope(config: DraftConfig, rope: Rope) -> Callable[[Copy], None]:
    def fix(mended: Copy) -> None:
        mended.layer.update(dialects.rope_keys(replace(config, rope=rope)))
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            if mended.layer is not mended.raw:
                mended.raw.pop(key, None)

    return fix


def _describe_rope(rope: Rope | None) -> str:
    if rope is None:
        return "cannot be read"
    return f"{rope.kind}, theta {rope.theta:g}" + (f", factor {rope.factor:g}" if rope.kind != "default" else "")


def _check_positions(patient: _Patient) -> Iterator[Finding]:
    if patient.config is None or patient.target is None:
        return
    stated, wanted = patient.flat.get("max_position_embeddings"), patient.target.config.max_len
    if isinstance(stated, int) and stated >= wanted:
        return
    rope = patient.rope  # some kinds follow from the length: they are to stay as they are

    def fix(mended: Copy) -> None:
        mended.layer["max_position_embeddings"] = wanted
        if mended.layer is not mended.raw:
            mended.raw.pop("max_position_embeddings", None)
        if rope is not None and _read_rope(mended.layer) != rope and patient.config:
            _write_rope(patient.config, rope)(mended)

    yield Finding(
        "max-positions",
        "error",
        "the head ends before the target does",
        f"{CONFIG}: max_position_embeddings",
        f"at least {wanted:,}, the target's",
        "nothing" if stated is None else f"{stated:,}" if isinstance(stated, int) else repr(stated),
        "vLLM crashes on prompts that are longer",
        "write the target's",
        fix,
    )


def _check_fit(patient: _Patient) -> Iterator[Finding]:
    if patient.config is None or patient.target is None:
        return
    config, target = patient.config, patient.target.config
    for code, key, got, wanted in (
        ("vocabulary-size", "vocab_size", config.vocab_size, target.vocab_size),
        ("target-width", "target_hidden_size", config.target_d_model, target.d_model),
    ):
        if got != wanted:
            yield Finding(
                code,
                "error",
                "a head for another target",
                f"{CONFIG}: {key}",
                f"{wanted:,}, as in {patient.target.folder}",
                f"{got:,}",
                "it cannot be served with this one",
                "give the target that it was trained for (--target)",
            )
    if not config.has_embedding and config.d_model != target.d_model:
        yield Finding(
            "embedding",
            "error",
            "a head of its own width without an embedding of its own",
            patient.where(dialects.EMBEDDING),
            f"[{config.vocab_size}, {config.d_model}]",
            "nothing",
            f"the target's embedding has width {target.d_model}, so there is none to share",
            "export the head again, with embed_tokens.weight",
        )


def _describe(table: np.ndarray | None) -> str:
    if table is None:
        return "nothing"
    shown = ", ".join(str(value) for value in table.ravel()[:3].tolist())
    last = f", .. {table.ravel()[-1]}" if table.size > 3 else ""
    if table.dtype == np.bool_:
        return f"{table.size:,} bools, {int(table.sum()):,} set"
    return f"{table.size:,} from {shown}{last}"


_CHECKS: tuple[Callable[[_Patient], Iterator[Finding]], ...] = (
    _check_names,  # first: what follows writes the right names
    _check_keys,
    _check_speculators,
    _check_fit,
    _check_tensors,
    _check_dtypes,
    _check_values,
    _check_vocab,
    _check_taps,
    _check_rope,
    _check_positions,
)
