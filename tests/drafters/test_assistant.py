"""Gemma 4's assistants are transformers' own, and change no token."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import seeded
import tiny
from dense_head import DenseHead
from engines import Dice, Reference, compile_programs, make_engine, make_runner, run, serving
from rounding import assert_same, tolerance
from safetensors.numpy import load_file, save_file

from specserve.checkpoints.load import Target
from specserve.drafters.gemma_assistant import model
from specserve.drafters.gemma_assistant.drafter import Assistant
from specserve.drafters.gemma_assistant.model import AssistantParams
from specserve.drafters.interface import Head
from specserve.drafters.registry import DraftSettings, load_kind
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.head import load_head, read_drafter
from specserve.models.cache import Cache, Prefix
from specserve.models.families.table import model_config
from specserve.models.params import init_params, specs
from specserve.models.target import TargetOutput, TargetParams, forward, target_spec

LENGTH, STEPS, PAGE_SIZE = 40, 4, 8
TARGET = parity.RAWS["gemma4"]
TEXT: dict[str, Any] = {
    **{key: TARGET[key] for key in ("model_type", "vocab_size", "head_dim", "global_head_dim", "rope_parameters")},
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 12,
    "max_position_embeddings": 256,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
RAW: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": TARGET["hidden_size"],
    "tie_word_embeddings": True,
    "text_config": TEXT,
}
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}


def _write(folder: Path, raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _assistant(folder: Path, raw: dict[str, Any], target: Target) -> Head:
    """Of drawn weights, by the names and shapes that are published."""
    own = _write(folder / "shape", raw, {})
    drafter = _read(own, target)
    shapes = {spec.name: spec.stored_shape for spec in specs(drafter.spec())}
    tensors = {name: seeded.draw(name, shape, 1) for name, shape in shapes.items()}
    if raw.get("use_ordered_embeddings"):
        order = np.random.default_rng(0).permutation(target.config.vocab_size)
        tensors["masked_embedding.token_ordering"] = order.astype(np.int64)
    return load_head(_write(folder / "assistant", raw, tensors), target, dtype="float32")


def _read(folder: Path, target: Target) -> Assistant:
    drafter = read_drafter(folder, target.config, "tiny", dtype="float32")
    assert isinstance(drafter, Assistant)
    return drafter


def _committed(head: Head, target: Target, token_ids: np.ndarray) -> TargetOutput:
    """What the target leaves of all tokens but the last, which it has not read yet."""
    n = len(token_ids) - 1

    @functools.partial(jax.jit, compiler_options=parity.QUICKLY)
    def read(params: TargetParams) -> TargetOutput:
        index, taps = jnp.arange(n, dtype=jnp.int32)[None], head.drafter.aux_layers
        return forward(params, target.config, jnp.asarray(token_ids[None, :-1]), index, tiny.causal(n), aux_layers=taps)

    return read(target.params)


def _chain(
    head: Head, target: Target, out: TargetOutput, token_ids: np.ndarray, drafted: np.ndarray
) -> Callable[[AssistantParams], list[jax.Array]]:
    """A program of the logits [vocab] of a chain behind the last token."""
    config, n = head.drafter.config, len(token_ids) - 1
    pages = -(-n // PAGE_SIZE)

    @functools.partial(jax.jit, compiler_options=parity.QUICKLY)
    def drafts(params: AssistantParams) -> list[jax.Array]:
        index, table = jnp.arange(n, dtype=jnp.int32)[None], jnp.arange(pages, dtype=jnp.int32)[None]
        cache = Cache.zeros(target.config, num_slots=1, num_pages=pages, page_size=PAGE_SIZE)
        cache = cache.write(out.new, table, index, jnp.ones((1, n), bool))
        assert out.aux_hidden_states is not None
        state, found = model.target_state(config, target.params, out.aux_hidden_states[:, -1:]), list[jax.Array]()
        prefix = Prefix(table, jnp.asarray([n], jnp.int32))
        for token in (token_ids[-1], *drafted[:-1]):
            states = model.run(params, config, target.params, cache, prefix, jnp.asarray([[token]]), state)
            found.append(model.assistant_logits(params, config, states)[0, 0])
            state = model.handed_on(params, states)
        return found

    return drafts


def test_drafts_are_those_of_a_plain_numpy_twin(tmp_path: Path) -> None:
    """Over the keys and values of the target's last layers of each kind, as far back as the window reaches."""
    (tmp_path / "target").mkdir()
    target = parity.golden_case("gemma4", tmp_path / "target").target
    head, token_ids = _assistant(tmp_path, RAW, target), seeded.tokens(target.config.vocab_size, seed=5)[:LENGTH]
    out, drafted = _committed(head, target, token_ids), token_ids[:STEPS]
    ropes, tensors = TEXT["rope_parameters"], load_file(tmp_path / "assistant" / "model.safetensors")
    whole = TEXT | {"rms_norm_eps": 1e-6}
    near = whole | {"rope_parameters": {"full_attention": ropes["sliding_attention"] | {"partial_rotary_factor": 1.0}}}
    kinds = [(DenseHead(near, tensors), 2, TEXT["sliding_window"] + 1)] * 2 + [(DenseHead(whole, tensors), 1, LENGTH)]
    twin, n = kinds[-1][0], LENGTH - 1
    assert out.aux_hidden_states is not None
    arrays = out.aux_hidden_states[0, -1], target.params.norm, target.params.embedding
    last, norm, table = (np.asarray(x, np.float64) for x in arrays)
    state, expected = last / np.sqrt(np.mean(last**2) + 1e-6) * norm, []
    for token in (token_ids[-1], *drafted[:-1]):
        x = twin._linear(np.concatenate([table[token] * np.sqrt(table.shape[1]), state]), "pre_projection")
        for i, (own, source, reach) in enumerate(kinds):
            name, width = f"model.layers.{i}", head.drafter.shape.of(head.drafter.shape.kind(i)).head_dim
            q = twin._linear(twin._norm(x, f"{name}.input_layernorm"), f"{name}.self_attn.q_proj").reshape(-1, width)
            q = own._turn(twin._norm(q, f"{name}.self_attn.q_norm"), n)
            seen = list(zip(*(np.asarray(each[0, -reach:], np.float64) for each in out.new[source]), strict=True))
            x = twin._after(name, x, twin._read(f"{name}.self_attn", q, seen))
        normed = twin._norm(x, "model.norm")
        expected.append(normed @ twin.tensors["model.embed_tokens.weight"].T)
        state = twin._linear(normed, "post_projection")
    chain = _chain(head, target, out, token_ids, drafted)
    assert_same(chain(head.params), expected, tolerance(chain, head.params))


@pytest.mark.oracle
@pytest.mark.parametrize("more", [{}, CLUSTERS], ids=["all tokens", "clusters"])
def test_drafts_are_those_of_transformers(tmp_path: Path, more: dict[str, Any]) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers

    (tmp_path / "target").mkdir()
    target, _, whole = parity.build("gemma4", tmp_path / "target")
    head = _assistant(tmp_path, RAW | more, target)
    config = transformers.Gemma4AssistantConfig(**{k: v for k, v in (RAW | more).items() if k != "architectures"})
    theirs = transformers.Gemma4AssistantForCausalLM(config).float().eval()
    tensors = {
        name: torch.from_numpy(value) for name, value in load_file(tmp_path / "assistant/model.safetensors").items()
    }
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert ([*missing], [*unexpected]) == (["lm_head.weight"], []), "another checkpoint"
    theirs.tie_weights()
    token_ids = seeded.tokens(target.config.vocab_size, seed=5)[:LENGTH]
    with torch.no_grad():
        ids = torch.from_numpy(token_ids[None, :-1]).long()
        out = whole(ids, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        state, token, expected, drafted = out.hidden_states[-1][:, -1:], int(token_ids[-1]), [], []
        for _ in range(STEPS):
            embedded = whole.get_input_embeddings()(torch.tensor([[token]]))
            own = theirs(
                inputs_embeds=torch.cat([embedded, state], dim=-1),
                position_ids=torch.tensor([[LENGTH - 1]]),
                shared_kv_states=out.shared_kv_states,
            )
            token, state = int(own.logits.argmax()), own.last_hidden_state
            expected.append(own.logits[0, 0].numpy())
            drafted.append(token)
    chain = _chain(head, target, _committed(head, target, token_ids), token_ids, np.asarray(drafted))
    found = chain(head.params)
    plain = dataclasses.replace(head.params, centroids=None, ordering=None)  # rounding may choose another cluster
    off = tolerance(chain, plain)
    for step, (ours, logits, own) in enumerate(zip(found, expected, off, strict=True)):
        is_chosen = np.isfinite(ours)
        assert is_chosen.sum() == (3 * 128 // 16 if more else 128)
        assert_same(np.where(is_chosen, ours, 0), np.where(is_chosen, logits, 0), own, f"step {step}")
        assert (logits[~is_chosen] == logits.min()).all()


def test_the_window_is_that_of_transformers_and_ends_before_the_root(tmp_path: Path) -> None:
    """It masks by distance, inclusively, from the last committed token on."""
    config = _read(_write(tmp_path / "own", RAW, {}), _described()).config.layers
    assert [kind.window for kind in config.layers] == [14, 14, 0]
    assert [kind.kv_from for kind in config.layers] == [2, 2, 1], "the last layers of the target with keys of their own"


def _described() -> Target:
    return Target(model_config(TARGET, dtype="float32"), None, (2,), Path("tiny"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"surprise": 1}, "surprise"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"backbone_hidden_size": 48}, "width 48 and vocabulary 128"),
        (
            {"text_config": TEXT | {"surprise": 1, "rope_theta": 5e5}},
            "text_config.rope_theta, text_config.surprise: not",
        ),
        ({"text_config": TEXT | {"tie_word_embeddings": False}}, "text_config: tie_word_embeddings"),
        ({"text_config": TEXT | {"enable_moe_block": True}}, "enable_moe_block"),
        ({"text_config": TEXT | {"num_kv_shared_layers": 1}}, "num_kv_shared_layers"),
        ({"text_config": TEXT | {"global_head_dim": 12}}, "keys for 4 heads of 12"),
        (CLUSTERS | {"num_centroids": 24}, "num_centroids 24 must divide the 128 tokens"),
    ],
)
def test_another_assistant_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=words):
        _read(_write(tmp_path / "own", RAW | changes, {}), _described())


def test_an_assistant_is_of_a_gemma_4_and_is_not_trained(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(ConfigError, match="an assistant of a Gemma 4, beside a qwen3 target"):
        _read(_write(tmp_path / "own", RAW, {}), tiny_target)
    with pytest.raises(ConfigError, match="not trained here"):
        load_kind("gemma4-assistant").new(DraftSettings(), tiny_target.config, 64)


@pytest.mark.slow
def test_an_assistant_changes_no_token(tmp_path: Path, kept: Path | None, rng: np.random.Generator) -> None:
    """Of chains and trees, in mixed batches with preemptions, beside plain steps."""
    raw = tiny.TARGET | TARGET | {"vocab_size": 64, "vocab_size_per_layer_input": 64, "max_position_embeddings": 512}
    config = model_config(raw, dtype="float32")
    params = init_params(target_spec(config), jax.random.key(3), "float32")
    target = Target(config, jax.tree.map(lambda x: x * np.float32(1.5), params), (2,), Path("tiny"))
    head = _assistant(tmp_path, RAW | CLUSTERS | {"text_config": TEXT | {"vocab_size": 64}}, target)
    runner = make_runner(target, head, "off", "chain:2", "tree:3x3x9", num_slots=3, has_constrained=False, folder=kept)
    compile_programs(runner)
    reference = Reference(target, kept)
    with serving(make_engine(runner, Dice(0), num_pages=18)) as engine, reference.engine:
        asks = [reference.any_ask(rng, length, i % 2 == 1) for i, length in enumerate((1, 16, 37, 20, 9))]
        inboxes = run(engine, asks)
        for ask, inbox in zip(asks, inboxes, strict=True):
            reference.check(ask, inbox)
        stats = [inbox.wait().stats for inbox in inboxes]
    assert sum(sum(each.accepted_per_depth) for each in stats if each) > 5, "nothing was accepted"
