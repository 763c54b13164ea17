"""Presets are short names for targets, each with a hub id, the facts of its config.json and the head to train.

They are kept in targets/presets.json. `config` holds what decides shapes and arithmetic, under config.json's own keys.
`draft` holds the settings of the head where they are not the target's own. `mesh` names the devices of 80 GB that
training takes where one is too small. Sizes are computed from these facts, never stated.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.models.config import ModelConfig
from specserve.models.families.table import model_config
from specserve.models.params import num_params
from specserve.models.target import Layer, target_spec

PRESETS_FILE = Path(__file__).parent.parent / "targets" / "presets.json"
DRAFT_VOCAB_SIZE = 32_000  # of a recommended head, as the published ones have


@dataclass(frozen=True)
class TargetSize:
    """The number of a target's parameters, in all and for one token."""

    total: int
    active: int  # of these, what one token needs: all but experts that it is not sent to, and tables of last tokens

    @property
    def bf16_bytes(self) -> int:
        return 2 * self.total


@dataclass(frozen=True)
class HeadSize:
    """The sizes that decide what a draft head costs."""

    d_model: int
    d_ff: int
    vocab_size: int  # of the draft


@dataclass(frozen=True)
class Preset:
    """A target that can be named by a short name."""

    name: str
    hub_id: str
    facts: Mapping[str, Any]  # of its config.json
    draft: Mapping[str, int]  # `draft` settings of a training run, where they are not the target's own
    mesh: str = ""  # to train on, see `mesh.make_mesh`; empty: one device

    def config(self) -> ModelConfig:
        return model_config(self.facts, dtype="bfloat16", where=f"preset {self.name}")

    def head_size(self) -> HeadSize:
        """The size of the head that the preset's recipe trains."""
        config = self.config()
        d_ff = self.draft.get("d_ff", config.d_ff)
        return HeadSize(config.d_model, d_ff, min(config.vocab_size, DRAFT_VOCAB_SIZE))


def target_size(config: ModelConfig) -> TargetSize:
    """Count the target's parameters from their shapes; nothing is allocated."""
    spec = target_spec(config)
    top_k = config.experts and config.experts.top_k
    tables = [
        layer.hashed.table.shape for layer in spec.layers if isinstance(layer, Layer) and layer.hashed is not None
    ]
    return TargetSize(num_params(spec), num_params(spec, top_k) - sum(map(math.prod, tables)))


def _read(file: Path) -> dict[str, Preset]:
    raw = json.loads(file.read_text(encoding="utf-8"))
    return {
        name: Preset(name, row["hub_id"], row["config"], row.get("draft", {}), row.get("mesh", ""))
        for name, row in raw.items()
    }


PRESETS = _read(PRESETS_FILE)
