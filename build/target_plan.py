"""What a TensorRT-LLM target will be, told before anything slow: config, shapes, bytes, command.

Pure: reads neither weights nor TensorRT-LLM. Formats follow TensorRT-LLM 1.2's checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engines.config import DecoderConfig, RopeConfig
from ..engines.recipe import Recipe, TargetRecipe
from ..engines.trtllm_folder import AWQ_VOCAB_MULTIPLE
from .quantization import QUANTIZATIONS
from .target_tensors import BITS, Shards

BUILDER = "trtllm-build"
ALGORITHMS = {"none": None, "fp8": "FP8", "int4_awq": "W4A16_AWQ", "nvfp4": "NVFP4"}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# NVIDIA advises the plugin for 16-bit weights and against it for FP8.
GEMM_PLUGINS = {"none": "auto", "fp8": "disable", "int4_awq": "auto", "nvfp4": "nvfp4"}
FP8_CACHES = ("fp8", "nvfp4")  # weights beside which an FP8 cache may be paged


@dataclass(frozen=True)
class TargetPlan:
    """A target to be built from a gpu recipe; `model` is the architecture it names."""

    recipe: Recipe
    model: DecoderConfig = field(init=False)

    def __post_init__(self):
        if self.recipe.lane != "gpu":
            raise ValueError(
                f"recipe {self.recipe.name} is of lane {self.recipe.lane}; TensorRT-LLM targets "
                "need lane gpu"
            )
        object.__setattr__(self, "model", self.recipe.target_config())
        _check_split(self.model, self.target)
        _check_cache(self.target)
        _check_blocks(self.model, self.target)
        _check_limits(self.model, self.recipe)

    @property
    def target(self) -> TargetRecipe:
        """The recipe's part about the target."""
        return self.recipe.target

    @property
    def shards(self) -> Shards:
        """The tensors of every rank."""
        return Shards(self.model, self.target)

    @property
    def needs_calibration(self) -> bool:
        """Whether scales must be measured on text."""
        return self.target.quantization != "none"

    def rank_bytes(self, rank: int) -> int:
        """Bytes of a rank's weights and scales."""
        return sum(tensor.bytes for tensor in self.shards.tensors(rank))

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all rank files; the engines need about as much."""
        return sum(map(self.rank_bytes, range(self.target.ranks)))

    @property
    def model_bytes(self) -> int:
        """Bytes of the unquantised model in the recipe's dtype, as it lies in host memory."""
        shards = Shards(self.model, TargetRecipe(dtype=self.target.dtype))
        count = sum(tensor.bytes for tensor in shards.tensors(0))
        return count - self.model.tied_embeddings * shards.last_stage[-1].bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token on one rank."""
        shards = self.shards
        bits = 8 if self.target.kv_cache == "fp8" else BITS[self.target.dtype]
        return 2 * shards.layers * shards.kv_heads * self.model.head_dim * bits // 8

    @property
    def config(self) -> dict[str, Any]:
        """The keys of the checkpoint's config.json that decide what is built."""
        m, t = self.model, self.target
        mapping = {"tp_size": t.tensor_parallel, "pp_size": t.pipeline_parallel}
        return {
            "architecture": ARCHITECTURES[m.family],
            "dtype": t.dtype,
            "logits_dtype": "float32",
            "vocab_size": m.vocab_size,
            "max_position_embeddings": m.max_positions,
            "hidden_size": m.hidden_size,
            "num_hidden_layers": m.layers,
            "num_attention_heads": m.heads,
            "num_key_value_heads": m.kv_heads,
            "head_size": m.head_dim,
            "hidden_act": "silu",
            "intermediate_size": m.intermediate_size,
            "norm_epsilon": m.norm_eps,
            "position_embedding_type": "rope_gpt_neox",
            "rotary_base": m.rope.theta,
            "rotary_scaling": rotary_scaling(m.rope),
            "rotary_embedding_dim": m.head_dim,
            "qk_layernorm": m.qk_norm,
            "attn_bias": m.qkv_bias,
            "mlp_bias": False,
            "use_parallel_embedding": True,
            "embedding_sharding_dim": 0,
            "share_embedding_table": False,  # a tied head is written out as a tensor of its own
            "tie_word_embeddings": False,
            "mapping": {"world_size": t.ranks} | mapping,
            "quantization": self._quantization(),
        } | self._family_keys()

    def _quantization(self) -> dict[str, Any]:
        kind = self.target.quantization
        found: dict[str, Any] = {
            "quant_algo": ALGORITHMS[kind],
            "kv_cache_quant_algo": "FP8" if self.target.kv_cache == "fp8" else None,
        }
        if block := QUANTIZATIONS[kind].block:
            found["group_size"] = block
        if kind == "int4_awq":
            found |= {"has_zero_point": False, "pre_quant_scale": True}
        return found | ({} if kind == "none" else {"exclude_modules": ["lm_head"]})

    def _family_keys(self) -> dict[str, Any]:
        """TensorRT-LLM's Qwen models read two keys more; seq_length is its converter's default."""
        if not self.model.family.startswith("qwen"):
            return {}
        return {"qwen_type": self.model.family, "seq_length": 8192}

    def command(self, checkpoint: Path, engine: Path, workers: int | None = None) -> list[str]:
        """The trtllm-build call. It adds max_draft_len to max_seq_len itself."""
        limits, t = self.recipe.limits, self.target
        options = {
            "checkpoint_dir": checkpoint,
            "output_dir": engine,
            "workers": workers or t.ranks,
            "speculative_decoding_mode": "draft_tokens_external",
            "max_draft_len": t.max_draft_len,
            "max_batch_size": limits.max_sequences,
            "max_input_len": limits.max_length,
            "max_seq_len": limits.max_length,
            "max_num_tokens": t.max_num_tokens,
            "max_beam_width": 1,
            "kv_cache_type": "paged",
            "tokens_per_block": t.tokens_per_block,
            "remove_input_padding": "enable",
            "context_fmha": "enable",
            "use_paged_context_fmha": "enable",
            "gpt_attention_plugin": "auto",
            "gemm_plugin": GEMM_PLUGINS[t.quantization],
        }
        if t.kv_cache == "fp8":
            options["use_fp8_context_fmha"] = "enable"
        return [BUILDER, *(str(word) for k, v in options.items() for word in (f"--{k}", v))]

    def as_dict(self) -> dict[str, Any]:
        """The plan for machines."""
        shards = self.shards
        return {
            "recipe": self.recipe.name,
            "config": self.config,
            "checkpoint_bytes": self.checkpoint_bytes,
            "cache_bytes_per_token": self.kv_bytes_per_token,
            "ranks": [
                {
                    "rank": rank,
                    "gpu": self.target.gpus[rank],
                    "bytes": self.rank_bytes(rank),
                    "tensors": {t.name: [t.dtype, list(t.shape)] for t in shards.tensors(rank)},
                }
                for rank in range(self.target.ranks)
            ],
        }


def rotary_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Hugging Face's rope_scaling, which TensorRT-LLM reads unchanged; None without scaling."""
    if rope.kind == "default":
        return None
    found = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        found |= {name: getattr(rope, name) for name in names}
    return found


def _divisible(name: str, value: int, part: str, parts: int) -> None:
    if value % parts:
        raise ValueError(f"{name} is {value}; {part} {parts} does not divide it: choose a divisor")


def _check_split(model: DecoderConfig, target: TargetRecipe) -> None:
    tensor, pipeline = target.tensor_parallel, target.pipeline_parallel
    for name in ("heads", "intermediate_size", "hidden_size"):
        _divisible(name, getattr(model, name), "target.tensor_parallel", tensor)
    if model.kv_heads % tensor and tensor % model.kv_heads:
        raise ValueError(
            f"kv_heads is {model.kv_heads}; target.tensor_parallel {tensor} must divide it or be a "
            "multiple of it"
        )
    _divisible("layers", model.layers, "target.pipeline_parallel", pipeline)


def _check_cache(target: TargetRecipe) -> None:
    """trtllm-build drops paged context attention, and so prefix reuse, for other FP8 caches."""
    if target.kv_cache == "fp8" and target.quantization not in FP8_CACHES:
        raise ValueError(
            f"target.kv_cache is 'fp8' with target.quantization {target.quantization!r}; an FP8 "
            f"cache can be reused only with {' or '.join(FP8_CACHES)}: use one, or kv_cache auto"
        )


def _check_blocks(model: DecoderConfig, target: TargetRecipe) -> None:
    """Blocks of weights that share a scale must not cross ranks."""
    kind, tensor = QUANTIZATIONS[target.quantization], target.tensor_parallel
    if uneven := kind.uneven(model, tensor):
        name, width = uneven
        raise ValueError(
            f"{name} is {width}, {width // tensor} on each of {tensor} ranks; "
            f"{kind.name} needs multiples of {kind.block}: lower target.tensor_parallel "
            "or use fp8"
        )
    if target.quantization == "int4_awq" and model.vocab_size % AWQ_VOCAB_MULTIPLE:
        raise ValueError(
            f"vocab_size is {model.vocab_size}; ModelOpt pads it to a multiple of "
            f"{AWQ_VOCAB_MULTIPLE} for int4_awq, and TensorRT-LLM would sample the padding: use "
            "fp8, nvfp4 or none"
        )


def _check_limits(model: DecoderConfig, recipe: Recipe) -> None:
    limits, target = recipe.limits, recipe.target
    if limits.max_length > model.max_positions:
        raise ValueError(
            f"limits.max_length is {limits.max_length}; {target.architecture} has "
            f"{model.max_positions} positions"
        )
    least = limits.max_sequences * (target.max_draft_len + 1)
    if target.max_num_tokens < least:
        raise ValueError(
            f"target.max_num_tokens is {target.max_num_tokens}; verifying max_sequences "
            f"{limits.max_sequences} x (max_draft_len {target.max_draft_len} + 1) takes {least}"
        )
