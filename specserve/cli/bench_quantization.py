"""`specserve bench quantization`: the loss by weights in few bits."""

import functools
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape

from specserve.checkpoints.tensors import write_json
from specserve.cli.progress import console
from specserve.drafters.speculation import parse_speculation
from specserve.eval.bench.comparison import AUTO
from specserve.eval.bench.quantization import load_quantized, measure_losses
from specserve.eval.report import loss_table
from specserve.eval.settings import QuantizationRun
from specserve.provenance import collect
from specserve.serve.progress import Bars


def quantization(run: QuantizationRun) -> None:
    """Have the target answer with its weights as floats and in each form of few bits, print a table of what changes,
    and write the report. Raises ConfigError, CheckpointError or DataError."""
    if run.speculation not in ("", AUTO):
        parse_speculation(run.speculation)  # a wrong one is reported before minutes of work
    with Bars() as progress:
        losses = measure_losses(run, functools.partial(load_quantized, run), on_progress=progress.reporter())
    positions = sum(losses[0].sizes)
    title = f"{run.bench}: {positions:,} positions of {len(losses[0].sizes)} answers; intervals of 95%"
    console.print(loss_table(losses, title))
    if run.output:
        facts = {"settings": asdict(run), "provenance": collect()}
        write_json(Path(run.output), {"losses": [loss.to_json() for loss in losses], **facts})
        console.print(f"report written to {escape(run.output)}")
