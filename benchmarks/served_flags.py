"""The flags of a benchmark that name what is served and what it is asked, and the end of one whose flags are wrong."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from environments import report
from over_http import BUNDLED, processor

from specserve.checkpoints.source import resolve_target
from specserve.serve.launch import find_names


def add_served(parser: argparse.ArgumentParser, *, has_questions: bool = True) -> None:
    """Add `--target` and `--draft`, and `--bench` where questions are asked."""
    parser.add_argument("--target", default="", help="as of `specserve serve`; empty: the draft's, or the bundled one")
    parser.add_argument("--draft", default="", help="as of `specserve serve`; empty: the one bundled for the target")
    if has_questions:
        parser.add_argument("--bench", help="the questions, as of `specserve eval`; pydoc for the bundled target")


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace, Path], Any]) -> int:
    """Parse the flags of `add_served` and measure, with the folder of the target. Returns the exit status: 2 where a
    flag names what is not there; stderr then has the reason."""
    given = parser.parse_args()

    def measured() -> None:
        source = resolve_target(find_names(given.target, given.draft)[0])
        if "bench" in given and not given.bench:
            if source.name != BUNDLED:
                parser.error(f"--target {source.name}: say what it is asked, such as --bench mt-bench:FILE")
            given.bench = BUNDLED
        measure(given, source.folder)

    return report(measured)


def flags_of(given: argparse.Namespace) -> list[str]:
    """Return the flags of `specserve serve` that name the same target and head."""
    named = {"--target": given.target, "--draft": given.draft}
    return [word for flag, name in named.items() if name for word in (flag, name)]


def device() -> str:
    """Name what JAX computes on: the accelerator, or the processor where there is none."""
    return processor() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind


def numbers(text: str) -> list[int]:
    """Read whole numbers with commas between them, for a flag of argparse."""
    found = text.split(",")
    if bad := [each for each in found if not each.isdecimal()]:
        raise argparse.ArgumentTypeError(f"{bad[0]!r} in {text!r}: expected whole numbers such as 1,4")
    return [int(each) for each in found]


def positive(text: str) -> int:
    """Read a whole number that is at least 1, for a flag of argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)
