"""Steps that are compiled for devices that are not here: what XLA's dump of a GPU program says, the time that follows,
and what cannot be compiled. The compilers themselves are asked in tests/aot."""

import importlib.util
import json

import pytest
from compiled import collectives
from typer.testing import CliRunner

from specserve.cli.main import app
from specserve.devices import parse_devices
from specserve.errors import ConfigError
from specserve.plan import compiled
from specserve.plan.ahead import Counted, read_thunks
from specserve.plan.compiled import CompiledStep, compile_steps
from specserve.plan.hlo import Program
from specserve.plan.serving import ServePlan, make_serve_plan
from specserve.plan.settings import PlanServeRun

DUMP = """000: kCommandBuffer [source | sink]
    001: kCopy         [source       | next=006 (5)] kCopy
    006: kWhile        [prev=005 (1) | sink        ]
condition:
        002: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1]
      body:
        003: kCustomKernel [source | sink] gemm_fusion_dot grid: [2048, 1, 1]
        009: kConditional  [prev=090 (1)  | next=477 (1) ]
          false_branch:
            004: kCustomKernel [source | sink] loop_add_fusion grid: [2000, 1, 1]
            007: kConditional  [prev=097 (2) | next=104 (1) ]
              false_branch:
              true_branch:
                005: kCopy [source | sink] kCopy
          true_branch:
            008: kCopy [source | sink] kCopy
            010: kCopy [source | sink] kCopy
    011: kCustomKernel [source | sink] argmax grid: [1, 1, 1]
012: kConditional [source | sink]
  false_branch:
  true_branch:
    013: kCopy [source | sink] kCopy
"""

# weights of 2 MB, on a chip's own memory where the layout says S(1)
HLO = """HloModule jit__steps, is_scheduled=true

%gathered (p.0: bf16[1000,1000], p.1: s32[4]) -> bf16[4,1000] {
  %p.0 = bf16[1000,1000]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = s32[4]{0:T(128)} parameter(1)
  ROOT %gather.1 = bf16[4,1000]{1,0:T(8,128)(2,1)} gather(%p.0, %p.1), offset_dims={1}
}

%best (q.0: f32[4,1000]) -> s32[4] {
  %q.0 = f32[4,1000]{1,0:T(8,128)} parameter(0)
  ROOT %reduce.1 = s32[4]{0:T(128)} reduce(%q.0), dimensions={1}
}

%greedy (g.0: f32[4,1000]) -> s32[4] {
  %g.0 = f32[4,1000]{1,0:T(8,128)} parameter(0)
  ROOT %argmax.1 = s32[4]{0:T(128)S(1)} fusion(%g.0), kind=kLoop, calls=%best
}

%sampled (s.0: f32[4,1000]) -> s32[4] {
  %s.0 = f32[4,1000]{1,0:T(8,128)} parameter(0)
  %all-gather.7 = f32[4,8000]{1,0:T(8,128)} all-gather(%s.0), dimensions={1}
  ROOT %draw.1 = s32[4]{0:T(128)S(1)} fusion(%all-gather.7), kind=kLoop, calls=%best
}

%body (b.0: (bf16[1000,1000], f32[4,1000])) -> (bf16[1000,1000], f32[4,1000]) {
  %b.0 = (bf16[1000,1000]{1,0}, f32[4,1000]{1,0:T(8,128)}) parameter(0)
  %weights = bf16[1000,1000]{1,0} get-tuple-element(%b.0), index=0
  %logits = f32[4,1000]{1,0:T(8,128)} get-tuple-element(%b.0), index=1
  %copy-start.1 = (bf16[1000,1000]{1,0:S(1)}, bf16[1000,1000]{1,0}, u32[]{:S(2)}) copy-start(%weights)
  %copy-done.1 = bf16[1000,1000]{1,0:S(1)} copy-done(%copy-start.1)
  %product = f32[4,1000]{1,0:T(8,128)S(1)} convolution(%copy-done.1, %copy-done.1), dim_labels=bf_io->bf
  %all-reduce.1 = f32[4,1000]{1,0:T(8,128)S(1)} all-reduce(%product), to_apply=%greedy
  %pages = bf16[1000,1000]{1,0} custom-call(%weights), custom_call_target="tpu_custom_call"
  %drawn = s32[4]{0:T(128)S(1)} conditional(%flag, %logits, %logits), branch_computations={%greedy, %sampled}
  ROOT %next = (bf16[1000,1000]{1,0}, f32[4,1000]{1,0:T(8,128)}) tuple(%weights, %logits)
}

ENTRY %main (a.0: bf16[1000,1000], a.1: s32[4]) -> f32[4,1000] {
  %a.0 = bf16[1000,1000]{1,0} parameter(0)
  %a.1 = s32[4]{0:T(128)S(1)} parameter(1)
  %rows = bf16[4,1000]{1,0:T(8,128)(2,1)S(1)} fusion(%a.0, %a.1), kind=kLoop, calls=%gathered
  %copy.1 = bf16[1000,1000]{0,1} copy(%a.0)
  %loop = (bf16[1000,1000]{1,0}, f32[4,1000]{1,0:T(8,128)}) while(%a.0), condition=%greedy, body=%body
  ROOT %out = f32[4,1000]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


@pytest.fixture(scope="module")
def plan() -> ServePlan:
    return make_serve_plan(PlanServeRun(target="qwen3-8b", devices="h100-1", prompt=600, answer=200))


def test_launches_are_those_of_the_cheapest_branches() -> None:
    """A copy, the loop with its condition and one of two branches in its body, and the kernel behind it."""
    thunks = read_thunks(DUMP)
    assert [thunk.kind for thunk in thunks] == ["CommandBuffer", "Conditional"]
    assert [thunk.launches for thunk in thunks] == [5, 0]


def test_moved_is_what_crosses_the_border_of_the_large_memory() -> None:
    """Four rows of a table, a copy, and in the loop's body once: a matrix fetched ahead, which is read on the chip, and
    the logits of the branch that moves least. What a kernel is given does not count."""
    rows, copy, fetched, logits = 4 * 2000, 2 * 2_000_000, 2_000_000, 4 * 4000
    assert Program(HLO).moved_bytes() == rows + copy + fetched + logits


def test_what_devices_send_is_that_of_the_branch_that_sends_nothing() -> None:
    assert collectives(HLO) == {"f32[4,1000]": 4 * 4000}


def test_a_step_takes_its_bytes_and_its_launches() -> None:
    (h100, _), (v6e, _) = (parse_devices(name) for name in ("h100-1", "tpu-v6e-1"))
    on_gpu = CompiledStep("off", 8, 3.35e9, 0, Counted(0, 0, 0, 0, "", launches=500), h100)
    assert on_gpu.seconds == pytest.approx(1e-3 + 500 * compiled.LAUNCH_SECONDS)
    on_tpu = CompiledStep("off", 8, 1.64e9, 0.4e9, Counted(0, 0, 0, 2_880_000_000, ""), v6e)
    assert (on_tpu.bound, on_tpu.seconds) == pytest.approx((1e-3, 2e-3))
    assert on_tpu.to_json()["of_the_bound"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "pip install jax-cuda13-plugin jax-cuda13-pjrt"),
        ({"devices": "tpu-v6e-1"}, "pip install libtpu"),
        ({"devices": "a100-1"}, "cannot be compiled here; those of up to 8 h100"),
        ({"quantization": "int8"}, "leave out --quantization int8"),
    ],
)
def test_what_cannot_be_compiled_is_one_line(
    changes: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    fields = {"target": "qwen3-8b", "devices": "h100-1", "prompt": 600, "answer": 200, **changes}
    with pytest.raises(ConfigError, match=said):
        compile_steps(make_serve_plan(PlanServeRun(**fields)))


def test_the_command_prints_what_was_counted(plan: ServePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        CompiledStep(way, batch, 1.6e10, 0, Counted(10**10, 10**9, 4 * 10**7, 0, "", 820, 1), plan.order.device)
        for way in ("off", "chain:3")
        for batch in (8, 32)
    ]
    monkeypatch.setattr("specserve.cli.plan.compile_steps", lambda _plan: steps)
    line = ["plan", "serve", "--target", "qwen3-8b", "--devices", "h100-1", "--prompt", "600", "--answer", "200"]
    shown = CliRunner().invoke(app, [*line, "--compile"], env={"COLUMNS": "120"}).output
    assert "Steps as XLA compiles them" in shown
    assert "820" in shown
    found = json.loads(CliRunner().invoke(app, [*line, "--compile", "--json"]).output)
    assert [(row["way"], row["batch"], row["launches"]) for row in found["compiled"]] == [
        ("off", 8, 820),
        ("off", 32, 820),
        ("chain:3", 8, 820),
        ("chain:3", 32, 820),
    ]
    assert "compiled" not in json.loads(CliRunner().invoke(app, [*line, "--json"]).output)
