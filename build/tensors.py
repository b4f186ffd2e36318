"""The tensors of every Triton model: names and types follow NVIDIA's inflight_batcher_llm layout.

Shapes leave out the batch axis that Triton puts in front. In the ensemble a tensor keeps the name
that its user sees; those between two steps start with an underscore.
"""

from dataclasses import dataclass

from tritonclient.grpc import model_config_pb2 as pb


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: name, Triton data type without `TYPE_`, dims (-1 = any length).

    reshape: the backend gets a single number without an axis beside the batch's.
    """

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    ragged: bool = False
    reshape: bool = False

    def __post_init__(self):
        if f"TYPE_{self.data_type}" not in dict(pb.DataType.items()):
            raise ValueError(f"{self.name}: data_type = {self.data_type!r} is not one of Triton's")
        if not self.dims or any(size == 0 or size < -1 for size in self.dims):
            raise ValueError(f"{self.name}: dims = {self.dims}: use sizes above 0, or -1 for any")
        if self.reshape and self.dims != (1,):
            raise ValueError(f"{self.name}: dims = {self.dims}: only (1,) can be reshaped away")

    def model_input(self) -> pb.ModelInput:
        message = pb.ModelInput(
            name=self.name,
            data_type=f"TYPE_{self.data_type}",
            dims=self.dims,
            optional=self.optional,
            allow_ragged_batch=self.ragged,
        )
        if self.reshape:
            message.reshape.SetInParent()
        return message

    def model_output(self) -> pb.ModelOutput:
        return pb.ModelOutput(name=self.name, data_type=f"TYPE_{self.data_type}", dims=self.dims)


def _option(name: str, data_type: str, *dims: int) -> TensorSpec:
    return TensorSpec(name, data_type, dims or (1,), optional=True)


# What a user may ask of the loop and of the ensemble alike.
REQUEST_OPTIONS = (
    _option("stream", "BOOL"),
    _option("num_draft_tokens", "INT32"),
    _option("use_draft_logits", "BOOL"),
    _option("adaptive_draft", "BOOL"),
    _option("time_limit", "FP32"),
    _option("temperature", "FP32"),
    _option("top_k", "INT32"),
    _option("top_p", "FP32"),
    _option("seed", "UINT64"),
    _option("min_tokens", "INT32"),
    _option("stop_words", "STRING", -1),
    _option("end_id", "INT32"),
    _option("pad_id", "INT32"),
    _option("exclude_input_in_output", "BOOL"),
    _option("beam_width", "INT32"),
    _option("return_perf_metrics", "BOOL"),
)

# NVIDIA's further inputs: taken at their neutral value, refused by name at any other.
NEUTRAL_OPTIONS = (
    _option("decoder_text_input", "STRING"),
    _option("bad_words", "STRING", -1),
    _option("embedding_bias_words", "STRING", -1),
    _option("embedding_bias_weights", "FP32", -1),
    _option("length_penalty", "FP32"),
    _option("repetition_penalty", "FP32"),
    _option("presence_penalty", "FP32"),
    _option("frequency_penalty", "FP32"),
    _option("return_log_probs", "BOOL"),
    _option("return_context_logits", "BOOL"),
    _option("return_generation_logits", "BOOL"),
    _option("num_return_sequences", "INT32"),
    _option("prompt_embedding_table", "FP16", -1, -1),
    _option("prompt_vocab_size", "INT32"),
    _option("prompt_table_extra_id", "UINT64"),
    _option("lora_task_id", "UINT64"),
    _option("lora_weights", "FP16", -1, -1),
    _option("lora_config", "INT32", -1, 3),
    _option("guided_decoding_guide_type", "STRING"),
    _option("guided_decoding_guide", "STRING"),
)

ACCEPTANCE_OUTPUTS = (
    TensorSpec("acceptance_rate", "FP32"),
    TensorSpec("total_accepted_draft_tokens", "INT32"),
    TensorSpec("total_draft_tokens", "INT32"),
)
CACHE_AND_TIME_OUTPUTS = (
    TensorSpec("kv_cache_alloc_new_blocks", "INT32"),
    TensorSpec("kv_cache_reused_blocks", "INT32"),
    TensorSpec("kv_cache_alloc_total_blocks", "INT32"),
    TensorSpec("arrival_time_ns", "INT64"),
    TensorSpec("first_scheduled_time_ns", "INT64"),
    TensorSpec("first_token_time_ns", "INT64"),
    TensorSpec("last_token_time_ns", "INT64"),
)
PERF_OUTPUTS = (
    *ACCEPTANCE_OUTPUTS,
    *CACHE_AND_TIME_OUTPUTS,
    TensorSpec("statistics", "STRING"),
)

BLS_INPUTS = (
    _option("text_input", "STRING"),
    _option("input_ids", "INT32", -1),
    TensorSpec("max_tokens", "INT32"),
    _option("apply_chat_template", "BOOL"),
    *REQUEST_OPTIONS,
    *NEUTRAL_OPTIONS,
)
BLS_OUTPUTS = (
    TensorSpec("text_output", "STRING", (-1,)),
    TensorSpec("output_ids", "INT32", (1, -1)),
    TensorSpec("sequence_length", "INT32"),
    TensorSpec("emitted_length", "INT32"),
    TensorSpec("is_final", "BOOL"),
    TensorSpec("stop_words_dict", "STRING", (-1,)),
    *PERF_OUTPUTS,
)

PREPROCESSING_INPUTS = (TensorSpec("QUERY", "STRING"), _option("APPLY_CHAT_TEMPLATE", "BOOL"))
PREPROCESSING_OUTPUTS = (
    TensorSpec("INPUT_ID", "INT32", (-1,)),
    TensorSpec("REQUEST_INPUT_LEN", "INT32"),
)

POSTPROCESSING_INPUTS = (
    TensorSpec("TOKENS_BATCH", "INT32", (-1, -1)),
    TensorSpec("SEQUENCE_LENGTH", "INT32", (-1,)),
    TensorSpec("EMITTED_LENGTH", "INT32"),
    TensorSpec("IS_FINAL", "BOOL"),
    TensorSpec("STOP_WORDS_DICT", "STRING", (-1,)),
)
POSTPROCESSING_OUTPUTS = (TensorSpec("OUTPUT", "STRING", (-1,)),)

TARGET_INPUTS = (
    TensorSpec("input_ids", "INT32", (-1,), ragged=True),
    TensorSpec("input_lengths", "INT32"),
    TensorSpec("request_output_len", "INT32"),
    TensorSpec("draft_input_ids", "INT32", (-1,), optional=True, ragged=True),
    TensorSpec("draft_logits", "FP32", (-1, -1), optional=True, ragged=True),
    _option("end_id", "INT32"),
    _option("temperature", "FP32"),
    _option("runtime_top_k", "INT32"),
    _option("runtime_top_p", "FP32"),
    _option("seed", "UINT64"),
    _option("min_tokens", "INT32"),
    _option("exclude_input_in_output", "BOOL"),
    _option("beam_width", "INT32"),
    _option("streaming", "BOOL"),
    _option("return_perf_metrics", "BOOL"),
)
TARGET_OUTPUTS = (
    TensorSpec("output_ids", "INT32", (-1, -1)),
    TensorSpec("sequence_length", "INT32", (-1,)),
)

DRAFT_INPUTS = (
    TensorSpec("sequence_id", "UINT64"),
    TensorSpec("start_position", "INT32"),
    TensorSpec("new_ids", "INT32", (-1,), ragged=True),
    TensorSpec("num_draft_tokens", "INT32"),
    TensorSpec("temperature", "FP32"),
    TensorSpec("top_p", "FP32"),
    TensorSpec("top_k", "INT32"),
    TensorSpec("seed", "UINT64"),
    TensorSpec("return_draft_logits", "BOOL"),
    TensorSpec("end", "BOOL"),
)
DRAFT_OUTPUTS = (
    TensorSpec("draft_input_ids", "INT32", (-1,)),
    TensorSpec("draft_logits", "FP32", (-1, -1)),
)

ENSEMBLE_INPUTS = (
    TensorSpec("text_input", "STRING"),
    *(tensor for tensor in BLS_INPUTS if tensor.name not in ("text_input", "input_ids")),
)
ENSEMBLE_OUTPUTS = (TensorSpec("text_output", "STRING", (-1,)), *PERF_OUTPUTS)

# (model, its tensor -> the ensemble's tensor for inputs, the same for outputs). A step behind a
# decoupled one may read only what that one sends with each response: the stop words go through it.
ENSEMBLE_STEPS = (
    (
        "preprocessing",
        {"QUERY": "text_input", "APPLY_CHAT_TEMPLATE": "apply_chat_template"},
        {"INPUT_ID": "_INPUT_ID"},
    ),
    (
        "tensorrt_llm_bls",
        {"input_ids": "_INPUT_ID", "max_tokens": "max_tokens"}
        | {tensor.name: tensor.name for tensor in (*REQUEST_OPTIONS, *NEUTRAL_OPTIONS)},
        {
            "output_ids": "_TOKENS_BATCH",
            "sequence_length": "_SEQUENCE_LENGTH",
            "emitted_length": "_EMITTED_LENGTH",
            "is_final": "_IS_FINAL",
            "stop_words_dict": "_STOP_WORDS_DICT",
        }
        | {tensor.name: tensor.name for tensor in PERF_OUTPUTS},
    ),
    (
        "postprocessing",
        {
            "TOKENS_BATCH": "_TOKENS_BATCH",
            "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH",
            "EMITTED_LENGTH": "_EMITTED_LENGTH",
            "IS_FINAL": "_IS_FINAL",
            "STOP_WORDS_DICT": "_STOP_WORDS_DICT",
        },
        {"OUTPUT": "text_output"},
    ),
)
