"""Tiny random Hugging Face models of every family the decoder covers, saved as files."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

VOCAB = 307
MAX_POSITIONS = 1024
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# name -> (config class, what it adds to the shape above)
MODELS = {
    "llama": ("LlamaConfig", {"num_hidden_layers": 3}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-linear": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": ("LlamaConfig", {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "rope_theta": 1000000.0}),
}


def hf_config(name: str, **changes) -> transformers.PretrainedConfig:
    """The Hugging Face config of a model of `MODELS`, with `changes` on top."""
    kind, extra = MODELS[name]
    return getattr(transformers, kind)(**_SHAPE | extra | changes)


def random_model(name: str, seed: int = 0, **changes) -> transformers.PreTrainedModel:
    """A random model in float32 whose norms and biases are not neutral, so that each matters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            hf_config(name, **changes), dtype=torch.float32, attn_implementation="eager"
        )
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model.requires_grad_(False).eval()


def save_model(directory: Path, name: str, seed: int = 0, **changes) -> Path:
    """Saves a random model as config.json + safetensors; returns the directory."""
    random_model(name, seed, **changes).save_pretrained(directory)
    return directory


def random_ids(length: int, seed: int = 0) -> list[int]:
    """`length` random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
