"""Checks of a head's files that need not know what the files mean: keys, names, shapes, dtypes, values."""

import re
from collections.abc import Iterator
from dataclasses import replace

from specserve.checkpoints.tensors import CONFIG, SINGLE_FILE, listed
from specserve.drafters.eagle3.model import draft_spec
from specserve.interop.eagle3.catalogue import CHECKS
from specserve.interop.eagle3.head_files import EagleFiles
from specserve.interop.examined import check_specs
from specserve.interop.findings import FLOATS, Copy, Finding, put
from specserve.interop.published import ACTIVATION, D2T, architectures, is_eps
from specserve.models.params import ParamSpec, specs

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
    flat, own = files.flat, files.family.architectures[files.dialect]
    stated = flat.get("architectures")
    if not files.family.known & architectures(flat):
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
    required = (*specs(draft_spec(config)), *files.family.more(config))
    yield from check_specs(files, required, checks, _BUFFERS.fullmatch, instead)


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
