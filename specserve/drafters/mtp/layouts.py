"""The layouts in which checkpoints keep their layer of multi-token prediction: the names of its tensors by family, and
what else differs between families, as their published code has it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve.models.config import ModelConfig


@dataclass(frozen=True)
class Layout:
    """The names of the tensors without `.weight`, `layer` being the prefix of an ordinary decoder layer's, and two
    switches. `{L}` stands for the number of the target's layers."""

    architecture: str  # what engines call the layer's class, for a folder of its own
    layer: str
    token_norm: str
    hidden_norm: str
    fc: str
    norm: str
    embedding: str = ""  # where a checkpoint may repeat the target's; empty: nowhere
    head: str = ""
    hidden_first: bool = False  # `fc` takes [hidden | token], else [token | hidden]
    takes_raw: bool = False  # the target's hidden state before its final norm, else after it

    def at(self, num_layers: int) -> "Layout":
        """The layout for a target of so many layers."""
        names = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {key: value.format(L=num_layers) for key, value in names.items() if isinstance(value, str)}
        return dataclasses.replace(self, **changed)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of the names of all its tensors."""
        names = (self.layer, self.token_norm, self.hidden_norm, self.fc, self.norm, self.embedding, self.head)
        return tuple(dict.fromkeys(name for name in names if name))


def _appended(architecture: str, *, norm: str = "shared_head.norm", embedding: str = "embed_tokens") -> Layout:
    """Make the layout of a layer that is one more entry of `model.layers`, with the names of DeepSeek-V3."""
    prefix = "model.layers.{L}"
    return Layout(
        architecture,
        layer=prefix,
        token_norm=f"{prefix}.enorm",
        hidden_norm=f"{prefix}.hnorm",
        fc=f"{prefix}.eh_proj",
        norm=f"{prefix}.{norm}",
        embedding=f"{prefix}.{embedding}",
        head=f"{prefix}.shared_head.head",
    )


def _of_its_own(architecture: str, prefix: str, *, hidden_first: bool = False, takes_raw: bool = False) -> Layout:
    """Make the layout of a layer with the names of MiMo, which speculators took over."""
    return Layout(
        architecture,
        layer=prefix,
        token_norm=f"{prefix}.token_layernorm",
        hidden_norm=f"{prefix}.hidden_layernorm",
        fc=f"{prefix}.input_proj",
        norm=f"{prefix}.final_layernorm",
        hidden_first=hidden_first,
        takes_raw=takes_raw,
    )


_LING = _appended("BailingMoeForCausalLMNextN", norm="final_layernorm", embedding="word_embeddings")
OTHERS = _appended("MTPModel")  # of targets that come without such a layer, where one was trained for them
SPECULATORS = _of_its_own("MTPDraftModel", "mtp_layers.0")
LAYOUTS: Mapping[str, Layout] = {
    "deepseek_v3": _appended("DeepSeekMTPModel"),
    "kimi_k2": _appended("DeepSeekMTPModel"),
    "glm4_moe": _appended("Glm4MoeMTPModel"),
    "glm4_moe_lite": _appended("Glm4MoeLiteMTPModel"),
    "bailing_moe": _LING,
    "bailing_moe_v2": _LING,
    "bailing_moe_linear": _LING,
    "bailing_hybrid": _LING,
    "mimo": _of_its_own("MiMoMTPModel", "model.mtp_layers.0", hidden_first=True, takes_raw=True),
    "qwen3_next": Layout(
        "Qwen3NextMTP",
        layer="mtp.layers.0",
        token_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        fc="mtp.fc",
        norm="mtp.norm",
    ),
}
ARCHITECTURES = frozenset(layout.architecture for layout in (*LAYOUTS.values(), OTHERS, SPECULATORS))


def layout_of(target: ModelConfig) -> Layout:
    """Return the layout in which a target's checkpoint keeps its layer."""
    return LAYOUTS.get(target.family, OTHERS).at(target.num_layers)


def num_carried(raw: Mapping[str, Any]) -> int:
    """Return how many layers of multi-token prediction a target's config.json counts. Where it counts none, Qwen3-Next
    and MiMo have one."""
    text = raw.get("text_config")
    raw = text if isinstance(text, Mapping) else raw
    count = raw.get("num_nextn_predict_layers", int(raw.get("model_type") in ("qwen3_next", "mimo")))
    return count if isinstance(count, int) else 0


def is_named(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of such a layer, or of a target whose checkpoint carries one."""
    stated = raw.get("architectures")
    own = isinstance(stated, list) and not ARCHITECTURES.isdisjoint(map(str, stated))
    return own or raw.get("speculators_model_type") == "mtp" or num_carried(raw) > 0
