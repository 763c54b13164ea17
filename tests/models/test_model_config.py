"""config.json: what is read, and what is refused with a reason."""

import pytest
import tiny

from specserve.drafters.eagle3.config import default_taps
from specserve.errors import ConfigError
from specserve.models.families.table import model_config
from specserve.models.rope import Rope, rope_from_hf, rope_to_hf

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen33"}, "qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": "yes"}, "true or false"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "spiral"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "llama3.*low_freq_factor"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_parameters.rope_type is 'default', rope_scaling.rope_type is 'yarn'",
        ),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer"),
    ],
)
def test_unsupported_configs_are_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_config(tiny.TARGET | changes, dtype="float32")


def test_both_spellings_of_rope_read_alike() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    new = {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    assert rope_from_hf(old, "") == rope_from_hf(new, "") == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    both = model_config(tiny.TARGET | {"rope_scaling": LLAMA3} | new, dtype="float32")
    assert both.rope == rope_from_hf(new, "")
    for scaling in (LLAMA3, {"rope_type": "linear", "factor": 2.0}, {}):
        assert rope_to_hf(rope_from_hf({"rope_scaling": scaling}, "")) == scaling


def test_default_taps_are_eagle3s() -> None:
    def taps(num_layers: int) -> tuple[int, int, int]:
        raw = tiny.TARGET | {"num_hidden_layers": num_layers}
        return default_taps(model_config(raw, dtype="float32"))

    assert taps(32) == (1, 15, 28)  # Llama-3.1-8B, as SGLang names them
    assert taps(36) == (1, 17, 32)  # Qwen3-8B
    with pytest.raises(ConfigError, match="4 layers"):
        taps(4)
