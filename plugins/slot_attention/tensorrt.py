"""Slot attention as two TensorRT plugins whose kernels are embedded in the engine (AOT).

Importing this module registers them with TensorRT; `add_slot_attention` puts both into a network.
TensorRT gives a plugin one launch and no workspace, so attention split over keys takes two:

    masw::slot_attention_partial  every part's output and log-sum-exp
    masw::slot_attention_merge    joins the parts of each row

Tensors, linear and contiguous; T is float16, bfloat16 or float32:
    q (B, H, N, D), k_new, v_new (B, Hkv, N, D), memory_k, memory_v (rows, Hkv, M, D)      T
    rows, fed (B,), times, kind (B, N)                                                  int32
    partial (B, N, H, parts, D), lse (B, N, H, parts), base 2                         float32
    out (B, N, H, D); padding rows are zeros                                                T

How many parts there are is a shape expression of batch, positions and entries, so TensorRT
evaluates it for every profile, and buffers, grid and merge agree without host code of ours. How a
part is cut into tiles is a tactic, which TensorRT measures.

TensorRT reads these functions' annotations, so they are not postponed here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy.typing  # noqa: F401 - tensorrt.plugin uses np.typing, which numpy 1 does not import
import tensorrt as trt
import tensorrt.plugin as trtp

from .aot import TARGETS, Attention, Kernel, compile_merge, compile_partial, plans
from .rule import MemoryRule

DTYPES = {trt.float16: "fp16", trt.bfloat16: "bf16", trt.float32: "fp32"}
SPLIT_ROWS = 64  # packed query rows of a program, and keys of a tile, when parts are counted
SPLIT_KEYS = 64
Compiled = tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]


@dataclass(frozen=True)
class Device:
    """The GPU that kernels are compiled and launches are cut for.

    sm: compute capability x 10. programs: how many programs should run at once, about two for
    each multiprocessor. most_parts: limit of the split over keys. shared_limit: bytes of shared
    memory that a program may ask for; a launch always has 48 KiB.
    """

    sm: int
    programs: int
    most_parts: int = 64
    shared_limit: int = 48 * 1024

    def __post_init__(self):
        if self.sm not in TARGETS:
            raise ValueError(f"sm is {self.sm}; kernels are compiled for {[*TARGETS]}")
        for name in ("programs", "most_parts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")


def add_slot_attention(
    network: trt.INetworkDefinition,
    tensors: Sequence[trt.ITensor],
    rule: MemoryRule,
    device: Device,
) -> trt.ITensor:
    """Adds both plugins for one layer; returns `out` (B, N, H, D). Modifies the network.

    tensors: q, k_new, v_new, memory_k, memory_v, rows, fed, times, kind; heads and their size are
    static, batch, positions and entries may be dynamic.
    """
    shape, dtype = _check(tensors), _dtype(tensors[0])
    limits = asdict(rule) | {"visibility": rule.visibility.value}
    create = trtp.op.masw.slot_attention_partial(*tensors, **shape, **limits, **asdict(device))
    first = network.add_plugin(create, aot=True)
    create = trtp.op.masw.slot_attention_merge(
        first.get_output(0),
        first.get_output(1),
        head_dim=shape["head_dim"],
        dtype=dtype,
        sm=device.sm,
        most_parts=device.most_parts,
    )
    return network.add_plugin(create, aot=True).get_output(0)


def _check(tensors: Sequence[trt.ITensor]) -> dict[str, int]:
    """Heads, key heads and size of a head; refuses tensors that do not belong together."""
    q, memory = tensors[0], tensors[3]
    shape = {"heads": q.shape[1], "kv_heads": memory.shape[1], "head_dim": q.shape[3]}
    heads = [shape["heads"]] + [shape["kv_heads"]] * 4
    values = [(q.dtype, n, shape["head_dim"]) for n in heads]
    given = [(x.dtype, x.shape[1], x.shape[3]) for x in tensors[:5]]
    if given != values:
        raise ValueError(f"types, heads and head sizes of q, k and v are {given}; not {values}")
    if any(x.dtype != trt.int32 for x in tensors[5:]):
        raise ValueError("rows, fed, times and kind must be int32")
    return shape


def _dtype(q: trt.ITensor | trtp.TensorDesc) -> str:
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}; slot attention takes {', '.join(map(str, DTYPES))}")
    return DTYPES[q.dtype]


def _attention(q: trtp.TensorDesc, heads: int, kv_heads: int, head_dim: int, *rule) -> Attention:
    return Attention(heads, kv_heads, head_dim, _dtype(q), MemoryRule(*rule))


def _launch(kernel: Kernel, grid: tuple, scalars: tuple) -> Compiled:
    """What `aot_impl` returns: entry, PTX, launch, and the scalars between inputs and outputs."""
    launch = trtp.KernelLaunchParams(*grid, block_x=kernel.threads, shared_mem=kernel.shared)
    arguments = trtp.SymIntExprs(len(scalars))
    for i, scalar in enumerate(scalars):
        arguments[i] = trtp.SymInt32(scalar)
    return kernel.name, kernel.ptx, launch, arguments


@trtp.register("masw::slot_attention_partial")
def describe_partial(
    q: trtp.TensorDesc,
    k_new: trtp.TensorDesc,
    v_new: trtp.TensorDesc,
    memory_k: trtp.TensorDesc,
    memory_v: trtp.TensorDesc,
    rows: trtp.TensorDesc,
    fed: trtp.TensorDesc,
    times: trtp.TensorDesc,
    kind: trtp.TensorDesc,
    heads: int,
    kv_heads: int,
    head_dim: int,
    sink: int,
    window: int,
    rollback: int,
    interval: int,
    visibility: str,
    sm: int,
    programs: int,
    most_parts: int,
    shared_limit: int,
) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
    """Shapes of partial and lse. As many parts as let `programs` programs run, within limits."""
    attention = _attention(
        q, heads, kv_heads, head_dim, sink, window, rollback, interval, visibility
    )
    batch, _, positions, _ = q.shape_expr
    tiles = trtp.cdiv(positions * attention.group, SPLIT_ROWS)
    # Not trtp.ShapeExpr(programs): where shapes are unknown still, TensorRT 10's is a number.
    parts = (batch * 0 + programs) // (batch * kv_heads * tiles)
    key_tiles = trtp.cdiv(memory_k.shape_expr[2] + positions, SPLIT_KEYS)
    parts = trtp.max(trtp.min(trtp.min(parts, key_tiles), most_parts), 1)
    shape = (batch, positions, heads, parts)
    partial = trtp.from_shape_expr((*shape, head_dim), trt.float32)
    return partial, trtp.from_shape_expr(shape, trt.float32)


@trtp.autotune("masw::slot_attention_partial")
def tune_partial(
    q: trtp.TensorDesc,
    k_new: trtp.TensorDesc,
    v_new: trtp.TensorDesc,
    memory_k: trtp.TensorDesc,
    memory_v: trtp.TensorDesc,
    rows: trtp.TensorDesc,
    fed: trtp.TensorDesc,
    times: trtp.TensorDesc,
    kind: trtp.TensorDesc,
    heads: int,
    kv_heads: int,
    head_dim: int,
    sink: int,
    window: int,
    rollback: int,
    interval: int,
    visibility: str,
    sm: int,
    shared_limit: int,
    outputs: tuple[trtp.TensorDesc, trtp.TensorDesc],
) -> list[trtp.AutoTuneCombination]:
    """The network's types, and tactic i + 1 for each of `plans` that the shared memory allows."""
    attention = _attention(
        q, heads, kv_heads, head_dim, sink, window, rollback, interval, visibility
    )
    kernels = [compile_partial(attention, plan, sm) for plan in plans(attention)]
    tactics = [i + 1 for i, kernel in enumerate(kernels) if kernel.shared <= shared_limit]
    if not tactics:
        least = min(kernel.shared for kernel in kernels)
        raise ValueError(f"shared_limit is {shared_limit}; slot attention needs {least} bytes")
    types = [attention.dtype.upper()] * 5 + ["INT32"] * 4 + ["FP32"] * 2
    return [trtp.AutoTuneCombination(", ".join(types), "LINEAR", tactics)]


@trtp.aot_impl("masw::slot_attention_partial")
def compile_partial_plugin(
    q: trtp.TensorDesc,
    k_new: trtp.TensorDesc,
    v_new: trtp.TensorDesc,
    memory_k: trtp.TensorDesc,
    memory_v: trtp.TensorDesc,
    rows: trtp.TensorDesc,
    fed: trtp.TensorDesc,
    times: trtp.TensorDesc,
    kind: trtp.TensorDesc,
    heads: int,
    kv_heads: int,
    head_dim: int,
    sink: int,
    window: int,
    rollback: int,
    interval: int,
    visibility: str,
    sm: int,
    programs: int,
    most_parts: int,
    shared_limit: int,
    outputs: tuple[trtp.TensorDesc, trtp.TensorDesc],
    tactic: int,
) -> Compiled:
    """The kernel of a tactic. Grid (tiles * parts, Hkv, B); scalars positions, capacity, parts."""
    attention = _attention(
        q, heads, kv_heads, head_dim, sink, window, rollback, interval, visibility
    )
    plan = plans(attention)[tactic - 1]
    batch, _, positions, _ = q.shape_expr
    parts = outputs[1].shape_expr[3]
    tiles = trtp.cdiv(positions * attention.group, plan.block_m)
    grid = (tiles * parts, kv_heads, batch)
    scalars = (positions, memory_k.shape_expr[2], parts)
    return _launch(compile_partial(attention, plan, sm), grid, scalars)


@trtp.register("masw::slot_attention_merge")
def describe_merge(
    partial: trtp.TensorDesc,
    lse: trtp.TensorDesc,
    head_dim: int,
    dtype: str,
    sm: int,
    most_parts: int,
) -> trtp.TensorDesc:
    """Shape of out. `dtype` is fp16, bf16 or fp32."""
    types = {name: kind for kind, name in DTYPES.items()}
    if dtype not in types:
        raise ValueError(f"dtype is {dtype}; it must be one of {', '.join(types)}")
    batch, positions, heads, _ = lse.shape_expr
    return trtp.from_shape_expr((batch, positions, heads, head_dim), types[dtype])


@trtp.aot_impl("masw::slot_attention_merge")
def compile_merge_plugin(
    partial: trtp.TensorDesc,
    lse: trtp.TensorDesc,
    head_dim: int,
    dtype: str,
    sm: int,
    most_parts: int,
    outputs: tuple[trtp.TensorDesc],
    tactic: int,
) -> Compiled:
    """The kernel that joins parts. Grid (B * N * H,); the scalar is the number of parts."""
    batch, positions, heads, parts = lse.shape_expr
    kernel = compile_merge(head_dim, dtype, most_parts, sm)
    return _launch(kernel, (batch * positions * heads,), (parts,))
