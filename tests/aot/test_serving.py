"""Whole programs of a server, compiled for an H100 and for TPUs that are not here (`-m cuda_aot`, `-m libtpu`;
`plan.ahead` says what to install). The targets are first layers, unless a case names more; the head is a whole one."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compiled import Case, collectives, dumped_to, planned, spilled

GPU, TPU = pytest.mark.cuda_aot, pytest.mark.libtpu
STEPS = ("off", "chain:3", "tree:5x4x16")
SHORT = 4096  # numbers of a row that XLA sorts by itself on any GPU


def on(devices: str, *ways: str, **others: Any) -> list[Any]:
    mark, cases = GPU if devices == "h100" else TPU, [Case(devices, way, **others) for way in ways]
    return [pytest.param(case, marks=mark, id=str(case)) for case in cases]


# SmolLM2's heads fill half of a TPU's register
ALONE = [
    *on("h100", *STEPS, "prefill", "mixed off", "mixed chain:3"),
    *on("h100", "prefill", "mixed chain:3", layers=36),
    *on("v5e:2x2", "off"),
    *on("v6e:2x2", *STEPS, "prefill", "mixed chain:3"),
    *on("v6e:2x2", "chain:3", preset="smollm2-135m"),
    *on("tpu7x:2x2x1", "chain:3"),
]
SHARED = [
    *on("h100", "chain:3", tensor=2),
    *on("h100", "off", tensor=4),
    *on("h100", *STEPS[:2], "prefill", "mixed chain:3", tensor=8),
    *on("v6e:2x2", "off", tensor=2),
    *on("v6e:2x2", "chain:3", tensor=4),
    *on("v5e:2x4", "chain:3", "prefill", tensor=8),
    *on("tpu7x:2x2x1", "off", tensor=8),
]


def those(cases: list[Any], condition: Callable[[Case], bool]) -> list[Any]:
    return [param for param in cases if condition(param.values[0])]


@pytest.mark.parametrize("case", [*ALONE, *SHARED])
def test_no_array_of_pages_is_copied_or_fetched_as_a_whole(case: Case) -> None:
    """Neither by the kernels that write and read pages, nor around the loop over a burst's steps."""
    assert not case.copies_of_pages()


@pytest.mark.parametrize("case", [*ALONE, *SHARED])
def test_the_state_is_written_in_place_and_memory_is_what_a_server_sets_aside(case: Case) -> None:
    """Or a server would compile its programs twice, since it finds only then that its cache is too large."""
    found = case.compiled()
    print(f"{case}: {found.temporary_bytes:,} bytes beside its arguments")
    assert found.aliased_bytes >= case.state_bytes
    assert found.temporary_bytes <= case.set_aside


@pytest.mark.parametrize("case", SHARED)
def test_devices_send_one_another_no_more_than_hidden_states(case: Case) -> None:
    """Of all rows, of which XLA joins two arrays to one; the logits of as many rows would be far more."""
    sent = collectives(case.compiled().text)
    assert sent
    assert max(sent.values()) <= 2 * 2 * case.rows * case.runner.config.target.d_model, sent


def is_ordered(case: Case) -> bool:
    """Steps on TPUs, but those of SmolLM2-135M: its LM head is the embedding, with 576 channels that fill no whole
    registers, and XLA copies it for the head (docs/log)."""
    return case.devices != "h100" and case.way in STEPS and case.preset != "smollm2-135m"


@pytest.mark.parametrize("case", those([*ALONE, *SHARED], is_ordered))
def test_no_matrix_is_copied_into_another_order(case: Case) -> None:
    assert not case.copies_of_matrices()


@pytest.mark.parametrize("case", those(ALONE, lambda case: case.devices == "h100"))
def test_a_program_is_one_graph(case: Case) -> None:
    """The host starts it and goes on: no loop or choice within it waits for the host. Over a mesh it is several: unless
    its flags say otherwise, XLA leaves what devices send one another outside graphs. Long rows are not sorted: on a GPU
    that is there XLA calls a library for that, which no graph holds."""
    assert case.compiled().parts == 1
    assert max(case.sorted_sizes(), default=0) <= SHORT


@pytest.mark.cuda_aot
@pytest.mark.parametrize(
    ("way", "most"), [("off", 17), ("chain:3", 17), ("tree:5x4x16", 17), ("prefill", 20), ("mixed chain:3", 25)]
)
def test_a_layer_launches_few_kernels(way: str, most: int) -> None:
    """Without autotuning, which may choose products of other parts."""
    shallow, deep = (Case("h100", way, layers=layers).compiled().launches for layers in (2, 4))
    print(f"{way}: {(deep - shallow) / 2} kernels a layer")
    assert (deep - shallow) / 2 <= most


@pytest.mark.parametrize(
    "four",
    [
        *on("h100", "off", bits=4),
        *on("h100", "off", bits=4, tensor=2),
        *on("h100", "off", "prefill", bits=4, preset="qwen3-30b-a3b"),
        *on("h100", "off", bits=4, preset="qwen3-30b-a3b", tensor=4),
        *on("v5e:2x2", "off", bits=4),
        *on("v6e:2x2", "off", bits=4),
        *on("v6e:2x2", "off", bits=4, tensor=4),
        *on("v6e:2x2", "off", "prefill", bits=4, preset="qwen3-30b-a3b"),
        *on("v6e:2x2", "off", bits=4, preset="qwen3-30b-a3b", tensor=4),
    ],
)
def test_matrices_of_4_bits_are_read_as_they_are(four: Case) -> None:
    """A program takes the bytes of the numbers, and of a scale and an offset of 16 bits for 32 of them; no matrix of
    wider numbers is ever made, nor are those of all experts. On a GPU a step is one graph."""
    eight = dataclasses.replace(four, bits=8)
    # columns fill a TPU's registers: the 192 channels of an expert that each of four has take 256
    filled = 4 / 3 if four.preset == "qwen3-30b-a3b" and four.devices == "v6e:2x2" and four.tensor == 4 else 1
    assert four.layer_bytes <= (1 / 2 + 4 / 32 + 0.01) * filled * eight.layer_bytes
    found, other = four.compiled(), eight.compiled()
    if four.way == "off" and four.tensor == 1:
        assert found.parts == (1 if four.devices == "h100" else 0)
    assert found.argument_bytes + eight.layer_bytes - four.layer_bytes <= other.argument_bytes
    assert found.temporary_bytes <= four.set_aside
    assert not four.widened_matrices()


@pytest.mark.parametrize("case", those(ALONE, lambda case: "mixed" in case.way and case.layers == 2))
def test_a_step_and_a_prefill_in_one_program_read_the_weights_once(case: Case) -> None:
    """A GPU launches fewer kernels than for both apart; a TPU moves less by the weights of the layers."""
    assert case.program in set(case.runner.shapes.mixed_programs())
    apart = [dataclasses.replace(case, way=way).compiled() for way in (case.way.removeprefix("mixed "), "prefill")]
    found = case.compiled()
    assert found.launches <= 0.9 * sum(each.launches for each in apart)
    assert found.moved_bytes <= sum(each.moved_bytes for each in apart) - case.layer_bytes * (found.moved_bytes > 0)


@pytest.mark.cuda_aot
def test_no_kernel_spills_registers(tmp_path: Path) -> None:
    """Of a program that has both those of steps and those of prompts."""
    case = Case("h100", "mixed chain:3")
    options = {**case.described.options, **dumped_to(tmp_path)}
    with case.described.made_for():
        case.runner.call(case.program).lower().compile(options)
    found = spilled(tmp_path, case.described)
    assert len(found) > 2
    assert not any(found.values()), found


@pytest.mark.parametrize(
    ("devices", "arguments", "bound"),
    [
        pytest.param("h100-1", (), 0.75, marks=GPU),
        pytest.param("tpu-v6e-1", ("--speculation", "off"), 0.8, marks=TPU),
        pytest.param("tpu-v5e-8", ("--speculation", "off", "--mesh", "tensor=8"), 0.8, marks=TPU),
    ],
)
def test_the_whole_target_takes_the_memory_of_its_plan_and_reads_little_else(
    devices: str, arguments: tuple[str, ...], bound: float
) -> None:
    for step in planned(devices, *arguments):
        print(step)
        assert step["of_the_bound"] >= bound, step
