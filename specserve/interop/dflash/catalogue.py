"""Tables about a block drafter's files: the keys of config.json that are known, and the faults that loaders refuse and
the draft doctor reports. `dialects` and `checks` look for them."""

from collections.abc import Mapping

from specserve.interop.findings import FAULTS
from specserve.interop.keys import HARMLESS, Key, KeyTable, counts, flag, flags, number, only
from specserve.interop.layers import LAYER_KEYS

OWN = "dflash_config"
TAPS, INPUT_TAPS = "target_layer_ids", ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
COUNTED_FROM = {TAPS: 0, **dict.fromkeys(INPUT_TAPS, 1)}  # of layer 0's output
SELECTOR: Mapping[str, str] = {  # keys of heads that choose among candidates, and the fields of our config
    "conv_kernel_size": "conv_taps",
    "conv_group_size": "conv_group",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
}
CORRECTION: Mapping[str, str] = {  # of Domino's heads
    "gru_hidden_dim": "gru_width",
    "emb_dim": "correction_rank",
    "pure_draft_prefix_len": "num_uncorrected",
}
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {  # the first is written; for speculators the second, if there is one
    "dflash": ("DFlashDraftModel", "DFlashSpeculator"),
    "dspark": ("Qwen3DSparkModel", "DSparkSpeculator", "DSparkDraftModel"),
    "dflash2": ("DFlash2DraftModel",),
    "domino": ("DominoDraftModel",),
}
# Any key may stand in `dflash_config`, beside it, or where speculators keeps the layers' settings.
KEYS = KeyTable(
    [
        *LAYER_KEYS,
        *counts("num_hidden_layers", "block_size", is_required=True),
        *counts("num_target_layers"),
        flag("attention_sink_bias", "add_swa_attention_sink_bias", sets="has_sinks"),
        number("input_embedding_scale", 1.0, sets="embedding_scale"),
        number("output_multiplier", 1.0, sets="output_scale"),
        number("logit_scale", 1.0, sets="logit_scale"),
        number("final_logit_softcapping", 0.0, sets="logit_softcap"),
        only("attention_value_scale", 1),
        only("attention_mode", "gqa", "mha"),  # the numbers of heads say it too
        only("markov_head_type", "vanilla", "gated", "rnn", aliases=("dspark_markov_head_type",)),
        # `dialects` reads these
        *flags("is_causal", "causal", "sliding_window_non_causal", "use_swa"),
        *flags("sample_from_anchor", "dspark_bonus_anchor", "enable_confidence_head", "confidence_head_with_markov"),
        flag("shift_label"),
        *map(Key, ("mask_token_id", TAPS, *INPUT_TAPS, "max_window_layers", "projector_type")),
        Key("markov_rank", ("dspark_markov_rank",)),
        *map(Key, (*SELECTOR, *CORRECTION)),
    ],
    classes=frozenset(name for names in ARCHITECTURES.values() for name in names),
    model_types=frozenset(ARCHITECTURES),
    places=frozenset({OWN}),
    harmless=HARMLESS | {"has_own_lm_head"},
)

CHECKS = FAULTS["blocks"]
