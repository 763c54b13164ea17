"""What can be seen of a head's files without knowing what they mean: keys, names, shapes, dtypes, values."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specserve.checkpoints.tensors import SINGLE_FILE, listed
from specserve.drafters.eagle3 import dialects
from specserve.drafters.eagle3.dialects import D2T, T2D
from specserve.drafters.eagle3.model import draft_spec
from specserve.drafters.eagle3.patient import Patient
from specserve.drafters.findings import CONFIG, FLOATS, Copy, Finding, put
from specserve.models.params import specs

KNOWN_ARCHITECTURES = frozenset(
    (*dialects.ARCHITECTURES.values(), "Eagle3LlamaForCausalLM", "Eagle3Speculator")  # the last of old speculators
)
_FLAG_TENSORS = {"fc_norm": r"fc_norm\.\d+\.weight", "norm_before_fc": r"input_norm\.weight"}
_BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def check_names(patient: Patient) -> Iterator[Finding]:
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


def check_keys(patient: Patient) -> Iterator[Finding]:
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
            put("draft_vocab_size", stated or rows),
        )
    stated = flat.get("num_hidden_layers", 1)
    if stated != patient.num_layers:
        is_cut = type(stated) is int and stated > patient.num_layers  # or the config is of another head
        yield Finding(
            "layers",
            "error",
            "another number of layers is stated than there are tensors of",
            f"{CONFIG}: num_hidden_layers",
            str(patient.num_layers),
            repr(stated),
            "engines leave layers out, or run some whose weights are whatever is in memory there",
            "find out which is wrong: tensors may be lost" if is_cut else "write the number that the tensors are of",
            None if is_cut else put("num_hidden_layers", patient.num_layers, in_layer=True),
        )


def check_identity(patient: Patient) -> Iterator[Finding]:
    """What engines pick the code by that is to read the head."""
    flat, own = patient.flat, dialects.ARCHITECTURES[patient.dialect]
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
            put("architectures", [own]),
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
            put("model_type", "llama", in_layer=True),
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
            put("tie_word_embeddings", False, everywhere=True),
        )


def check_tensors(patient: Patient) -> Iterator[Finding]:
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
            put(flag, True),
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


def check_dtypes(patient: Patient) -> Iterator[Finding]:
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
    key, other = ("dtype", "torch_dtype") if patient.dialect == "speculators" else ("torch_dtype", "dtype")

    def set_dtype(mended: Copy) -> None:
        for place in (mended.raw, mended.layer):
            place.pop(other, None)
            place[key] = found[0]

    if stated not in found and len(found) == 1:
        yield Finding(
            "dtype",
            "warning",
            "the dtype is not stated" if not stated else "another dtype is stated than the weights have",
            f"{CONFIG}: {key}",
            found[0],
            stated or "nothing",
            "engines then load the head in float32 or in the target's dtype",
            "state that of the weights",
            set_dtype,
        )


def check_values(patient: Patient) -> Iterator[Finding]:
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
