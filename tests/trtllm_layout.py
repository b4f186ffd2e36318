"""NVIDIA's published layout of `tensorrt_llm` (inflight_batcher_llm, TensorRT-LLM 1.2).

One tensor a line: name, type, dims, flags ("reshape": to no dims at all). LOGITS and FP16 stand for
types that the template leaves open. KEYS are the settings that its template fills in.
"""

INPUTS = """
input_ids INT32 [ -1 ] optional ragged
encoder_input_features FP16 [ -1, -1 ] optional ragged
encoder_output_lengths INT32 [ 1 ] optional reshape
input_lengths INT32 [ 1 ] reshape
request_output_len INT32 [ 1 ] reshape
num_return_sequences INT32 [ 1 ] optional reshape
draft_input_ids INT32 [ -1 ] optional ragged
decoder_input_ids INT32 [ -1 ] optional ragged
decoder_input_lengths INT32 [ 1 ] optional reshape
draft_logits LOGITS [ -1, -1 ] optional ragged
draft_acceptance_threshold FP32 [ 1 ] optional reshape
end_id INT32 [ 1 ] optional reshape
pad_id INT32 [ 1 ] optional reshape
stop_words_list INT32 [ 2, -1 ] optional ragged
bad_words_list INT32 [ 2, -1 ] optional ragged
embedding_bias FP32 [ -1 ] optional ragged
beam_width INT32 [ 1 ] optional reshape
temperature FP32 [ 1 ] optional reshape
runtime_top_k INT32 [ 1 ] optional reshape
runtime_top_p FP32 [ 1 ] optional reshape
runtime_top_p_min FP32 [ 1 ] optional reshape
runtime_top_p_decay FP32 [ 1 ] optional reshape
runtime_top_p_reset_ids INT32 [ 1 ] optional reshape
len_penalty FP32 [ 1 ] optional reshape
early_stopping BOOL [ 1 ] optional reshape
repetition_penalty FP32 [ 1 ] optional reshape
min_tokens INT32 [ 1 ] optional reshape
beam_search_diversity_rate FP32 [ 1 ] optional reshape
presence_penalty FP32 [ 1 ] optional reshape
frequency_penalty FP32 [ 1 ] optional reshape
seed UINT64 [ 1 ] optional reshape
return_log_probs BOOL [ 1 ] optional reshape
return_context_logits BOOL [ 1 ] optional reshape
return_generation_logits BOOL [ 1 ] optional reshape
return_perf_metrics BOOL [ 1 ] optional reshape
exclude_input_in_output BOOL [ 1 ] optional reshape
stop BOOL [ 1 ] optional reshape
streaming BOOL [ 1 ] optional reshape
prompt_embedding_table FP16 [ -1, -1 ] optional ragged
prompt_table_extra_ids UINT64 [ -1 ] optional ragged
prompt_vocab_size INT32 [ 1 ] optional reshape
cross_attention_mask BOOL [ -1, -1 ] optional ragged
mrope_rotary_cos_sin FP32 [ -1 ] optional
mrope_position_deltas INT64 [ 1 ] optional
lora_task_id UINT64 [ 1 ] optional reshape
lora_weights FP16 [ -1, -1 ] optional ragged
lora_config INT32 [ -1, 3 ] optional ragged
context_phase_params UINT8 [ -1 ] optional ragged
skip_cross_attn_blocks BOOL [ 1 ] optional ragged
retention_token_range_starts INT32 [ -1 ] optional ragged
retention_token_range_ends INT32 [ -1 ] optional ragged
retention_token_range_priorities INT32 [ -1 ] optional ragged
retention_token_range_durations_ms INT32 [ -1 ] optional ragged
retention_decode_priority INT32 [ 1 ] optional ragged
retention_decode_duration_ms INT32 [ 1 ] optional ragged
guided_decoding_guide_type STRING [ 1 ] optional ragged
guided_decoding_guide STRING [ 1 ] optional ragged
lookahead_window_size INT32 [ 1 ] optional ragged
lookahead_ngram_size INT32 [ 1 ] optional ragged
lookahead_verification_set_size INT32 [ 1 ] optional ragged
return_num_input_tokens BOOL [ 1 ] optional reshape
return_num_output_tokens BOOL [ 1 ] optional reshape
"""

OUTPUTS = """
output_ids INT32 [ -1, -1 ]
sequence_length INT32 [ -1 ]
cum_log_probs FP32 [ -1 ]
output_log_probs FP32 [ -1, -1 ]
context_logits LOGITS [ -1, -1 ]
generation_logits LOGITS [ -1, -1, -1 ]
batch_index INT32 [ 1 ]
sequence_index INT32 [ 1 ]
context_phase_params UINT8 [ -1 ]
kv_cache_alloc_new_blocks INT32 [ 1 ]
kv_cache_reused_blocks INT32 [ 1 ]
kv_cache_alloc_total_blocks INT32 [ 1 ]
arrival_time_ns INT64 [ 1 ]
first_scheduled_time_ns INT64 [ 1 ]
first_token_time_ns INT64 [ 1 ]
last_token_time_ns INT64 [ 1 ]
acceptance_rate FP32 [ 1 ]
total_accepted_draft_tokens INT32 [ 1 ]
total_draft_tokens INT32 [ 1 ]
num_input_tokens INT32 [ 1 ]
num_output_tokens INT32 [ 1 ]
"""

KEYS = """
batch_scheduler_policy batching_strategy cancellation_check_period_ms cross_kv_cache_fraction
cuda_graph_cache_size cuda_graph_mode decoding_mode decoupled_mode eagle_choices
enable_chunked_context enable_context_fmha_fp32_acc enable_kv_cache_reuse enable_trt_overlap
encoder_engine_dir encoder_input_features_data_type engine_dir exclude_input_in_output
gpu_device_ids gpu_weights_percent guided_decoding_backend iter_stats_max_iterations
kv_cache_free_gpu_mem_fraction kv_cache_host_memory_bytes kv_cache_onboard_blocks
logits_datatype lookahead_ngram_size lookahead_verification_set_size lookahead_window_size
lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes lora_cache_max_adapter_size
lora_cache_optimal_adapter_size lora_prefetch_dir max_attention_window_size max_beam_width
max_queue_delay_microseconds max_queue_size max_tokens_in_paged_kv_cache medusa_choices
multi_block_mode normalize_log_probs num_nodes participant_ids request_stats_max_iterations
sink_token_length speculative_decoding_fast_logits stats_check_period_ms tokenizer_dir
triton_backend triton_max_batch_size xgrammar_tokenizer_info_path
"""

# Settings whose parameter has another name, and those that are no parameters of the model.
PARAMETERS = {
    "engine_dir": "gpt_model_path",
    "encoder_engine_dir": "encoder_model_path",
    "batching_strategy": "gpt_model_type",
}
ELSEWHERE = {
    "decoupled_mode",
    "encoder_input_features_data_type",
    "logits_datatype",
    "max_queue_delay_microseconds",
    "max_queue_size",
    "triton_backend",
    "triton_max_batch_size",
}

# Parameters of the same backend that a deployment of ours leaves out, and why. Left out, each has
# the backend's default; an unfilled or empty value would not.
LEFT_OUT = {
    "encoder_model_path": "no encoder",
    "cross_kv_cache_fraction": "no encoder",
    "max_tokens_in_paged_kv_cache": "the memory fraction decides",
    "max_attention_window_size": "windows switch block reuse off",
    "sink_token_length": "sinks switch block reuse off",
    "enable_trt_overlap": "experimental",
    "participant_ids": "for orchestrators that do not spawn their ranks",
    "lora_cache_optimal_adapter_size": "no LoRA",
    "lora_cache_max_adapter_size": "no LoRA",
    "lora_cache_gpu_memory_fraction": "no LoRA",
    "lora_cache_host_memory_bytes": "no LoRA",
    "lora_prefetch_dir": "no LoRA",
    "lookahead_window_size": "another kind of speculation",
    "lookahead_ngram_size": "another kind of speculation",
    "lookahead_verification_set_size": "another kind of speculation",
    "medusa_choices": "another kind of speculation",
    "eagle_choices": "another kind of speculation",
    "guided_decoding_backend": "no guided decoding",
    "xgrammar_tokenizer_info_path": "no guided decoding",
    "tokenizer_dir": "for guided decoding only",
}


def tensors(text: str) -> dict[str, tuple]:
    """{name: (type, dims, optional, ragged, reshape)} of INPUTS or OUTPUTS."""
    found = {}
    for line in text.strip().splitlines():
        head, _, rest = line.partition(" [")
        name, kind = head.split()
        dims, _, flags = rest.partition("]")
        shape = [int(size) for size in dims.split(",")]
        flags = [flag in flags for flag in ("optional", "ragged", "reshape")]
        found[name] = (kind, shape, *flags)
    return found
