"""A TensorRT network under construction, with one short method per operation.

Tensors are `ITensor`s of a strongly typed network, so that every dtype is the one written here.
Activations are (B, N, ...): B sequences and N positions vary, all other sizes are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...engines.draft_io import BATCH, POSITIONS, IoTensor

ITensor = Any  # of whichever TensorRT module is used
DATA_TYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int32": "INT32",
    "int64": "INT64",
    "float8_e4m3fn": "FP8",
}


class EngineBuildError(RuntimeError):
    """TensorRT refused a layer or could not build the engine; its log says why."""


class Graph:
    """Adds layers to an `INetworkDefinition` and keeps the weights that it points to."""

    def __init__(self, trt: ModuleType, network: Any):
        self.trt, self.network = trt, network
        self._weights: list[Tensor] = []  # TensorRT reads them when the engine is built
        self._varying: dict[str, ITensor] = {}  # BATCH, POSITIONS -> int64 (1,)

    def dtype(self, name: str) -> Any:
        """TensorRT's data type for torch's name of it."""
        return getattr(self.trt.DataType, DATA_TYPES[name])

    # --- inputs, outputs, constants

    def input(self, tensor: IoTensor) -> ITensor:
        """An input; sizes of the same name are equal, which TensorRT may rely on."""
        x = self.network.add_input(tensor.name, self.dtype(tensor.dtype), tensor.dims)
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, str):
                x.set_dimension_name(axis, size)
        return x

    def read_sizes(self, x: ITensor) -> None:
        """Says where the sizes that vary are read from: x (B, N)."""
        shape = self._out(self.network.add_shape(x))
        for place, name in enumerate((BATCH, POSITIONS)):
            self._varying[name] = self._out(self.network.add_slice(shape, (place,), (1,), (1,)))

    def output(self, tensor: IoTensor, x: ITensor) -> None:
        """Makes x an output; raises TypeError if it is not what the table says."""
        if (x.dtype, tuple(x.shape)) != (self.dtype(tensor.dtype), tensor.dims):
            raise TypeError(f"{tensor.name} is {x.dtype} {x.shape}, not {tensor}")
        x.name = tensor.name
        self.network.mark_output(x)

    def constant(self, values: Tensor) -> ITensor:
        """A constant of the tensor's own shape and dtype."""
        values = values.detach().cpu().contiguous()
        self._weights.append(values)
        dtype = self.dtype(str(values.dtype).removeprefix("torch."))
        weights = self.trt.Weights(dtype, values.data_ptr(), values.numel())
        return self._out(self.network.add_constant(tuple(values.shape), weights))

    def constant_int4(self, values: Tensor) -> ITensor:
        """An INT4 constant of the shape of values (int8, -8 to 7): two to a byte, the first low."""
        flat = values.detach().cpu().contiguous().view(torch.uint8).flatten() & 0xF
        packed = flat[0::2] | (flat[1::2] << 4)
        self._weights.append(packed)
        weights = self.trt.Weights(self.trt.DataType.INT4, packed.data_ptr(), values.numel())
        return self._out(self.network.add_constant(tuple(values.shape), weights))

    def integers(self, values: Sequence[int], rank: int = 1) -> ITensor:
        """int32 numbers along the last of `rank` axes."""
        return self.constant(torch.tensor(values, dtype=torch.int32).view(*(1,) * (rank - 1), -1))

    def number(self, value: float, like: ITensor) -> ITensor:
        """One number of the dtype and rank of another tensor."""
        name = next(name for name in DATA_TYPES if self.dtype(name) == like.dtype)
        sizes = (1,) * len(like.shape)
        return self.constant(torch.full(sizes, value, dtype=getattr(torch, name)))

    # --- elementwise

    def add(self, x: ITensor, y: ITensor) -> ITensor:
        return self._elementwise("SUM", x, y)

    def subtract(self, x: ITensor, y: ITensor) -> ITensor:
        return self._elementwise("SUB", x, y)

    def multiply(self, x: ITensor, y: ITensor) -> ITensor:
        return self._elementwise("PROD", x, y)

    def divide(self, x: ITensor, y: ITensor) -> ITensor:
        return self._elementwise("DIV", x, y)

    def floor_divide(self, x: ITensor, y: ITensor) -> ITensor:
        return self._elementwise("FLOOR_DIV", x, y)

    def less(self, x: ITensor, y: ITensor) -> ITensor:
        return self._elementwise("LESS", x, y)

    def equal(self, x: ITensor, y: ITensor) -> ITensor:
        return self._elementwise("EQUAL", x, y)

    def both(self, x: ITensor, y: ITensor) -> ITensor:
        return self._elementwise("AND", x, y)

    def either(self, x: ITensor, y: ITensor) -> ITensor:
        return self._elementwise("OR", x, y)

    def select(self, condition: ITensor, x: ITensor, y: ITensor) -> ITensor:
        """x where the condition holds, else y; sizes of 1 are stretched."""
        return self._out(self.network.add_select(condition, x, y))

    def cast(self, x: ITensor, dtype: str) -> ITensor:
        if x.dtype == self.dtype(dtype):
            return x
        return self._out(self.network.add_cast(x, self.dtype(dtype)))

    def sqrt(self, x: ITensor) -> ITensor:
        return self._out(self.network.add_unary(x, self.trt.UnaryOperation.SQRT))

    def silu(self, x: ITensor) -> ITensor:
        sigmoid = self.network.add_activation(x, self.trt.ActivationType.SIGMOID)
        return self.multiply(x, self._out(sigmoid))

    def softmax(self, x: ITensor) -> ITensor:
        """Over the last axis."""
        layer = self.network.add_softmax(x)
        layer.axes = 1 << (len(x.shape) - 1)
        return self._out(layer)

    # --- products, reductions, indices

    def multiply_matrices(self, x: ITensor, y: ITensor, transpose: bool = False) -> ITensor:
        """x @ y of the same rank, or x @ y.T."""
        operation = self.trt.MatrixOperation
        turned = operation.TRANSPOSE if transpose else operation.NONE
        return self._out(self.network.add_matrix_multiply(x, operation.NONE, y, turned))

    def mean(self, x: ITensor) -> ITensor:
        """Over the last axis, which is kept with size 1."""
        axes = 1 << (len(x.shape) - 1)
        return self._out(self.network.add_reduce(x, self.trt.ReduceOperation.AVG, axes, True))

    def top(self, x: ITensor, count: int) -> tuple[ITensor, ITensor]:
        """The highest values of the last axis, in order, and where they are (int32)."""
        axes = 1 << (len(x.shape) - 1)
        layer = self.network.add_topk(x, self.trt.TopKOperation.MAX, count, axes)
        return layer.get_output(0), layer.get_output(1)

    def take(self, x: ITensor, indices: ITensor, axis: int = 0, batch_axes: int = 0) -> ITensor:
        """x at `indices` along an axis; the first `batch_axes` axes belong together."""
        layer = self.network.add_gather(x, indices, axis)
        layer.num_elementwise_dims = batch_axes
        return self._out(layer)

    # --- quantisation

    def quantize_fp8(self, x: ITensor, scale: ITensor) -> ITensor:
        """x / scale, rounded to FP8; scale: a scalar constant of x's dtype."""
        return self._out(self.network.add_quantize(x, scale, self.trt.DataType.FP8))

    def dequantize(self, x: ITensor, scale: ITensor) -> ITensor:
        """x * scale in the dtype of the scale: a scalar, or one for each block of one axis."""
        return self._out(self.network.add_dequantize(x, scale, scale.dtype))

    # --- shapes

    def reshape(
        self, x: ITensor, *sizes: int, before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> ITensor:
        """x with its axes in the order `before`, then in new sizes, then in the order `after`.

        A size of 0 is that of the same axis of x, -1 is what is left over.
        """
        layer = self.network.add_shuffle(x)
        if before:
            layer.first_transpose = tuple(before)
        if sizes:
            layer.reshape_dims = sizes
        if after:
            layer.second_transpose = tuple(after)
        return self._out(layer)

    def join(self, tensors: Sequence[ITensor], axis: int) -> ITensor:
        layer = self.network.add_concatenation(tensors)
        layer.axis = axis
        return self._out(layer)

    def reshape_to(self, x: ITensor, shape: Sequence[int | str]) -> ITensor:
        """x in a shape with BATCH and POSITIONS, wherever they stood before."""
        layer = self.network.add_shuffle(x)
        layer.set_input(1, self._sizes(shape))
        return self._out(layer)

    def split(self, x: ITensor, axis: int, sizes: Sequence[int]) -> list[ITensor]:
        """Cuts an axis of x (B, N, ...) behind the first two into parts."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self._part(x, axis, *part) for part in zip(starts, sizes, strict=True)]

    def _part(self, x: ITensor, axis: int, start: int, size: int) -> ITensor:
        rank = len(x.shape)
        starts, sizes = [0] * rank, [BATCH, POSITIONS, *x.shape[2:]]
        starts[axis], sizes[axis] = start, size
        layer = self.network.add_slice(x, starts, [1] * rank, [1] * rank)
        layer.set_input(2, self._sizes(sizes))
        return self._out(layer)

    def _sizes(self, shape: Sequence[int | str]) -> ITensor:
        """int64 shape tensor; BATCH and POSITIONS are those of this call."""
        parts = [
            self._varying[size] if isinstance(size, str) else self.constant(torch.tensor([size]))
            for size in shape
        ]
        return self.join(parts, 0)

    def _elementwise(self, operation: str, x: ITensor, y: ITensor) -> ITensor:
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self._out(self.network.add_elementwise(x, y, kind))

    def _out(self, layer: Any) -> ITensor:
        """The output of a layer; asking for its shape makes TensorRT check the layer now."""
        try:
            output = layer.get_output(0)
            len(output.shape)
        except (AttributeError, RuntimeError, ValueError) as error:
            raise EngineBuildError("TensorRT refused a layer; its log says why") from error
        return output
