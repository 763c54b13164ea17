"""`ModelConfig` describes a target: the shapes and the arithmetic of its layers. It is static and hashable, and is
never edited.

`models.families` decides which keys of config.json give which of these fields.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from specserve.kernels.rowwise import Activation
from specserve.models.rope import Rope

Mixer = Literal["attention", "latent", "compressed", "delta", "lightning", "mamba", "conv", "none"]
RECURRENT: tuple[Mixer, ...] = ("delta", "lightning", "mamba", "conv")


@dataclass(frozen=True)
class LayerKind:
    """The parts of one layer: its mixer, its attention window, and whether it has an MLP or experts."""

    mixer: Mixer = "attention"
    window: int = 0  # tokens that a query sees, itself included; 0: all before it
    is_local: bool = False  # turns its heads by `local_rope`
    has_rope: bool = True  # turns its heads by their position
    has_growth: bool = False  # its queries grow with their position (`query_growth`)
    has_experts: bool = False
    has_mlp: bool = True  # or experts
    has_sinks: bool = True  # where the model has any
    has_indexer: bool = True  # where the model has any; without, it sees what the last one before it chose
    slope_scale: float = 1.0  # lightning: of the rates at which its heads forget
    head_dim: int = 0  # this and the next two are the model's unless given (`ModelConfig.of`)
    num_kv_heads: int = 0  # in the checkpoint
    d_ff: int = 0
    values_are_keys: bool = False  # one projection gives both: keys are normed and turned, values are not
    hashed: int | None = None  # place among those that add embeddings of the last tokens together; None: not one
    pool: int = 0  # compressed: tokens that one more key is of; 0: it sees its window alone
    is_hashed: bool = False  # the token alone chooses its experts
    kv_from: int | None = None  # the earlier layer whose keys and values it sees; None: it has its own


@dataclass(frozen=True)
class Latent:
    """The sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    kv_rank: int
    nope_dim: int  # of a head's query and key, without position
    rope_dim: int  # of a head's query, and of the one key that all heads share
    v_dim: int
    q_rank: int = 0  # 0: queries are projected in one matrix
    has_gate: bool = False  # one sigmoid gate for each head's output
    index_heads: int = 0  # of the indexer of sparse attention (`models.mixers.indexer`); 0: it has none
    index_dim: int = 0  # of the indexer's heads
    index_topk: int = 0  # tokens that a query sees, those that the indexer chooses; 0: all
    index_interleaves: bool = False  # position turns its heads by neighbours
    index_pool: int = 0  # tokens that it chooses together, by one key (`models.mixers.pools`); 0: each alone
    norm_eps: float = 1e-6  # of the two inner norms

    @property
    def cache_dim(self) -> int:
        """The number of values that attention reads of a committed token: its latent, and the key with position that
        all heads share."""
        return self.kv_rank + self.rope_dim

    @property
    def entry_dim(self) -> int:
        """The number of values that a committed token has in the cache: those, and its key in the indexer where that
        chooses."""
        each = self.index_dim * (2 if self.index_pool else 1)
        return self.cache_dim + (each if self.index_topk else 0)

    @property
    def whole_length(self) -> int:
        """The tokens of the longest sequence of which the indexer chooses all; 0 where nothing is chosen."""
        return self.index_topk + max(self.index_pool - 1, 0) if self.index_topk else 0

    def of(self, kind: LayerKind) -> "Latent":
        """The sizes in layers of this kind."""
        return self if kind.has_indexer else dataclasses.replace(self, index_heads=0, index_dim=0)


@dataclass(frozen=True)
class Compressed:
    """The sizes of attention over compressed keys (`models.mixers.compressed`)."""

    q_rank: int
    rope_dim: int  # the last channels of a head, which turn
    window: int  # tokens that a query sees one by one, itself included
    num_groups: int  # of heads, whose outputs are projected apart
    o_rank: int  # of each group's
    index_heads: int  # of the indexer, in layers that have one
    index_dim: int
    index_topk: int  # compressed keys that it chooses


@dataclass(frozen=True)
class Streams:
    """Residual streams side by side (`models.mixers.streams`), or mixed channel by channel (`channel_streams`)."""

    num: int
    steps: int = 0  # of Sinkhorn and Knopp
    eps: float = 0.0
    rank: int = 0  # of the products that weigh channels; 0: a stream has one weight
    has_head: bool = False  # the last sum has weights of the token's own streams; otherwise it is their mean

    @property
    def is_by_channel(self) -> bool:
        return self.rank > 0


@dataclass(frozen=True)
class BlockIndex:
    """The sizes of an indexer that chooses blocks of tokens, of which queries of heads see the keys
    (`models.mixers.block_index`): MiniMax's scores tokens and chooses for each KV head, Qwen's scores the means of its
    keys over whole blocks and chooses for all heads."""

    num_heads: int
    dim: int  # of its heads
    size: int  # tokens of a block
    top: int  # blocks that it chooses for a query; 0: all
    local: int = 0  # of these the last ones, whatever they score
    pools_keys: bool = False  # Qwen's

    @property
    def reach(self) -> int:
        """The number of tokens up to which all are chosen. A last block that is not whole is always."""
        return self.top * self.size + (self.size - 1 if self.pools_keys and self.top else 0)


@dataclass(frozen=True)
class Experts:
    """The sizes and the routing of a mixture of experts, which takes the place of the MLP."""

    num_experts: int
    top_k: int
    d_ff: int  # of one expert
    scoring: Literal["softmax", "sigmoid", "softmax_of_top", "sqrt_softplus"] = "softmax"
    renormalize: bool = False  # the chosen experts' weights sum to 1
    scale: float = 1.0  # of their weighted sum
    num_groups: int = 1
    top_groups: int = 1  # only experts of the best groups are chosen from
    group_score: Literal["max", "top2"] = "max"  # of its experts: the largest, or the two largest together
    has_correction: bool = False  # a bias that is added to choose and not to weigh (DeepSeek-V3, section 2.1.2)
    has_router_bias: bool = False
    has_float32_router: bool = False  # in a model of any dtype
    has_bias: bool = False  # on the experts' projections
    scales_input: bool = False  # the weight is of what the one chosen expert takes, and not of what it gives
    shared_d_ff: int = 0  # of the expert that every token passes; 0: none
    has_shared_gate: bool = False
    has_norms: bool = False  # router, experts and shared expert each norm their own input (`moe.MoeNorms`)
    is_hashed: bool = False  # a table gives each token's experts
    latent_dim: int = 0  # of what the routed experts take and give, projected to and from d_model; 0: d_model

    def of(self, kind: LayerKind) -> "Experts":
        """The experts of layers of this kind."""
        return dataclasses.replace(self, is_hashed=True, has_correction=False) if kind.is_hashed else self


@dataclass(frozen=True)
class DeltaSizes:
    """The sizes of gated delta-net layers (Yang et al. 2024, arXiv 2412.06464), or of Kimi's, which have a decay for
    each channel (arXiv 2510.26692)."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    by_channel: bool = False
    gate_rank: int = 0  # by_channel: of the projections of the gate and the decay; 0: each is one matrix
    has_sigmoid_gate: bool = False  # of the output; by_channel: always
    has_wide_rates: bool = False  # by_channel: checkpoints keep the heads' rates as [1, 1, head, 1]
    decay_bound: float = 0.0  # by_channel: the log decay lies between this and 0; 0: unbounded


@dataclass(frozen=True)
class HashedTokens:
    """The sizes of embeddings of the last tokens together (`models.mixers.hashed`)."""

    size: int  # tokens of the longest
    heads_of_each: int  # of two tokens, of three, and so on
    dim: int  # of all heads together
    base: int  # from which on the primes are taken that bound the heads' rows
    multiple: int  # of rows of the table
    parts: int  # of the table, in a checkpoint
    seed: int
    eos: int
    conv_width: int  # each `size`-th token is seen

    @property
    def num_heads(self) -> int:
        """The number of heads, of all lengths together."""
        return (self.size - 1) * self.heads_of_each


@dataclass(frozen=True)
class Lightning:
    """The sizes of lightning linear attention (arXiv 2401.04658), which has a fixed decay for each head."""

    num_heads: int
    head_dim: int
    rotary_dim: int
    num_norm_groups: int  # of the norm on the heads' outputs
    has_qk_norm: bool = True


@dataclass(frozen=True)
class MambaSizes:
    """The sizes of Mamba-2 layers (Dao and Gu 2024, arXiv 2405.21060)."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads, which share what they write under and read by
    state_dim: int
    conv_width: int
    has_conv_bias: bool = True

    @property
    def v_size(self) -> int:
        """The channels of all heads' values."""
        return self.num_heads * self.head_dim

    @property
    def k_size(self) -> int:
        """The channels of all groups' keys."""
        return self.num_groups * self.state_dim


@dataclass(frozen=True)
class Names:
    """The names of tensors in a family's checkpoints, where families differ. `{i}` stands for a layer's number, `{e}`
    for an expert's."""

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{i}"
    attention: str = "self_attn"
    linear_attention: str = "linear_attn"
    delta_qkvz: str = "in_proj_qkvz"  # q, k, v and gate of a delta-net, by key head; empty: q, k and v, and the gate
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = "post_attention_layernorm"  # where there is one
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"  # where there is one
    o: str = "o_proj"
    qkv: str = ""  # one matrix for q, k and v; empty: three
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    sinks: str = "sinks"
    mlp: str = "mlp"
    gate_up: str = ""  # one matrix for gate and up; empty: two
    mlp_gate: str = "gate_proj"
    mlp_up: str = "up_proj"
    mlp_down: str = "down_proj"
    experts: str = "mlp"  # the block's prefix
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    expert_gate: str = "experts.{e}.gate_proj"
    expert_up: str = "experts.{e}.up_proj"
    expert_down: str = "experts.{e}.down_proj"
    shared: str = "shared_experts"
    # how the publisher keeps a layer's experts in one tensor, gate and up side by side; empty: only one by one
    stacked_experts: Literal["", "inputs first", "outputs first"] = ""


@dataclass(frozen=True)
class ModelConfig:
    """The shape and the arithmetic of a decoder-only language model."""

    family: str
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # in memory
    head_dim: int  # of queries and keys
    d_ff: int
    max_len: int
    v_dim: int = 0  # of a head's values; 0: head_dim
    value_scale: float = 1.0
    kv_repeats: int = 1  # times that each KV head of the checkpoint is there (`sharding.spread_kv_heads`)
    norm_eps: float = 1e-6
    rope: Rope = field(default=Rope())
    local_rope: Rope | None = None  # of layers that are `is_local`
    layers: tuple[LayerKind, ...] = ()  # empty: all of them LayerKind()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""  # over each head, or over all heads together
    norms_turned: bool = False  # `qk_norm` is of heads that position has turned
    has_unit_norms: bool = False  # of heads that position has turned, without weights
    has_value_norm: bool = False  # of each head's values, without weights
    # queries at position p are multiplied by 1 + growth * log(1 + (p + shift) // span)
    query_growth: float = 0.0
    query_span: int = 0
    query_shift: int = 0
    attention_scale: float = 0.0  # 0: head_dim ** -0.5
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0
    has_sinks: bool = False  # a learned logit for each head that takes its share of the softmax
    has_attention_gate: bool = False  # a sigmoid gate for each channel of the heads' outputs
    activation: Activation = "silu"
    norm_offset: bool = False  # norms multiply by 1 + weight
    has_float32_norms: bool = False  # in a model of any dtype
    centred_norms: bool = False  # but those of heads subtract the mean first: LayerNorm without a bias
    in_norms: bool = True  # on what attention and the MLP take
    out_norms: bool = False  # on what attention and the MLP add to the residual
    is_parallel: bool = False  # the MLP takes what attention takes, and not what it gives
    residual_scale: float = 1.0  # of what they add
    streams: Streams | None = None  # None: one
    layer_input_dim: int = 0  # of the input that each layer has beside the residual stream (`layer_inputs`); 0: none
    layer_input_vocab: int = 0  # tokens that these inputs know
    hashed: HashedTokens | None = None  # of layers that add embeddings of the last tokens together
    has_layer_scale: bool = False  # a number by which each layer's output is multiplied
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    tie_embeddings: bool = False
    latent: Latent | None = None
    block_index: BlockIndex | None = None  # of layers that attend
    compressed: Compressed | None = None
    experts: Experts | None = None
    delta: DeltaSizes | None = None
    lightning: Lightning | None = None
    mamba: MambaSizes | None = None
    conv_width: int = 0  # tokens that a short convolution sees, where that is a layer's mixer
    carried: LayerKind | None = None  # the layer of multi-token prediction in checkpoints; None: as the last one
    names: Names = field(default=Names(), repr=False)
    dtype: str = "float32"
    cache_dtype: str = ""  # of committed keys and values; int8 and float8_e4m3fn with scales; empty: dtype

    def kind(self, i: int) -> LayerKind:
        if not self.layers:
            return LayerKind()
        return self.layers[i]

    def of(self, kind: LayerKind) -> "ModelConfig":
        """The config with the sizes that layers of this kind have."""
        stored = kind.num_kv_heads or self.num_kv_heads // self.kv_repeats
        heads = max(stored, self.num_kv_heads) if self.kv_repeats > 1 else stored
        return dataclasses.replace(
            self,
            num_kv_heads=heads,
            kv_repeats=heads // stored,
            head_dim=kind.head_dim or self.head_dim,
            d_ff=kind.d_ff or self.d_ff,
            has_sinks=self.has_sinks and kind.has_sinks,
            block_index=self.block_index if kind.has_indexer else None,
            latent=self.latent and self.latent.of(kind),
            experts=self.experts and self.experts.of(kind),
        )

    @property
    def num_blocks(self) -> int:
        """The number of mixers, MLPs and mixtures of experts in all layers: of outputs that are added to the residual
        stream. Layers of some families have one alone."""
        kinds = map(self.kind, range(self.num_layers))
        return sum((kind.mixer != "none") + kind.has_mlp for kind in kinds)

    @property
    def shared_layers(self) -> frozenset[int]:
        """The layers whose keys and values later ones see too."""
        return frozenset(kind.kv_from for kind in self.layers if kind.kv_from is not None)

    @property
    def value_dim(self) -> int:
        """The number of channels in a head's values, and in what it finds."""
        return self.v_dim or self.head_dim

    @property
    def key_dim(self) -> int:
        """The number of channels that a KV head's key has in the cache, in a layer of these sizes: its own, and behind
        them a share of the indexer's key where that chooses."""
        index = self.block_index
        return self.head_dim + (-(-index.dim // self.num_kv_heads) if index and index.top else 0)

    @property
    def num_streams(self) -> int:
        """The number of residual streams."""
        return 1 if self.streams is None else self.streams.num

    @property
    def chooses(self) -> bool:
        """Return whether an indexer may choose what a query sees."""
        of_latents = self.latent is not None and self.latent.index_topk > 0
        return of_latents or self.compressed is not None or bool(self.block_index and self.block_index.top)

    @property
    def keeps_zeros(self) -> bool:
        """Return whether every layer makes zeros of a token whose embedding is zero and that sees nothing."""
        has_bias = self.o_bias or self.mlp_bias or (self.experts is not None and self.experts.has_bias)
        has_more = self.streams is not None or self.hashed is not None or self.layer_input_dim > 0
        return not (has_bias or has_more or self.is_recurrent or self.chooses)

    @property
    def is_recurrent(self) -> bool:
        """Return whether some layers keep a recurrent state instead of every token's keys and values."""
        return any(kind.mixer in RECURRENT for kind in self.layers)

    @property
    def stored(self) -> "ModelConfig":
        """The config as the checkpoint has it."""
        return dataclasses.replace(self, num_kv_heads=self.num_kv_heads // self.kv_repeats, kv_repeats=1)

    def for_length(self, length: int) -> "ModelConfig":
        """The config for sequences of at most `length` tokens, which some rotary embeddings depend on
        (`Rope.for_length`). Attention over no more tokens than an indexer chooses needs none."""
        local, latent = self.local_rope and self.local_rope.for_length(length), self.latent
        if latent and 0 < length <= latent.whole_length:
            latent = dataclasses.replace(latent, index_topk=0)
        blocks = self.block_index
        if blocks and 0 < length <= blocks.reach:
            blocks = dataclasses.replace(blocks, top=0)
        rope = self.rope.for_length(length)
        return dataclasses.replace(self, rope=rope, local_rope=local, latent=latent, block_index=blocks)
