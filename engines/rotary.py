"""Rotary position embedding under the scalings that the supported models use."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .config import DecoderConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """(D / 2,) float32 rotary frequencies under the config's scaling."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponent
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    # llama3: long wavelengths are slowed by `factor`, short ones kept, those between blended.
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


class RotaryTable(nn.Module):
    """cos and sin for positions 0 ... max_positions (a slot's position reaches the maximum)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        positions = torch.arange(config.max_positions + 1, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim))
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
        sin = angles.sin()
        self.register_buffer("sin", torch.cat([-sin, sin], -1), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin, (B, 1, N, D) each, of positions (B, N)."""
        return self.cos[positions][:, None].to(dtype), self.sin[positions][:, None].to(dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x (B, H, N, D), halves layout."""
    cos, sin = rotary
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
