"""What a model is: the numbers of its architecture, read from a Hugging Face config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_SIZE = 2**31 - 1  # of any size
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
        stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(stated, dict):
            raise UnsupportedModelError(f"rope_parameters is {stated!r}; it must be a JSON object")
        scaling = dict(stated)
        theta = scaling.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in tuple(_ROPE_KEYS):
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
        numbers = {key: _positive(key, scaling[key]) for key in _ROPE_KEYS[kind]}
        return cls(float(_positive("rope_theta", theta)), kind, **numbers)


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
        if self.kv_heads < 1 or self.heads % self.kv_heads:
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
        heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
        return cls(
            family=family,
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden,
            layers=_count(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=_count(config, "num_key_value_heads", heads),
            head_dim=_count(config, "head_dim", hidden // heads),
            intermediate_size=_count(config, "intermediate_size"),
            norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            max_positions=_count(config, "max_position_embeddings"),
            rope=RopeConfig.from_hf(config),
            tied_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            eos_ids=_eos_ids(config),
        )

    @classmethod
    def load(cls, directory: Path) -> DecoderConfig:
        """Reads `config.json`, with the end ids of `generation_config.json` where it has some.

        Raises UnsupportedModelError naming the file and the field.
        """
        path = directory / "config.json"
        config = read_config(path) | {"eos_token_id": list(end_ids(directory))}
        try:
            return cls.from_hf(config)
        except ValueError as error:
            raise UnsupportedModelError(f"{path}: {error}") from None


def end_ids(directory: Path) -> tuple[int, ...]:
    """A model folder's end ids: of `generation_config.json` where that has some."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        config = read_config(path) if path.exists() else {}
        if config.get("eos_token_id") is not None:
            try:
                return _eos_ids(config)
            except ValueError as error:
                raise UnsupportedModelError(f"{path}: {error}") from None
    return ()


def max_positions(directory: Path) -> int | None:
    """Positions that a model folder's `config.json` states, of any architecture."""
    config = read_config(directory / "config.json")
    if config.get("max_position_embeddings") is None:
        return None
    return _count(config, "max_position_embeddings")


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises UnsupportedModelError, or OSError where there is none."""
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{path} holds no JSON object")
    return config


def _count(config: dict[str, Any], name: str, default: int | None = None) -> int:
    """A size; `default` where it is absent or null."""
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or not 1 <= value <= MOST_SIZE:
        raise UnsupportedModelError(
            f"{name} is {value!r}; it must be an integer from 1 to {MOST_SIZE}"
        )
    return value


def _positive(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise UnsupportedModelError(f"{name} is {value!r}; it must be a number above 0")
    return value


def _flag(config: dict[str, Any], name: str) -> bool:
    value = config.get(name)
    if value not in (None, False, True):
        raise UnsupportedModelError(f"{name} is {value!r}; it must be true or false")
    return bool(value)


def _eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """The end ids: none, one, or a list."""
    value = config.get("eos_token_id")
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(type(each) is not int for each in ids):
        raise UnsupportedModelError(f"eos_token_id is {value!r}; it must be one token id or a list")
    return ids


def _refuse_unknown_features(family: str, config: dict[str, Any]) -> None:
    """Raises for features that would change the logits if they were ignored."""
    # Hugging Face gives Mistral a window of 4096 unless the config says null.
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    sliding = window is not None and (
        config.get("use_sliding_window") if family.startswith("qwen") else True
    )
    layer_types = config.get("layer_types") or ()
    if isinstance(layer_types, list):
        layer_types = sorted(set(map(str, layer_types)) - {"full_attention"})
    features = {
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        f"sliding_window {window}": sliding,
        f"layer_types {layer_types}": layer_types,
        "attention_bias": config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        "quantization_config": config.get("quantization_config"),
        "partial_rotary_factor": (config.get("partial_rotary_factor") or 1.0) != 1.0,
    }
    for name, present in features.items():
        if present:
            raise UnsupportedModelError(f"{name} is not supported for model_type {family!r}")
