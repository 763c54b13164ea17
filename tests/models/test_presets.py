"""Presets: what is computed from their facts is what their publishers say, and their names lead to their hub ids."""

from pathlib import Path

import huggingface_hub
import pytest

from specserve.checkpoints.source import resolve_target
from specserve.errors import ConfigError
from specserve.models.presets import PRESETS, target_size

# Billions of parameters: of the model card or paper, or of the published safetensors where the card rounds more. Text
# alone, without layers for multi-token prediction, and a tied matrix counted once.
PUBLISHED = {
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "llama-3.3-70b": 70.6,
    "deepseek-r1-distill-llama-8b": 8.03,
    "deepseek-r1-distill-llama-70b": 70.6,
    "deepseek-r1-distill-qwen-1.5b": 1.78,
    "deepseek-r1-distill-qwen-7b": 7.62,
    "deepseek-r1-distill-qwen-14b": 14.8,
    "deepseek-r1-distill-qwen-32b": 32.8,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "qwen2.5-vl-7b": 7.61,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "qwen3-coder-30b-a3b": 30.5,
    "qwen3-next-80b-a3b": 80,
    "qwen3-vl-8b": 8.19,
    "qwen3-vl-30b-a3b": 30.5,
    "qwen3.5-9b": 9,
    "qwen3.5-27b": 27,
    "qwen3.5-35b-a3b": 35,
    "qwen3.5-122b-a10b": 122,
    "qwen3.5-397b-a17b": 397,
    "qwen3.6-27b": 27,
    "qwen3.6-35b-a3b": 35,
    "qwen3.8-27b": 27,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "gemma-2-2b": 2.61,
    "gemma-2-9b": 9.24,
    "gemma-2-27b": 27.2,
    "gemma-3-1b": 1.00,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.77,
    "gemma-3-27b": 27.0,
    "gemma-4-e2b": 4.65,  # 2.3 and the tables of the layers' inputs, which are 2.35
    "gemma-4-e4b": 7.5,
    "gemma-4-12b": 11.9,
    "gemma-4-26b-a4b": 25.2,
    "gemma-4-31b": 30.7,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "deepseek-r1": 671,
    "kimi-k2": 1026,
    "glm-4-9b": 9.40,
    "glm-4-9b-0414": 9.40,
    "glm-4.5-air": 106,
    "glm-4.5": 355,
    "glm-4.6": 355,
    "glm-4.7": 355,
    "glm-4.7-flash": 30,
    "deepseek-v3.2": 672,
    "deepseek-v4-flash": 284,
    "glm-5": 744,
    "lfm2-1.2b": 1.17,
    "lfm2-8b-a1b": 8.34,
    "kimi-linear-48b-a3b": 49.1,
    "nemotron-3-nano": 31.6,
    "nemotron-3-super": 120.6,
    "mistral-small-4": 119,
    "minimax-m2": 229,
    "minimax-m3": 428,
    "qwen3.8-flash-next": 176,  # 125 and its tables of 51
    "mimo-v2-flash": 309,
    "ling-mini-2.0": 16.26,
    "ring-mini-2.0": 16.26,
    "ling-flash-2.0": 103,
    "ring-mini-linear-2.0": 16.4,
    "phi-4": 14.66,
    "smollm3-3b": 3.08,
    "smollm2-135m": 0.1345,
    "smollm2-360m": 0.3618,
    "llama-4-scout": 107.8,
    "seed-oss-36b": 36.2,
    "granite-3.3-8b": 8.17,
    "command-r7b": 8.03,
    "exaone-4.0-32b": 32.0,
    "olmo-3-7b": 7.30,
    "ernie-4.5-0.3b": 0.361,
    "qwen1.5-moe-a2.7b": 14.3,
    "smollm2-1.7b": 1.711,
}
# The parameters that a token needs, where the publisher counts as we do (embedding and head included)...
PUBLISHED_ACTIVE = {
    "qwen3-235b-a22b": 22.2,
    "mixtral-8x7b": 12.9,
    "ling-mini-2.0": 1.43,
    "ling-flash-2.0": 6.1,
    "ring-mini-linear-2.0": 1.6,
    "gemma-4-26b-a4b": 3.8,
    "qwen1.5-moe-a2.7b": 2.7,
    "nemotron-3-super": 12.7,
}
# ...or without the embedding, of which a token reads one row
PUBLISHED_ACTIVE_WITHOUT_EMBEDDING = {"gpt-oss-20b": 3.61, "gpt-oss-120b": 5.13, "deepseek-v3": 36.6, "kimi-k2": 31.7}


def test_every_preset_has_its_published_size() -> None:
    """Within 1%: what is published has three digits at most."""
    got = {name: target_size(preset.config()).total / 1e9 for name, preset in PRESETS.items()}
    assert got == pytest.approx(PUBLISHED, rel=0.01)


def test_a_token_needs_all_but_the_experts_that_it_is_not_sent_to() -> None:
    sizes = {name: target_size(PRESETS[name].config()) for name in PUBLISHED}
    got = {name: sizes[name].active / 1e9 for name in PUBLISHED_ACTIVE}
    assert got == pytest.approx(PUBLISHED_ACTIVE, rel=0.01)
    for name, published in PUBLISHED_ACTIVE_WITHOUT_EMBEDDING.items():
        config = PRESETS[name].config()
        assert (sizes[name].active - config.vocab_size * config.d_model) / 1e9 == pytest.approx(published, rel=0.01)
    has_experts = {name: preset.config().experts is not None for name, preset in PRESETS.items()}
    assert {name: size.active < size.total for name, size in sizes.items()} == has_experts


def test_a_preset_is_downloaded_under_its_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.chdir(tmp_path)  # a folder of a preset's name would go first
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda hub_id, **_: asked.append(hub_id) or str(tmp_path))
    for name in PRESETS:
        source = resolve_target(name)
        assert (source.name, source.folder) == (name, tmp_path)
    assert asked == [preset.hub_id for preset in PRESETS.values()]
    assert all(hub_id.count("/") == 1 for hub_id in asked)


@pytest.mark.parametrize(("typed", "meant"), [("qwen3-8x", "qwen3-8b"), ("glm4.5", "glm-4.5"), ("GLM-4.5", "glm-4.5")])
def test_a_near_miss_is_named(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        resolve_target(typed)
