"""Tables about a block drafter's files: the keys of config.json that are known, and the faults that loaders refuse and
the draft doctor reports. `dialects` and `checks` look for them."""

from collections.abc import Mapping

from specserve.interop.findings import read_checks
from specserve.interop.keys import HARMLESS, Key, KeyTable, counts, flag, flags, number, only
from specserve.interop.layers import LAYER_KEYS

OWN = "dflash_config"
TAPS, INPUT_TAPS = "target_layer_ids", ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
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

CHECKS = read_checks("""
[block drafters: keys]
mask-token error: the mask token is none of the target's tokens
  every slot but the anchor's is filled with the embedding of something else, or of nothing
  by hand: write the id that it was trained with; for Qwen3 that is a padding row behind the tokenizer's tokens
  refused: mask_token_id is {got}; expected a token of the target's embedding, {expected}
[block drafters: windows and causality]
use-swa warning: windows are stated by use_swa alone
  vLLM reads it, SGLang and the package `dflash` run without windows
  fix: write layer_types, sliding_window and is_causal too
all-causal warning: sliding_window_non_causal is not true, beside layers without windows
  vLLM makes all layers causal by it, those without windows too, which were trained to see the whole block
  fix: write true, which changes nothing where no layer has a window
  by hand: serve it with another engine than vLLM: the layout cannot say it
sinks error: attention sinks are there, attention_sink_bias is not
  attention is computed without them
  fix: write dflash_config.attention_sink_bias: true
[block drafters: target]
block-taps error: taps that make no sense
  the head cannot be fed
  by hand: count the target's layers again: target_layer_ids names outputs, aux_hidden_state_layer_ids inputs
taps-unstated warning: no taps are stated
  every engine takes default ones, and speculators none
  fix: write the default ones of the package `dflash`
taps-slipped warning: tap ids look as if they were counted in the other layout
  if they are, every tap is one layer off: acceptance falls, and nothing else shows
  by hand: compare the acceptance with both, and keep the better
last-tap warning: the last layer is tapped
  transformers gives its state after the target's final norm, other engines before it
  by hand: find out with which it was trained; we take the state before the norm
""")
