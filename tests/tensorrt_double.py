"""The compiled half of `tensorrt`, as far as the plugin sources of its bindings wheel use it.

The wheel's Python sources run unchanged on top of this module, which stands where the library is
and does what it does with a plugin: asks for types and shapes, then for each profile for type
combinations and tactics, then for kernel, launch and scalars of a tactic. Shapes are expressions
here as there, and are evaluated when dimensions are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import SimpleNamespace

import numpy as np

# --- types

DataType = Enum("DataType", "FLOAT HALF BF16 INT8 INT32 INT64 BOOL UINT8 FP8 INT4")
float32, float16, bfloat16 = DataType.FLOAT, DataType.HALF, DataType.BF16
int8, int32, int64 = DataType.INT8, DataType.INT32, DataType.INT64
TensorFormat = Enum("TensorFormat", "LINEAR CHW32 HWC")
PluginFieldType = Enum(
    "PluginFieldType", "UNKNOWN CHAR INT8 INT16 INT32 INT64 FLOAT16 FLOAT32 FLOAT64"
)
QuickPluginCreationRequest = Enum(
    "QuickPluginCreationRequest", "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT"
)
TensorRTPhase = Enum("TensorRTPhase", "BUILD RUNTIME")
PluginArgType = IntEnum("PluginArgType", "INT", start=0)
PluginArgDataType = IntEnum("PluginArgDataType", "INT8 INT16 INT32", start=0)
DimensionOperation = Enum(
    "DimensionOperation", "SUM PROD MAX MIN SUB EQUAL LESS FLOOR_DIV CEIL_DIV"
)


class Logger:
    """Silent."""

    WARNING = "warning"

    def log(self, severity, message):
        pass


class Dims(tuple):
    """Dimensions; -1 is dynamic."""

    MAX_DIMS = 8


@dataclass
class PluginTensorDesc:
    """Type, format and dimensions of one tensor."""

    type: DataType | None = None
    format: TensorFormat | None = None
    dims: Dims = field(default_factory=Dims)
    scale: float = 1.0


@dataclass
class DynamicPluginTensorDesc:
    """The same for a range of dimensions."""

    desc: PluginTensorDesc
    min: Dims
    opt: Dims
    max: Dims


@dataclass
class PluginField:
    """A named attribute; text is an array of bytes."""

    name: str
    data: np.ndarray | bytes
    type: PluginFieldType

    def __post_init__(self):
        if isinstance(self.data, bytes):
            self.data = np.frombuffer(self.data, np.uint8)


class PluginFieldCollection(list):
    """Attributes in order."""


class _Interface:
    """What the plugin classes derive from."""

    def __init__(self, *_):
        pass


class IPluginV3(_Interface):
    """See _Interface."""


class IPluginV3QuickCore(_Interface):
    """See _Interface."""


class IPluginV3QuickBuild(_Interface):
    """See _Interface."""


class IPluginV3QuickRuntime(_Interface):
    """See _Interface."""


class IPluginV3QuickAOTBuild(_Interface):
    """See _Interface."""


class IPluginCreatorV3Quick(_Interface):
    """See _Interface."""


class ISymExpr(_Interface):
    """A scalar argument: `expr` with a type."""


_creators: dict[tuple[str, str], IPluginCreatorV3Quick] = {}


def get_plugin_registry():
    """Where plugin creators are put and found by namespace and name."""
    return SimpleNamespace(
        register_creator=lambda creator, space: _creators.update({(space, creator.name): creator}),
        get_creator=lambda name, version, space: _creators[(space, name)],
    )


# --- shape expressions


class IDimensionExpr:
    """A number, a named dimension, or an operation on two expressions."""

    def __init__(self, *parts):
        self.parts = parts

    def is_constant(self) -> bool:
        return isinstance(self.parts[0], int)

    def get_constant_value(self) -> int:
        return self.parts[0]

    def value(self, sizes: dict[str, int]) -> int:
        """Its number when named dimensions have these sizes."""
        if len(self.parts) == 1:
            part = self.parts[0]
            return part if isinstance(part, int) else sizes[part]
        left, right = (part.value(sizes) for part in self.parts[1:])
        return {
            "SUM": lambda: left + right,
            "PROD": lambda: left * right,
            "MAX": lambda: max(left, right),
            "MIN": lambda: min(left, right),
            "SUB": lambda: left - right,
            "EQUAL": lambda: int(left == right),
            "LESS": lambda: int(left < right),
            "FLOOR_DIV": lambda: left // right,
            "CEIL_DIV": lambda: -(-left // right),
        }[self.parts[0].name]()


class ExprBuilder:
    """Makes expressions."""

    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(value)

    def operation(self, op: DimensionOperation, left, right) -> IDimensionExpr:
        assert isinstance(left, IDimensionExpr) and isinstance(right, IDimensionExpr)
        return IDimensionExpr(op, left, right)


class DimsExprs(list):
    """Expressions of a shape; made with a rank."""

    def __init__(self, rank: int):
        super().__init__([None] * rank)


# --- network and builder


@dataclass
class ITensor:
    """A tensor of the network with its shape as expressions."""

    dtype: DataType
    exprs: list[IDimensionExpr]

    @property
    def shape(self) -> Dims:
        """Dimensions that are constant, and -1."""
        return Dims(x.get_constant_value() if x.is_constant() else -1 for x in self.exprs)

    def dims(self, sizes: dict[str, int]) -> Dims:
        """Its shape when named dimensions have these sizes."""
        return Dims(expr.value(sizes) for expr in self.exprs)


@dataclass
class _Layer:
    """A plugin of the network."""

    plugin: object
    inputs: list[ITensor]
    outputs: list[ITensor] = field(default_factory=list)

    def get_output(self, index: int) -> ITensor:
        return self.outputs[index]


class INetworkDefinition:
    """Plugin layers in the order they were added."""

    def __init__(self):
        self.layers: list[_Layer] = []

    def add_input(self, dtype: DataType, shape: tuple[int | str, ...]) -> ITensor:
        """A network input; dimensions given by name are dynamic."""
        return ITensor(dtype, [IDimensionExpr(size) for size in shape])

    def add_plugin(self, create, aot: bool) -> _Layer:
        request = QuickPluginCreationRequest
        inputs, shape_inputs, plugin = create(request.STRICT_AOT if aot else request.STRICT_JIT)
        layer = _Layer(plugin, inputs)
        types = plugin.get_output_data_types(
            [x.dtype for x in inputs], [len(x.exprs) for x in inputs]
        )
        shapes = plugin.get_output_shapes([x.exprs for x in inputs], shape_inputs, ExprBuilder())
        layer.outputs = [ITensor(*pair) for pair in zip(types, map(list, shapes), strict=True)]
        self.layers.append(layer)
        return layer


def describe(tensor: ITensor, profile: tuple[dict[str, int], ...]) -> DynamicPluginTensorDesc:
    """A tensor in a profile, which is the least, usual and greatest size of every dimension."""
    least, usual, greatest = (tensor.dims(sizes) for sizes in profile)
    dims = Dims(a if a == b else -1 for a, b in zip(least, greatest, strict=True))
    desc = PluginTensorDesc(tensor.dtype, TensorFormat.LINEAR, dims)
    return DynamicPluginTensorDesc(desc, least, usual, greatest)


def launches(layer: _Layer, profile: tuple[dict[str, int], ...]) -> dict[int, dict]:
    """Every valid tactic of a layer in a profile: kernel, PTX, and launch at its usual sizes."""
    tensors = [*layer.inputs, *layer.outputs]
    descs = [describe(x, profile) for x in tensors]
    found = layer.plugin.get_supported_format_combinations(descs, len(layer.inputs))
    assert [x.type for x in found] == [x.dtype for x in tensors], "not the network's types"
    assert all(x.format is TensorFormat.LINEAR for x in found)
    of_inputs, of_outputs = descs[: len(layer.inputs)], descs[len(layer.inputs) :]
    layer.plugin.configure_plugin(of_inputs, of_outputs)
    tactics = layer.plugin.get_valid_tactics() or [0]
    return {tactic: _launch(layer, descs, tactic, profile[1]) for tactic in tactics}


def _launch(layer: _Layer, descs, tactic: int, sizes: dict[str, int]) -> dict:
    plugin, inputs = layer.plugin.clone(), len(layer.inputs)
    plugin.set_tactic(tactic)
    launch, scalars = SimpleNamespace(), _Scalars()
    shapes = [x.exprs for x in layer.inputs]
    plugin.get_launch_params(shapes, descs, inputs, launch, scalars, ExprBuilder())
    plain = [x.desc for x in descs]
    name, ptx = plugin.get_kernel(plain[:inputs], plain[inputs:])
    numbers = {key: scalar.expr.value(sizes) for key, scalar in vars(launch).items()}
    assert all(scalars[i].dtype is PluginArgDataType.INT32 for i in range(scalars.nbSymExprs))
    return {
        "name": name,
        "ptx": ptx.decode(),
        "grid": [numbers[f"grid_{axis}"] for axis in "xyz"],
        "block": [numbers[f"block_{axis}"] for axis in "xyz"],
        "shared": numbers["shared_mem"],
        "scalars": [scalars[i].expr.value(sizes) for i in range(scalars.nbSymExprs)],
    }


class _Scalars(dict):
    """Where a plugin puts its scalar arguments."""

    nbSymExprs = 0  # the name that the wheel's sources set
