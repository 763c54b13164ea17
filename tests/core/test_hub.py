"""Where there is no hub, that is found out by one request, and what is in the caches serves."""

import socket
import sys
import threading
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from specserve import hub
from specserve.checkpoints.source import resolve_target
from specserve.errors import CheckpointError, DataError
from specserve.eval.prompts import load_questions

PROBE = hub._probe  # other tests do without it


class DeadHub:
    """Takes every connection, and hangs up."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.num_connections = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.num_connections += 1
            connection.close()


@pytest.fixture
def dead_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[DeadHub]:
    import datasets

    dead = DeadHub()
    monkeypatch.setattr(hub, "_probe", PROBE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    for module in (constants, sys.modules["datasets"].config):
        name = "ENDPOINT" if module is constants else "HF_ENDPOINT"
        monkeypatch.setattr(module, name, dead.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    yield dead
    dead.socket.close()


def test_a_dead_hub_is_asked_once_by_whoever_needs_it(dead_hub: DeadHub) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match=rf"^--bench gsm8k: .*{dead_hub.url} cannot be reached.*gsm8k:PATH$"):
            load_questions("gsm8k", 0)
        with pytest.raises(CheckpointError, match=rf"{dead_hub.url} cannot be reached.*--target models/Qwen3-8B$"):
            resolve_target("qwen3-8b")
    assert dead_hub.num_connections == 1


def test_offline_nothing_is_asked(dead_hub: DeadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.absence() == "HF_HUB_OFFLINE is set"
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        resolve_target("qwen3-8b")
    assert dead_hub.num_connections == 0
