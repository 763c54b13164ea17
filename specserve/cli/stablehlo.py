"""`specserve export --stablehlo`: the served step as programs that run without this package."""

import shlex
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.serve.launch import load_models
from specserve.serve.stablehlo import RUNNER, ExportSizes, export_step


def export_stablehlo(
    head: Path | None, output: Path, *, target: str, speculation: str, platforms: str, sizes: ExportSizes
) -> None:
    """Load target and head, write the folder, and say how to run what is in it. Raises ConfigError."""
    if speculation == "auto":
        raise ConfigError("--speculation auto: an exported step has one shape; give chain:3, tree:4x2x7, off, ...")
    tree = parse_speculation(speculation)
    models = load_models(target, str(head or ""), has_tokenizer=False)
    wanted = [name.strip() for name in platforms.split(",") if name.strip()]
    names = export_step(models, tree, sizes, wanted, output)
    Console(soft_wrap=True).print(
        f"{escape(str(output))}: {', '.join(names)} for {', '.join(wanted)}; next: "
        f"[bold]python {escape(shlex.quote(str(output / RUNNER)))} 5 6 7[/] (token ids)",
        highlight=False,
    )
