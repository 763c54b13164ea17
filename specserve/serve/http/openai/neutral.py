"""Known fields of other servers, with the values that change nothing. null always is one.

Clients of OpenAI, vLLM and SGLang send these values by default. This server does not do what a field of another value
asks for, so such a value is an error.
"""

from typing import Any

ANYWHERE: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    # vLLM
    "early_stopping": (False,),
    "ec_transfer_params": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": (),
    "logprob_token_ids": (),
    "mm_processor_kwargs": ({},),
    "repetition_detection": (),
    "return_mm_kwargs": (True,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "structural_tag": (),
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # SGLang
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_labels": ({},),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "data_parallel_rank": (),
    "disagg_prefill_dp_rank": (),
    "ebnf": (),
    "extra_key": (),
    "images_config": ({},),
    "lora_path": ("",),
    "no_stop_trim": (False,),
    "regex": (),
    "return_cached_tokens_details": (False,),
    "rid": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_dp_rank": (),
    "routed_experts_start_len": (0,),
    "session_params": ({},),
    "stop_regex": ([], ""),
}
IN_COMPLETIONS: dict[str, tuple[Any, ...]] = ANYWHERE | {"json_schema": (), "prompt_embeds": ()}
IN_CHAT: dict[str, tuple[Any, ...]] = ANYWHERE | {
    "add_special_tokens": (False,),  # the template writes them
    "input_ids": (),
    "max_dynamic_patch": (),
    "media_io_kwargs": ({},),
    "min_dynamic_patch": (),
    "return_meta_info": (False,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "task": (),
    "use_audio_in_video": (False,),
}
