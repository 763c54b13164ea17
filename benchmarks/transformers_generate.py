"""`specserve bench engine` with transformers' own `generate` as further arms: one stream, greedy, plain and with prompt
lookup. Its options are those of `specserve bench engine`; with more clients or a temperature it measures ours alone.

Run from the checkout: `python benchmarks/transformers_generate.py --concurrency 1 --temperature 0`. Where there is no
torch, the first run makes an environment that has it, and the benchmark runs there with the packages of this one.
"""

import importlib.util
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from environments import environment

from specserve.cli.bench import BenchRun, engine
from specserve.cli.options import command
from specserve.eval.bench.comparison import TimedAnswer
from specserve.host import cache_folder
from specserve.mesh import default_dtype
from specserve.serve.engine.interface import EngineStats
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.acceptance import Acceptance


class _Streamer:
    """Takes down tokens as transformers makes them; the prompt comes first."""

    def __init__(self, answer: TimedAnswer) -> None:
        self._answer, self._is_prompt = answer, True

    def put(self, value: Any) -> None:
        if not self._is_prompt:
            self._answer.take(value.reshape(-1).tolist())
        self._is_prompt = False

    def end(self) -> None:
        pass


class TransformersArm:
    """An arm that decodes with a model in torch.

    `lookup` is the number of tokens that prompt lookup proposes; 0 is plain decoding.
    """

    def __init__(self, model: Any, lookup: int = 0) -> None:
        self._model, self._lookup = model, lookup

    def can_run(self, temperature: float, concurrency: int, /) -> bool:
        return temperature == 0 and concurrency == 1

    def forget(self) -> None:
        pass  # it keeps nothing

    def stats(self) -> EngineStats:
        return EngineStats()

    def ask(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], concurrency: int
    ) -> tuple[list[TimedAnswer], float]:
        import torch  # pyright: ignore[reportMissingImports]

        assert self.can_run(params[0].temperature, concurrency)
        begin = time.perf_counter()
        answers = []
        for prompt, own in zip(prompts, params, strict=True):
            answer = TimedAnswer(begin=time.perf_counter())
            token_ids = torch.tensor([list(prompt)])
            options: dict[str, Any] = {"prompt_lookup_num_tokens": self._lookup} if self._lookup else {}
            self._model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                max_new_tokens=own.max_tokens,
                do_sample=False,
                streamer=_Streamer(answer),
                **options,
            )
            answer.acceptance = _acceptance(answer) if self._lookup else Acceptance(len(answer.token_ids) - 1)
            answers.append(answer)
        return answers, time.perf_counter() - begin


def _acceptance(answer: TimedAnswer) -> Acceptance:
    """Compute the acceptance from the number of forwards of an answer: the depth at which each stopped is not known."""
    num_steps = len(answer.arrivals) - 1
    return Acceptance(num_steps, accepted_per_depth=(len(answer.token_ids) - 1 - num_steps,))


def transformers_arms(folder: Path, lookup: int = 3) -> dict[str, TransformersArm]:
    """Load a folder's model for two arms, plain and with prompt lookup."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, default_dtype()))
    return {"transformers": TransformersArm(model), f"transformers, lookup {lookup}": TransformersArm(model, lookup)}


app = typer.Typer()


@app.command()
@command(BenchRun)
def main(run: BenchRun) -> None:
    """Measure what `specserve bench engine` does, and transformers' generate beside it."""
    engine(run, transformers_arms)


def run_beside_torch() -> None:
    """Run this file again in an environment that has torch, with the packages of this one."""
    python = environment(cache_folder() / "benchmarks" / "transformers", ("torch==2.13.0",))
    paths = [str(Path(__file__).resolve().parent.parent), sysconfig.get_path("purelib")]
    os.execve(python, [str(python), *sys.argv], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None and not {"-h", "--help"} & {*sys.argv}:
        run_beside_torch()
    app()
