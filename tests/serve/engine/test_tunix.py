"""Tunix's learners with our rollouts, live: weights as Tunix's own loader reads them, answers of a server that began
with the trainer's weights, and log-probabilities of Tunix's own forward pass."""

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rounding
import tiny
from hypothesis import given
from hypothesis import strategies as st

from specserve import LLM, SamplingParams
from specserve.checkpoints.load import load_target
from specserve.errors import CheckpointError, ConfigError
from specserve.models.target import target_spec

pytestmark = [pytest.mark.tunix, pytest.mark.filterwarnings("ignore")]
FAMILIES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {  # config.json; Tunix's package, class, config
    "qwen3": ({}, "qwen3.Qwen3", {}),
    "tied llama": ({"model_type": "llama", "tie_word_embeddings": True}, "llama3.Llama3", {"weight_tying": True}),
    "qwen2": ({"model_type": "qwen2"}, "qwen2.Qwen2", {}),
    "experts": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        "qwen3.Qwen3",
        {"num_experts": 4, "num_experts_per_tok": 2},
    ),
}
PROMPTS = ["abcab", "hello there", "x", "abcabcabc"]
ROOM: dict[str, Any] = {"max_slots": 4, "max_model_len": 128, "page_size": 16, "tokenizer": None, "progress": False}


class Letters:
    """A tokenizer by Tunix's interface: a token for each character."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(each) % 60 for each in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(96 + each) for each in token_ids)

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def _dtypes() -> Iterator[None]:
    """Tunix's threads too."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def _folder(path: Path, family: str, seed: int) -> Path:
    path.mkdir()
    # Tunix 0.1.7 turns by this theta, whatever its config says
    tiny.write_target(path, tiny.TARGET | {"num_hidden_layers": 2, "rope_theta": 1e6} | FAMILIES[family][0], seed=seed)
    return path


def _model(folder: Path, family: str) -> Any:
    """The model as Tunix's own loader reads it."""
    _, kind, changes = FAMILIES[family]
    package, _ = kind.split(".")
    config = importlib.import_module(f"tunix.models.{package}.model").ModelConfig(
        num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8, num_kv_heads=2,
        rope_theta=1_000_000, norm_eps=1e-6, **changes,
    )  # fmt: skip
    loader = importlib.import_module(f"tunix.models.{package}.params")
    return loader.create_model_from_safe_tensors(str(folder), config, mesh=_mesh())


def _mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def _with_lora(model: Any, rng: np.random.Generator) -> Any:
    import qwix
    from flax import nnx

    provider = qwix.LoraProvider(module_path=".*(attn|mlp).*proj", rank=4, alpha=6.0)
    found = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(0), **model.get_model_input())
    state = nnx.state(found, nnx.LoRAParam)
    nnx.update(found, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 4, x.dtype), state))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """To the last bit, whatever the family."""
    from flax import nnx

    from specserve.checkpoints.nnx import target_params
    from specserve.serve import tunix

    target = load_target(_folder(tmp_path / "model", family, 3), dtype="float32")
    model = _model(target.folder, family)
    found = target_params(tunix._arrays(nnx.state(model)), target_spec(target.config), tunix._path_of(model))
    jax.tree.map(np.testing.assert_array_equal, found, target.params)


def _rollout(llm: LLM, model: Any, **options: Any) -> Any:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from specserve.serve.tunix import SpecserveRollout

    config = RolloutConfig(max_tokens_to_generate=16, max_prompt_length=16, temperature=1.0, return_logprobs=True)
    return SpecserveRollout(model, TokenizerAdapter(Letters()), _mesh(), config, llm=llm, **options), config


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A server of other weights than any trainer has, or those of the trainer before."""
    folder = _folder(tmp_path_factory.mktemp("served") / "other", "qwen3", 5)
    with LLM(folder, speculation="ngram:2", **ROOM) as llm:
        yield llm


def _check_logps(found: Any, model: Any, prompts: Any, completions: Any) -> None:
    """Tunix's own forward pass gives these log-probabilities; it takes a padding token that was drawn for padding."""
    from flax import nnx
    from tunix.rl import common

    graph, state = nnx.split(model)

    def run(state: Any) -> Any:
        return common.compute_per_token_logps(graph, state, prompts, completions, pad_id=0, eos_id=2)

    expected, off = np.asarray(run(state)), rounding.tolerance(run, state)
    for own, other, most, tokens in zip(np.asarray(found), expected, off, np.asarray(completions), strict=True):
        length = [*tokens, 0].index(0)
        rounding.assert_within(own[:length], other[:length], most)


@pytest.mark.parametrize("has_lora", [False, True])
def test_answers_are_by_the_trainers_weights(
    llm: LLM, has_lora: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Greedy tokens are those of a server that began with these weights; log-probabilities of rollouts are those of
    `get_per_token_logps` and of Tunix's own forward pass; LoRA alone is an update too."""
    from flax import nnx

    first, folder = _folder(tmp_path / "first", "qwen3", 6), _folder(tmp_path / "moved", "qwen3", 7)
    moved = _model(folder, "qwen3")
    if has_lora:
        moved = _with_lora(moved, rng)
        rollout, config = _rollout(llm, _with_lora(_model(folder, "qwen3"), rng), lora_alpha=6.0)
        rollout.update_params(nnx.state(moved, (nnx.LoRAParam,)), (nnx.LoRAParam,))
    else:
        rollout, config = _rollout(llm, _model(first, "qwen3"))
        rollout.update_params(nnx.state(moved, (nnx.Param,)), (nnx.Param,))
        config_greedy = type(config)(temperature=0.0, max_tokens_to_generate=24)
        greedy = rollout.generate(PROMPTS, config_greedy)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[2])
        with LLM(folder, speculation="off", **ROOM) as fresh:
            expected = fresh.generate([[1, *Letters().encode(prompt)] for prompt in PROMPTS], params)
        assert [[*tokens] for tokens in greedy.tokens] == [[*each.outputs[0].token_ids] for each in expected]
    for seed in (3, jax.random.key(3), None):
        found = rollout.generate(PROMPTS, type(config)(**vars(config) | {"seed": seed}))
    assert len({each.tobytes() for each in rollout.generate(["same"] * 4, config).tokens}) == 4
    completions = jnp.array([np.pad(each, (0, 16 - len(each))) for each in found.tokens])
    prompts = jnp.array(found.left_padded_prompt_tokens)
    assert prompts.shape == (4, 16)
    scored = np.asarray(rollout.get_per_token_logps(prompts, completions))
    _check_logps(scored, moved, prompts, completions)
    sampled = np.stack([np.pad(each, (0, 16 - len(each))) for each in found.logprobs])
    _check_logps(sampled, moved, prompts, completions)
    assert not scored[sampled == 0].any()


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
def test_a_seed_of_any_form_is_one_that_answers_have(number: int, small: int) -> None:
    """Seeds that differ below 2^62 stay different, also as the words of a key; the key of a seed is that seed; and
    there is room for many answers' own, whatever the words are."""
    from specserve.serve.tunix import MOST_SEEDS, _whole

    words = jnp.array([number >> 32, number & 0xFFFFFFFF], jnp.uint32)
    forms = (number, np.uint64(number), words, jax.random.wrap_key_data(words))
    assert {_whole(form) for form in forms} == {number % 2**62}
    assert {_whole(form) for form in (small, jax.random.key(small), jax.random.PRNGKey(small))} == {small}
    SamplingParams(seed=MOST_SEEDS - 1 + 2**32)
    assert _whole(None) is None


@pytest.mark.parametrize("has_lora", [False, True])
def test_tunix_trains_by_grpo(llm: LLM, has_lora: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    """Two iterations on each batch, so the ratio is taken to the rollouts' own log-probabilities. In the end the
    server has the trainer's last weights."""
    from flax import nnx
    from tunix.rl import rl_cluster
    from tunix.rl.grpo import grpo_learner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from specserve.serve.tunix import SpecserveRollout

    folder = _folder(tmp_path / "model", "qwen3", 6)
    actor, reference = _model(folder, "qwen3"), _model(folder, "qwen3")
    if has_lora:
        actor = _with_lora(actor, rng)
    before = jax.tree.map(np.array, nnx.state(actor, nnx.LoRAParam if has_lora else nnx.Param))
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.sgd(1e-1), eval_every_n_steps=100, max_steps=4, metrics_logging_options=None
    )
    config = RolloutConfig(max_tokens_to_generate=12, max_prompt_length=16, temperature=1.0, kv_cache_size=64)
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=Letters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(
                (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), _mesh()
            ),
            rollout_engine=functools.partial(SpecserveRollout, llm=llm, lora_alpha=6.0),
            training_config=training,
            rollout_config=config,
        ),
    )
    learner = grpo_learner.GRPOLearner(
        cluster,
        grpo_learner.GRPOConfig(num_generations=4, num_iterations=2, beta=0.04),
        reward_fns=lambda prompts, completions, **_: [float(len(each)) for each in completions],
    )
    learner.train([{"prompts": np.array(PROMPTS[:2])}, {"prompts": np.array(PROMPTS[2:])}])
    trained = cluster.actor_trainer.model
    after = nnx.state(trained, nnx.LoRAParam if has_lora else nnx.Param)
    moves = jax.tree.leaves(jax.tree.map(lambda x, y: bool(np.any(np.asarray(x) != y)), after, before))
    assert sum(moves) > len(moves) / 2
    asked = cluster.rollout.generate(PROMPTS, RolloutConfig(temperature=0.0, max_tokens_to_generate=16))
    prompts = jnp.array(asked.left_padded_prompt_tokens)
    completions = jnp.array([np.pad(each, (0, 16 - len(each))) for each in asked.tokens])
    _check_logps(cluster.rollout.get_per_token_logps(prompts, completions), trained, prompts, completions)


def test_what_cannot_hold_is_refused(llm: LLM, tmp_path: Path, rng: np.random.Generator) -> None:
    from flax import nnx

    from specserve.serve.tunix import SpecserveRollout

    model = _model(_folder(tmp_path / "model", "qwen3", 6), "qwen3")
    rollout, config = _rollout(llm, model)
    version = llm.generate([1], SamplingParams(max_tokens=1))[0].outputs[0].weight_versions
    changed = type(config)(**vars(config) | {"temperature": 0.9, "tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="tensor_parallel_size: leave it out"):
        SpecserveRollout(model, Letters(), _mesh(), changed, llm=llm)
    for other in ({"temperature": 0.9}, {"top_p": 0.3}, {"top_k": 1}):
        with pytest.raises(ConfigError, match="and log-probabilities are of the target's own"):
            rollout.generate(PROMPTS, type(config)(**vars(config) | other))
    long = type(config)(**vars(config) | {"max_tokens_to_generate": 112})
    with pytest.raises(ConfigError, match="max_model_len 129, one more than both, and it has 128"):
        SpecserveRollout(model, Letters(), _mesh(), long, llm=llm)
    with pytest.raises(ConfigError, match="offload_to_cpu does not go with this"):
        rollout.update_params(nnx.State({}), (nnx.Param,))
    with pytest.raises(ConfigError, match="Linear: expected a model of Tunix"):
        _rollout(llm, nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match=r"lm_head\.w is missing"):
        _rollout(llm, _model(_folder(tmp_path / "llama", "tied llama", 6), "tied llama"))
    with pytest.raises(ConfigError, match="which Tunix's Qwen2 has not, is missing"):
        _rollout(llm, _model(_folder(tmp_path / "qwen2", "qwen2", 6), "qwen2"))
    with pytest.raises(ConfigError, match="give lora_alpha"):
        _rollout(llm, _with_lora(model, rng))
    broken = jax.tree.map(lambda x: x * np.float32(np.nan), nnx.state(model, nnx.Param))
    with pytest.raises(CheckpointError, match="infinite"):
        rollout.update_params(broken, (nnx.Param,))
    assert llm.generate([1], SamplingParams(max_tokens=1))[0].outputs[0].weight_versions == version
