"""The config of a layer of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2), and the names that
checkpoints have for its tensors. It is one more layer of the target's own kind, over the target's last hidden state of
a token and the embedding of the token after it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from specserve.errors import ConfigError
from specserve.models.config import ModelConfig


@dataclass(frozen=True)
class Layout:
    """The names of the tensors without `.weight`, `layer` being the prefix of an ordinary decoder layer's, and two
    switches. `{L}` stands for the number of the target's layers."""

    architecture: str  # the name that engines have for the layer's class, for a folder of its own
    layer: str
    token_norm: str
    hidden_norm: str
    fc: str
    norm: str
    embedding: str = ""  # where a checkpoint may repeat the target's; empty: nowhere
    head: str = ""
    hidden_first: bool = False  # `fc` takes [hidden | token], else [token | hidden]
    takes_raw: bool = False  # the target's hidden state before its final norm, else after it
    token_fc: str = ""  # where the token has a matrix of its own, and `fc` takes the hidden state alone
    mixture: str = ""  # of its last mixture, where it has the target's streams, whose own states it takes
    names: tuple[tuple[str, str], ...] = ()  # of the layer's parts (`config.Names`), where the target has others

    def at(self, num_layers: int) -> "Layout":
        """The layout for a target of so many layers."""
        names = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {key: value.format(L=num_layers) for key, value in names.items() if isinstance(value, str)}
        return dataclasses.replace(self, **changed)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of the names of all its tensors."""
        names = (self.layer, self.token_norm, self.hidden_norm, self.fc, self.token_fc, self.norm, self.mixture)
        names += (self.embedding, self.head)
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


def of_its_own(architecture: str, prefix: str, *, hidden_first: bool = False, takes_raw: bool = False) -> Layout:
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


_QWEN = Layout(
    "Qwen3NextMTP",
    layer="mtp.layers.0",
    token_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    fc="mtp.fc",
    norm="mtp.norm",
)
_LING = _appended("BailingMoeForCausalLMNextN", norm="final_layernorm", embedding="word_embeddings")
_MIMO_V2 = Layout(
    "MiMoV2MTP",
    layer="model.mtp.layers.0",
    token_norm="model.mtp.layers.0.enorm",
    hidden_norm="model.mtp.layers.0.hnorm",
    fc="model.mtp.layers.0.eh_proj",
    norm="model.mtp.layers.0.final_layernorm",
    names=(("mlp_norm", "pre_mlp_layernorm"),),
)
_NEMOTRON_H = Layout(  # two blocks, of which the first attends
    "NemotronHMTPModel",
    layer="mtp.layers",
    token_norm="mtp.layers.0.enorm",
    hidden_norm="mtp.layers.0.hnorm",
    fc="mtp.layers.0.eh_proj",
    norm="mtp.layers.1.final_layernorm",
    names=(
        ("attention_norm", "0.norm"),
        ("attention", "0.mixer"),
        ("mlp_norm", "1.norm"),
        ("experts", "1.mixer"),
        ("mlp", "1.mixer"),
    ),
)
_QWEN_4 = dataclasses.replace(
    _QWEN,
    architecture="Qwen4ExpMTP",
    fc="mtp.fc_hidden",
    token_fc="mtp.fc_embedding",
    norm="mtp.hyper_connection_mixer.hc_norm",
    mixture="mtp.hyper_connection_mixer",
)
_DEEPSEEK_V4 = Layout(
    "DeepSeekV4MTPModel",
    layer="mtp.0",
    token_norm="mtp.0.enorm",
    hidden_norm="mtp.0.hnorm",
    fc="mtp.0.h_proj",
    token_fc="mtp.0.e_proj",
    norm="mtp.0.norm",
    embedding="mtp.0.emb.tok_emb",
    head="mtp.0.head",
    mixture="mtp.0.hc_head",
    names=(("k_norm", "kv_norm"),),
)
OTHERS = _appended("MTPModel")  # of targets that come without such a layer, where one was trained for them
LAYOUTS: Mapping[str, Layout] = {
    "deepseek_v3": _appended("DeepSeekMTPModel"),
    "deepseek_v32": _appended("DeepSeekMTPModel"),
    "deepseek_v4": _DEEPSEEK_V4,
    "glm_moe_dsa": _appended("DeepSeekMTPModel"),
    "glm5_next": _appended("Glm5NextMTPModel"),
    "glm5_next_text": _appended("Glm5NextMTPModel"),
    "kimi_k2": _appended("DeepSeekMTPModel"),
    "glm4_moe": _appended("Glm4MoeMTPModel"),
    "glm4_moe_lite": _appended("Glm4MoeLiteMTPModel"),
    "bailing_moe": _LING,
    "bailing_moe_v2": _LING,
    "bailing_moe_linear": _LING,
    "bailing_hybrid": _LING,
    "mimo": of_its_own("MiMoMTPModel", "model.mtp_layers.0", hidden_first=True, takes_raw=True),
    "mimo_v2_flash": _MIMO_V2,
    "nemotron_h": _NEMOTRON_H,
    "qwen3_next": _QWEN,
    "qwen3_5_text": dataclasses.replace(_QWEN, architecture="Qwen3_5MTP"),
    "qwen3_5_moe_text": dataclasses.replace(_QWEN, architecture="Qwen3_5MoeMTP"),
    "qwen4_exp_text": _QWEN_4,
}


def layout_of(target: ModelConfig) -> Layout:
    """Return the layout in which a target's checkpoint keeps its layer."""
    return LAYOUTS.get(target.family, OTHERS).at(target.num_layers)


@dataclass(frozen=True)
class MtpConfig:
    """The shape of a layer and where its tensors stand. Static and hashable."""

    layer: ModelConfig  # the target's, of this one layer
    layout: Layout
    num_target_layers: int
    draft_vocab_size: int  # the tokens that it proposes
    has_embedding: bool = False  # its own token embedding; otherwise the target's is shared
    has_own_head: bool = False  # its own output head for all tokens; otherwise the target's is shared

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's last layer, whose output the layer reads, or each stream behind it."""
        if self.layer.streams is None:
            return (self.num_target_layers - 1,)
        return tuple(range(self.num_target_layers, self.num_target_layers + self.layer.num_streams))

    @property
    def state_size(self) -> int:
        """The numbers of the states that the layer takes, makes and hands on."""
        return self.layer.num_streams * self.layer.d_model

    @property
    def is_partial(self) -> bool:
        """Return whether it proposes a part of the target's tokens."""
        return self.draft_vocab_size < self.layer.vocab_size

    @property
    def has_head(self) -> bool:
        """Return whether it has output rows of its own, as it must for a part of the tokens."""
        return self.has_own_head or self.is_partial


def config_of(target: ModelConfig, *, dtype: str) -> MtpConfig:
    """The layer that a target's checkpoint carries after its last one, or that is trained for it: of the last one's
    kind, or of the one that the family's carried layers have, for all tokens. Raises ConfigError where that keeps a
    recurrent state, which knows no trees of a draft's own, or needs other layers."""
    kind, layout = target.carried or target.kind(target.num_layers - 1), layout_of(target)
    if kind.kv_from is not None or target.layer_input_dim:
        raise ConfigError(
            f"the last layer of this {target.family} target sees the keys of another layer, or has an input of its own "
            "beside the stream; a layer of multi-token prediction has none of these here. Give a head of another kind "
            "(--drafter)"
        )
    if kind.mixer not in ("attention", "latent", "compressed") or kind.pool:
        has = "has no mixer" if kind.mixer == "none" else f"keeps a recurrent state ({kind.mixer})"
        raise ConfigError(
            f"the last layer of a {target.family} target {has}; a layer of multi-token prediction needs one that "
            "attends. Give a head of another kind (--drafter)"
        )
    layer = dataclasses.replace(
        target.of(kind),
        num_layers=1,
        layers=(kind,),
        streams=target.streams if layout.mixture else None,
        names=dataclasses.replace(target.names, layer=layout.layer, **dict(layout.names)),
        dtype=dtype,
        cache_dtype="",
    )
    return MtpConfig(layer, layout, target.num_layers, target.vocab_size)
