"""Evaluates a TensorRT network definition on the CPU with torch, layer by layer.

It reads nothing but the `INetworkDefinition`, so what it computes is what TensorRT was told. Every
result is checked against the dtype and the shape that TensorRT inferred for it. Layer types that
the draft does not use are refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
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


class NetworkInterpreter:
    """Runs a network of the module `trt`; `run` may be called any number of times."""

    def __init__(self, trt, network):
        self.trt, self.network = trt, network
        self.inputs = {network.get_input(i).name for i in range(network.num_inputs)}
        self.outputs = {network.get_output(i).name for i in range(network.num_outputs)}
        self.steps = self._in_order([self._step(i) for i in range(network.num_layers)])

    def run(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name, given every input by name."""
        assert feeds.keys() == self.inputs, f"inputs are {sorted(self.inputs)}"
        values = {}
        for i in range(self.network.num_inputs):
            tensor = self.network.get_input(i)
            values[tensor.name] = self._checked(tensor, feeds[tensor.name])
        for evaluate, layer in self.steps:
            results = evaluate(layer, *(values[tensor.name] for tensor in _inputs(layer)))
            results = results if isinstance(results, tuple) else (results,)
            for i, value in enumerate(results):
                values[layer.get_output(i).name] = self._checked(layer.get_output(i), value)
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
        known, ordered = set(self.inputs), []
        while steps:
            ready = [x for x in steps if all(tensor.name in known for tensor in _inputs(x[1]))]
            assert ready, "the network has a cycle"
            ordered += ready
            for _, layer in ready:
                known |= {layer.get_output(i).name for i in range(layer.num_outputs)}
            steps = [x for x in steps if x[1].get_output(0).name not in known]
        return ordered

    def _checked(self, tensor, value: Tensor) -> Tensor:
        expected = tuple(tensor.shape)
        fits = len(expected) == value.dim() and all(
            size in (-1, found) for size, found in zip(expected, value.shape, strict=True)
        )
        assert fits, f"{tensor.name} is {tuple(value.shape)}, not {expected}"
        assert value.dtype == TYPES[tensor.dtype.name], f"{tensor.name}: {value.dtype}"
        return value

    # --- one method per layer type: (layer, inputs ...) -> outputs

    def _constant(self, layer):
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


def _inputs(layer) -> list:
    """The tensors a layer reads; optional ones that are absent are left out."""
    tensors = (layer.get_input(i) for i in range(layer.num_inputs))
    return [tensor for tensor in tensors if tensor is not None]


def _axis(axes: int) -> int:
    """The one axis of a bit mask."""
    assert axes.bit_count() == 1
    return axes.bit_length() - 1
