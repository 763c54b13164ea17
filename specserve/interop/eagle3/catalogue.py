"""Tables about an EAGLE-3 head's files: the keys of config.json that are known, and the faults that loaders refuse and
the draft doctor reports. `dialects` and `checks` look for them, and `tools/list_checks.py` makes the table in
docs/checkpoints.md of the faults."""

from collections.abc import Mapping

from specserve.interop.findings import FAULTS
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
            *LATENT_CLASSES,
        )
    ),
    model_types=frozenset({"eagle3"}),
    places=frozenset({EAGLE}),
    # of DeepSpec's training, and of the target
    harmless=HARMLESS
    | {"ttt_length", "step_loss_decay", "draft_num_hidden_layers", "num_target_layers", *_OF_EXPERTS.split()},
)

CHECKS = FAULTS["eagle3"]
