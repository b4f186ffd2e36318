"""How a compiled draft's linear layers may be quantised, and where TensorRT runs that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from ..engines.config import DecoderConfig
from ..engines.recipe import GPU_DRAFTS
from .modelopt import check_modelopt
from .quantization import QUANTIZATIONS, Quantization, sm_of

NONE = "none"


@dataclass(frozen=True)
class Scheme:
    """A way to quantise. Only the backbone's linear layers are; see docs/plugin.md for why.

    data_type: TensorRT's. bits: of a weight. samples: texts to calibrate with, `length` tokens
    each. Without blocks a layer has one scale for its weights and one for its inputs.
    """

    quantization: Quantization
    data_type: str
    bits: int
    samples: int
    length: int = 512

    @property
    def name(self) -> str:
        """The recipe's and the command's word."""
        return self.quantization.name

    def check_model(self, model: DecoderConfig) -> None:
        """Refuses a model whose layers cannot be cut into blocks."""
        if uneven := self.quantization.uneven(model):
            name, inputs = uneven
            raise ValueError(
                f"quantization is {self.name!r}; {name} is {inputs}, no multiple of its "
                f"blocks of {self.quantization.block}: use --quantization {_other(self.name)}"
            )

    def check_module(self, trt: ModuleType) -> None:
        """Refuses a TensorRT that lacks the data type, and a missing ModelOpt."""
        if not hasattr(trt.DataType, self.data_type):
            raise ValueError(
                f"quantization is {self.name!r}; {trt.__name__} {trt.__version__} has no data "
                f"type {self.data_type}: use version 10 or newer, or --quantization none"
            )
        check_modelopt()

    def check_device(self, capability: str | None) -> None:
        """Refuses a GPU that cannot compute in it; None: built without a GPU, for any."""
        least = self.quantization.sm
        if capability is None or sm_of(capability) >= least:
            return
        raise ValueError(
            f"quantization is {self.name!r}, which needs compute capability {least / 10} or "
            f"higher; this GPU has {capability}: use --quantization {_lesser(least, capability)}"
        )

    def linear_bytes(self, model: DecoderConfig, itemsize: int) -> int:
        """Bytes of all quantised layers with their scales, which take `itemsize` each."""
        layers = list(linear_shapes(model))
        weights = sum(inputs * outputs for inputs, outputs in layers)
        scales = 2 * len(layers)
        if block := self.quantization.block:
            scales = weights // block + sum(inputs for inputs, _ in layers)
        return model.layers * (weights * self.bits // 8 + scales * itemsize)


AWQ = QUANTIZATIONS["int4_awq"]
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(QUANTIZATIONS["fp8"], "FP8", bits=8, samples=128),
        Scheme(AWQ, "INT4", bits=4, samples=AWQ.samples),
    )
}


def find_scheme(name: str) -> Scheme | None:
    """The scheme of a recipe's or command's word; None for "none".

    Raises ValueError naming the field.
    """
    if name not in GPU_DRAFTS:
        raise ValueError(f"quantization is {name!r}; use one of {', '.join(GPU_DRAFTS)}")
    return SCHEMES.get(name)


def linear_shapes(model: DecoderConfig) -> Iterator[tuple[int, int]]:
    """(inputs, outputs) of each linear layer of one transformer layer."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield from ((hidden, q), (hidden, kv), (hidden, kv), (q, hidden))
    yield from ((hidden, inner), (hidden, inner), (inner, hidden))


def _other(name: str) -> str:
    return " or ".join(other for other in GPU_DRAFTS if other != name)


def _lesser(needed: int, capability: str) -> str:
    """What that GPU can do instead."""
    kinds = [scheme.quantization for scheme in SCHEMES.values()]
    able = [each.name for each in kinds if each.sm <= sm_of(capability) and each.sm != needed]
    return " or ".join([*able, NONE])
