"""Inputs and outputs of `tensorrt_llm` where TensorRT-LLM's C++ backend serves it.

All of NVIDIA's inflight_batcher_llm layout (TensorRT-LLM 1.2), because the backend knows a tensor
only if the configuration lists it. The loop sends a few of them: those of `tensors.TARGET_INPUTS`.
"""

from __future__ import annotations

from .tensors import ACCEPTANCE_OUTPUTS, CACHE_AND_TIME_OUTPUTS, TensorSpec

LOGITS = "FP32"  # as the draft sends them


def _number(name: str, data_type: str, *, optional: bool = True) -> TensorSpec:
    """One number per request, which the backend reads without a further axis."""
    return TensorSpec(name, data_type, optional=optional, reshape=True)


def _ragged(name: str, data_type: str, *dims: int) -> TensorSpec:
    """An optional tensor whose length differs between the requests of a batch."""
    return TensorSpec(name, data_type, dims or (-1,), optional=True, ragged=True)


TARGET_INPUTS = (
    _ragged("input_ids", "INT32"),
    _ragged("encoder_input_features", "FP16", -1, -1),
    _number("encoder_output_lengths", "INT32"),
    _number("input_lengths", "INT32", optional=False),
    _number("request_output_len", "INT32", optional=False),
    _number("num_return_sequences", "INT32"),
    _ragged("draft_input_ids", "INT32"),
    _ragged("decoder_input_ids", "INT32"),
    _number("decoder_input_lengths", "INT32"),
    _ragged("draft_logits", LOGITS, -1, -1),
    _number("draft_acceptance_threshold", "FP32"),
    _number("end_id", "INT32"),
    _number("pad_id", "INT32"),
    _ragged("stop_words_list", "INT32", 2, -1),
    _ragged("bad_words_list", "INT32", 2, -1),
    _ragged("embedding_bias", "FP32"),
    _number("beam_width", "INT32"),
    _number("temperature", "FP32"),
    _number("runtime_top_k", "INT32"),
    _number("runtime_top_p", "FP32"),
    _number("runtime_top_p_min", "FP32"),
    _number("runtime_top_p_decay", "FP32"),
    _number("runtime_top_p_reset_ids", "INT32"),
    _number("len_penalty", "FP32"),
    _number("early_stopping", "BOOL"),
    _number("repetition_penalty", "FP32"),
    _number("min_tokens", "INT32"),
    _number("beam_search_diversity_rate", "FP32"),
    _number("presence_penalty", "FP32"),
    _number("frequency_penalty", "FP32"),
    _number("seed", "UINT64"),
    _number("return_log_probs", "BOOL"),
    _number("return_context_logits", "BOOL"),
    _number("return_generation_logits", "BOOL"),
    _number("return_perf_metrics", "BOOL"),
    _number("return_num_input_tokens", "BOOL"),
    _number("return_num_output_tokens", "BOOL"),
    _number("exclude_input_in_output", "BOOL"),
    _number("stop", "BOOL"),
    _number("streaming", "BOOL"),
    _ragged("prompt_embedding_table", "FP16", -1, -1),
    _ragged("prompt_table_extra_ids", "UINT64"),
    _number("prompt_vocab_size", "INT32"),
    _ragged("cross_attention_mask", "BOOL", -1, -1),
    TensorSpec("mrope_rotary_cos_sin", "FP32", (-1,), optional=True),
    TensorSpec("mrope_position_deltas", "INT64", optional=True),
    _number("lora_task_id", "UINT64"),
    _ragged("lora_weights", "FP16", -1, -1),
    _ragged("lora_config", "INT32", -1, 3),
    _ragged("context_phase_params", "UINT8"),
    _ragged("skip_cross_attn_blocks", "BOOL", 1),
    _ragged("retention_token_range_starts", "INT32"),
    _ragged("retention_token_range_ends", "INT32"),
    _ragged("retention_token_range_priorities", "INT32"),
    _ragged("retention_token_range_durations_ms", "INT32"),
    _ragged("retention_decode_priority", "INT32", 1),
    _ragged("retention_decode_duration_ms", "INT32", 1),
    _ragged("guided_decoding_guide_type", "STRING", 1),
    _ragged("guided_decoding_guide", "STRING", 1),
    _ragged("lookahead_window_size", "INT32", 1),
    _ragged("lookahead_ngram_size", "INT32", 1),
    _ragged("lookahead_verification_set_size", "INT32", 1),
)
TARGET_OUTPUTS = (
    TensorSpec("output_ids", "INT32", (-1, -1)),
    TensorSpec("sequence_length", "INT32", (-1,)),
    TensorSpec("cum_log_probs", "FP32", (-1,)),
    TensorSpec("output_log_probs", "FP32", (-1, -1)),
    TensorSpec("context_logits", LOGITS, (-1, -1)),
    TensorSpec("generation_logits", LOGITS, (-1, -1, -1)),
    TensorSpec("batch_index", "INT32"),
    TensorSpec("sequence_index", "INT32"),
    TensorSpec("context_phase_params", "UINT8", (-1,)),
    *CACHE_AND_TIME_OUTPUTS,
    *ACCEPTANCE_OUTPUTS,
    TensorSpec("num_input_tokens", "INT32"),
    TensorSpec("num_output_tokens", "INT32"),
)
