"""What may stand after `--target`, and how one that cannot be found is refused."""

import socket
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from specserve.checkpoints.source import BUNDLED_FOLDER, is_hub_id, resolve_target
from specserve.errors import CheckpointError, ConfigError


def test_the_bundled_name_and_local_folders_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert resolve_target("pydoc").folder == BUNDLED_FOLDER
    assert resolve_target(str(tmp_path)).folder == tmp_path.resolve()


def test_an_unreachable_hub_names_the_folder_to_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> str:
        raise OSError("no route to host\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    for text in ("qwen3-8b", "Qwen/Qwen3-8B"):
        with pytest.raises(CheckpointError) as error:
            resolve_target(text)
        message = str(error.value)
        assert "no route to host" in message
        assert "and much more" not in message
        assert "--target models/Qwen3-8B" in message


@pytest.mark.parametrize("text", ["qwen3-8", "./nowhere/at-all", "pydocs", "/no/such/folder"])
def test_names_that_nobody_knows_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ConfigError, match="--target"):
        resolve_target(text)


def test_of_a_repository_the_weights_are_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some hold them again in a folder or a file of another layout."""
    asked: dict[str, list[str]] = {}

    def fetch(hub_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(allow=allow_patterns, ignore=ignore_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve_target("openai/gpt-oss-20b").folder == tmp_path
    needed = ["config.json", "generation_config.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
    others = ["original/model.safetensors", "metal/model.bin", "consolidated.safetensors", "README.md"]
    kept = filter_repo_objects(needed + others, allow_patterns=asked["allow"], ignore_patterns=asked["ignore"])
    assert list(kept) == needed
    resolve_target("openai/gpt-oss-20b", needs_weights=False)
    kept = filter_repo_objects(needed + others, allow_patterns=asked["allow"], ignore_patterns=asked["ignore"])
    assert list(kept) == [name for name in needed if not name.endswith(".safetensors")]


@pytest.mark.parametrize("text", ["./model", "../model", "a/b/c", "a/.b", "a/b-", "a--b/c", "a/b..c", "a/b.git", "ä/b"])
def test_an_id_is_the_hub_s_exactly_where_the_hub_says_so(text: str) -> None:
    assert not is_hub_id(text)
    with pytest.raises(HFValidationError):
        validate_repo_id(text)


def test_hub_ids_are_those_that_the_hub_takes() -> None:
    for text in ("Qwen/Qwen3-8B", "a_b/c.d-e", "_a/b_"):
        validate_repo_id(text)
        assert is_hub_id(text)


def test_offline_the_cache_is_used_and_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    with pytest.raises(CheckpointError, match="not in the local cache"):
        resolve_target("qwen3-8b")
    repository = tmp_path / "models--Qwen--Qwen3-8B"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert resolve_target("qwen3-8b").folder == snapshot
