"""What a step is made of on a GPU, without one: each attention layer is two kernels, each mixture of experts two,
and one writes the pages of all layers."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import tiny
from paging import kernel_calls, lower_for_cuda
from parity import RAWS

from specserve.drafters.speculation import drafter_for
from specserve.models.families.table import model_config
from specserve.models.params import init_params
from specserve.models.target import target_spec
from specserve.speculative import slot_state, step
from specserve.speculative.drafter import Weights
from specserve.speculative.slot_state import PromptChunks, SlotState, StepConfig
from specserve.speculative.tree import chain


@pytest.mark.parametrize("family", ["llama-llama3", "gpt-oss", "deepseek-v2-lite"])
def test_every_layer_calls_its_kernels(family: str) -> None:
    """Grouped heads, windows with sinks, and latents; a head of one layer attends twice in a chain of two tokens."""
    target = model_config(RAWS[family], dtype="bfloat16")
    params = jax.eval_shape(lambda: init_params(target_spec(target), jax.random.key(0), "bfloat16"))
    head, tree = tiny.random_head(target, seed=1, dtype="bfloat16"), chain(2)
    drafter = drafter_for([tree], head.drafter)
    config = StepConfig(target, drafter, max_depth=2)
    width = 8
    num_kernels = 1 + 2 * target.num_layers + 2 * sum(target.kind(i).has_experts for i in range(target.num_layers))

    def lower(function: Callable[..., object]) -> str:
        def run(params: object, draft: object, slots: jax.Array) -> object:
            weights = Weights(params, dataclasses.replace(head, params=draft).weights())
            state = slot_state.init_state(config, num_slots=2, num_pages=16, page_size=16, max_pages=width)
            return function(config, weights, state, slots)

        return lower_for_cuda(run, params, head.params, jax.ShapeDtypeStruct((2,), jnp.int32))

    assert kernel_calls(lower(functools.partial(step.decode, width=width))) == num_kernels

    def prefill(config: StepConfig, weights: Weights, state: SlotState, slots: jax.Array) -> object:
        chunks = PromptChunks(slots, jnp.ones(2, jnp.int32), jnp.ones(2, bool))
        return step.prefill(config, weights, state, chunks, chunk=16, width=width)

    # one over the pages and one over the chunk; the head writes pages of its own
    assert kernel_calls(lower(prefill)) == num_kernels + 1
    assert kernel_calls(lower(functools.partial(step.speculate, tree=tree, width=width))) == num_kernels + 2 * 2 + 1
