"""`tensorrt_llm` as a model of TensorRT-LLM's C++ backend: tensors, parameters, scheduling."""

from __future__ import annotations

from dataclasses import dataclass

from tritonclient.grpc import model_config_pb2 as pb

from .trtllm_tensors import TARGET_INPUTS, TARGET_OUTPUTS

BACKEND = "tensorrtllm"
WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"

# The same in every deployment. A request ends after one verification and the next one sends all ids
# again: only reuse of cached blocks makes that cheap. Chunked context lets prompts be longer than
# the engine's max_num_tokens. exclude_input_in_output is what a request may override; NVIDIA's own
# clients of this mode expect the prompt in the output, the loop says what it wants itself.
FIXED = {
    "gpt_model_type": "inflight_fused_batching",
    "batch_scheduler_policy": "guaranteed_no_evict",
    "enable_kv_cache_reuse": "true",
    "enable_chunked_context": "true",
    "exclude_input_in_output": "false",
    "executor_worker_path": WORKER,
    "decoding_mode": "top_k_top_p",
    "max_beam_width": "1",
    "num_nodes": "1",
    "kv_cache_host_memory_bytes": "0",
    "kv_cache_onboard_blocks": "true",
    "normalize_log_probs": "true",
    "cancellation_check_period_ms": "100",
    "stats_check_period_ms": "100",
    "iter_stats_max_iterations": "1000",
    "request_stats_max_iterations": "0",
    "gpu_weights_percent": "1.0",
    "multi_block_mode": "true",
    "cuda_graph_mode": "false",
    "cuda_graph_cache_size": "0",
    "enable_context_fmha_fp32_acc": "false",
    "speculative_decoding_fast_logits": "false",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
}


@dataclass(frozen=True)
class BackendTarget:
    """A target engine as the backend loads it.

    engine: its folder, as the server sees it. gpus: device of each rank. kv_fraction: share of the
    device memory still free after loading that the cache of keys and values takes.
    """

    engine: str
    gpus: tuple[int, ...]
    kv_fraction: float = 0.9

    def __post_init__(self):
        object.__setattr__(self, "gpus", tuple(self.gpus))
        if not isinstance(self.engine, str) or not self.engine.strip():
            raise ValueError(f"engine = {self.engine!r}: give the folder of the target's engine")
        wrong = [gpu for gpu in self.gpus if type(gpu) is not int or gpu < 0]
        if not self.gpus or wrong or len(set(self.gpus)) < len(self.gpus):
            raise ValueError(f"gpus = {self.gpus}: give each rank a device of its own, from 0 up")
        if not 0 < self.kv_fraction < 1:
            raise ValueError(f"kv_fraction = {self.kv_fraction}: use a share between 0 and 1")

    @property
    def parameters(self) -> dict[str, str]:
        """All parameters of the model, as text."""
        return FIXED | {
            "gpt_model_path": self.engine,
            "gpu_device_ids": ",".join(map(str, self.gpus)),
            "kv_cache_free_gpu_mem_fraction": f"{self.kv_fraction:g}",
        }

    def message(self, name: str, max_batch_size: int) -> pb.ModelConfig:
        """The protobuf message of the model.

        Never decoupled: the loop's calls are answered once, and only so are they safe from one
        event loop. The queue policy is the default one: any other stalls bursts of calls.
        """
        message = pb.ModelConfig(
            name=name,
            backend=BACKEND,
            max_batch_size=max_batch_size,
            input=[tensor.model_input() for tensor in TARGET_INPUTS],
            output=[tensor.model_output() for tensor in TARGET_OUTPUTS],
            instance_group=[pb.ModelInstanceGroup(kind="KIND_CPU", count=1)],
        )
        message.model_transaction_policy.decoupled = False
        message.dynamic_batching.SetInParent()
        for key, value in self.parameters.items():
            message.parameters[key].string_value = value
        return message
