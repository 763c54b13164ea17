"""Checks of a head's meaning and of its fit to the target: vocabulary, special tokens, taps, rotary settings."""

from collections.abc import Callable, Iterator

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, listed
from specserve.drafters.eagle3.config import Eagle3Config, default_taps
from specserve.interop.eagle3 import dialects
from specserve.interop.eagle3.catalogue import CHECKS
from specserve.interop.eagle3.head_files import EagleFiles, read_rope
from specserve.interop.findings import Copy, Finding, describe
from specserve.interop.published import D2T, EMBEDDING, T2D, Vocabulary, rope_keys, vocab_to_tensors
from specserve.models.rope import Rope, plain_rope
from specserve.tokenizer import Tokenizer


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

    def set_d2t(repaired: Copy) -> None:
        repaired.tensors[D2T] = right

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

    def set_t2d(repaired: Copy) -> None:
        repaired.tensors[T2D] = right

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
    if not ropes:
        fix = _write_rope(required) if required else None
        yield CHECKS["rope-missing"].found(where, both, "nothing", fix)
        return
    if len(set(readable)) != 1 or len(readable) < len(ropes):
        fix = _write_rope(required) if required and required in readable else None
        yield CHECKS["rope-spellings"].found(where, both, stated, fix)
        return
    rope = readable[0]
    if len(ropes) == 1 and rope != Rope():
        fix = _write_rope(rope)
        yield CHECKS["rope-one-spelling"].found(where, "both spellings, alike", stated, fix)
    if required and rope != required:
        yield CHECKS["rope-differs"].found(where, _describe_rope(required), _describe_rope(rope))


def _write_rope(rope: Rope) -> Callable[[Copy], None]:
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
