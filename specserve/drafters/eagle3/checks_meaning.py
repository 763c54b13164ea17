"""Whether a head means what its files say, and fits its target: vocabulary, special tokens, taps, rotary settings."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import listed
from specserve.drafters.eagle3 import dialects
from specserve.drafters.eagle3.config import Eagle3Config, default_taps
from specserve.drafters.eagle3.dialects import D2T, T2D, Vocabulary
from specserve.drafters.eagle3.patient import Patient, read_rope
from specserve.drafters.findings import CONFIG, Copy, Finding, describe
from specserve.models.rope import Rope, plain_rope
from specserve.tokenizer import Tokenizer


def check_speculators(patient: Patient) -> Iterator[Finding]:
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


def check_fit(patient: Patient) -> Iterator[Finding]:
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


def check_vocabulary(patient: Patient) -> Iterator[Finding]:
    config, vocab = patient.config, patient.vocab
    if config is None or vocab is None:
        return
    d2t, rows, where = patient.table(D2T), config.draft_vocab_size, patient.where(D2T)
    if vocab.target_ids is None:
        yield Finding(
            "vocabulary",
            "error",
            "d2t is missing" if d2t is None else "d2t does not say what the draft's rows stand for",
            where,
            f"{rows:,} offsets (target id = i + d2t[i]) to unique ids below {config.vocab_size:,}",
            "nothing" if d2t is None else describe(d2t),
            "proposals are other tokens than the head means: nothing is accepted",
            "take d2t from the checkpoint that the head was trained with",
        )
        return
    tables = dialects.vocab_to_tensors(np.sort(vocab.target_ids), config.vocab_size)
    yield from _check_d2t(patient, vocab, vocab.target_ids, tables[D2T])
    yield from _check_t2d(patient, config, vocab, tables[T2D])
    yield from _check_special_tokens(patient, vocab.target_ids)


def _check_d2t(patient: Patient, vocab: Vocabulary, target_ids: np.ndarray, right: np.ndarray) -> Iterator[Finding]:
    """Against the table that it should be."""
    d2t, where = patient.table(D2T), patient.where(D2T)

    def set_d2t(mended: Copy) -> None:
        mended.tensors[D2T] = right

    def sort_rows(mended: Copy) -> None:
        set_d2t(mended)
        mended.tensors["lm_head.weight"] = mended.tensors["lm_head.weight"][np.argsort(target_ids)]

    offsets = f"offsets (target id = i + d2t[i]), {describe(right)}"
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
            describe(d2t),
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
            f"{int((np.diff(target_ids) < 0).sum()):,} steps down",
            "code that pairs the rows with nonzero(t2d), trainers above all, takes them for other tokens",
            "sort d2t, and the rows of lm_head.weight with it",
            sort_rows if patient.head_rows == len(target_ids) else None,
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


def _check_t2d(patient: Patient, config: Eagle3Config, vocab: Vocabulary, right: np.ndarray) -> Iterator[Finding]:
    """Against the mask that it should be."""
    t2d, d2t, rows = patient.table(T2D), patient.table(D2T), config.draft_vocab_size

    def set_t2d(mended: Copy) -> None:
        mended.tensors[T2D] = right

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
            describe(t2d) + (", and a d2t of zeros, as if it was never filled" if is_blank else ""),
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


def _check_special_tokens(patient: Patient, target_ids: np.ndarray) -> Iterator[Finding]:
    drafted = {int(i) for i in target_ids}
    stated = patient.flat.get("eos_token_id")
    own = [i for i in (stated if isinstance(stated, list) else [stated]) if type(i) is int]
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


def check_taps(patient: Patient) -> Iterator[Finding]:
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
    default = list(default_taps(target.config))
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


def check_rope(patient: Patient) -> Iterator[Finding]:
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


def _write_rope(config: Eagle3Config, rope: Rope) -> Callable[[Copy], None]:
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


def check_positions(patient: Patient) -> Iterator[Finding]:
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
        if rope is not None and read_rope(mended.layer) != rope and patient.config:
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
