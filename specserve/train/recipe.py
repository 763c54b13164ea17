"""The settings that a named target is trained with: a starting point for `specserve train --config`."""

from pathlib import Path
from typing import Any

import yaml

from specserve.errors import ConfigError
from specserve.models.presets import DRAFT_VOCAB_SIZE, PRESETS

FOLDER = Path(__file__).parent.parent / "targets" / "recipes"  # of runs that do not follow the one below


def recipe(name: str) -> str:
    """A target's recipe as YAML. Raises ConfigError for a name that has none."""
    own = FOLDER / f"{name}.yaml"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    if name not in PRESETS:
        raise ConfigError(f"{name!r} has no recipe; `specserve targets` lists the names that have one")
    return "# on the target's own answers, made by `specserve data regenerate`\n" + yaml.safe_dump(
        _settings(name), sort_keys=False
    )


def _settings(name: str) -> dict[str, Any]:
    """As the published heads were trained: rows of 2,048 tokens, a rollout of 7, a peak learning rate of 1e-4."""
    preset = PRESETS[name]
    return {
        "target": name,
        "output": f"heads/{name}",
        **({"mesh": preset.mesh} if preset.mesh else {}),
        "data": {"source": [f"data/{name}.jsonl"]},
        "draft": {"vocab_size": DRAFT_VOCAB_SIZE, **preset.draft},
        "train": {
            "max_steps": 40_000,
            "max_minutes": 0,
            "seq_len": 2048,
            "remat": True,
            "rollout": 7,
            "lr": 1e-4,
            "eval_every": 2000,
            "save_every": 2000,
        },
    }
