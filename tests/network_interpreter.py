"""Evaluates a TensorRT network definition on the CPU with torch, layer by layer.

It reads nothing but the `INetworkDefinition`, so what it computes is what TensorRT was told. Every
result is checked against the dtype and the shape that TensorRT inferred for it. Layer types that
the draft does not use are refused by name.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "FP8": torch.float8_e4m3fn,
    "INT4": torch.int8,  # unpacked
}
ELEMENTWISE = {
    "SUM": torch.add,
    "SUB": torch.sub,
    "PROD": torch.mul,
    "DIV": torch.div,
    "FLOOR_DIV": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "LESS": torch.lt,
    "GREATER": torch.gt,
    "EQUAL": torch.eq,
    "AND": torch.logical_and,
    "OR": torch.logical_or,
}
# Python class of a layer type where it is not the type's name in camel case.
CLASSES = {
    "ELEMENTWISE": "IElementWiseLayer",
    "SOFTMAX": "ISoftMaxLayer",
    "TOPK": "ITopKLayer",
}


class _Expected:
    """Name, shape and dtype of a tensor as TensorRT inferred them."""

    def __init__(self, tensor):
        self.name, self.dims = tensor.name, tuple(tensor.shape)
        self.dtype = TYPES[tensor.dtype.name]

    def check(self, value: Tensor) -> Tensor:
        """The value, which must be what TensorRT expects."""
        fits = len(self.dims) == value.dim() and all(
            size in (-1, found) for size, found in zip(self.dims, value.shape, strict=True)
        )
        assert fits, f"{self.name} is {tuple(value.shape)}, not {self.dims}"
        assert value.dtype == self.dtype, f"{self.name}: {value.dtype}"
        return value


class _Step:
    """One layer: how to evaluate it, what it reads and what it gives."""

    def __init__(self, evaluate, layer):
        self.evaluate, self.layer = evaluate, layer
        self.reads = [tensor.name for tensor in _inputs(layer)]
        self.gives = [_Expected(layer.get_output(i)) for i in range(layer.num_outputs)]

    def run(self, values: dict[str, Tensor]) -> None:
        """Adds the layer's results to the values."""
        results = self.evaluate(self.layer, *(values[name] for name in self.reads))
        results = results if isinstance(results, tuple) else (results,)
        for tensor, value in zip(self.gives, results, strict=True):
            values[tensor.name] = tensor.check(value)


class NetworkInterpreter:
    """Runs a network of the module `trt`; `run` may be called any number of times."""

    def __init__(self, trt, network):
        self.trt, self.network = trt, network
        self.inputs = [_Expected(network.get_input(i)) for i in range(network.num_inputs)]
        self.outputs = {network.get_output(i).name for i in range(network.num_outputs)}
        ordered = self._in_order([self._step(i) for i in range(network.num_layers)])
        steps = [_Step(*step) for step in ordered]
        self.constants = {}  # they do not change from run to run
        for step in steps:
            if not step.reads:
                step.run(self.constants)
        self.steps = [step for step in steps if step.reads]

    def run(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name, given every input by name."""
        names = {tensor.name for tensor in self.inputs}
        assert feeds.keys() == names, f"inputs are {sorted(names)}"
        values = dict(self.constants)
        for tensor in self.inputs:
            values[tensor.name] = tensor.check(feeds[tensor.name])
        for step in self.steps:
            step.run(values)
        return {name: values[name] for name in self.outputs}

    def _step(self, i: int) -> tuple:
        """The method for layer i, and the layer as an object of its own class."""
        layer = self.network.get_layer(i)
        kind = layer.type.name  # before the cast: classes have a `type` of their own
        camel = "I" + "".join(word.capitalize() for word in kind.split("_")) + "Layer"
        layer.__class__ = getattr(self.trt, CLASSES.get(kind, camel))
        return getattr(self, f"_{kind.lower()}"), layer

    def _in_order(self, steps: list[tuple]) -> list[tuple]:
        """Steps such that each comes after those whose results it reads."""
        known, ordered = {tensor.name for tensor in self.inputs}, []
        while steps:
            ready = [x for x in steps if all(tensor.name in known for tensor in _inputs(x[1]))]
            assert ready, "the network has a cycle"
            ordered += ready
            for _, layer in ready:
                known |= {layer.get_output(i).name for i in range(layer.num_outputs)}
            steps = [x for x in steps if x[1].get_output(0).name not in known]
        return ordered

    # --- one method per layer type: (layer, inputs ...) -> outputs

    def _constant(self, layer):
        kind = layer.get_output(0).dtype.name
        if kind in ("FP8", "INT4"):  # TensorRT's Python module has no array for these
            return _read_constant(layer.weights, kind).view(tuple(layer.shape))
        return torch.from_numpy(layer.weights.copy()).view(tuple(layer.shape))

    def _elementwise(self, layer, x, y):
        assert x.dtype == y.dtype and x.dim() == y.dim(), f"{layer.name}: {x.dtype} {y.dtype}"
        return ELEMENTWISE[layer.op.name](x, y)

    def _select(self, layer, condition, x, y):
        assert x.dtype == y.dtype and x.dim() == y.dim() == condition.dim()
        return torch.where(condition, x, y)

    def _cast(self, layer, x):
        return x.to(TYPES[layer.get_output(0).dtype.name])

    def _unary(self, layer, x):
        assert layer.op.name == "SQRT", layer.op
        return x.sqrt()

    def _activation(self, layer, x):
        assert layer.type.name == "SIGMOID", layer.type
        return x.sigmoid()

    def _softmax(self, layer, x):
        return x.softmax(_axis(layer.axes))

    def _reduce(self, layer, x):
        assert layer.op.name == "AVG" and layer.keep_dims
        return x.mean(_axis(layer.axes), keepdim=True)

    def _topk(self, layer, x):
        assert layer.op.name == "MAX"
        values, indices = x.topk(layer.k, _axis(layer.axes))
        return values, indices.int()

    def _matrix_multiply(self, layer, x, y):
        assert x.dim() == y.dim()
        assert layer.op0.name == "NONE"
        return x @ (y.mT if layer.op1.name == "TRANSPOSE" else y)

    def _gather(self, layer, x, indices):
        """DEFAULT mode: x.shape[:axis] + indices.shape[batch axes:] + x.shape[axis + 1:]."""
        assert layer.mode.name == "DEFAULT"
        if not layer.num_elementwise_dims:
            return x[(slice(None),) * layer.axis + (indices.long(),)]
        assert layer.num_elementwise_dims == layer.axis == 1
        return torch.stack([row[places.long()] for row, places in zip(x, indices, strict=True)])

    def _concatenation(self, layer, *tensors):
        assert len({x.dtype for x in tensors}) == 1
        return torch.cat(tensors, layer.axis)

    def _quantize(self, layer, x, scale):
        """FP8 with one scale: the nearest number of x / scale, the largest where it is beyond."""
        assert layer.get_output(0).dtype.name == "FP8" and scale.dim() == 0
        assert x.dtype == scale.dtype
        return (x.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)

    def _dequantize(self, layer, x, scale):
        """x * scale; the scale is one, or one for each block along one axis."""
        assert scale.dtype == TYPES[layer.get_output(0).dtype.name]
        if scale.dim():
            times = [a // b for a, b in zip(x.shape, scale.shape, strict=True)]
            assert sum(n > 1 for n in times) == 1 and max(times) in (64, 128)
            for axis, n in enumerate(times):
                scale = scale.repeat_interleave(n, axis)
        return (x.float() * scale.float()).to(scale.dtype)

    def _shape(self, layer, x):
        return torch.tensor(x.shape)

    def _slice(self, layer, x, *given):
        """Sizes are an input where they vary; starts and steps never are."""
        sizes = given[0].tolist() if given else list(layer.shape)
        assert set(layer.stride) == {1}
        for axis, (start, size) in enumerate(zip(layer.start, sizes, strict=True)):
            assert start + size <= x.shape[axis], f"{layer.name} reads beyond axis {axis}"
            x = x.narrow(axis, start, size)
        return x

    def _shuffle(self, layer, x, *given):
        x = x.permute(*tuple(layer.first_transpose)[: x.dim()])
        sizes = given[0].tolist() if given else layer.reshape_dims  # None: only axes move
        if sizes is not None:
            x = x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)])
        return x.permute(*tuple(layer.second_transpose)[: x.dim()])

    def _attention_input(self, layer, q, k, v, mask):
        """q (B, H, N, D) already scaled; k, v (B, Hkv, M, D); mask (B or 1, H or 1, N, M) bool."""
        attention = layer.attention
        assert attention.norm_op.name == "SOFTMAX" and not attention.causal
        assert mask.dtype == torch.bool and q.dtype == k.dtype == v.dtype
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q.float() @ k.float().mT).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1).to(q.dtype) @ v

    def _attention_output(self, layer, x):
        return x


def _read_constant(weights, kind: str) -> Tensor:
    """Elements of a `Weights`, read from the C++ struct {type, values, count} that it wraps.

    Two INT4 elements share a byte, the first in the low half.
    """
    struct = ctypes.c_void_p.from_address(id(weights) + 16).value  # behind CPython's object head
    values = ctypes.c_void_p.from_address(struct + 8).value
    size = weights.size if kind == "FP8" else weights.size // 2
    data = torch.frombuffer(bytearray(ctypes.string_at(values, size)), dtype=torch.uint8)
    if kind == "FP8":
        return data.view(torch.float8_e4m3fn)
    nibbles = torch.stack([data & 0xF, data >> 4], -1).flatten().to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def _inputs(layer) -> list:
    """The tensors a layer reads; optional ones that are absent are left out."""
    tensors = (layer.get_input(i) for i in range(layer.num_inputs))
    return [tensor for tensor in tensors if tensor is not None]


def _axis(axes: int) -> int:
    """The one axis of a bit mask."""
    assert axes.bit_count() == 1
    return axes.bit_length() - 1
