"""The layer of multi-token prediction: its forward against plain NumPy, training against serving, its laws when it is
served, and its files in the names of every family."""

import dataclasses
from pathlib import Path
from typing import Any

import bailing
import carried
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rounding import assert_same, tolerance
from tiny_run import metrics, tiny_trainer

from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.tensors import TensorFolder, write_json, write_tensors
from specserve.drafters.interface import Head
from specserve.drafters.learning import Rollout, Rows
from specserve.drafters.mtp.config import MtpConfig
from specserve.drafters.mtp.drafter import Mtp, at_root, ready
from specserve.drafters.mtp.model import MtpParams, draft_logits, inputs, run, taken
from specserve.drafters.mtp.rollout import rollout_states
from specserve.drafters.registry import DraftSettings, load_kind
from specserve.errors import ConfigError
from specserve.interop.head import load_head
from specserve.models.params import silenced, specs
from specserve.models.target import TargetParams, forward
from specserve.speculative import slot_state, step
from specserve.speculative.drafter import Weights
from specserve.speculative.slot_state import StepConfig
from specserve.train.chunked_loss import Sums
from specserve.train.step import LossConfig, rollout_loss, teach

ROLLOUT = 3
VOCAB = 64


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Head]:
    return carried.models(tmp_path_factory.mktemp("dense"), carried.SMALL)


def _mtp(head: Head) -> Mtp:
    assert isinstance(head.drafter, Mtp)
    return head.drafter


def _by_numpy(folder: Path, token_ids: list[int], hidden: np.ndarray) -> np.ndarray:  # [n, d] -> [n - 1, vocab]
    """DeepSeek-V3's formula (arXiv 2412.19437, section 2.2) around a Qwen3 layer, by the names in the file: the logits
    that position t has of the token after t + 1."""
    tensors = TensorFolder(folder)
    read = {name: tensors.read(name).astype(np.float64) for name in tensors.names()}
    own = {name.removeprefix("model.layers.3."): read[name] for name in read if name.startswith("model.layers.3.")}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def turned(x: np.ndarray) -> np.ndarray:  # [n, head, 8]
        angles = np.arange(1, len(x) + 1)[:, None] / 10_000.0 ** (np.arange(4) / 4)
        cos, sin = (np.tile(part(angles), 2)[:, None] for part in (np.cos, np.sin))
        return x * cos + np.concatenate([-x[..., 4:], x[..., :4]], axis=-1) * sin

    token = read["model.embed_tokens.weight"][token_ids[1:]]
    both = np.concatenate([norm(token, own["enorm.weight"]), norm(hidden[:-1], own["hnorm.weight"])], axis=-1)
    x = both @ own["eh_proj.weight"].T
    normed = norm(x, own["input_layernorm.weight"])
    q, k, v = ((normed @ own[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, 8) for name in "qkv")
    q, k = turned(norm(q, own["self_attn.q_norm.weight"])), turned(norm(k, own["self_attn.k_norm.weight"]))
    scores = np.einsum("nhd,mhd->hnm", q, np.repeat(k, 2, axis=1)) / 8**0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hnm,mhd->nhd", weights, np.repeat(v, 2, axis=1))
    x = x + out.reshape(len(x), -1) @ own["self_attn.o_proj.weight"].T
    normed = norm(x, own["post_attention_layernorm.weight"])
    gate, up = (normed @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T
    return norm(x, own["shared_head.norm.weight"]) @ read["lm_head.weight"].T


def _by_transformers(folder: Path, config: MtpConfig, raw: dict[str, Any], text: list[int], hidden: np.ndarray) -> Any:
    """The same by transformers' torch model of one such layer, which is fed what DeepSeek's formula makes. [n - 1,
    vocab]"""
    import torch
    from transformers import AutoModelForCausalLM

    tensors, layout, layer_names = TensorFolder(folder), config.layout, config.layer.names
    read = {name: tensors.read(name) for name in tensors.names()}
    embedding, final = (getattr(layer_names, name) for name in ("embedding", "norm"))
    first = "backbone.layers" if raw["model_type"] == "nemotron_h" else "model.layers.0"  # the former: of two blocks
    names = {name: name.replace(layout.layer, first, 1) for name in read if name.startswith(f"{layout.layer}.")}
    own = {names[name]: read[name] for name in names} | {name: read[name] for name in (embedding, "lm_head.weight")}
    if first == "model.layers.0":
        own = {name.replace(layer_names.mlp_norm, "post_attention_layernorm"): own[name] for name in own}
    parts = (layout.token_norm, layout.hidden_norm, layout.fc, layout.norm)
    for part in parts:
        own.pop(f"{part}.weight".replace(layout.layer, first, 1), None)
    own[final] = read[f"{layout.norm}.weight"]
    alone = folder / "alone"
    alone.mkdir()
    write_tensors(alone / "model.safetensors", own)
    model_type = {"mimo": "qwen2"}.get(raw["model_type"], raw["model_type"])
    changes = {"model_type": model_type, "num_hidden_layers": 1, "first_k_dense_replace": 0, "torch_dtype": "float32"}
    attends = {"full_attention_interval": 1, "layer_types": ["full_attention"]}
    changes |= {  # transformers would not take these from the same config as we do
        **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), attends),
        "deepseek_v3": {"head_dim": raw.get("qk_rope_head_dim")},
        "glm4_moe": {"partial_rotary_factor": 0.5},
        "mimo_v2_flash": {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        "nemotron_h": {"hybrid_override_pattern": "*E"},
        "deepseek_v32": {"mlp_layer_types": ["sparse"]},
    }.get(model_type, {})
    write_json(alone / "config.json", {**raw, **changes, "num_nextn_predict_layers": 0, "architectures": None})
    model = AutoModelForCausalLM.from_pretrained(alone, dtype=torch.float32, attn_implementation="eager").eval()

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        weight = read[f"{name}.weight"].astype(np.float64) + config.layer.norm_offset
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.layer.norm_eps) * weight

    token = norm(read[embedding][text[1:]].astype(np.float64), layout.token_norm)
    state = norm(hidden[:-1].astype(np.float64), layout.hidden_norm)
    both = np.concatenate([state, token] if raw["model_type"] == "mimo" else [token, state], axis=-1)
    x = torch.tensor(both @ read[f"{layout.fc}.weight"].T.astype(np.float64), dtype=torch.float32)[None]
    with torch.no_grad():
        return model(inputs_embeds=x, position_ids=torch.arange(1, len(text))[None]).logits[0].numpy()


def _in_streams(folder: Path, config: MtpConfig, raw: dict[str, Any], text: list[int], taps: np.ndarray) -> Any:
    """The same of a layer that has its target's streams: transformers' torch model of one layer, whose input is what
    SGLang's code makes of them (deepseek_v4_nextn, qwen4_exp_mtp)."""
    import torch
    from transformers import AutoModelForCausalLM

    tensors, layout, is_v4 = TensorFolder(folder), config.layout, raw["model_type"] == "deepseek_v4"
    read = {name: tensors.read(name) for name in tensors.names()}
    own = {name: value for name, value in read.items() if "embed_tokens" in name or name.endswith("head.weight")}
    for name in [name for name in read if name.startswith(f"{layout.layer}.")]:
        own[name.replace(layout.layer, "model.layers.0", 1).replace("kv_norm", "norm")] = read[name]
    for name in [name for name in read if name.startswith(layout.mixture)]:
        own[name.replace("mtp.0.hc_head_", "model.hc_head.hc_").replace("mtp.", "model.")] = read[name]
    changes = {"layer_types": ["full_attention"]}
    if is_v4:
        own["model.norm.weight"] = read[f"{layout.norm}.weight"]
        changes = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    alone = folder / "alone"
    alone.mkdir()
    write_tensors(alone / "model.safetensors", own)
    write_json(alone / "config.json", raw | changes | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0})
    model = AutoModelForCausalLM.from_pretrained(alone, dtype=torch.float32, attn_implementation="eager").eval()

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        weight = read[f"{name}.weight"].astype(np.float64) + config.layer.norm_offset
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.layer.norm_eps) * weight

    token = norm(read["model.embed_tokens.weight"][text[1:]].astype(np.float64), layout.token_norm)
    states = taps[:-1].astype(np.float64)
    streams = states.reshape(len(states), -1, raw["hidden_size"])
    # DeepSeek norms each stream, Qwen all together
    hidden = norm(streams, layout.hidden_norm) if is_v4 else norm(states, layout.hidden_norm).reshape(streams.shape)
    of_token, of_hidden = (read[f"{name}.weight"].astype(np.float64) for name in (layout.token_fc, layout.fc))
    x = (token @ of_token.T)[:, None] + hidden @ of_hidden.T
    given = torch.tensor(x if is_v4 else x.reshape(len(x), -1), dtype=torch.float32)[None]
    model.model.layers[0].register_forward_pre_hook(
        lambda _layer, args, kwargs: ((given, *args[1:]), kwargs), with_kwargs=True
    )
    with torch.no_grad():
        positions = torch.arange(1, len(text))[None]
        return model(input_ids=torch.tensor(text[1:])[None], position_ids=positions).logits[0].numpy()


def _rows(text: list[int]) -> Rows:
    token_ids = jnp.asarray([text], jnp.int32)
    ones = jnp.ones_like(token_ids)
    return Rows(token_ids, ones > 0, ones, jnp.arange(len(text), dtype=jnp.int32)[None])


def _trained(target: Target, head: Head, rows: Rows) -> Any:
    """The program that gives the logits of every rollout step, [rollout] x [seq, vocab], the hidden states that the
    target's head takes, and those before the final norm."""
    config, n = _mtp(head).config, rows.token_ids.shape[1]

    @jax.jit
    def train(params: TargetParams, own: MtpParams) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        taps = head.drafter.aux_layers
        out = forward(params, target.config, rows.token_ids, rows.position_ids, tiny.causal(n), aux_layers=taps)
        assert out.aux_hidden_states is not None
        states = rollout_states(own, config, params, rows, out.aux_hidden_states, Rollout(ROLLOUT, True))
        logits = [draft_logits(own.output, config, params, state)[0] for state in states]
        return logits, out.hidden_states[0], out.aux_hidden_states[0]

    return train


def test_the_forward_equals_plain_numpy(dense: tuple[Target, Head], rng: np.random.Generator) -> None:
    target, head = dense
    text = rng.integers(0, VOCAB, 16).tolist()
    train = _trained(target, head, _rows(text))
    logits, hidden, _ = train(target.params, head.params)
    off = tolerance(lambda *params: train(*params)[0][0], target.params, head.params)
    expected = _by_numpy(target.folder, text, np.asarray(hidden, np.float64))
    assert np.abs(expected).max() > 1, "logits that say nothing prove nothing"
    assert_same(logits[0][:-1], expected, off[:-1])


@pytest.mark.parametrize("raw", [carried.LING, carried.LING_2_5], ids=["ling-2", "ling-2.5"])
def test_the_forward_equals_ling_in_numpy(tmp_path: Path, rng: np.random.Generator, raw: dict[str, Any]) -> None:
    """Of a family that transformers has not, experts and latents included."""
    target, head = carried.models(tmp_path, raw)
    text = rng.integers(0, VOCAB, 16).tolist()
    train = _trained(target, head, _rows(text))
    logits, hidden, _ = train(target.params, head.params)
    off = tolerance(lambda *params: train(*params)[0][0], target.params, head.params)
    tensors = TensorFolder(tmp_path)
    weights = {name: tensors.read(name) for name in tensors.names()}
    expected = bailing.predicted(raw, weights, np.array(text), np.asarray(hidden))
    assert np.abs(expected).max() > 1, "logits that say nothing prove nothing"
    assert_same(logits[0][:-1], expected, off[:-1])


@pytest.mark.oracle
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(carried.SMALL, id="qwen3"),
        pytest.param(carried.LATENT, id="deepseek_v3"),
        pytest.param(carried.GLM, id="glm4_moe"),
        pytest.param(carried.NEXT, id="qwen3_next"),
        pytest.param(carried.NEXT_DENSE, id="qwen3_5"),
        pytest.param(carried.NEXT_SPARSE, id="qwen3_5_moe"),
        pytest.param(carried.MIMO, id="mimo"),
        pytest.param(carried.MIMO_V2, id="mimo_v2_flash"),
        pytest.param(carried.INDEXED, id="deepseek_v32"),
        pytest.param(carried.NEMOTRON_H, id="nemotron_h"),
    ],
)
def test_the_forward_equals_transformers_layer(tmp_path: Path, rng: np.random.Generator, raw: dict[str, Any]) -> None:
    """Of every family that transformers has: it knows the layer itself, if not the rest."""
    target, head = carried.models(tmp_path, raw)
    text = rng.integers(0, VOCAB, 16).tolist()
    train, config = _trained(target, head, _rows(text)), _mtp(head).config
    logits, hidden, taps = train(target.params, head.params)
    off = tolerance(lambda *params: train(*params)[0][0], target.params, head.params)
    expected = _by_transformers(tmp_path, config, raw, text, np.asarray(taps if config.layout.takes_raw else hidden))
    assert np.abs(expected).max() > 1, "logits that say nothing prove nothing"
    assert_same(logits[0][:-1], expected, off[:-1])


@pytest.mark.oracle
@pytest.mark.parametrize("raw", [carried.COMPRESSED, carried.STREAMS], ids=lambda raw: raw["model_type"])
def test_the_forward_in_streams_equals_the_published_code(
    tmp_path: Path, rng: np.random.Generator, raw: dict[str, Any]
) -> None:
    target, head = carried.models(tmp_path, raw)
    n, config = 24, _mtp(head).config
    text = rng.integers(0, VOCAB, n).tolist()

    @jax.jit
    def draft(params: TargetParams, own: MtpParams) -> tuple[jax.Array, jax.Array]:
        rows = _rows(text)
        ids, places, taps = rows.token_ids, rows.position_ids, head.drafter.aux_layers
        aux = forward(params, target.config, ids, places, tiny.causal(n), aux_layers=taps).aux_hidden_states
        assert aux is not None
        x = inputs(own, config, params, ids[:, 1:], taken(config, params, aux)[:, :-1])
        states, _ = run(own, config, x, places[:, 1:], tiny.causal(n - 1))
        return draft_logits(own.output, config, params, states)[0], aux[0]

    logits, taps = draft(target.params, head.params)
    off = tolerance(lambda *params: draft(*params)[0], target.params, head.params)
    expected = _in_streams(tmp_path, config, raw, text, np.asarray(taps))
    assert np.abs(expected).max() > 1, "logits that say nothing prove nothing"
    assert_same(logits, expected, off)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(carried.LATENT, id="latents and experts"),
        pytest.param(carried.WINDOWED, id="windows", marks=pytest.mark.slow),
        pytest.param(carried.MIMO, id="mimo", marks=pytest.mark.slow),
        pytest.param(carried.MIMO_V2, id="heads of two widths", marks=pytest.mark.slow),
        pytest.param(carried.NEMOTRON_H, id="two blocks", marks=pytest.mark.slow),
        pytest.param(carried.INDEXED, id="an indexer", marks=pytest.mark.slow),
        pytest.param(carried.BLOCKS, id="blocks", marks=pytest.mark.slow),
        pytest.param(carried.POOLS, id="pools in one stream", marks=pytest.mark.slow),
        pytest.param(carried.STREAMS, id="several streams", marks=pytest.mark.slow),
        pytest.param(carried.LING, id="ling", marks=pytest.mark.slow),
        pytest.param(carried.LING_2_5, id="latents beside lightning", marks=pytest.mark.slow),
        pytest.param(carried.GLM, id="biases and experts", marks=pytest.mark.slow),
        pytest.param(carried.NEXT, id="beside recurrent layers", marks=pytest.mark.slow),
        pytest.param(carried.NEXT_DENSE, id="Qwen3.5", marks=pytest.mark.slow),
        pytest.param(carried.NEXT_SPARSE, id="Qwen3.5 with experts", marks=pytest.mark.slow),
    ],
)
def test_rollout_step_k_equals_servings_kth_draft_step(
    tmp_path: Path, rng: np.random.Generator, raw: dict[str, Any]
) -> None:
    """Serving: prefill, catch up with the root, then a chain that is forced to follow the text."""
    target, head = carried.models(tmp_path, raw)
    n, config = 24, _mtp(head).config
    text = rng.integers(0, VOCAB, n).tolist()
    train = _trained(target, head, _rows(text))
    (trained, *_), (off, *_) = train(target.params, head.params), tolerance(train, target.params, head.params)
    weights = Weights(target.params, head.weights())
    step_config = StepConfig(target.config, head.drafter, ROLLOUT)

    @jax.jit
    def serve(prompt: jax.Array, length: jax.Array, ahead: jax.Array) -> list[jax.Array]:
        """The draft's logits at the root, ahead[0], and after each of ahead[1:]."""
        state = slot_state.init_state(step_config, num_slots=1, num_pages=8, page_size=4, max_pages=8)
        table = jnp.arange(8, dtype=jnp.int32)[None]
        state = dataclasses.replace(state, page_table=table, history=state.history.at[0, :n].set(prompt))
        chunks = slot_state.PromptChunks(jnp.zeros(1, jnp.int32), length[None], jnp.ones(1, bool))
        state, _ = step.prefill(step_config, weights, state, chunks, chunk=n, width=8)
        draft: Any = state.draft
        pending = dataclasses.replace(draft.pending, token_ids=draft.pending.token_ids.at[0, 0].set(ahead[0]))
        view = slot_state.gather(state, chunks.slots, 8).view
        _, expand, level = at_root(ready(weights), config, dataclasses.replace(draft, pending=pending), view, ROLLOUT)
        found = [draft_logits(head.params.output, config, target.params, level.states)[0, 0]]
        for depth in range(1, ROLLOUT):
            level = expand.descend(level, jnp.zeros((1, 1), jnp.int32), ahead[None, depth : depth + 1], depth)
            found.append(draft_logits(head.params.output, config, target.params, level.states)[0, 0])
        return found

    for t in (0, 1, 6, 7, 8, n - ROLLOUT - 1):  # the position: its hidden state is the prompt's last
        prompt = np.zeros(n, np.int32)
        prompt[: t + 1] = text[: t + 1]
        ahead = jnp.asarray(text[t + 1 : t + 1 + ROLLOUT], jnp.int32)
        for k, logits in enumerate(serve(jnp.asarray(prompt), jnp.int32(t + 1), ahead)):
            assert_same(trained[k][t], logits, off[k][t], f"position {t}, step {k}")


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(carried.SMALL, id="dense"),
        pytest.param(carried.LATENT, id="latents and experts"),
        pytest.param(carried.WINDOWED, id="windows"),
    ],
)
def test_packed_documents_do_not_leak(tmp_path: Path, rng: np.random.Generator, raw: dict[str, Any]) -> None:
    """The loss of a row is the sum of its documents' losses, each in a row of its own."""
    target, head = carried.models(tmp_path, raw)
    lengths, seq = (9, 17, 11), 40
    config, vocab = LossConfig(target.config, head.drafter, Rollout(ROLLOUT, True), 0.8), head.weights().vocab
    documents = [rng.integers(0, VOCAB, n).tolist() for n in lengths]

    def row(*documents: list[int]) -> Rows:
        text = [token for document in documents for token in document]
        ids = [i for i, document in enumerate(documents, start=1) for _ in document]
        positions = [t for document in documents for t in range(len(document))]
        token_ids, ids, positions = (
            jnp.asarray([each + [0] * (seq - len(text))], jnp.int32) for each in (text, ids, positions)
        )
        return Rows(token_ids, (ids > 0) & (positions > 0), ids, positions)

    @jax.jit
    def losses(params: MtpParams, target: TargetParams, rows: Rows) -> tuple[jax.Array, Sums]:
        return rollout_loss(params, config, target, vocab, rows, teach(target, config, rows), jnp.ones(ROLLOUT))

    args = head.params, target.params
    packed, off = losses(*args, row(*documents)), tolerance(losses, *args, row(*documents))
    each = [losses(*args, row(document)) for document in documents]
    assert packed[1].n_known.min() > 0
    assert_same(packed, jax.tree.map(lambda *parts: sum(map(np.asarray, parts)), *each), off)


def _leaves(params: Any) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(params)]


@pytest.mark.parametrize("raw", [carried.SMALL], ids=["dense"])
def test_training_begins_with_the_targets_own_layer(tmp_path: Path, raw: dict[str, Any]) -> None:
    """The layer that its checkpoint carries, else a copy of its last one that adds nothing."""
    target, head = carried.models(tmp_path, raw)
    everything = np.arange(VOCAB, dtype=np.int32)
    assert load_kind("mtp").new(DraftSettings(), target.config, VOCAB) == head.drafter
    found = head.drafter.init_params(target, everything, 0)
    for leaf, same in zip(_leaves(found), _leaves(head.params), strict=True):
        np.testing.assert_array_equal(leaf, same)
    tiny.write_target(tmp_path, raw, seed=0)
    fresh = head.drafter.init_params(target, everything, 0)
    last = silenced(target.params.layers[-1])
    for leaf, same in zip(_leaves(fresh.layer), _leaves(last), strict=True):
        np.testing.assert_array_equal(leaf, same)
    state = np.arange(target.config.d_model * 2.0, dtype=np.float32).reshape(1, 2, -1)
    x, mask = jnp.asarray(state), jnp.ones((1, 2, 2), bool)
    out, _ = run(fresh, head.drafter.config, x, jnp.arange(2)[None], mask)
    np.testing.assert_array_equal(out, state)  # it adds nothing yet
    settings: list[dict[str, Any]] = [{"num_layers": 2}, {"d_ff": 8}, {"aux_layers": (0,)}, {"num_heads": 1}]
    for setting in settings:
        with pytest.raises(ConfigError, match="one layer of the target's own kind and size"):
            load_kind("mtp").new(DraftSettings(**setting), target.config, VOCAB)


@pytest.mark.parametrize("raw", [carried.MIMO_V2, carried.STREAMS], ids=lambda raw: raw["model_type"])
def test_no_layer_begins_as_one_of_another_kind(tmp_path: Path, raw: dict[str, Any]) -> None:
    tiny.write_target(tmp_path, raw, seed=0)
    target = load_target(tmp_path, dtype="float32")
    with pytest.raises(ConfigError, match="several streams or are of another kind"):
        load_kind("mtp").new(DraftSettings(), target.config, VOCAB).init_params(target, np.arange(VOCAB), 0)


def test_a_part_of_the_tokens_is_foreseen_as_all_are(tmp_path: Path, rng: np.random.Generator) -> None:
    """A layer begins with the target's output rows for the tokens that it proposes, so its logits are those that a
    layer for all tokens has of them; training moves these rows alone, and not the target's."""
    target, whole = carried.models(tmp_path, carried.SMALL)
    target_ids = np.sort(rng.choice(VOCAB, 24, replace=False)).astype(np.int32)
    drafter = load_kind("mtp").new(DraftSettings(), target.config, 24)
    head = Head(drafter, drafter.init_params(target, target_ids, 0), target_ids)
    assert (drafter.draft_vocab_size, drafter.vocab_size) == (24, VOCAB)
    rows = _rows(rng.integers(0, VOCAB, 16).tolist())
    some, every = (_trained(target, each, rows) for each in (head, whole))
    off = tolerance(lambda *params: every(*params)[0], target.params, whole.params)
    got, expected = some(target.params, head.params)[0], every(target.params, whole.params)[0]
    for k in range(ROLLOUT):
        assert_same(got[k], expected[k][:, target_ids], off[k], f"step {k}")
    trainer = tiny_trainer(tmp_path / "run", target, head=head, drafter="mtp", rollout=3)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        trainer.train()
    own = load_head(tmp_path / "run", target, dtype="float32")
    assert own.drafter == drafter
    np.testing.assert_array_equal(own.target_ids, target_ids)
    assert np.any(np.asarray(own.params.head) != np.asarray(head.params.head))


@pytest.mark.slow
@pytest.mark.parametrize("raw", [carried.LATENT], ids=["latents and experts"])
def test_a_run_learns_and_writes_what_loads(tmp_path: Path, raw: dict[str, Any]) -> None:
    """The real trainer: the loss falls, and every part of the layer moves."""
    target, head = carried.models(tmp_path / "target", raw)
    trainer = tiny_trainer(tmp_path / "run", target, head=head, drafter="mtp", rollout=3, remat=True)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        trainer.train()
    losses = [row["loss"] for row in metrics(tmp_path / "run")]
    assert losses[-1] < 0.95 * losses[0]
    own = load_head(tmp_path / "run", target, dtype="float32")
    assert own.drafter == head.drafter
    names = [spec.name for spec in specs(head.drafter.spec())]
    moved = [np.any(leaf != same) for leaf, same in zip(_leaves(own.params), _leaves(head.params), strict=True)]
    still = {name.rsplit(".", 1)[-1] for name, has_moved in zip(names, moved, strict=True) if not has_moved}
    assert still <= {"e_score_correction_bias"}, "which chooses experts, and has no gradient"
