"""Write tests/goldens: tiny random checkpoints by transformers, and the logits that its torch models compute from them.

Needs the `oracle` extra. Run from the checkout: `python tools/make_goldens.py`. The tests read the files without torch.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens"
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (family, what it changes)
    "llama-rope3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "llama-biased-tied": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
        },
    ),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3-tied": (
        "Qwen3",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3-untied": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 4}),
}


def write_case(folder: Path, name: str, seed: int, **sizes: Any) -> None:
    """A Hugging Face folder and `expected.safetensors`: token ids, logits, the output of every layer but the last."""
    family, changes = CASES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **sizes, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # norms and biases away from one and zero, so that leaving one out is seen
            is_norm = parameter_name.endswith("norm.weight")
            parameter.normal_(float(is_norm), 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
        token_ids = torch.randint(0, config.vocab_size, (2, 80))
        out = model(token_ids, output_hidden_states=True)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    expected = {"token_ids": token_ids.numpy().astype(np.int32), "logits": out.logits.numpy()}
    for i, hidden in enumerate(out.hidden_states[1:-1]):
        expected[f"layer_{i}"] = hidden.numpy()
    save_file({key: np.ascontiguousarray(value) for key, value in expected.items()}, folder / "expected.safetensors")


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    shutil.rmtree(GOLDENS, ignore_errors=True)
    for i, case in enumerate(CASES):
        write_case(GOLDENS / case, case, seed=i)
