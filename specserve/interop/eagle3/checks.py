"""Checks of a head's files: keys, names, shapes, dtypes and values, then vocabulary, taps and rotary settings, and the
fit to the target."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, SINGLE_FILE, listed
from specserve.drafters.eagle3.config import Eagle3Config, default_taps
from specserve.interop.eagle3 import dialects
from specserve.interop.eagle3.catalogue import CHECKS
from specserve.interop.eagle3.head_files import EagleFiles, read_rope
from specserve.interop.examined import check_specs, check_values
from specserve.interop.findings import FLOATS, Copy, Finding, Fix, describe, put, put_tensor
from specserve.interop.published import (
    ACTIVATION,
    D2T,
    EMBEDDING,
    T2D,
    Vocabulary,
    architectures,
    is_eps,
    rope_keys,
    vocab_to_tensors,
)
from specserve.models.params import ParamSpec
from specserve.models.rope import Rope, plain_rope
from specserve.tokenizer import Tokenizer

_FLAG_TENSORS = {"fc_norm": r"fc_norm\.\d+\.weight", "norm_before_fc": r"input_norm\.weight"}
_BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def check_names(files: EagleFiles) -> Iterator[Finding]:
    """Check that the tensors have the names of the layout that the head is in."""
    odd = {name: name.removeprefix("model.") for name in files.names if name.startswith("model.")}
    if (stored := files.rename(D2T)) in files.names and stored != D2T:
        odd[stored] = D2T

    def strip(repaired: Copy) -> None:
        repaired.tensors = {odd.get(name, name): value for name, value in repaired.tensors.items()}

    if odd:
        file, right, wrong = files.tensors.file(min(odd)).name, min(odd.values()), min(odd)
        yield CHECKS["names"].found(file, f"{right}, and so on", f"{wrong}, and so on", strip, count=len(odd))


def check_keys(files: EagleFiles) -> Iterator[Finding]:
    """Check that config.json states the shape, and as many layers as there are tensors of."""
    flat = files.flat
    stated = flat.get("draft_vocab_size")
    right = stated or files.head_rows
    if files.bad_keys:
        got = ", ".join(f"{key}: {flat.get(key)!r}" for key in files.bad_keys)
        yield CHECKS["config-keys"].found(CONFIG, "positive whole numbers", got)
    elif stated is None or "draft_vocab_size" not in files.raw:
        got = "nothing" if stated is None else "truncated_vocab_size"
        yield CHECKS["draft-vocab-size"].found(CONFIG, f"{right}", got, put("draft_vocab_size", right))
    stated, counted = flat.get("num_hidden_layers", 1), files.num_layers
    if stated != counted:
        is_cut = type(stated) is int and stated > counted  # or the config is of another head
        fix = None if is_cut else put("num_hidden_layers", counted, in_layer=True)
        yield CHECKS["layers"].found(f"{CONFIG}: num_hidden_layers", str(counted), repr(stated), fix)


def check_identity(files: EagleFiles) -> Iterator[Finding]:
    """Check the keys by which engines choose the code that reads the head."""
    flat, own = files.flat, files.architectures[files.dialect]
    stated = flat.get("architectures")
    if not files.known & architectures(flat):
        check = CHECKS["architecture warning"] if stated else CHECKS["architecture"]
        yield check.found(f"{CONFIG}: architectures", own, repr(stated), put("architectures", [own]))
    if not flat.get("model_type"):
        place = "transformer_layer_config" if files.dialect == "speculators" else CONFIG
        yield CHECKS["model-type"].found(place, "llama", "nothing", put("model_type", "llama", in_layer=True))
    layer = files.raw.get("transformer_layer_config") or {}
    if flat.get("tie_word_embeddings") is True or layer.get("tie_word_embeddings") is True:
        fix = put("tie_word_embeddings", False, everywhere=True)
        yield CHECKS["tied"].found(CONFIG, "false", "true", fix)


def check_tensors(files: EagleFiles) -> Iterator[Finding]:
    """Check that the tensors are those of the shape and flags that config.json states."""
    if files.config is None:
        return
    config, names = files.config, files.names
    implied = {
        flag: any(re.fullmatch(pattern, n.removeprefix("model.")) for n in names)
        for flag, pattern in _FLAG_TENSORS.items()
    }
    unstated = [flag for flag, has_tensors in implied.items() if has_tensors and not getattr(config, flag)]
    for flag in unstated:
        where, got = f"{CONFIG}: {flag}", repr(files.flat.get(flag))
        yield CHECKS["norm-flag"].found(where, "true", got, put(flag, True), flag=flag)
    config = replace(config, **dict.fromkeys(unstated, True))

    def instead(spec: ParamSpec) -> str:
        asking = [flag for flag, pattern in _FLAG_TENSORS.items() if re.fullmatch(pattern, spec.name)]
        return f"nothing, though {asking[0]} is true" if asking else "nothing"

    checks = CHECKS["missing-tensor"], CHECKS["shape"], CHECKS["unknown-tensor"]
    yield from check_specs(files, files.specs(config), checks, _BUFFERS.fullmatch, instead)


def check_dtypes(files: EagleFiles) -> Iterator[Finding]:
    """Check that the weights are floats, all of the dtype that config.json states."""
    dtypes = {name: files.tensors.dtype(name).name for name in sorted(files.weights)}
    odd = [f"{name} {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]
    if odd:
        yield CHECKS["weight-dtype"].found(SINGLE_FILE, " or ".join(FLOATS), listed(odd, 3))
        return
    found = sorted(set(dtypes.values()))
    if len(found) > 1:
        yield CHECKS["mixed-dtypes"].found(SINGLE_FILE, "one", ", ".join(found))
    stated = str(files.flat.get("torch_dtype") or files.flat.get("dtype") or "").removeprefix("torch.")
    key, other = ("dtype", "torch_dtype") if files.dialect == "speculators" else ("torch_dtype", "dtype")

    def set_dtype(repaired: Copy) -> None:
        for place in (repaired.raw, repaired.layer):
            place.pop(other, None)
            place[key] = found[0]

    if stated not in found and len(found) == 1:
        yield CHECKS["dtype"].found(f"{CONFIG}: {key}", found[0], stated or "nothing", set_dtype)


def check_layer(files: EagleFiles) -> Iterator[Finding]:
    """Check that the layer's activation is the one that engines compute, and that its norms have the target's
    epsilon."""
    act, eps = files.flat.get("hidden_act"), files.flat.get("rms_norm_eps", 1e-6)
    if act not in (None, ACTIVATION):
        yield CHECKS["hidden-act"].found(f"{CONFIG}: hidden_act", ACTIVATION, repr(act))
    where = f"{CONFIG}: rms_norm_eps"
    if not is_eps(eps):
        yield CHECKS["eps"].found(where, "a number above 0 and far below 1, such as 1e-06", repr(eps))
    elif files.target is not None and eps != files.target.config.norm_eps:
        yield CHECKS["eps-differs"].found(where, f"{files.target.config.norm_eps:g}, the target's", f"{eps:g}")


def check_speculators(files: EagleFiles) -> Iterator[Finding]:
    """Check that a head in the layout of speculators states what vLLM reads of that layout."""
    if files.dialect != "speculators":
        return
    if "norm_before_residual" not in files.flat:
        yield CHECKS["implicit-flag"].found(CONFIG, "true or false", "nothing")
    stated = files.raw.get("speculators_config")
    methods = stated.get("proposal_methods") if isinstance(stated, dict) else None
    verifier = stated.get("verifier") if isinstance(stated, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    has_method = isinstance(first, dict) and "speculative_tokens" in first
    if not has_method or not isinstance(verifier, dict) or "name_or_path" not in verifier:
        expected = "proposal_methods with speculative_tokens, and a verifier with name_or_path"
        yield CHECKS["speculators-config"].found(CONFIG, expected, "nothing" if stated is None else "less")


def check_fit(files: EagleFiles) -> Iterator[Finding]:
    """Check that the head's sizes are those of its target."""
    if files.config is None or files.target is None:
        return
    config, target = files.config, files.target.config
    for check, key, got, required in (
        (CHECKS["vocabulary-size"], "vocab_size", config.vocab_size, target.vocab_size),
        (CHECKS["target-width"], "target_hidden_size", config.target_d_model, target.d_model),
    ):
        if got != required:
            yield check.found(f"{CONFIG}: {key}", f"{required:,}, as in {files.target.folder}", f"{got:,}")
    if not config.has_embedding and config.d_model != target.d_model:
        where, expected = files.where(EMBEDDING), f"[{config.vocab_size}, {config.d_model}]"
        yield CHECKS["embedding"].found(where, expected, "nothing", width=target.d_model)


def check_vocabulary(files: EagleFiles) -> Iterator[Finding]:
    """Check that d2t and t2d say which tokens the draft's rows stand for, and that the tokens that end turns are among
    them."""
    config, vocab = files.config, files.vocab
    if config is None or vocab is None:
        return
    if vocab.target_ids is None:
        rows, d2t = config.draft_vocab_size, files.table(D2T)
        expected = f"{rows:,} offsets (target id = i + d2t[i]) to unique ids below {config.vocab_size:,}"
        yield CHECKS["vocabulary"].found(files.where(D2T), expected, describe(d2t))
        return
    tables = vocab_to_tensors(np.sort(vocab.target_ids), config.vocab_size)
    yield from _check_d2t(files, vocab, vocab.target_ids, tables[D2T])
    yield from _check_t2d(files, config, vocab, tables[T2D])
    yield from _check_special_tokens(files, vocab.target_ids)


def _check_d2t(files: EagleFiles, vocab: Vocabulary, target_ids: np.ndarray, right: np.ndarray) -> Iterator[Finding]:
    """Compare d2t with the table that it should be."""
    d2t, where = files.table(D2T), files.where(D2T)

    set_d2t = put_tensor(D2T, right)

    def sort_rows(repaired: Copy) -> None:
        set_d2t(repaired)
        repaired.tensors["lm_head.weight"] = repaired.tensors["lm_head.weight"][np.argsort(target_ids)]

    offsets = f"offsets (target id = i + d2t[i]), {describe(right)}"
    if vocab.reading == "mask":
        got = "nothing, but t2d names as many tokens as the head has rows"
        yield CHECKS["d2t-missing"].found(where, offsets, got, set_d2t)
    elif vocab.reading == "absolute":
        yield CHECKS["absolute-d2t"].found(where, offsets, describe(d2t), set_d2t)
    if not vocab.is_sorted:
        got = f"{int((np.diff(target_ids) < 0).sum()):,} steps down"
        fix = sort_rows if files.head_rows == len(target_ids) else None
        yield CHECKS["unsorted-d2t"].found(where, "ascending target ids", got, fix)
    elif d2t is not None and d2t.dtype != np.int64:
        yield CHECKS["d2t-dtype"].found(where, "int64", d2t.dtype.name, set_d2t)


def _check_t2d(files: EagleFiles, config: Eagle3Config, vocab: Vocabulary, right: np.ndarray) -> Iterator[Finding]:
    """Compare t2d with the mask that it should be."""
    t2d, d2t, where = files.table(T2D), files.table(D2T), files.where(T2D)
    set_t2d = put_tensor(T2D, right)
    if t2d is None and config.draft_vocab_size != config.vocab_size:
        expected = f"a mask of {config.vocab_size:,} with {config.draft_vocab_size:,} set"
        yield CHECKS["t2d-missing"].found(where, expected, "nothing", set_t2d)
    elif t2d is not None and not vocab.agrees:
        is_blank = d2t is not None and not d2t.any()
        got = describe(t2d) + (", and a d2t of zeros, as if it was never filled" if is_blank else "")
        yield CHECKS["t2d-disagrees"].found(where, f"a mask of {config.vocab_size:,}, set where d2t points", got)
    elif t2d is not None and t2d.dtype != np.bool_:
        yield CHECKS["t2d-dtype"].found(where, "bool", t2d.dtype.name, set_t2d)


def _check_special_tokens(files: EagleFiles, target_ids: np.ndarray) -> Iterator[Finding]:
    drafted = {int(i) for i in target_ids}
    stated = files.flat.get("eos_token_id")
    own = [i for i in (stated if isinstance(stated, list) else [stated]) if type(i) is int]
    ends = list(files.target.eos_ids) if files.target else own
    tokenizer = _tokenizer(files.target)
    template = tokenizer.template_token_ids() if tokenizer else frozenset[int]()

    def named(i: int) -> str:
        return f"{i} {tokenizer.decode([i], skip_special_tokens=False)!r}" if tokenizer else str(i)

    for check, required in ((CHECKS["eos"], ends), (CHECKS["template-tokens"], sorted(template - set(ends)))):
        missing = [i for i in required if i not in drafted and i < files.flat["vocab_size"]]
        if missing:
            got = f"{len(missing)} missing: {listed(list(map(named, missing)), 6)}"
            yield check.found(files.where(D2T), "all of them", got)


def _tokenizer(target: Target | None) -> Tokenizer | None:
    names = ("tokenizer.json", "tokenizer_config.json")
    if target is None or not any((target.folder / name).is_file() for name in names):
        return None
    return Tokenizer.load(target.folder)


def check_taps(files: EagleFiles) -> Iterator[Finding]:
    """Check that the tapped layers are layers of the target, in order, and counted as this layout counts them."""
    ids, target = dialects.tap_ids(files.raw), files.target
    named, other = ("outputs", "inputs") if files.dialect == "sglang" else ("inputs", "outputs")
    where = f"{CONFIG}: {dialects.TAP_IDS}"
    got = f"{ids}, {named} of layers in this layout"
    if not ids or target is None:
        return
    num_layers = target.config.num_layers
    if any(not 0 <= i < num_layers for i in files.taps):
        yield CHECKS["taps-range"].found(where, f"{named} of layers within 0..{num_layers - 1}", got)
        return
    if list(files.taps) != sorted(set(files.taps)):
        yield CHECKS["taps-order"].found(where, "ascending layers", got)
    if num_layers < 5:
        return
    # the usual taps by this layout's count, and what they look like in it when the other layout's count is kept
    first, slip = (0, 1) if files.dialect == "sglang" else (1, -1)
    usual = [i + first for i in default_taps(target.config)]
    if ids == [i + slip for i in usual]:
        yield CHECKS["taps-off-by-one"].found(where, f"{usual} for the usual taps", got, other=other)


def check_switches(files: EagleFiles) -> Iterator[Finding]:
    """Check that no switch asks for what is left out."""
    if ignored := dialects.unsupported(files.raw):
        yield CHECKS["ignored-switch"].found(CONFIG, "a layer that sees everything, without biases", ", ".join(ignored))


def check_rope(files: EagleFiles) -> Iterator[Finding]:
    """Check that the rotary settings are stated in both spellings, alike, and are the target's."""
    if files.config is None:
        return
    required = plain_rope(files.target.config.rope) if files.target else None
    ropes, where = files.ropes, f"{CONFIG}: rope_theta, rope_scaling, rope_parameters"
    readable = [rope for rope in ropes.values() if rope is not None]
    stated = "; ".join(f"{name}: {_describe_rope(rope)}" for name, rope in ropes.items()) or "nothing"
    both = "both spellings, alike" + (f": {_describe_rope(required)}" if required else "")
    fix = required and _write_rope(required)
    if not ropes:
        yield CHECKS["rope-missing"].found(where, both, "nothing", fix)
        return
    if len(set(readable)) != 1 or len(readable) < len(ropes):
        yield CHECKS["rope-spellings"].found(where, both, stated, fix if required in readable else None)
        return
    rope = readable[0]
    if len(ropes) == 1 and rope != Rope():
        yield CHECKS["rope-one-spelling"].found(where, "both spellings, alike", stated, _write_rope(rope))
    if required and rope != required:
        yield CHECKS["rope-differs"].found(where, _describe_rope(required), _describe_rope(rope))


def _write_rope(rope: Rope) -> Fix:
    def fix(repaired: Copy) -> None:
        repaired.layer.update(rope_keys(rope))
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            if repaired.layer is not repaired.raw:
                repaired.raw.pop(key, None)

    return fix


def _describe_rope(rope: Rope | None) -> str:
    if rope is None:
        return "cannot be read"
    return f"{rope.kind}, theta {rope.theta:g}" + (f", factor {rope.factor:g}" if rope.kind != "default" else "")


def check_positions(files: EagleFiles) -> Iterator[Finding]:
    """Check that the head can follow sequences as long as the target's."""
    if files.config is None or files.target is None:
        return
    stated, required = files.flat.get("max_position_embeddings"), files.target.config.max_len
    if isinstance(stated, int) and stated >= required:
        return
    rope = files.rope  # some kinds follow from the length: they are to stay as they are

    def fix(repaired: Copy) -> None:
        repaired.layer["max_position_embeddings"] = required
        if repaired.layer is not repaired.raw:
            repaired.raw.pop("max_position_embeddings", None)
        if rope is not None and read_rope(repaired.layer) != rope:
            _write_rope(rope)(repaired)

    got = "nothing" if stated is None else f"{stated:,}" if isinstance(stated, int) else repr(stated)
    where = f"{CONFIG}: max_position_embeddings"
    yield CHECKS["max-positions"].found(where, f"at least {required:,}, the target's", got, fix)


OF_NETWORK = (
    check_names,  # first: what follows writes the right names
    check_keys,
    check_identity,
    check_speculators,
    check_fit,
    check_tensors,
    check_dtypes,
    check_values,
    check_layer,
    check_vocabulary,
    check_taps,
    check_rope,
    check_positions,
)
