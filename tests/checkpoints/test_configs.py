"""The dtype in which a loaded target keeps keys and values: by how its checkpoint is stored and what computes it."""

from pathlib import Path
from typing import Any

import pytest
import tiny

from specserve.checkpoints import configs
from specserve.checkpoints.load import load_target
from specserve.checkpoints.update import other_target
from specserve.eval.bench.synthetic import random_target
from specserve.eval.trial import load_target_of
from specserve.models.cache import Cache
from specserve.serve.launch import Models, load_models, with_cache_dtype
from specserve.serve.settings import ServeRun


@pytest.mark.parametrize(
    ("stated", "dtype", "platform", "expected"),
    [
        ({"dtype": "bfloat16"}, "float32", "cpu", "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "float32", "cpu", "bfloat16"),
        ({"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, "float32", "cpu", "bfloat16"),
        ({"dtype": "float16", "text_config": {"dtype": "bfloat16"}}, "float32", "cpu", "bfloat16"),
        ({"dtype": "bfloat16", "text_config": {}}, "float32", "cpu", "bfloat16"),
        ({"dtype": "float16"}, "float32", "cpu", ""),  # more bits than bfloat16 has
        ({"dtype": "float32"}, "float32", "cpu", ""),
        ({}, "float32", "cpu", ""),
        ({"dtype": "bfloat16"}, "bfloat16", "cpu", ""),
        ({"dtype": "bfloat16"}, "bfloat16", "gpu", ""),
        ({"dtype": "bfloat16"}, "float32", "gpu", ""),
    ],
)
def test_keys_and_values_are_kept_in_bfloat16_where_a_cpu_computes_a_checkpoint_of_it_in_float32(
    monkeypatch: pytest.MonkeyPatch, stated: dict[str, Any], dtype: str, platform: str, expected: str
) -> None:
    monkeypatch.setattr(configs, "program_platform", lambda: platform)
    assert configs.auto_cache_dtype(configs.stored_dtype(stated), dtype) == expected


@pytest.mark.parametrize(("stored", "kept"), [("bfloat16", "bfloat16"), ("float16", ""), ("float32", ""), ("", "")])
def test_all_who_load_a_target_keep_its_keys_and_values_alike(
    tmp_path: Path, stored: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what a training run, `eval` and a random twin measure, of a folder or of a hub id whose config.json the hub's
    cache has, is what serves; and an update changes nothing of it."""
    tiny.write_target(tmp_path, tiny.TARGET | {"dtype": stored}, seed=0)
    target, served = load_target(tmp_path, dtype="float32"), load_models(str(tmp_path), "", has_tokenizer=False).target
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda _name, file: str(tmp_path / file))
    random, of_hub = random_target(str(tmp_path)), random_target("somebody/tiny")
    other = "float32" if stored == "bfloat16" else "bfloat16"
    (tmp_path / "update").mkdir()
    tiny.write_target(tmp_path / "update", tiny.TARGET | {"dtype": other}, seed=1)
    again = other_target(served, tmp_path / "update", quantization="none", mesh=None)
    measured = load_target_of(tmp_path, str(tmp_path))
    found = [each.config.cache_dtype for each in (target, served, measured, random, of_hub, again)]
    assert found == [kept] * 6
    for asked in ("auto", "float32", "bfloat16"):
        run = ServeRun(kv_cache_dtype=asked)
        config = with_cache_dtype(Models("m", served, None, None), run).target.config
        pages = Cache.zeros(config, num_slots=1, num_pages=1, page_size=8).layers[0].k.dtype
        assert pages == (asked if asked != "auto" else kept or "float32")
