"""Rollouts of Tunix's trainers by an `LLM`: a class that Tunix takes as its rollout engine.

Tunix (`google-tunix`) is no dependency of this package, and nothing else imports this file.
"""

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx  # pyright: ignore[reportMissingImports]
from tunix.generate.utils import next_power_of_2, pad_to_length  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]
from tunix.utils.torch_utils import torch_key_to_jax_key  # pyright: ignore[reportMissingImports]

from specserve.checkpoints.nnx import is_pair, target_params
from specserve.errors import CapacityError, ConfigError
from specserve.models.target import target_spec
from specserve.serve.llm import LLM
from specserve.serve.requests.completion import CompletionOutput
from specserve.serve.requests.request import SamplingParams

# Tunix's settings of what an engine is, which here are those of the LLM
_OF_ENGINES = (
    "data_type",
    "rollout_mapping_config",
    "tensor_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
)

MOST_SEEDS = 2**62  # half of those that a request may have: answer i is drawn with the seed + i


class SpecserveRollout(base_rollout.BaseRollout):
    """Tunix's rollout worker around an `LLM`, which speculates. Give `functools.partial(SpecserveRollout, llm=llm)` as
    `ClusterConfig.rollout_engine`.

    The LLM serves the same model as the trainer's, from a folder of a checkpoint; from the start on it has the
    trainer's weights. Its own mesh is where rollouts are made. `lora_alpha` is the `alpha` of Qwix's LoRA, which the
    weights do not hold. Raises ConfigError where the trainer's model is not one of Tunix's with a mapping of Hugging
    Face's names (Llama, Qwen), is another one than the LLM's, or a setting cannot hold.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,  # Tunix's TokenizerAdapter
        mesh: jax.sharding.Mesh,  # noqa: ARG002  of the trainer's model; the LLM has its own
        rollout_config: base_rollout.RolloutConfig,
        *,
        llm: LLM,
        lora_alpha: float | None = None,
    ) -> None:
        default = base_rollout.RolloutConfig()
        if given := [name for name in _OF_ENGINES if getattr(rollout_config, name) != getattr(default, name)]:
            raise ConfigError(f"RolloutConfig: {', '.join(given)}: leave it out, and give the LLM its own settings")
        needed = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate + 1
        if needed > llm.engine.max_model_len:
            raise ConfigError(
                f"RolloutConfig: max_prompt_length and max_tokens_to_generate need an LLM of max_model_len {needed}, "
                f"one more than both, and it has {llm.engine.max_model_len}"
            )
        self._actor, self._tokenizer, self._config, self._llm = rollout_actor, tokenizer, rollout_config, llm
        self._path_of, self._lora_alpha = _path_of(rollout_actor), lora_alpha
        self.update_params(nnx.state(rollout_actor))

    def generate(self, prompts: list[str], rollout_config: base_rollout.RolloutConfig) -> base_rollout.RolloutOutput:
        """Answer prompts. Tokens are NumPy arrays [length] with the one that ended the answer, and log-probabilities,
        where they are asked for, float32 arrays of as many. Prompts are padded to `max_prompt_length`, or to the next
        power of 2 where one is longer. Answer i is drawn with `seed` + i. Raises ConfigError as
        `get_per_token_logps` does, RequestError where a prompt does not fit, and CapacityError where an answer
        fails."""
        config = rollout_config
        if config.return_logprobs:
            _check_temperature(config)
        token_ids = [self._encode(prompt) for prompt in prompts]
        eos_ids = [*(config.eos_tokens or [self.eos_id()])]
        seed = _whole(config.seed)
        params = [
            SamplingParams(
                max_tokens=config.max_tokens_to_generate,
                temperature=config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=config.top_k or 0,
                seed=None if seed is None else seed + i,
                stop_token_ids=eos_ids,
                ignore_eos=True,  # an EOS of the checkpoint's that the trainer does not know ends nothing
                logprobs=0 if config.return_logprobs else None,
            )
            for i in range(len(prompts))
        ]
        answers = self._answer(token_ids, params)
        longest = max(map(len, token_ids))
        width = config.max_prompt_length if longest <= config.max_prompt_length else next_power_of_2(longest)
        padded = [pad_to_length(np.array(ids, np.int32), width, self.pad_id(), left=True) for ids in token_ids]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(_without_end(answer.token_ids, eos_ids)) for answer in answers],
            logits=None,
            tokens=[np.array(answer.token_ids, np.int32) for answer in answers],
            left_padded_prompt_tokens=np.stack(padded),
            logprobs=[_logprobs(answer.logprobs) for answer in answers] if config.return_logprobs else None,
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Return the log-probabilities of answers [batch, length] behind prompts that are padded on the left, by the
        weights of the last update: float32 [batch, length], 0 where an answer is padded. They are those that
        `generate` returns, of the target's own distribution. Raises ConfigError where rollouts are sampled from
        another one."""
        _check_temperature(self._config)
        asked, places = [], []
        for prompt, answer in zip(np.asarray(prompt_tokens), np.asarray(completion_tokens), strict=True):
            start = int(np.argmax(prompt != self.pad_id()))
            length = int(np.max(np.flatnonzero(answer != self.pad_id()), initial=-1)) + 1
            asked.append([*prompt[start:].tolist(), *answer[:length].tolist()])
            places.append((len(prompt) - start, length))
        scored = self._answer(asked, [SamplingParams(max_tokens=1, prompt_logprobs=0)] * len(asked))
        found = np.zeros(completion_tokens.shape, np.float32)
        for row, (start, length), answer in zip(found, places, scored, strict=True):
            row[:length] = _logprobs([each.logprobs for each in answer.prompt[start:]])
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:  # noqa: ARG002
        """Answer by other weights from now on: the trainer's state, or its LoRA alone, which is merged into the
        trainer's other weights. Raises ConfigError that names what is missing, unknown, of another shape or not a
        number; then nothing has changed."""
        state = _arrays(params)
        if not state:
            raise ConfigError("weights of the trainer: there are none; Tunix's offload_to_cpu does not go with this")
        if state and all(map(is_pair, state)):
            state = _arrays(nnx.state(self._actor)) | state
        spec = target_spec(self._llm.engine.runner.config.target.stored)
        with jax.transfer_guard("allow"):  # Tunix forbids copies between host and device here, on a CPU
            self._llm.update_weights(target=target_params(state, spec, self._path_of, self._lora_alpha))

    def pad_id(self) -> int:
        """Return the token id that fills prompts and answers up."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Return the token id that ends an answer where the settings name none."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Return nothing: the LLM has weights of its own, so Tunix must bring them an update after each step."""

    def _encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt, as Tunix's samplers do: behind one token for its beginning."""
        begin = self._tokenizer.bos_id()
        return self._tokenizer.dedup_bos_ids([*([begin] if begin else []), *self._tokenizer.encode(prompt)])

    def _answer(self, token_ids: list[list[int]], params: list[SamplingParams]) -> list[CompletionOutput]:
        answers = [each.outputs[0] for each in self._llm.generate(token_ids, params, progress=False)]
        for answer in answers:
            if answer.finish_reason not in ("stop", "length"):
                raise CapacityError(f"a rollout has failed: {answer.error or answer.finish_reason}")
        return answers


def _arrays(state: Any) -> dict[str, jax.Array]:
    """Return the parameters of a state by their paths: `layers.0.attn.q_proj.w`."""
    kept = nnx.to_pure_dict(nnx.filter_state(state, nnx.Param))  # LoRA's are a kind of these
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(kept)
    }


def _path_of(model: nnx.Module) -> Callable[[str], str]:
    """Return a function from a checkpoint's names to paths in a model of Tunix, by the mapping that Tunix loads
    checkpoints with. Raises ConfigError where it has none."""
    bases = [each.__module__ for each in type(model).__mro__ if each.__module__.startswith("tunix.models.")]
    try:  # Qwix gives a model with LoRA a class of its own
        names = importlib.import_module(f"{bases[0].rpartition('.')[0]}.params")._get_key_and_transform_mapping
    except (IndexError, ImportError, AttributeError):
        raise ConfigError(
            f"{type(model).__name__}: expected a model of Tunix with a mapping of Hugging Face's names, such as Llama3 "
            "or Qwen3"
        ) from None
    mapping = names(model.config)

    def path_of(name: str) -> str:
        try:
            path, _ = torch_key_to_jax_key(mapping, name)
        except ValueError:
            return f"{name}, which Tunix's {type(model).__name__} has not,"
        return re.sub(r"\.experts\.0\.(\w+)\.kernel$", r".\1", path)  # those of a layer are one array

    return path_of


def _check_temperature(config: base_rollout.RolloutConfig) -> None:
    """Raise ConfigError where log-probabilities are not of what answers are drawn from."""
    is_cut = config.top_p not in (None, 1.0) or (config.top_k or -1) > 0
    if config.temperature not in (0, 1) or is_cut:
        raise ConfigError(
            f"RolloutConfig: temperature is {config.temperature}, top_p {config.top_p} and top_k {config.top_k}, and "
            "log-probabilities are of the target's own distribution: sample at temperature 1 without the others, or "
            "ask for none"
        )


def _whole(seed: Any) -> int | None:
    """Return a seed, which may be a key of JAX, as a whole number that leaves room for those of other answers. A key is
    read as words of 32 bits, the highest first, so that the key of a seed is that seed."""
    if seed is None:
        return None
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = map(int, np.ravel(seed))
    return functools.reduce(lambda number, word: number << 32 | word, words) % MOST_SEEDS


def _without_end(token_ids: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    return [*token_ids[: -1 if token_ids and token_ids[-1] in eos_ids else None]]


def _logprobs(found: Any) -> np.ndarray:  # [token] float32
    return np.array([each.logprob for each in found], np.float32)
