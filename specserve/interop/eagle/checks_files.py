"""Checks of a head's files that need not know what the files mean: keys, names, shapes, dtypes, values."""

import re
from collections.abc import Iterator
from dataclasses import replace

from specserve.checkpoints.tensors import CONFIG, SINGLE_FILE, listed
from specserve.drafters.eagle.model import draft_spec
from specserve.drafters.published import D2T, T2D, is_eps
from specserve.interop import values
from specserve.interop.eagle import catalogue, dialects
from specserve.interop.eagle.patient import Patient
from specserve.interop.findings import FLOATS, Copy, Finding, put
from specserve.models.params import specs

_FLAG_TENSORS = {"fc_norm": r"fc_norm\.\d+\.weight", "norm_before_fc": r"input_norm\.weight"}
_BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def check_names(patient: Patient) -> Iterator[Finding]:
    """Check that the tensors have the names of the layout that the head is in."""
    odd = {name: name.removeprefix("model.") for name in patient.names if name.startswith("model.")}
    if (stored := patient.rename(D2T)) in patient.names and stored != D2T:
        odd[stored] = D2T

    def strip(mended: Copy) -> None:
        mended.tensors = {odd.get(name, name): value for name, value in mended.tensors.items()}

    if odd:
        file, right, wrong = patient.tensors.file(min(odd)).name, min(odd.values()), min(odd)
        yield catalogue.NAMES.found(file, f"{right}, and so on", f"{wrong}, and so on", strip, count=len(odd))


def check_keys(patient: Patient) -> Iterator[Finding]:
    """Check that config.json states the shape, and as many layers as there are tensors of."""
    flat = patient.flat
    stated = flat.get("draft_vocab_size")
    right = stated or patient.head_rows
    if patient.bad_keys:
        got = ", ".join(f"{key}: {flat.get(key)!r}" for key in patient.bad_keys)
        yield catalogue.CONFIG_KEYS.found(CONFIG, "positive whole numbers", got)
    elif stated is None or "draft_vocab_size" not in patient.raw:
        got = "nothing" if stated is None else "truncated_vocab_size"
        yield catalogue.DRAFT_VOCAB_SIZE.found(CONFIG, f"{right}", got, put("draft_vocab_size", right))
    stated, counted = flat.get("num_hidden_layers", 1), patient.num_layers
    if stated != counted:
        is_cut = type(stated) is int and stated > counted  # or the config is of another head
        fix = None if is_cut else put("num_hidden_layers", counted, in_layer=True)
        yield catalogue.LAYERS.found(f"{CONFIG}: num_hidden_layers", str(counted), repr(stated), fix)


def check_identity(patient: Patient) -> Iterator[Finding]:
    """Check the keys by which engines choose the code that reads the head."""
    flat, own = patient.flat, patient.family.architectures[patient.dialect]
    stated = flat.get("architectures")
    if not isinstance(stated, list) or not patient.family.known.intersection(map(str, stated)):
        check = catalogue.ARCHITECTURE_UNKNOWN if stated else catalogue.ARCHITECTURE_MISSING
        yield check.found(f"{CONFIG}: architectures", own, repr(stated), put("architectures", [own]))
    if not flat.get("model_type"):
        place = "transformer_layer_config" if patient.dialect == "speculators" else CONFIG
        yield catalogue.MODEL_TYPE.found(place, "llama", "nothing", put("model_type", "llama", in_layer=True))
    layer = patient.raw.get("transformer_layer_config") or {}
    if flat.get("tie_word_embeddings") is True or layer.get("tie_word_embeddings") is True:
        fix = put("tie_word_embeddings", False, everywhere=True)
        yield catalogue.TIED.found(CONFIG, "false", "true", fix)


def check_tensors(patient: Patient) -> Iterator[Finding]:
    """Check that the tensors are those of the shape and flags that config.json states."""
    if patient.config is None:
        return
    config, names = patient.config, patient.names
    implied = {
        flag: any(re.fullmatch(pattern, n.removeprefix("model.")) for n in names)
        for flag, pattern in _FLAG_TENSORS.items()
    }
    unstated = [flag for flag, has_tensors in implied.items() if has_tensors and not getattr(config, flag)]
    for flag in unstated:
        where, got = f"{CONFIG}: {flag}", repr(patient.flat.get(flag))
        yield catalogue.NORM_FLAG.found(where, "true", got, put(flag, True), flag=flag)
    config = replace(config, **dict.fromkeys(unstated, True))
    used = {patient.rename(name) for name in (D2T, T2D)}
    for spec in (*specs(draft_spec(config)), *patient.family.more(config)):
        stored, expected = patient.rename(spec.name), f"{list(spec.stored_shape)}"
        used.add(stored)
        if stored not in names:
            asked = [flag for flag, pattern in _FLAG_TENSORS.items() if re.fullmatch(pattern, spec.name)]
            got = f"nothing, though {asked[0]} is true" if asked else "nothing"
            yield catalogue.MISSING_TENSOR.found(SINGLE_FILE, expected, got, name=stored)
        elif (shape := patient.tensors.shape(stored)) != spec.stored_shape:
            yield catalogue.SHAPE.found(patient.where(spec.name), expected, f"{list(shape)}", name=stored)
    for name in sorted(names - used):
        if not _BUFFERS.fullmatch(name):
            where, got = patient.tensors.file(name).name, f"{list(patient.tensors.shape(name))}"
            yield catalogue.UNKNOWN_TENSOR.found(where, "nothing", got, name=name)


def check_dtypes(patient: Patient) -> Iterator[Finding]:
    """Check that the weights are floats, all of the dtype that config.json states."""
    dtypes = {name: patient.tensors.dtype(name).name for name in sorted(patient.weights)}
    odd = [f"{name} {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]
    if odd:
        yield catalogue.WEIGHT_DTYPE.found(SINGLE_FILE, " or ".join(FLOATS), listed(odd, 3))
        return
    found = sorted(set(dtypes.values()))
    if len(found) > 1:
        yield catalogue.MIXED_DTYPES.found(SINGLE_FILE, "one", ", ".join(found))
    stated = str(patient.flat.get("torch_dtype") or patient.flat.get("dtype") or "").removeprefix("torch.")
    key, other = ("dtype", "torch_dtype") if patient.dialect == "speculators" else ("torch_dtype", "dtype")

    def set_dtype(mended: Copy) -> None:
        for place in (mended.raw, mended.layer):
            place.pop(other, None)
            place[key] = found[0]

    if stated not in found and len(found) == 1:
        yield catalogue.DTYPE.found(f"{CONFIG}: {key}", found[0], stated or "nothing", set_dtype)


def check_values(patient: Patient) -> Iterator[Finding]:
    """Check that the numbers can be weights."""
    yield from values.check_values(patient.tensors, patient.weights)


def check_layer(patient: Patient) -> Iterator[Finding]:
    """Check that the layer's activation is the one that engines compute, and that its norms have the target's
    epsilon."""
    act, eps = patient.flat.get("hidden_act"), patient.flat.get("rms_norm_eps", 1e-6)
    if act not in (None, dialects.ACTIVATION):
        yield catalogue.HIDDEN_ACT.found(f"{CONFIG}: hidden_act", dialects.ACTIVATION, repr(act))
    where = f"{CONFIG}: rms_norm_eps"
    if not is_eps(eps):
        yield catalogue.EPS.found(where, "a number above 0 and far below 1, such as 1e-06", repr(eps))
    elif patient.target is not None and eps != patient.target.config.norm_eps:
        yield catalogue.EPS_DIFFERS.found(where, f"{patient.target.config.norm_eps:g}, the target's", f"{eps:g}")
