"""Linear layers in FP8 and INT4: Q/DQ layers, which TensorRT fuses into the product.

Values are rounded here, with scales in the network's own dtype, and stored in their final width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from .graph import Graph, ITensor

FP8_MAX = 448.0  # of float8_e4m3fn
INT4_MAX = 7.0


class QuantizedLinear(ABC):
    """Weights of a linear layer and what their quantisation was calibrated to."""

    @abstractmethod
    def product(self, graph: Graph, x: ITensor, dtype: torch.dtype) -> ITensor:
        """x (B, N, inputs) of that dtype by the weights, without the bias: (B, N, outputs)."""


@dataclass(frozen=True)
class Fp8Linear(QuantizedLinear):
    """Weights and inputs in FP8, one scale each.

    weight: (outputs, inputs), not yet rounded; weight_amax, input_amax: largest magnitudes.
    """

    weight: Tensor
    weight_amax: float
    input_amax: float

    def product(self, graph, x, dtype):
        x_scale, scale = (_fp8_scale(most, dtype) for most in (self.input_amax, self.weight_amax))
        values = (self.weight.float() / scale.float()).clamp(-FP8_MAX, FP8_MAX)
        stored = graph.constant(values.to(torch.float8_e4m3fn)[None])  # (1, outputs, inputs)
        weight = graph.dequantize(stored, graph.constant(scale))
        x = graph.dequantize(
            graph.quantize_fp8(x, graph.constant(x_scale)), graph.constant(x_scale)
        )
        return graph.multiply_matrices(x, weight, transpose=True)


@dataclass(frozen=True)
class Int4Linear(QuantizedLinear):
    """Weights in INT4, one scale for each block of inputs; AWQ's scales on the inputs.

    weight: (outputs, inputs), for scaled inputs, not yet rounded; block_max: (outputs, blocks),
    largest magnitudes; input_scale: (inputs,).
    """

    weight: Tensor
    block_max: Tensor
    input_scale: Tensor

    def product(self, graph, x, dtype):
        scales = (self.block_max.float() / INT4_MAX).to(dtype)
        scales = torch.where(scales > 0, scales, 1)  # a block of zeros
        block = self.weight.shape[1] // scales.shape[1]
        wide = scales.float().repeat_interleave(block, 1)
        values = (self.weight.float() / wide).round().clamp(-INT4_MAX - 1, INT4_MAX)
        # Blocks along the first axis of a matrix: what every TensorRT 10 takes.
        stored = graph.constant_int4(values.to(torch.int8).t())  # (inputs, outputs)
        weight = graph.dequantize(stored, graph.constant(scales.t()))
        x = graph.multiply(x, graph.constant(self.input_scale.to(dtype)[None, None]))
        return graph.multiply_matrices(x, graph.reshape(weight, 1, *weight.shape))


def _fp8_scale(most: float, dtype: torch.dtype) -> Tensor:
    """The scale that maps `most` to the largest FP8 number; a scalar of that dtype."""
    return torch.tensor(most / FP8_MAX).clamp(min=torch.finfo(dtype).tiny).to(dtype)
