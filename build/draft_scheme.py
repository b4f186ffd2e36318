"""How a compiled draft's linear layers may be quantised, and where TensorRT runs that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from ..engines.config import DecoderConfig
from ..engines.recipe import GPU_DRAFTS
from .target_quantization import check_modelopt

NONE = "none"


@dataclass(frozen=True)
class Scheme:
    """A way to quantise. Only the backbone's linear layers are; see docs/plugin.md for why.

    data_type: TensorRT's. capability: the least a GPU needs. bits: of a weight. block: inputs that
    share a scale, 0: the whole layer has one for its weights and one for its inputs. samples: texts
    to calibrate with, `length` tokens each.
    """

    name: str
    data_type: str
    capability: tuple[int, int]
    bits: int
    block: int
    samples: int
    length: int = 512

    def check_model(self, model: DecoderConfig) -> None:
        """Refuses a model whose layers cannot be cut into blocks."""
        for name, inputs in {
            "hidden_size": model.hidden_size,
            "heads * head_dim": model.heads * model.head_dim,
            "intermediate_size": model.intermediate_size,
        }.items():
            if self.block and inputs % self.block:
                raise ValueError(
                    f"quantization is {self.name!r}; {name} is {inputs}, no multiple of its "
                    f"blocks of {self.block}: use --quantization {_other(self.name)}"
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
        if capability is None or tuple(map(int, capability.split("."))) >= self.capability:
            return
        least = ".".join(map(str, self.capability))
        raise ValueError(
            f"quantization is {self.name!r}, which needs compute capability {least} or higher; "
            f"this GPU has {capability}: use --quantization {_lesser(self.capability, capability)}"
        )

    def linear_bytes(self, model: DecoderConfig, itemsize: int) -> int:
        """Bytes of all quantised layers with their scales, which take `itemsize` each."""
        layers = list(linear_shapes(model))
        weights = sum(inputs * outputs for inputs, outputs in layers)
        scales = 2 * len(layers)
        if self.block:
            scales = weights // self.block + sum(inputs for inputs, _ in layers)
        return model.layers * (weights * self.bits // 8 + scales * itemsize)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8", "FP8", (8, 9), bits=8, block=0, samples=128),
        Scheme("int4_awq", "INT4", (8, 0), bits=4, block=128, samples=32),
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


def _lesser(needed: tuple[int, int], capability: str) -> str:
    """What that GPU can do instead."""
    has = tuple(map(int, capability.split(".")))
    able = [s.name for s in SCHEMES.values() if s.capability <= has and s.capability != needed]
    return " or ".join([*able, NONE])
