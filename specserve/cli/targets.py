"""`specserve targets`: which targets have a name here, and what they need."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specserve.checkpoints.source import BUNDLED, BUNDLED_FOLDER, BUNDLED_HEADS
from specserve.checkpoints.tensors import read_json
from specserve.errors import ConfigError
from specserve.interop.bundled import BUNDLED_HEAD
from specserve.models.config import ModelConfig
from specserve.models.families.table import model_config
from specserve.models.presets import PRESETS, HeadSize, target_size
from specserve.train.run.recipe import recipe


@dataclass(frozen=True)
class TargetRow:
    """A line of the list of targets. Sizes are in parameters and bytes."""

    name: str
    hub_id: str | None  # None: it is bundled
    family: str
    parameters: int
    active_parameters: int
    bf16_bytes: int
    head: HeadSize  # recommended, or bundled

    @property
    def origin(self) -> str:
        return self.hub_id or "bundled"

    @property
    def size(self) -> tuple[str, str]:
        """The number of parameters, and of those that a token needs where that is not all, as text."""
        is_sparse = self.active_parameters < self.parameters
        return short(self.parameters), f"{short(self.active_parameters)} active" if is_sparse else ""

    @property
    def memory(self) -> str:
        return short(self.bf16_bytes, " MB", " GB", " TB")

    @property
    def head_shape(self) -> tuple[str, str]:
        return f"{self.head.d_model} x {self.head.d_ff}", f"{self.head.vocab_size:,}"


def targets(
    name: Annotated[str, typer.Argument(help="Only this one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")] = False,
    has_recipe: Annotated[
        bool, typer.Option("--recipe", help="Print settings to train its head with, for `specserve train --config`.")
    ] = False,
) -> None:
    """Print a table or JSON of the targets, or the recipe of one. Raises ConfigError for an unknown name."""
    if has_recipe:
        if not name:
            raise ConfigError("--recipe: which target's? Give its name, as in `specserve targets qwen3-8b --recipe`")
        print(recipe(name), end="")
        return
    rows = [row for row in _rows() if name in ("", row.name)]
    if not rows:
        raise ConfigError(f"{name!r} is no target's name; `specserve targets` lists them")
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return

    console = Console()
    console.print(_table_in(console, rows))
    console.print(
        "head: d_model x d_ff and draft vocabulary, as `specserve targets NAME --recipe` trains it. "
        "Sizes follow from each config.json; memory is that of the weights alone.",
        style="dim",
        highlight=False,
    )


def _rows() -> list[TargetRow]:
    def row(name: str, hub_id: str | None, config: ModelConfig, head: HeadSize) -> TargetRow:
        size = target_size(config)
        return TargetRow(name, hub_id, config.family, size.total, size.active, size.bf16_bytes, head)

    bundled = model_config(read_json(BUNDLED_FOLDER / "config.json"), dtype="bfloat16")
    head = read_json(BUNDLED_HEADS[BUNDLED_HEAD] / "config.json")
    bundled_head = HeadSize(*(int(str(head[key])) for key in ("hidden_size", "intermediate_size", "draft_vocab_size")))
    presets = [row(preset.name, preset.hub_id, preset.config(), preset.head_size()) for preset in PRESETS.values()]
    return [row(BUNDLED, None, bundled, bundled_head), *presets]


def _table_in(console: Console, rows: Sequence[TargetRow]) -> Table:
    """The table that fits the console: a line for each target, or two, or three where an id is too long for that."""

    def excess(table: Table) -> int:
        return console.measure(table, options=console.options.update(max_width=1000)).maximum - console.width

    wide, longest = _wide_table(rows), max(len(row.origin) for row in rows)
    if excess(wide) <= 0:
        return wide
    return _narrow_table(rows, longest - max(excess(_narrow_table(rows, longest)), 0))


def _wide_table(rows: Sequence[TargetRow]) -> Table:
    table = _table("target", "from", "family", "parameters", "", "bf16", "head", "", right=(3, 4, 5, 6, 7))
    for row in rows:
        table.add_row(row.name, row.origin, row.family, *row.size, row.memory, *row.head_shape)
    return table


def _narrow_table(rows: Sequence[TargetRow], room: int) -> Table:
    """The table with two lines for each target. Ids of more than `room` characters are broken behind their owner."""
    table = _table("target, family\nfrom", "parameters", "bf16", "head", right=(1, 2, 3))
    for row in rows:
        origin = row.origin if len(row.origin) <= room else row.origin.replace("/", "/\n")
        name = f"[bold]{row.name}[/] {row.family}\n[dim]{origin}[/]"
        table.add_row(name, "\n".join(row.size), row.memory, "\n".join(row.head_shape))
    return table


def _table(*columns: str, right: Sequence[int]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold")
    return table


def short(value: float, million: str = "M", billion: str = "B", trillion: str = "T") -> str:
    """The value with three significant digits and a unit: 7.62e9 is "7.62B"."""
    scale, unit = next(
        (scale, unit)
        for scale, unit in ((1e12, trillion), (1e9, billion), (1e6, million))
        if value >= 0.9995 * scale or unit == million
    )
    return f"{value / scale:#.3g}".rstrip(".") + unit
