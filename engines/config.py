"""What a model is: the numbers of its architecture, read from a Hugging Face config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


class UnsupportedModelError(ValueError):
    """The model has a feature that the decoder does not implement; the message names it."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and scaling (`kind` is Hugging Face's rope_type)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> RopeConfig:
        """Reads `rope_theta` + `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
        scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = scaling.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in _ROPE_KEYS:
            raise UnsupportedModelError(
                f"rope type {kind!r} is not supported; known: {', '.join(_ROPE_KEYS)}"
            )
        missing = [key for key in _ROPE_KEYS[kind] if key not in scaling]
        if missing:
            raise UnsupportedModelError(f"rope type {kind!r} lacks {', '.join(missing)}")
        if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError("partial_rotary_factor is not supported")
        unknown = sorted(scaling.keys() - {*_ROPE_KEYS[kind], "rope_type", "type"})
        if unknown:
            raise UnsupportedModelError(
                f"rope parameters {', '.join(unknown)} are not supported for rope type {kind!r}"
            )
        return cls(float(theta), kind, **{key: scaling[key] for key in _ROPE_KEYS[kind]})


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture of a Llama-like decoder (Llama 2/3.x, Mistral, Qwen2/2.5, Qwen3)."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> DecoderConfig:
        """Reads the dict of a Hugging Face config.json; refuses what the decoder lacks by name."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UnsupportedModelError(
                f"model_type {family!r} is not supported; known: {', '.join(FAMILIES)}"
            )
        _refuse_unknown_features(family, config)
        heads, eos = config["num_attention_heads"], config.get("eos_token_id")
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            max_positions=config["max_position_embeddings"],
            rope=RopeConfig.from_hf(config),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )

    @classmethod
    def load(cls, directory: Path) -> DecoderConfig:
        """Reads `config.json`, with the end ids of `generation_config.json` where it has some."""
        config = json.loads((directory / "config.json").read_text())
        config["eos_token_id"] = list(end_ids(directory))
        return cls.from_hf(config)


def end_ids(directory: Path) -> tuple[int, ...]:
    """A model folder's end ids: of `generation_config.json` where that has some."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return ()


def _refuse_unknown_features(family: str, config: dict[str, Any]) -> None:
    """Raises for features that would change the logits if they were ignored."""
    # Hugging Face gives Mistral a window of 4096 unless the config says null.
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    sliding = window is not None and (
        config.get("use_sliding_window") if family.startswith("qwen") else True
    )
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    features = {
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        f"sliding_window {window}": sliding,
        f"layer_types {sorted(layer_types)}": layer_types,
        "attention_bias": config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        "quantization_config": config.get("quantization_config"),
        "partial_rotary_factor": (config.get("partial_rotary_factor") or 1.0) != 1.0,
    }
    for name, present in features.items():
        if present:
            raise UnsupportedModelError(f"{name} is not supported for model_type {family!r}")
