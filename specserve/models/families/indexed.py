"""The config.json of the families whose attention is of few tokens, which an indexer chooses: DeepSeek-V3.2, GLM-5 and
GLM-5.3-Flash."""

import dataclasses

from specserve.errors import ConfigError
from specserve.models.config import DeltaSizes, LayerKind, Mixer, Names, Streams
from specserve.models.families.keys import Flags, Keys
from specserve.models.families.latent import deepseek_v3
from specserve.models.rope import Rope


def deepseek_v32(keys: Keys) -> Flags:
    """The flags of DeepSeek-V3.2: DeepSeek-V3 with an indexer, which chooses the tokens that a query sees."""
    if keys.raw.get("first_k_dense_replace") is None:
        keys = Keys({**keys.raw, "first_k_dense_replace": 3}, keys.where)
    flags = deepseek_v3(keys)
    indexed = dataclasses.replace(
        flags["latent"],
        q_rank=keys.integer("q_lora_rank"),
        index_heads=keys.integer("index_n_heads"),
        index_dim=keys.integer("index_head_dim"),
        index_topk=keys.integer("index_topk"),
    )
    if indexed.index_dim < indexed.rope_dim:
        raise ConfigError(
            f"{keys.where}: index_head_dim is {indexed.index_dim}, less than the {indexed.rope_dim} channels "
            "(qk_rope_head_dim) that turn"
        )
    experts = dataclasses.replace(flags["experts"], has_float32_router=True)
    return flags | {"latent": indexed, "experts": experts}


def glm_moe_dsa(keys: Keys) -> Flags:
    """The flags of GLM-5: the same. In some checkpoints only some layers have an indexer, and the others see what the
    last one before them chose (arXiv 2603.12201). A carried layer of multi-token prediction has its own."""
    flags = deepseek_v32(keys)
    layers = tuple(
        dataclasses.replace(layer, has_indexer=kind == "full")
        for layer, kind in zip(flags["layers"], indexer_types(keys), strict=True)
    )
    return flags | {
        "latent": dataclasses.replace(flags["latent"], index_interleaves=True),
        "layers": layers,
        "carried": dataclasses.replace(layers[-1], has_indexer=True),
    }


def indexer_types(keys: Keys) -> list[str]:
    """Return for each layer of GLM-5 whether it has an indexer ("full") or not ("shared"): by a list, by a pattern, or
    each of so many layers after the first ones."""
    n = keys.num_layers
    kinds = list(keys.strings("indexer_types", n) or ())
    if not kinds:
        frequency, offset = keys.integer("index_topk_freq", 1), keys.integer("index_skip_topk_offset", 2, least=0)
        kinds = ["shared" if max(i - offset + 1, 0) % frequency else "full" for i in range(n)]
        if pattern := keys.raw.get("index_topk_pattern"):
            names = {"F": "full", "S": "shared"}
            kinds = [names.get(entry, str(entry)) for entry in pattern][:n]
    if len(kinds) < n or not set(kinds) <= {"full", "shared"}:
        raise ConfigError(
            f"{keys.where}: index_topk_pattern or indexer_types must say 'full' or 'shared' of {n} layers"
        )
    if kinds[0] == "shared":
        raise ConfigError(
            f"{keys.where}: indexer_types or index_topk_pattern says 'shared' of the first layer, before which none "
            "chooses; it must say 'full'"
        )
    return kinds


def glm5_next(keys: Keys) -> Flags:
    """The flags of GLM-5.3-Flash: Kimi's delta attention, and in each fourth layer the sparse attention of GLM-5, which
    knows no positions here and whose indexer chooses pools of tokens; residual streams side by side."""
    keys = _flat(keys)
    width, pool = keys.integer("linear_head_dim", 128), keys.integer("index_kpool", 16)
    keys.must_be("qk_rope_head_dim", 0)
    keys.must_be("hidden_act", "silu")
    keys.must_be("swiglu_limit", 10.0)
    keys.must_be("index_kpool_always_select_tail", True)
    kinds = keys.kinds_in_groups("linear_attention", 4)
    sparse = ("indexed_attention", "full_attention", "deepseek_sparse_attention")
    if not {*kinds} <= {"linear_attention", *sparse}:
        raise ConfigError(f"{keys.where}: layer_types must name linear_attention or {' or '.join(sparse)}, got {kinds}")
    mixers: list[Mixer] = ["delta" if kind == "linear_attention" else "latent" for kind in kinds]
    shares = [kind == "shared" for kind in indexer_types(keys)]
    if any(shared and mixers[i - 1 : i + 1] == ["delta", "latent"] for i, shared in enumerate(shares)):
        raise ConfigError(
            f"{keys.where}: indexer_types says 'shared' of a layer that follows one with linear attention, which "
            "chooses nothing"
        )
    # the part with position is left out again below
    flags = deepseek_v32(Keys({**keys.raw, "qk_rope_head_dim": 2, "rope_parameters": None}, keys.where))
    latent = dataclasses.replace(
        flags["latent"], rope_dim=0, index_pool=pool, norm_eps=keys.number("rms_norm_eps", 1e-6)
    )
    if latent.index_topk % pool:
        raise ConfigError(f"{keys.where}: index_topk is {latent.index_topk}, not a multiple of {pool} (index_kpool)")
    layers = (
        dataclasses.replace(kind, mixer=mixer, has_rope=False, has_indexer=not shared)
        for kind, mixer, shared in zip(flags["layers"], mixers, shares, strict=True)
    )
    heads, is_bounded = keys.integer("linear_num_heads", 64), keys.raw.get("linear_lower_bound", -5.0) is not None
    return flags | {
        "latent": latent,
        "head_dim": latent.nope_dim,
        "attention_scale": latent.nope_dim**-0.5,
        "rope": Rope(),
        "layers": tuple(layers),
        "carried": LayerKind("latent", has_experts=True, has_rope=False),
        "activation": "bounded_swiglu",
        "delta": DeltaSizes(
            heads,
            heads,
            width,
            width,
            keys.integer("linear_conv_kernel_dim", 4),
            by_channel=True,
            gate_rank=width,
            decay_bound=keys.number("linear_lower_bound", -5.0) if is_bounded else 0.0,
        ),
        "streams": Streams(
            keys.integer("hc_mult", 4), keys.integer("hc_sinkhorn_iters", 20), keys.number("hc_eps", 1e-6)
        ),
        "names": Names(linear_attention="self_attn"),
    }


def _flat(keys: Keys) -> Keys:
    """The keys with the entries of `linear_attn_config` by the names that transformers has for them."""
    given = dict(keys.raw.get("linear_attn_config") or {})
    spellings = {
        "linear_head_dim": "head_dim",
        "linear_num_heads": "num_heads",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
        "linear_lower_bound": "gate_lower_bound",
    }
    found = {ours: given[theirs] for ours, theirs in spellings.items() if theirs in given}
    if given and given.get("safe_gate", True) and found.get("linear_lower_bound") is None:
        found["linear_lower_bound"] = keys.number("linear_lower_bound", -5.0)
    return Keys({**keys.raw, **found}, keys.where)
