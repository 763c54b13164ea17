"""The files of an EAGLE-3 head under examination, and their checks: keys, names, shapes, dtypes and values, then
vocabulary, taps and rotary settings, and the fit to the target."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, SINGLE_FILE, listed
from specserve.drafters.eagle3.config import Eagle3Config, default_taps
from specserve.drafters.eagle3.model import draft_spec
from specserve.drafters.layers import windows_of
from specserve.interop import examined, published
from specserve.interop.eagle3 import dialects
from specserve.interop.eagle3.dialects import CHECKS, FLAGS, KEYS, OUTPUT_TAPS, TAP_IDS
from specserve.interop.examined import ExaminedFiles, given
from specserve.interop.findings import FLOATS, LAYERS, Copy, Dialect, Finding, both, put
from specserve.interop.key_checks import ROPE_KEYS, check_named, check_rotary
from specserve.interop.keys import EPS, LAYER, ROTARY, SCALING, KeyTable, Stated, architectures, inner, is_count, within
from specserve.interop.repairs import write_rope
from specserve.models.params import ParamSpec, specs
from specserve.models.rope import Rope, plain_rope
from specserve.tokenizer import Tokenizer

_LAYOUTS = {"sglang": "sglang (sglang-jax reads the same)"}  # as they are shown
_COUNTED = ("outputs", "inputs")  # the states that layer ids name, by `dialects.COUNTED_FROM`
_FLAG_TENSORS = {"fc_norm": r"fc_norm\.\d+\.weight", "norm_before_fc": r"input_norm\.weight"}
_BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


class EagleFiles(ExaminedFiles):
    """The files of a head on this network."""

    architectures: ClassVar[Mapping[Dialect, str]] = dialects.ARCHITECTURES  # the name of its kind in each layout
    normed: ClassVar[Mapping[Dialect, str]] = dialects.NORMED  # with norms of queries and keys
    keys: ClassVar[KeyTable] = KEYS
    renamer = staticmethod(dialects.renamer)

    def __init__(self, folder: Path, target: Target | None) -> None:
        super().__init__(folder, target)
        self.stated = self.keys.read(self.raw, CONFIG)

    @property
    def dialect(self) -> Dialect:
        return dialects.dialect_of(self.raw, self.names)

    @cached_property
    def head_rows(self) -> int | None:
        """The number of rows of the output head; None where there is none."""
        name = self.rename(published.OUTPUT)
        return next(iter(self.tensors.shape(name)), None) if name in self.names else None

    @cached_property
    def counted(self) -> Stated:
        """The config.json with what can be counted by the tensors in the place of what it states of that."""
        rows = self.stated.get("draft_vocab_size", self.head_rows)
        num_layers = max(1, published.count_layers(self.names))
        return self.stated.with_values(draft_vocab_size=rows, num_hidden_layers=num_layers)

    def make(self) -> Eagle3Config:
        """Return the head's shape as loaders read it, beside rotary settings that make no sense, taps that the target
        does not have, and counts that the tensors show, all of which have checks of their own."""
        stated, target = self.counted, self.target_config
        if not stated.bad_counts() and any(check_rotary(stated)):
            stated = stated.with_values(**dict.fromkeys((*ROTARY, *SCALING)))
        taps = dialects.read_taps(stated, self.names)
        if target and (any(not 0 <= i < target.num_layers for i in taps) or target.num_layers < 5):
            target = None
        return dialects.draft_config_from_hf(stated, target, self.names, dtype="float32")

    def specs(self, config: Eagle3Config) -> list[ParamSpec]:
        """Return the parameters that a head of this shape has."""
        return specs(draft_spec(config))

    def facts(self) -> dict[str, str]:
        facts = {"layout": _LAYOUTS.get(self.dialect, self.dialect)}
        if self.config is None:
            return facts
        config = self.config
        vocab = published.read_vocab(
            self.table(published.D2T), self.table(published.T2D), config.draft_vocab_size, config.vocab_size
        )
        ids = self.stated.get(TAP_IDS, [])
        named = f"{_COUNTED[dialects.COUNTED_FROM[self.dialect]]} of layers"
        taps = f"{named} {tuple(ids)}"
        if outputs := self.stated.get(OUTPUT_TAPS):
            taps = f"outputs of layers {tuple(outputs)}"
        elif not ids:
            taps = "the default"
            if self.target and self.target.config.num_layers >= 5:
                taps += f": outputs of layers {config.aux_layers}"
        reading = {
            "offset": "d2t holds offsets",
            "absolute": "d2t holds absolute ids",
            "identity": "no d2t: every token",
            "mask": "no d2t: as t2d says",
            "unsound": "d2t makes no sense",
        }
        options: dict[str, object] = {"latent attention": config.latent}
        options |= {"norms of queries and keys": config.qk_norm, "attention biases": config.qkv_bias}
        options |= {"MLP biases": config.mlp_bias, config.activation: config.activation != "silu"}
        flags = [flag for flag in FLAGS if getattr(config, flag)] + published.present(options)
        layers = examined.describe_layers(config, embedding=config.has_embedding, output_head=config.has_own_head)
        return facts | {
            "layers": f"{config.num_layers}{_windows(config)}",
            "width": f"{layers.pop('width')}, target {config.target_d_model}",
            "vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,}; {reading[vocab.reading]}",
            "taps": taps,
            "flags": ", ".join(flags) or "none: plain EAGLE-3",
            "rope": f"{_describe_rope(config.rope)}, up to {config.max_len:,} positions",
            **layers,
        }


def _windows(config: Eagle3Config) -> str:
    """Describe the layers that see no further than a window."""
    windows = windows_of(config)
    if not any(windows):
        return ""
    those = [str(i) for i, window in enumerate(windows) if window]
    which = "" if all(windows) else f", of layers {', '.join(those)}"
    return f"; a window of {max(windows):,} tokens{which}"


def check_names(files: EagleFiles) -> Iterator[Finding]:
    """Check that the tensors have the names of the layout that the head is in."""
    odd = {name: name.removeprefix("model.") for name in files.names if name.startswith("model.")}
    if (stored := files.rename(published.D2T)) in files.names and stored != published.D2T:
        odd[stored] = published.D2T

    def strip(repaired: Copy) -> None:
        repaired.tensors = {odd.get(name, name): value for name, value in repaired.tensors.items()}

    if odd:
        file, right, wrong = files.tensors.file(min(odd)).name, min(odd.values()), min(odd)
        yield CHECKS["names"].found(file, f"{right}, and so on", f"{wrong}, and so on", strip, count=len(odd))


def check_keys(files: EagleFiles) -> Iterator[Finding]:
    """Check the keys as loaders do, and that config.json states as many rows and layers as there are tensors of."""
    stated, counted = files.stated, files.counted
    for check in dialects.OF_KEYS:
        yield from check(counted if check in (dialects.check_shape, dialects.check_masks) else stated)
    rows, paths = counted.get("draft_vocab_size"), stated.found.get("draft_vocab_size", {})
    is_named = any(path.endswith("draft_vocab_size") for path in paths)
    if is_count(rows) and not is_named and (paths or rows != stated.get("vocab_size")):
        got = next(iter(paths), "nothing")
        yield CHECKS["draft-vocab-size"].found(CONFIG, f"{rows}", got, put(draft_vocab_size=rows))
    num_layers = stated.get("num_hidden_layers", 1)
    yield from examined.check_num_layers(num_layers, counted.get("num_hidden_layers"))


def check_identity(files: EagleFiles) -> Iterator[Finding]:
    """Check the keys by which engines choose the code that reads the head."""
    own, layer = files.architectures[files.dialect], inner(files.raw, LAYER)
    stated = {**layer, **files.raw}
    named = stated.get("architectures")
    if not files.keys.classes & architectures(stated) and not list(check_named(files.stated)):
        check = CHECKS["architecture warning"] if named else CHECKS["architecture"]
        yield check.found(f"{CONFIG}: architectures", own, repr(named), put(architectures=[own]))
    if not stated.get("model_type"):
        place = LAYER if files.dialect == "speculators" else CONFIG
        yield CHECKS["model-type"].found(place, "llama", "nothing", put(LAYERS, model_type="llama"))
    key = "tie_word_embeddings"
    if untold := list(dialects.check_output(files.stated, files.names)):
        yield from untold
    elif any(place.get(key) is True for place in (stated, layer)):
        fix = both(put(**{key: False}), put(LAYERS, **{key: False}))
        yield CHECKS["tied"].found(CONFIG, "false", "true", fix)


@given("config")
def check_tensors(files: EagleFiles, config: Eagle3Config) -> Iterator[Finding]:
    """Check that the tensors are those of the shape and flags that config.json states."""
    names = [name.removeprefix("model.") for name in files.names]
    unstated = [
        flag
        for flag, pattern in _FLAG_TENSORS.items()
        if not getattr(config, flag) and any(re.fullmatch(pattern, name) for name in names)
    ]
    for flag in unstated:
        where, got = f"{CONFIG}: {flag}", repr(files.stated.get(flag))
        yield CHECKS["norm-flag"].found(where, "true", got, put(**{flag: True}), flag=flag)
    config = replace(config, **dict.fromkeys(unstated, True))

    def instead(spec: ParamSpec) -> str:
        asking = (flag for flag, pattern in _FLAG_TENSORS.items() if re.fullmatch(pattern, spec.name))
        return next((f"nothing, though {flag} is true" for flag in asking), "nothing")

    if config.qk_norm and not dialects.is_normed(files.stated):
        where, expected, fix = f"{CONFIG}: {LAYER}.model_type", "qwen3", put(LAYERS, model_type="qwen3")
        if files.dialect != "speculators":
            where, expected = f"{CONFIG}: architectures", files.normed.get(files.dialect, "")
            fix = put(architectures=[expected])
        if expected:  # SGLang's layout has no such class
            yield CHECKS["normed-class"].found(where, expected, "another class", fix)
    yield from examined.check_specs(files, files.specs(config), _BUFFERS.fullmatch, instead)


def check_dtypes(files: EagleFiles) -> Iterator[Finding]:
    """Check that the weights are floats, all of the dtype that config.json states."""
    stored = sorted(name for name in files.weights if not files.tensors.is_widened(name))
    dtypes = {name: files.tensors.dtype(name).name for name in stored}
    odd = [f"{name} {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]
    if odd:
        yield CHECKS["weight-dtype"].found(SINGLE_FILE, " or ".join(FLOATS), listed(odd, 3))
        return
    found = sorted(set(dtypes.values()))
    if len(found) > 1:
        yield CHECKS["mixed-dtypes"].found(SINGLE_FILE, "one", ", ".join(found))
    given = {**inner(files.raw, LAYER), **files.raw}
    stated = str(given.get("torch_dtype") or given.get("dtype") or "").removeprefix("torch.")
    key, other = ("dtype", "torch_dtype") if files.dialect == "speculators" else ("torch_dtype", "dtype")

    def set_dtype(repaired: Copy) -> None:
        for place in (repaired.raw, repaired.layer):
            place.pop(other, None)
            place[key] = found[0]

    if stated not in found and len(found) == 1:
        yield CHECKS["dtype"].found(f"{CONFIG}: {key}", found[0], stated or "nothing", set_dtype)


def check_norms(files: EagleFiles) -> Iterator[Finding]:
    """Check that the layer's norms have the target's epsilon."""
    eps = files.stated.get("rms_norm_eps", 1e-6)
    if files.target and EPS.fits(eps) and eps != files.target.config.norm_eps:
        where, expected = f"{CONFIG}: rms_norm_eps", f"{files.target.config.norm_eps:g}, the target's"
        yield CHECKS["eps-differs"].found(where, expected, f"{eps:g}")


def check_speculators(files: EagleFiles) -> Iterator[Finding]:
    """Check that a head in the layout of speculators states what vLLM reads of that layout."""
    if files.dialect != "speculators":
        return
    if files.stated.get("norm_before_residual") is None:
        yield CHECKS["implicit-flag"].found(CONFIG, "true or false", "nothing")
    stated = files.raw.get("speculators_config")
    paths = ("proposal_methods", 0, "speculative_tokens"), ("verifier", "name_or_path")
    if any(within(stated, *path) is None for path in paths):
        got = "nothing" if stated is None else "less"
        expected = "proposal_methods with speculative_tokens, and a verifier with name_or_path"
        yield CHECKS["speculators-config"].found(CONFIG, expected, got)


@given("config", "target")
def check_fit(files: EagleFiles, config: Eagle3Config, target: Target) -> Iterator[Finding]:
    """Check that the head's sizes are those of its target, and that it can follow sequences as long."""
    vocab_size, width = target.config.vocab_size, target.config.d_model
    yield from examined.check_of_target("vocab_size", config.vocab_size, vocab_size, target)
    yield from examined.check_of_target("target_hidden_size", config.target_d_model, width, target)
    yield from examined.check_length(files.stated, target)
    if not config.has_embedding and config.d_model != width:
        where, expected = files.where(published.EMBEDDING), f"[{config.vocab_size}, {config.d_model}]"
        yield CHECKS["embedding"].found(where, expected, "nothing", width=width)


@given("config")
def check_vocabulary(files: EagleFiles, config: Eagle3Config) -> Iterator[Finding]:
    """Check the tables of the draft vocabulary, and that the tokens that end turns are in it."""
    rows, vocab_size = config.draft_vocab_size, config.vocab_size
    yield from examined.check_tables(files, rows, vocab_size)
    ids = published.read_vocab(*files.tables, rows, vocab_size).target_ids
    if ids is not None:
        yield from _check_special_tokens(files, ids)


def _check_special_tokens(files: EagleFiles, target_ids: np.ndarray) -> Iterator[Finding]:
    drafted = {int(i) for i in target_ids}
    ends = files.raw.get("eos_token_id", inner(files.raw, LAYER).get("eos_token_id"))
    if files.target:
        ends = list(files.target.eos_ids)
    if not isinstance(ends, list):
        ends = [ends]
    ends = [i for i in ends if type(i) is int]
    tokenizer = _tokenizer(files.target)
    template = tokenizer.template_token_ids() if tokenizer else frozenset[int]()

    def named(i: int) -> str:
        return f"{i} {tokenizer.decode([i], skip_special_tokens=False)!r}" if tokenizer else str(i)

    for check, required in ((CHECKS["eos"], ends), (CHECKS["template-tokens"], sorted(template - set(ends)))):
        missing = [i for i in required if i not in drafted and i < files.stated.get("vocab_size")]
        if missing:
            got = f"{len(missing)} missing: {listed(list(map(named, missing)), 6)}"
            yield check.found(files.where(published.D2T), "all of them", got)


def _tokenizer(target: Target | None) -> Tokenizer | None:
    names = ("tokenizer.json", "tokenizer_config.json")
    if target is None or not any((target.folder / name).is_file() for name in names):
        return None
    return Tokenizer.load(target.folder)


@given("config", "target")
def check_taps(files: EagleFiles, config: Eagle3Config, target: Target) -> Iterator[Finding]:
    """Check that the tapped layers are layers of the target, in order, and counted as this layout counts them."""
    ids, num_layers, taps = files.stated.get(TAP_IDS), target.config.num_layers, config.aux_layers
    if not ids:
        return
    first = dialects.COUNTED_FROM[files.dialect]
    named, other = _COUNTED[first], _COUNTED[1 - first]
    where, got = f"{CONFIG}: {TAP_IDS}", f"{ids}, {named} of layers in this layout"
    if any(not 0 <= i < num_layers for i in taps):
        yield CHECKS["taps-range"].found(where, f"{named} of layers within 0..{num_layers - 1}", got)
        return
    if list(taps) != sorted(set(taps)):
        yield CHECKS["taps-order"].found(where, "ascending layers", got)
    if num_layers < 5:
        return
    # the usual taps by this layout's count, and what they look like in it when the other layout's count is kept
    slip = 1 - 2 * first
    usual = [i + first for i in default_taps(target.config)]
    if ids == [i + slip for i in usual]:
        yield CHECKS["taps-off-by-one"].found(where, f"{usual} for the usual taps", got, other=other)


@given("config")
def check_rope(files: EagleFiles, _config: Eagle3Config) -> Iterator[Finding]:
    """Check that the rotary settings are stated in both spellings, alike, and are the target's."""
    stated, where = files.stated, f"{CONFIG}: {', '.join(ROPE_KEYS)}"
    required = plain_rope(files.target.config.rope) if files.target else None
    if faults := list(check_rotary(stated, required)):
        yield from faults
        return
    rope, expected = stated.rope(), "both spellings, alike"
    if not any(map(stated.get, (*ROTARY, *SCALING))):
        yield from examined.check_rope_stated(stated, required)
        return
    if spelled := [_describe_rope(each) for each in stated.ropes() if each != rope]:
        fix = write_rope(rope, stated.head_dim)
        yield CHECKS["rope-one-spelling"].found(where, f"{expected}: {_describe_rope(rope)}", "; ".join(spelled), fix)
    if required and rope != required:
        yield CHECKS["rope-differs"].found(where, _describe_rope(required), _describe_rope(rope))


def _describe_rope(rope: Rope | None) -> str:
    if rope is None:
        return "cannot be read"
    parts = [f"{rope.kind}, theta {rope.theta:g}"]
    parts += [f"factor {rope.factor:g}"] * (rope.kind != "default")
    return ", ".join(parts + [f"{rope.rotary_dim} channels of a head"] * (rope.rotary_dim > 0))


OF_NETWORK = (
    check_names,  # first: what follows writes the right names
    check_keys,
    check_identity,
    check_speculators,
    check_tensors,
    check_dtypes,
    examined.check_values,
    check_norms,
    check_vocabulary,
    check_taps,
    check_rope,
    check_fit,
)
