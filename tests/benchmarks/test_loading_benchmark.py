"""The benchmark of loading: its checkpoint is as large as asked, lies in shards, and is loaded as a whole."""

from pathlib import Path

import loading
import pytest
from loading import CONFIG, Load, load_lines, measure, write_checkpoint

SMALL = CONFIG | {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "head_dim": 32}


def test_the_checkpoint_is_as_asked_and_all_of_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SHARD_BYTES", 100_000)
    write_checkpoint(tmp_path, 500_000, SMALL)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert 400_000 < sum(file.stat().st_size for file in files) < 500_000
    half, whole = (measure(f"specserve, {dtype}", str(tmp_path)) for dtype in ("bfloat16", "float32"))
    assert 400_000 < half.weight_bytes < 500_000
    assert whole.weight_bytes == 2 * half.weight_bytes
    assert half.seconds > 0


def test_medians_are_reported() -> None:
    loads = {"one": [Load(1.0, 3 * 10**9, 2 * 10**9), Load(5.0, 2 * 10**9, 2 * 10**9), Load(2.0, 10**9, 2 * 10**9)]}
    assert load_lines(loads) == ["one: 2.00 s, peak memory 2.00 GB for 2.00 GB of weights"]
