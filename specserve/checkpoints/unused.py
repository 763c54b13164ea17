"""Tensors of a checkpoint that are not loaded, and why. One without a reason is refused."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from specserve.checkpoints.quantized import UNUSED_SCALES
from specserve.checkpoints.tensors import TensorFolder
from specserve.models.config import ModelConfig

logger = logging.getLogger(__name__)

TIED, AS_VOCABULARY = "tied to the embedding", "read as the draft vocabulary"
_COMPUTED, _ZEROS = "rotary buffers, computed here", "biases of zeros, which add nothing"
_NOT_MISSED = frozenset((TIED, AS_VOCABULARY, _COMPUTED, _ZEROS))  # reasons that a user need not know
_HASHING = r"(.*\.)?ple_embedding\.(layer_multipliers|ngram_heads_(offsets|vocab_sizes))"
UNUSED = {
    r"(.*\.)?rotary_emb\.inv_freq": _COMPUTED,
    _HASHING: "numbers of hashes, computed here",
    r"(.*\.)?hyper_connection_mixer\.block_inject_weight\..*": "weights of streams that nothing is added to",
    **UNUSED_SCALES,
}
# layers of multi-token prediction, by family
_FURTHER = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "nemotron_h"), r"mtp\..*"),
    "deepseek_v4": r"(model\.)?mtp\..*",
    "mimo": r"model\.mtp_layers\..*",
    "mimo_v2_flash": r"model\.mtp\..*",
}
# families whose checkpoints append such layers to the model's own, and the key that counts them
_PREDICTS_FURTHER = {
    "deepseek_v3": "num_nextn_predict_layers",
    "deepseek_v32": "num_nextn_predict_layers",
    "glm_moe_dsa": "num_nextn_predict_layers",
    "glm5_next": "num_nextn_predict_layers",
    "glm5_next_text": "num_nextn_predict_layers",
    "kimi_k2": "num_nextn_predict_layers",
    "glm4_moe": "num_nextn_predict_layers",
    "glm4_moe_lite": "num_nextn_predict_layers",
    "minimax_m2": "num_mtp_modules",
    "bailing_moe": "num_nextn_predict_layers",
    "bailing_moe_v2": "num_nextn_predict_layers",
    "bailing_moe_linear": "num_nextn_predict_layers",
    "bailing_hybrid": "num_nextn_predict_layers",
}
_OTHER_SENSES = (
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|patch_merge_mlp|audio_tower|vision_embedder|embed_(vision|audio))"
    r"\..*"
)


def unused_tensors(config: ModelConfig, raw: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, str]:
    """Tensors of a target's checkpoint that its forward does not need, as patterns, and why."""
    skipped = {_OTHER_SENSES: "of a model that also sees or hears; text alone is served"}
    if config.tie_embeddings:
        skipped[re.escape(rename(config.names.head))] = TIED
    further = {pattern for family, pattern in _FURTHER.items() if family == config.family}
    count = raw.get(_PREDICTS_FURTHER.get(config.family, "num_nextn_predict_layers"))
    if count is None:
        count = int(config.family in _PREDICTS_FURTHER)
    for i in range(config.num_layers, config.num_layers + count):
        further.add(re.escape(rename(config.names.layer.format(i=i))) + r"\..*")
    skipped |= dict.fromkeys(further, "layers of multi-token prediction")
    for i, kind in enumerate(config.layers):
        if kind.kv_from is not None:
            prefix = re.escape(rename(f"{config.names.layer.format(i=i)}.{config.names.attention}"))
            skipped[rf"{prefix}\.(k|v)_(proj|norm)\..*"] = "keys and values of layers that see those of others"
    return skipped


def account_for(names: frozenset[str], tensors: TensorFolder, skipped: Mapping[str, str]) -> list[str]:
    """Log which tensors are not loaded, and why. Return those without a reason as problems."""
    reasons = {name: [why for pattern, why in skipped.items() if re.fullmatch(pattern, name)] for name in names}
    for name in [name for name in names if name.endswith(".bias") and not reasons[name]]:  # as AutoGPTQ writes them
        if f"{name.removesuffix('bias')}qweight" in tensors.names() and not tensors.read(name).any():
            reasons[name] = [_ZEROS]
    counts = Counter(why[0] for why in reasons.values() if why)
    if counts:
        counted = ", ".join(f"{count} ({why})" for why, count in sorted(counts.items()))
        level = logging.INFO
        if counts.keys() <= _NOT_MISSED:
            level = logging.DEBUG
        logger.log(level, "%s: tensors that are not loaded: %s", tensors.folder, counted)
    return [f"{name} is not part of this architecture" for name in sorted(names) if not reasons[name]]
