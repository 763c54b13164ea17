"""Tables about an EAGLE-3 head's files: the keys of config.json that are known, and the faults that loaders refuse and
the draft doctor reports. `dialects` and `checks` look for them, and `tools/list_checks.py` makes the table in
docs/checkpoints.md of the faults."""

from collections.abc import Mapping

from specserve.interop.findings import read_checks
from specserve.interop.gemma import CLASSES as GEMMA
from specserve.interop.gemma import plain
from specserve.interop.keys import HARMLESS, Key, KeyTable, counts, flag, only
from specserve.interop.layers import LAYER_KEYS

EAGLE, TAP_IDS = "eagle_config", "eagle_aux_hidden_state_layer_ids"
OUTPUT_TAPS = "target_layer_ids"  # DeepSpec's, of outputs in every layout
FLAGS = ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")


NORMED_CLASSES = frozenset(  # with norms of queries and keys: vLLM's, and DeepSpec's
    ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM", "Qwen3Eagle3Model")
)
LATENT_CLASSES = frozenset(("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"))  # with latent attention
LATENT_KEYS: Mapping[str, str] = {  # and our names
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "nope_dim",
    "qk_rope_head_dim": "rope_dim",
    "v_head_dim": "v_dim",
    "q_lora_rank": "q_rank",
}
_OF_EXPERTS = """
aux_loss_alpha ep_size first_k_dense_replace moe_intermediate_size moe_layer_freq n_group n_routed_experts
n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers routed_scaling_factor scoring_func seq_aux
topk_group topk_method diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size length_penalty max_length
min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores pruned_heads
remove_invalid_values repetition_penalty return_dict_in_generate temperature tf_legacy_loss tie_encoder_decoder top_k
top_p torchscript typical_p use_bfloat16
"""  # and of generating, in a config.json that was copied from a target with experts: no head here has any
KEYS = KeyTable(
    [
        *LAYER_KEYS,
        *counts("num_hidden_layers", "num_aux_hidden_states"),
        *(flag(name, sets=name) for name in FLAGS),
        *map(Key, (TAP_IDS, OUTPUT_TAPS)),
        *counts(*LATENT_KEYS),
        Key("rope_interleave", fits=lambda value: isinstance(value, bool), expected="true or false"),
        only("use_swa", False),
        # Model-Optimizer's and AngelSlim's
        only("use_input_layernorm_in_first_layer", True),
        only("use_last_layernorm", True),
        only("use_mtp_layernorm", False),
        only("next_layer_regular", True),
        only("parallel_draft_step", 1, 0),
        Key("parallel_draft_heads_num_layers"),  # of the further steps
        only("use_qk_norm", False),
        only("use_cla", False),
        only("norm_type", "rms"),
        only("use_rotary_pos_emb", True),
        only("logit_scale", 1),
    ],
    classes=frozenset(
        (
            *("Eagle3DraftModel", "Eagle3Speculator"),  # speculators', now and in its early days
            *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
            *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"),  # vLLM's, of the same head
            *("Eagle3Qwen3ForCausalLM", "Qwen3Eagle3Model"),
            GEMMA["eagle3"],
            *LATENT_CLASSES,
        )
    ),
    model_types=frozenset({"eagle3"}),
    places=frozenset({EAGLE}),
    # of DeepSpec's training, and of the target
    harmless=HARMLESS
    | {"ttt_length", "step_loss_decay", "draft_num_hidden_layers", "num_target_layers", *_OF_EXPERTS.split()}
    | {"target_text_model_type"},
    translate=plain,
)

CHECKS = read_checks("""
[keys]
draft-vocab-size error: draft_vocab_size is not stated
  loaders take the head's rows for the target's whole vocabulary
  fix: write the number of rows of lm_head.weight
architecture error: not named as an EAGLE-3 head
  engines pick the model class by this name: they refuse it, or build a whole language model
  fix: name it
architecture warning: not named as an EAGLE-3 head
  engines pick the model class by this name: they refuse it, or build a whole language model
  fix: name it
model-type error: model_type is missing
  transformers cannot tell which config class to read it with
  fix: write it
tied error: tie_word_embeddings is true
  loaders ignore lm_head.weight and the draft vocabulary, and propose from the embedding
  fix: write false
[keys of speculators]
implicit-flag warning: norm_before_residual is not stated
  vLLM then assumes true, the speculators package and we assume false: one of them computes another head
  by hand: write what the head was trained with
speculators-config error: speculators_config is not whole
  vLLM refuses the head
  by hand: import it and export it again: `specserve export --to speculators` writes all of it
[target]
embedding error: a head of its own width without an embedding of its own
  the target's embedding has width {width}, so there is none to share
  by hand: export the head again, with embed_tokens.weight
[tensors]
names error: {count} tensors have another engine's names
  SGLang leaves out what it does not know, vLLM refuses it
  fix: rename them
norm-flag error: the tensors of {flag} are there, the flag is not
  the head is computed without norms that it was trained with: nearly nothing is accepted
  fix: write {flag}: true
normed-class error: norms of queries and keys are there, the class that is named has none
  vLLM refuses the head, others run it without
  fix: name the class of a Qwen3's layers
weight-dtype error: weights that are no 16 or 32 bit floats
  EAGLE-3 loaders would read the numbers as they stand, without scales
  by hand: export the head again in bfloat16
mixed-dtypes warning: weights of several dtypes
  engines cast all to one of them, and not to the same
  by hand: `specserve import --dtype` writes all in one
dtype warning: the dtype that is stated is not that of the weights
  engines then load the head in float32 or in the target's dtype
  fix: state that of the weights
[the layer]
eps-differs warning: another rms_norm_eps than the target's
  right only if the head was trained so; if not, small states are scaled otherwise
  by hand: compare with what it was trained with
[vocabulary]
eos warning: EOS ids are not in the draft vocabulary
  the end of an answer can never be proposed: its last step drafts in vain
  by hand: train with them in the draft vocabulary, as `specserve train` does
template-tokens warning: tokens of the chat template, or special ones, are not in the draft vocabulary
  turns, tool calls and thinking that they open or close are drafted in vain
  by hand: train with them in the draft vocabulary, as `specserve train` does
[taps]
taps-range error: taps that the target does not have
  the head cannot be fed
  by hand: give the target that it was trained for, or count its layers again
taps-order warning: taps out of order
  fc.weight expects low, middle, high: engines that collect them on the way up feed it otherwise
  by hand: write them in the order that the head was trained with
taps-off-by-one warning: tap ids look as if they were counted in another layout
  if they name {other}, every tap is one layer off: acceptance falls to a quarter, and nothing else shows
  by hand: compare the acceptance with both, and keep the better; leave the key out for the usual taps
[rotary settings]
rope-one-spelling warning: the rotary settings are spelled in one way only
  engines that know only the other one turn by theta 10,000
  fix: write both
rope-differs warning: other rotary settings than the target's
  right only if the head was trained so; if not, acceptance falls with the position
  by hand: compare with the settings that it was trained with
""")
