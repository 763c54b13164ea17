"""What the tool that runs the published DFlash packages and the test that does not have in common: the heads, their
input, our logits."""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from specserve.checkpoints.load import Target
from specserve.drafters.dflash import joint
from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.drafter import DFlash, run_block
from specserve.drafters.dflash.model import DFlashParams, block_logits, context_kv, head_spec
from specserve.drafters.dflash.start import NAMES
from specserve.drafters.interface import Head
from specserve.kernels.rowwise import rms_norm
from specserve.models.config import LayerKind
from specserve.models.params import init_params
from specserve.models.target import TargetParams
from specserve.speculative.drafter import DraftWeights, Sizes, SlotView
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.vocab import DraftVocab

WIDTH, LENGTH, BLOCK = 16, 24, 4
TARGET = tiny.TARGET | {"hidden_size": WIDTH, "intermediate_size": 24, "architectures": ["Qwen3ForCausalLM"]}
PREVIOUS = (3, 61)  # tokens after which slots are asked
OUTPUTS = ("logits", "scores", "confidences")
NOTHING = -1e4  # in the place of -inf
ANCHORS = (0, 5, 17)  # of a row; the first sees nothing but its block
PAGE_SIZE = 4
PAGES = -(-LENGTH // PAGE_SIZE)
PLAIN: dict[str, Any] = {"num_layers": 2, "aux_layers": (0, 2, 4), "block_size": BLOCK, "d_ff": 24, "mask_token": 61}
WINDOWS: dict[str, Any] = {"window": 6}
SCALES: dict[str, Any] = {"embedding_scale": 1.5, "output_scale": 0.5, "logit_softcap": 3.0}
MARKOV: dict[str, Any] = {"markov_rank": 4, "confidence": "state and token", "has_confidence_bias": True}
SELECTOR: dict[str, Any] = {"conv_taps": 2, "conv_group": 4, "selector_rank": 4, "selector_top_k": 5}
# heads that we write, by the settings they are made of and by what is changed of their config afterwards
Z_LAB: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({"causal": "all"}, {}),
    "windows": (WINDOWS, {}),
    "mixed": (WINDOWS, {"mixed": True}),
    "scaled": ({}, SCALES),
    "dflash2": (WINDOWS, SELECTOR),
}
SPECULATORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "mixed": ({"window": LENGTH}, {"mixed": True}),  # see the tool for windows that are shorter
    "part": ({"vocab_size": 48}, {}),
    "dspark": ({"vocab_size": 48}, MARKOV | {"foresees_anchor": True}),
    "dspark-later": ({}, MARKOV | {"confidence": "state"}),
    "dspark-gated": ({}, MARKOV | {"foresees_anchor": True, "markov_type": "gated"}),
    "dspark-rnn": ({}, MARKOV | {"foresees_anchor": True, "markov_type": "rnn"}),
    "dflash2": ({}, SELECTOR),
}

GEMMA: tuple[dict[str, Any], dict[str, Any]] = (  # DeepSpec's of Gemma 4's layers
    {},
    {
        "has_embedding": True,
        "has_own_head": True,
        "embedding_scale": WIDTH**0.5,
        "foresees_anchor": True,
        **MARKOV,
        "backbone": {
            **{name: value for name, value in tiny.GEMMA.items() if name not in ("has_embedding", "embedding_scale")},
            "names": dataclasses.replace(NAMES, mlp_norm="pre_feedforward_layernorm"),
            "layers": (LayerKind(values_are_keys=True),) * 2,
        },
    },
)


@dataclass(frozen=True)
class Case:
    """A row, what a target would have said about it, and the tables that its head shares."""

    token_ids: np.ndarray  # [LENGTH] int32
    aux_hidden_states: np.ndarray  # [LENGTH, taps * WIDTH] float32
    embedding: np.ndarray  # [vocab, WIDTH]
    head: np.ndarray  # [vocab, WIDTH]

    @classmethod
    def random(cls, seed: int) -> "Case":
        rng, vocab_size = np.random.default_rng(seed), TARGET["vocab_size"]

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        token_ids = rng.integers(0, vocab_size, LENGTH).astype(np.int32)
        return cls(token_ids, normal(LENGTH, 3 * WIDTH), normal(vocab_size, WIDTH), 0.5 * normal(vocab_size, WIDTH))

    @classmethod
    def load(cls, path: Path) -> tuple["Case", list[np.ndarray]]:  # and what `our_logits` should be
        with np.load(path) as arrays:
            names = [field.name for field in dataclasses.fields(cls)]
            return cls(*(arrays[name] for name in names)), [arrays[name] for name in OUTPUTS if name in arrays]

    def save(self, path: Path, outputs: list[np.ndarray]) -> None:
        named = {name: array.astype(np.float32) for name, array in zip(OUTPUTS, outputs, strict=False)}
        np.savez_compressed(path, **named, **vars(self))

    @property
    def target(self) -> TargetParams:
        """The part of a target that heads share."""
        return TargetParams(jnp.asarray(self.embedding), (), jnp.ones(WIDTH), jnp.asarray(self.head.T))


def random_head(target: Target, changes: tuple[dict[str, Any], dict[str, Any]]) -> Head:
    settings, config_changes = changes
    head = tiny.random_block_head(target.config, seed=1, **{"vocab_size": TARGET["vocab_size"], **PLAIN, **settings})
    assert isinstance(head.drafter, DFlash)
    config, backbone = head.drafter.config, head.drafter.config.backbone
    more = dict(config_changes)
    if more.pop("mixed", False):  # the first layer sees all, and both ways
        first = dataclasses.replace(backbone.layers[0], window=0)
        backbone = dataclasses.replace(backbone, layers=(first, *backbone.layers[1:]))
        more["is_causal"] = (False, *config.is_causal[1:])
    backbone = dataclasses.replace(backbone, logit_softcap=more.pop("logit_softcap", 0.0))
    backbone = dataclasses.replace(backbone, **more.pop("backbone", {}))
    config = dataclasses.replace(config, backbone=backbone, **more)
    rng = np.random.default_rng(7)  # every part is to matter, norms too

    def stir(x: jax.Array) -> jax.Array:
        return jnp.asarray(x + 0.15 * rng.standard_normal(x.shape), x.dtype)

    params = init_params(head_spec(config), jax.random.key(1), "float32")
    return Head(DFlash(config), jax.tree.map(stir, params), head.target_ids)


def our_logits(head: Head, case: Case) -> list[np.ndarray]:
    """By what serving runs: keys and values of the committed tokens in pages, ragged in a batch, then one block. Logits
    [anchor, slot, draft_vocab], and of heads that make slots depend on each other what `_joint` gives."""
    assert isinstance(head.drafter, DFlash)
    found = _logits(head.params, head.weights().vocab.target_ids, head.drafter, case.target, *_arrays(case))
    return [np.where(np.isfinite(x), x, NOTHING) for x in jax.device_get(jax.tree.leaves(found))]


def _arrays(case: Case) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(case.token_ids), jnp.asarray(case.aux_hidden_states)


@functools.partial(jax.jit, static_argnums=2)
def _logits(
    params: DFlashParams,
    target_ids: jax.Array,
    drafter: DFlash,
    target: TargetParams,
    token_ids: jax.Array,
    aux_hidden_states: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    config, batch = drafter.config, len(ANCHORS)
    anchors = jnp.asarray(ANCHORS, jnp.int32)
    table = jnp.arange(batch * PAGES, dtype=jnp.int32).reshape(batch, PAGES)
    pages = drafter.init_state(config.backbone, Sizes(batch, batch * PAGES, PAGE_SIZE, PAGES, BLOCK))
    index = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (batch, LENGTH))
    taps = jnp.broadcast_to(aux_hidden_states, (batch, *aux_hidden_states.shape))
    entries = context_kv(params, config, taps, index)
    pages = pages.write(entries, table, index, index < anchors[:, None])
    view = SlotView(
        slots=jnp.arange(batch, dtype=jnp.int32),
        page_table=table,
        read_table=table,
        seq_lens=anchors,
        root_ids=token_ids[anchors],
        history=jnp.broadcast_to(token_ids, (batch, LENGTH)),
        rows=SamplerRows.greedy(batch),
    )
    draft = DraftWeights(params, DraftVocab(target_ids))
    states = run_block(draft, target, config, pages, view, config.num_slots)
    logits = block_logits(params.output, config, target, states)
    return logits, _joint(params, config, logits, rms_norm(states, params.norm, config.backbone.norm_eps))


def _joint(
    params: DFlashParams, config: DFlashConfig, logits: jax.Array, states: jax.Array
) -> tuple[jax.Array, ...]:  # scores [anchor, slot, PREVIOUS, draft_vocab], and confidences [anchor, slot, PREVIOUS]
    """What the heads that make slots depend on each other say of every slot after a few tokens."""
    previous = jnp.broadcast_to(jnp.asarray(PREVIOUS, jnp.int32), (len(ANCHORS), len(PREVIOUS)))
    slots = [(logits[:, k : k + 1], states[:, k : k + 1]) for k in range(config.num_slots)]
    if params.selector is not None:
        heads = params.selector
        return (jnp.stack([selected(heads, config, *slot, previous) for slot in slots], axis=1),)
    if params.markov is None:
        return ()
    heads = params.markov
    scores = jnp.stack([biased(heads, config, *slot, previous) for slot in slots], axis=1)
    if heads.confidence is None:
        return (scores,)
    given = heads.previous[previous]
    every = [jnp.broadcast_to(state, (*given.shape[:2], state.shape[-1])) for _, state in slots]
    return scores, jnp.stack([joint.confidences(heads.confidence, config, state, given) for state in every], axis=1)


def biased(
    heads: joint.Markov, config: DFlashConfig, logits: jax.Array, state: jax.Array, previous: jax.Array
) -> jax.Array:  # [batch, k, draft_vocab]
    """The logits of a slot after each of k tokens [batch, k] with which a path begins."""
    given = heads.previous[previous]
    each = jnp.broadcast_to(state, (*given.shape[:2], state.shape[-1]))
    width = joint.memory_width(config)
    features = joint.read_token(heads, jnp.zeros((*given.shape[:2], width)) if width else None, given, each)[1]
    return joint.corrected(heads.bias, None, logits, features, each)


def config_of(head: Head) -> DFlashConfig:
    assert isinstance(head.drafter, DFlash)
    return head.drafter.config


def assert_same(head: Head, other: Head) -> None:
    assert head.drafter == other.drafter
    np.testing.assert_array_equal(head.target_ids, other.target_ids)
    for leaf, read in zip(jax.tree.leaves(head.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(leaf, read)


def selected(
    heads: joint.Selector, config: DFlashConfig, logits: jax.Array, states: jax.Array, previous: jax.Array
) -> jax.Array:  # [batch, k, vocab] float32, -inf but for the candidates
    """`joint.selected` over the whole vocabulary."""
    scores, candidates = joint.selected(heads, config, logits, states, previous, 1)
    assert candidates.shape[-1] == config.selector_top_k
    batch, k = previous.shape
    rows = jnp.arange(batch)[:, None, None], jnp.arange(k)[:, None]
    return jnp.full((batch, k, logits.shape[-1]), -jnp.inf, jnp.float32).at[*rows, candidates[:, None]].set(scores)
