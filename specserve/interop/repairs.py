"""Changes of a head's files that undo slips, as far as they are the same for the `repairs` of all kinds."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import read_json
from specserve.interop.findings import Copy, Fix, Renamer, Repair
from specserve.interop.keys import FULL, OLD_ROPE, ROPE, ROTARY, SLIDING, Stated, find, inner, is_count
from specserve.interop.published import rope_keys
from specserve.models.config import ModelConfig
from specserve.models.rope import Rope, plain_rope

MOST_ORDERED = 4  # taps of which every order is tried
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "mask_token_id")


def change(rename: Renamer, how: Callable[[np.ndarray], np.ndarray], *names: str) -> Fix:
    """Change tensors, given by our own names."""

    def fix(repaired: Copy) -> None:
        for stored in map(rename(frozenset(repaired.tensors)), names):
            repaired.tensors[stored] = np.ascontiguousarray(how(repaired.tensors[stored]))

    return fix


def put_everywhere(*nested: str, at_top: Iterable[str] = ()) -> Callable[..., Fix]:
    """Return a function that makes a fix which writes keys wherever they stand, be it at the top or in the objects of
    these names. A key that stands nowhere yet is written beside the layers' settings, those of `at_top` at the top."""

    def put(**values: object) -> Fix:
        def fix(repaired: Copy) -> None:
            places = [place for place in map(repaired.raw.get, nested) if isinstance(place, dict)]
            for key, value in values.items():
                there = [place for place in (*places, repaired.raw) if key in place]
                if key in at_top:
                    there.append(repaired.raw)
                for place in there or [repaired.layer]:
                    place[key] = value

        return fix

    return put


def exchange(rename: Renamer, one: str, other: str) -> Fix:
    """Put two tensors in each other's place."""

    def fix(repaired: Copy) -> None:
        first, second = map(rename(frozenset(repaired.tensors)), (one, other))
        repaired.tensors[first], repaired.tensors[second] = repaired.tensors[second], repaired.tensors[first]

    return fix


def exchanged(rename: Renamer, names: Iterable[str], label: Callable[[str], str] = str) -> Iterator[Repair]:
    """List repairs that put two of these tensors in each other's place, for every two of them."""
    for one, other in itertools.combinations(names, 2):
        yield Repair(f"{label(one)} and {label(other)} stand in each other's place", exchange(rename, one, other))


def short_name(name: str) -> str:
    """Return the part of a tensor's name that says what it is, such as `gate_proj`."""
    return name.split(".")[-2]


def write_rope(rope: Rope, head_dim: int = 0) -> Fix:
    """Write rotary settings in both spellings where the layers' settings stand, and nowhere else. The width of a head
    is needed where only a part of it turns."""

    def forget(part: dict[str, Any]) -> None:
        for key in (ROPE, OLD_ROPE, *ROTARY):
            part.pop(key, None)
        for value in part.values():
            if isinstance(value, dict):
                forget(value)

    def fix(repaired: Copy) -> None:
        forget(repaired.raw)
        repaired.layer.update(rope_keys(rope, head_dim))

    return fix


def write_length(length: int, rest: Fix | None) -> Fix:
    """Write the number of positions. What follows from it, and is to stay as it is, is what `rest` writes."""

    def fix(repaired: Copy) -> None:
        repaired.layer["max_position_embeddings"] = length
        if repaired.layer is not repaired.raw:
            repaired.raw.pop("max_position_embeddings", None)
        if rest is not None:
            rest(repaired)

    return fix


def tap_orders(rename: Renamer, named: Sequence[str], norms: Sequence[str] = ()) -> Iterator[Repair]:
    """List repairs that put the inputs of `fc.weight`, [out, taps * target_d_model], into another order of taps, which
    are named; alone, and together with the norms of the taps. Of more than four taps only the reverse is tried."""
    taps = range(len(named))
    for order in [*itertools.permutations(taps)][1:] if len(taps) <= MOST_ORDERED else [(*reversed(taps),)]:
        how = f"take%s the taps in the order {', '.join(named[i] for i in order)}"

        def reorder(weight: np.ndarray, order: Sequence[int] = order) -> np.ndarray:
            return weight.reshape(len(weight), len(order), -1)[:, list(order)].reshape(weight.shape)

        blocks = change(rename, reorder, "fc.weight")
        yield Repair(f"fc.weight {how % 's'}", blocks)
        if norms:

            def with_norms(repaired: Copy, order: Sequence[int] = order, blocks: Fix = blocks) -> None:
                blocks(repaired)
                stored = [*map(rename(frozenset(repaired.tensors)), norms)]
                values = [repaired.tensors[stored[i]] for i in order]
                repaired.tensors.update(zip(stored, values, strict=True))

            yield Repair(f"fc.weight and its norms {how % ''}", with_norms)


def of_products(rename: Renamer, layer: str, names: frozenset[str], *, is_square: bool) -> Iterator[Repair]:
    """List repairs of a layer's matrices whose shape leaves open which way they are meant, of those that are there."""
    stored, output = rename(names), f"{layer}.self_attn.o_proj.weight"
    if is_square and stored(output) in names:
        yield Repair("the first o_proj is stored transposed", change(rename, np.transpose, output))
    gates = [f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up")]
    if {*map(stored, gates)} <= names:
        yield from exchanged(rename, gates, short_name)


def tap_layers(
    taps: tuple[int, ...], usual: tuple[int, ...], num_layers: int, write: Callable[[tuple[int, ...]], Fix]
) -> Iterator[Repair]:
    """List repairs with other layers as taps, as far as the target has them: all of them one layer off, as the other
    way of counting has them, and the usual ones, if there are any."""
    for layers in dict.fromkeys((*(tuple(i + by for i in taps) for by in (1, -1)), usual or taps)):
        if layers != taps and all(0 <= i < num_layers for i in layers):
            yield Repair(f"the taps are the outputs of layers {list(layers)}", write(layers))


def set_taps(put: Callable[..., Fix], counted: Mapping[str, int], layers: Sequence[int], unstated: Fix) -> Fix:
    """Write the taps under each of these keys that is stated, as it counts; `unstated` writes them where none is."""

    def fix(repaired: Copy) -> None:
        stated = [key for key in counted if any(find(repaired.raw, (key,)))]
        for each in [put(**{key: [i + counted[key] for i in layers]}) for key in stated] or [unstated]:
            each(repaired)

    return fix


def of_windows(windows: Sequence[int], stated: Stated, *nested: str) -> Iterator[Repair]:
    """List repairs of how far back the layers see, which is stated at the top or in the objects of these names."""

    def set_window(window: int) -> Fix:
        kinds = [SLIDING if window else FULL] * len(windows)
        keys = {"use_sliding_window": window > 0, "sliding_window": window or None, "layer_types": kinds}

        def fix(repaired: Copy) -> None:
            places = [place for place in (repaired.raw, *map(repaired.raw.get, nested)) if isinstance(place, dict)]
            for place, key in itertools.product(places, (*keys, "use_swa", "swa_window_size")):
                place.pop(key, None)
            repaired.layer.update(keys)

        return fix

    window = stated.get("sliding_window")
    if any(windows):
        yield Repair("its layers see all that is committed", set_window(0))
        for window in (max(windows) - 1, max(windows) + 1):
            yield Repair(f"its windows are of {window} tokens", set_window(window))
    elif is_count(window):
        yield Repair(f"its layers have windows of {window} tokens", set_window(window))


def of_target(norm_eps: float, rope: Rope, target: ModelConfig, write: Callable[..., Fix]) -> Iterator[Repair]:
    """List repairs that take the epsilon and the rotary settings of the target, where a head has others."""
    if norm_eps != target.norm_eps:
        yield Repair("rms_norm_eps is the target's", write(rms_norm_eps=target.norm_eps))
    if rope != (own := plain_rope(target.rope)):
        yield Repair("the rotary settings are the target's", write(**rope_keys(own, target.head_dim)))


def masks(target: Target, stated: int) -> list[int]:
    """Tokens that a head's masked slots may hold instead of the one that is stated: the last of the vocabulary, those
    that the tokenizer calls a mask, and the target's special ones."""
    found = [target.config.vocab_size - 1]
    for name in ("tokenizer_config.json", "config.json"):
        path = target.folder / name
        raw: Mapping[str, Any] = read_json(path) if path.is_file() else {}
        added = inner(raw, "added_tokens_decoder")
        found += [int(i) for i, token in added.items() if "mask" in str(token.get("content", "")).lower()]
        special = [raw.get(key) for key in _SPECIAL]
        found += [i for each in special for i in (each if isinstance(each, list) else [each]) if type(i) is int]
    found.append(0)
    return [i for i in dict.fromkeys(found) if 0 <= i < target.config.vocab_size and i != stated]
