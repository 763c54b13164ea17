"""A folder that one server alone may change."""

from pathlib import Path
from typing import Any

import pytest

from specserve.cli import serve as command
from specserve.errors import CheckpointError, ConfigError
from specserve.serve.settings import ServeRun


@pytest.mark.parametrize(
    ("option", "settings"),
    [("--update-folder", {"allow_update_weights": True, "update_folder": "FOLDER"}), ("--learn", {"learn": "FOLDER"})],
)
def test_a_second_server_of_a_folder_is_refused_before_anything_is_loaded(
    option: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first one loads already, and by whatever way it names the folder; it takes nothing from there. Once the
    first has ended, however it does, the folder is free."""
    folder, link = tmp_path / "own", tmp_path / "link"
    link.symlink_to(folder)
    num_loads = 0

    def run(path: Path) -> ServeRun:
        options: dict[str, Any] = {name: str(path) if value == "FOLDER" else value for name, value in settings.items()}
        return ServeRun(port=0, api_key="k", **options)

    def load(*_given: Any, **_options: Any) -> None:
        nonlocal num_loads
        num_loads += 1
        sent = folder / "sent-1.safetensors"
        sent.write_text("what a client sends to the first")
        for path in (folder, link):
            words = f"{option} {path}: another server has this folder; end that one, or give another"
            with pytest.raises(ConfigError, match=f"^{words}$"):
                command.serve(run(path))
        assert sent.exists()
        raise CheckpointError("no model")

    monkeypatch.setattr(command, "load_models", load)
    monkeypatch.setattr(command, "bind_listener", lambda *_given: None)  # nobody would close it
    for number in (1, 2):
        with pytest.raises(CheckpointError, match="no model"):
            command.serve(run(folder))
        assert num_loads == number
