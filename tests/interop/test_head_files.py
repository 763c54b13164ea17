"""Law 3: heads on disk. What is written reads back bit for bit, says what an independent forward says, and whatever
does not fit is refused by name."""

import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from rounding import assert_same, tolerance
from safetensors.numpy import load_file, save_file

from specserve.checkpoints.load import Target, load_target
from specserve.drafters.eagle3.config import default_taps
from specserve.drafters.eagle3.model import Eagle3Params, token_embedding
from specserve.drafters.eagle3.rollout import rollout_states
from specserve.drafters.interface import Head
from specserve.drafters.layers import windowed
from specserve.drafters.learning import Rollout, Rows
from specserve.errors import CheckpointError, ConfigError, SpecServeError
from specserve.interop import doctor
from specserve.interop.convert import export_head
from specserve.interop.head import load_head, save_head
from specserve.interop.notes import read_notes
from specserve.models.families.latent import scale_of
from specserve.models.rope import Rope
from specserve.models.target import forward

Tensors = dict[str, np.ndarray]
YARN = Rope(5e4, "yarn", factor=8.0, original_max_len=64, magnitude=0.95, is_interleaved=True)


@pytest.fixture
def folder(tmp_path: Path, tiny_head: Head, tiny_target: Target) -> Path:
    """A head as it is exported."""
    save_head(tmp_path / "head", tiny_head, tiny_target, dtype="float32", notes={"target": "tiny"})
    return tmp_path / "head"


def _edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _edit_config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def _assert_same(head: Head, other: Head) -> None:
    assert head.drafter == other.drafter
    np.testing.assert_array_equal(head.target_ids, other.target_ids)
    assert jax.tree.structure(head.params) == jax.tree.structure(other.params)
    for leaf, same in zip(jax.tree.leaves(head.params), jax.tree.leaves(other.params), strict=True):
        assert leaf.dtype == same.dtype
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint8), np.asarray(same).view(np.uint8))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"has_embedding": True, "aux_layers": (0, 3, 5)},
        {"norm_output": True, "fc_norm": True, "norm_before_fc": True, "norm_before_residual": True},
        {"draft_vocab_size": 64, "num_heads": 2, "num_kv_heads": 1, "d_ff": 24},
        {**tiny.LATENTS, "num_layers": 2, "layers": windowed((9, 9))},
        tiny.GEMMA,
        tiny.GEMMA | {"layers": (), "logit_softcap": 0.0, "qkv_bias": True, "o_bias": True},
        {
            **tiny.LATENTS,
            "latent": replace(tiny.LATENT, q_rank=0),
            "rope": YARN,
            "yarn_scales": (0.7, 1.0),
            "attention_scale": scale_of(tiny.LATENT, YARN, 1.0),
        },
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_then_import_is_bit_exact(
    tmp_path: Path, tiny_target: Target, changes: dict[str, object], dtype: str
) -> None:
    head = tiny.random_head(tiny_target.config, seed=3, dtype=dtype, **changes)
    save_head(tmp_path, head, tiny_target, dtype=dtype, notes={"target": "tiny", "tau": 1.5})
    _assert_same(head, load_head(tmp_path, tiny_target, dtype=dtype))
    assert read_notes(tmp_path) == {"target": "tiny", "tau": 1.5}
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["d2t"].dtype == np.int64
    assert tensors["t2d"].dtype == bool
    assert {value.dtype.name for name, value in tensors.items() if name not in ("d2t", "t2d")} == {dtype}


def test_a_full_disk_is_said_and_leaves_the_head_that_was_there(
    folder: Path, tiny_head: Head, tiny_target: Target
) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # Python ignores the signal: writing more fails
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written .*File too large.*make room.*--resume") as error:
            save_head(folder, tiny_head, tiny_target, dtype="float32", notes={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(error.value).startswith(str(folder))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_float32_head_is_rounded_to_bfloat16_once(tmp_path: Path, tiny_head: Head, tiny_target: Target) -> None:
    save_head(tmp_path, tiny_head, tiny_target, dtype="bfloat16", notes={})
    loaded = load_head(tmp_path, tiny_target, dtype="float32")
    for leaf, read in zip(jax.tree.leaves(tiny_head.params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf).astype(ml_dtypes.bfloat16).astype(np.float32), read)


def test_the_config_is_what_other_loaders_expect(folder: Path, tiny_target: Target) -> None:
    raw = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "draft_vocab_size": 48,
        "max_position_embeddings": tiny_target.config.max_len,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    assert {key: raw[key] for key in expected} == expected
    assert "eagle_config" not in raw, "default taps are left out: readers disagree on how to count them"


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_exported_head_says_what_a_plain_numpy_forward_says(
    folder: Path, tiny_target: Target, rng: np.random.Generator, share: float
) -> None:
    """The forward of the checkpoint's own document, by SGLang's tensor names; two rollout steps of it. The share of a
    head's channels turns that `partial_rotary_factor` states."""
    n = 11
    rope = {"rope_type": "default", "partial_rotary_factor": share, "mrope_section": [1, 1, 2]}
    _edit_config(folder, rope_parameters=rope)
    text = rng.integers(0, 64, n)
    token_ids, positions = jnp.asarray(text[None], jnp.int32), jnp.arange(n, dtype=jnp.int32)[None]
    target = forward(
        tiny_target.params,
        tiny_target.config,
        token_ids,
        positions,
        tiny.causal(n),
        aux_layers=default_taps(tiny_target.config),
    )
    head = load_head(folder, tiny_target, dtype="float32")
    rows = Rows(token_ids, jnp.ones((1, n), bool), jnp.ones((1, n), jnp.int32), positions)
    embedding = token_embedding(head.params, tiny_target.params.embedding)
    assert target.aux_hidden_states is not None

    @jax.jit
    def run(params: Eagle3Params, embedding: jax.Array, taps: jax.Array) -> list[jax.Array]:
        states = rollout_states(params, head.drafter.config, embedding, rows, taps, Rollout(2, remat=False))
        return [head.drafter.logits(params.output, tiny_target.params, state)[0, : n - 2] for state in states]

    args = head.params, embedding, target.aux_hidden_states

    tensors = load_file(folder / "model.safetensors")
    embed = load_file(tiny_target.folder / "model.safetensors")["model.embed_tokens.weight"]
    expected = _numpy_eagle3(tensors, embed, np.asarray(target.aux_hidden_states)[0], text, share)
    assert_same(run(*args), [logits[: n - 2] for logits in expected], tolerance(run, *args))
    draft_ids = np.arange(48)
    np.testing.assert_array_equal(head.target_ids, draft_ids + tensors["d2t"])
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), draft_ids + tensors["d2t"])


def _numpy_eagle3(
    tensors: Tensors, embed: np.ndarray, taps: np.ndarray, text: np.ndarray, share: float
) -> list[np.ndarray]:
    """Logits of rollout steps 0 and 1 at every slot. Slot t takes feature t and token t + 1; at step 1 its own state
    and token t + 2, and sees the step-0 entries up to t and itself."""
    heads, kv_heads, head_dim, theta = 4, 2, 8, 10_000.0
    n = len(text)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * tensors[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ tensors[f"{name}.weight"].T

    def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:  # [n, head, head_dim]
        turned = int(head_dim * share)
        angles = positions[:, None] * theta ** (-np.arange(0, turned, 2) / turned)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b, rest = np.split(x, [turned // 2, turned], axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def project(step: int, hidden: np.ndarray) -> tuple[np.ndarray, ...]:
        tokens = np.append(text, [0, 0])[1 + step : 1 + step + n]
        x = [norm(embed[tokens], "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm")]
        x, positions = np.concatenate(x, axis=-1), np.arange(n) + 1 + step
        q = rotate(linear(x, "midlayer.self_attn.q_proj").reshape(n, heads, head_dim), positions)
        k = rotate(linear(x, "midlayer.self_attn.k_proj").reshape(n, kv_heads, head_dim), positions)
        return q, k, linear(x, "midlayer.self_attn.v_proj").reshape(n, kv_heads, head_dim)

    hidden, logits, entries = linear(taps, "fc"), [], []
    for step in range(2):
        q, k, v = project(step, hidden)
        entries.append((k, v))
        out = np.zeros((n, heads, head_dim))
        for t in range(n):
            keys = np.concatenate([entries[0][0][: t + 1], *(own[t : t + 1] for own, _ in entries[1:])])
            values = np.concatenate([entries[0][1][: t + 1], *(own[t : t + 1] for _, own in entries[1:])])
            for head in range(heads):
                scores = keys[:, head // 2] @ q[t, head] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[t, head] = weights / weights.sum() @ values[:, head // 2]
        x = hidden + linear(out.reshape(n, -1), "midlayer.self_attn.o_proj")
        y = norm(x, "midlayer.post_attention_layernorm")
        gate = linear(y, "midlayer.mlp.gate_proj")
        hidden = x + linear(gate / (1 + np.exp(-gate)) * linear(y, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj")
        logits.append(linear(norm(hidden, "norm"), "lm_head"))
    return logits


def test_both_spellings_load(folder: Path, tiny_head: Head, tiny_target: Target) -> None:
    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    _edit(folder, rename)
    _assert_same(tiny_head, load_head(folder, tiny_target, dtype="float32"))


def test_layer_ids_are_read_as_each_dialect_means_them(tmp_path: Path, tiny_target: Target) -> None:
    """SGLang names the output of layer i, vLLM and speculators the input of layer i + 1."""
    head = tiny.random_head(tiny_target.config, seed=3, aux_layers=(0, 2, 4))
    save_head(tmp_path, head, tiny_target, dtype="float32", notes={})
    assert load_head(tmp_path, tiny_target, dtype="float32").drafter.aux_layers == (0, 2, 4)

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    _edit(tmp_path, rename)
    _edit_config(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]})
    assert load_head(tmp_path, tiny_target, dtype="float32").drafter.aux_layers == (0, 2, 4)


def test_the_speculators_config_nests_its_layer(folder: Path, tiny_head: Head, tiny_target: Target) -> None:
    raw = json.loads((folder / "config.json").read_text())
    outer = {key: raw.pop(key) for key in ("draft_vocab_size",)}
    nested = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": raw,
    }
    (folder / "config.json").write_text(json.dumps(nested | outer))
    _assert_same(tiny_head, load_head(folder, tiny_target, dtype="float32"))


@pytest.mark.parametrize("make", [tiny.random_head, tiny.random_masked_head])
def test_a_head_for_all_tokens_without_output_rows_shares_the_targets(
    tmp_path: Path, tiny_target: Target, make: Callable[..., Head]
) -> None:
    """SGLang does the same where no draft vocabulary is stated: so it is written, and comes back. In the layout of
    speculators, which has no such heads, it brings a copy of the target's rows along."""
    save_head(tmp_path, make(tiny_target.config, seed=3, draft_vocab_size=64), tiny_target, dtype="float32", notes={})
    _edit(tmp_path, lambda tensors: [tensors.pop(name) for name in ("lm_head.weight", "d2t", "t2d")])
    for change in ({}, {"draft_vocab_size": None}):
        _edit_config(tmp_path, **change)
        head = load_head(tmp_path, tiny_target, dtype="float32")
        assert not head.drafter.shape.has_own_head
        np.testing.assert_array_equal(head.target_ids, np.arange(64))
        assert [each.code for each in doctor.examine(tmp_path, tiny_target).errors] == []
    save_head(tmp_path / "again", head, tiny_target, dtype="float32", notes={})
    assert "draft_vocab_size" not in json.loads((tmp_path / "again" / "config.json").read_text())
    _assert_same(head, load_head(tmp_path / "again", tiny_target, dtype="float32"))
    export_head(tmp_path / "again", tmp_path / "theirs", tiny_target, target_name="tiny", dialect="speculators")
    rows = load_file(tmp_path / "theirs" / "model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(rows, load_file(tiny_target.folder / "model.safetensors")["lm_head.weight"])
    _edit_config(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="tie_word_embeddings is True"):
        load_head(tmp_path, tiny_target, dtype="float32")
    assert {each.code for each in doctor.examine(tmp_path, tiny_target).errors} == {"uncomputed"}
    _edit_config(tmp_path, tie_word_embeddings=False, draft_vocab_size=48)
    with pytest.raises(CheckpointError, match=r"(lm_head\.weight|d2t) is missing"):
        load_head(tmp_path, tiny_target, dtype="float32")


def _absolute(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + np.arange(48)


def _swap(tensors: Tensors) -> None:
    ids = tensors["d2t"] + np.arange(48)
    tensors["d2t"] = ids[::-1] - np.arange(48)


def _flip(tensors: Tensors) -> None:
    tensors["t2d"] = ~tensors["t2d"]


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _cut(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


def _add(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_cut("fc.weight"), r"model.safetensors: fc.weight has shape \(31, 96\), config.json says \(32, 96\)"),
        (_cut("midlayer.hidden_norm.weight"), r"midlayer.hidden_norm.weight has shape \(31,\)"),
        (_drop("midlayer.mlp.up_proj.weight"), "midlayer.mlp.up_proj.weight is missing"),
        (_drop("d2t"), "d2t is missing"),
        (_add("midlayer.self_attn.gate_proj.weight"), "gate_proj.weight is not part of this architecture"),
        (_absolute, "absolute ids instead of offsets"),
        (_swap, "sorted, unique"),
        (_cut("d2t"), "does not hold 48 offsets"),
        (_flip, "t2d and d2t name different tokens"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    folder: Path, tiny_target: Target, change: Callable[[Tensors], object], words: str
) -> None:
    _edit(folder, change)
    with pytest.raises(CheckpointError, match=words) as error:
        load_head(folder, tiny_target, dtype="float32")
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 65}, "vocabulary 65"),
        ({"target_hidden_size": 48}, "width 48"),
        ({"num_hidden_layers": 2}, r"layers\.1\.\S* is missing"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, "layers 0..5"),
    ],
)
def test_a_head_for_another_target_is_refused(
    folder: Path, tiny_target: Target, changes: dict[str, object], words: str
) -> None:
    _edit_config(folder, **changes)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        load_head(folder, tiny_target, dtype="float32")


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_truncated_files_are_refused(folder: Path, tiny_target: Target, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_head(folder, tiny_target, dtype="float32")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "config.json is not there"),
        ("config.json", "{", "not readable as JSON"),
        ("config.json", "[]", "expected a JSON object"),
        ("config.json", "[" * 100_000, "not readable as JSON"),
        ("config.json", '{"rms_norm_eps": NaN}', "rms_norm_eps is nan, which is not computed"),
        ("config.json", "{}", "hidden_size"),
        ("model.safetensors", None, "no model.safetensors and no model.safetensors.index.json"),
    ],
)
def test_broken_folders_are_refused(
    folder: Path, tiny_target: Target, name: str, content: str | None, words: str
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(SpecServeError, match=words):
        load_head(folder, tiny_target, dtype="float32")


def test_a_sharded_target_loads_like_a_whole_one(tmp_path: Path, tiny_target: Target) -> None:
    shutil.copytree(tiny_target.folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[i::2]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[i::2], file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = load_target(tmp_path, dtype="float32")
    for leaf, same in zip(jax.tree.leaves(tiny_target.params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(leaf, same)
    assert loaded.eos_ids == (2,)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors, which is not there"):
        load_target(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda fc: np.where(fc == fc.max(), np.nan, fc), r"not a number or infinite: fc\.weight"),
        (np.zeros_like, r"nothing but zeros: fc\.weight"),
    ],
)
def test_weights_that_say_nothing_are_refused_by_the_tensor(
    folder: Path, tiny_target: Target, how: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    _edit(folder, lambda tensors: tensors.update({"fc.weight": how(tensors["fc.weight"])}))
    with pytest.raises(CheckpointError, match=message):
        load_head(folder, tiny_target, dtype="float32")


@pytest.mark.parametrize("changes", [{"hidden_act": "relu"}, {"rms_norm_eps": 0.5}, {"rms_norm_eps": "small"}])
def test_a_layer_that_is_not_computed_is_refused(folder: Path, tiny_target: Target, changes: dict[str, object]) -> None:
    _edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} is {next(iter(changes.values()))!r}"):
        load_head(folder, tiny_target, dtype="float32")
