"""The LoRA adapters that the settings of a server name, and the room that they have."""

import dataclasses
from pathlib import Path

from specserve.checkpoints.lora import adapter_fingerprint, read_adapter
from specserve.errors import CheckpointError, ConfigError, first_line
from specserve.models.adapters import Adapter, check_adapter
from specserve.models.config import ModelConfig
from specserve.serve.engine.adapters import ServedLoras
from specserve.serve.settings import ServeRun

DEFAULT_RANK = 16  # as vLLM's


def read_loras(config: ModelConfig, run: ServeRun) -> tuple[ServedLoras, ServeRun]:
    """Read the adapters of a target with this config, and return the settings with as much room as was asked for, or as
    these need. Raises ConfigError or CheckpointError."""
    folders: dict[str, str] = {}
    for each in run.lora:
        name, _, folder = each.partition("=")
        if not (name and folder):
            raise ConfigError(f"--lora {each!r}: expected NAME=FOLDER")
        if name in folders:
            raise ConfigError(f"--lora: two adapters are named {name!r}; give each a name of its own")
        folders[name] = folder
    if run.max_loras and len(folders) > run.max_loras:
        raise ConfigError(f"--max-loras {run.max_loras}: --lora names {len(folders)} adapters; raise it")
    adapters = {name: _read(folder) for name, folder in folders.items()}
    ranks = [len(pair.a) for adapter in adapters.values() for pair in adapter.values()]
    max_rank = run.max_lora_rank or max(ranks, default=DEFAULT_RANK)
    for name, adapter in adapters.items():
        check_adapter(config, adapter, max_rank, folders[name])

    def read(folder: str) -> Adapter:
        adapter = _read(folder)
        check_adapter(config, adapter, max_rank, folder)
        return adapter

    run = dataclasses.replace(run, max_loras=run.max_loras or len(folders), max_lora_rank=max_rank)
    return ServedLoras(folders, list(adapters.values()), read, _fingerprint), run


def _fingerprint(folder: str) -> str:
    return adapter_fingerprint(Path(folder).expanduser())


def _read(folder: str) -> Adapter:
    try:
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise ConfigError(f"{folder[:200]}: no such folder on the server; give the PEFT folder of a LoRA adapter")
        return read_adapter(path)
    except (OSError, RuntimeError) as error:  # also of a path that none can be, or the home of nobody
        raise CheckpointError(f"{folder[:200]}: the adapter cannot be read ({first_line(error)})") from error
