"""Compiles the kernels of the TensorRT plugins ahead of time, to PTX. No GPU is needed.

What TensorRT passes to a kernel is its input pointers, then 32-bit scalars, then its output
pointers, and nothing else. So model and rule are compiled in, and the scratch pointers that Triton
appends to a kernel's parameters are taken out again. The same request gives the same bytes in
every process: line information, which holds paths, is left out, and no cache is asked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .kernels import RULE, dense_partial_kernel, merge_kernel
from .launch import (
    Plan,
    attention_constants,
    chunk_plan,
    decode_plan,
    head_constants,
    rule_scalars,
)
from .rule import MemoryRule

# Compute capability -> version of the PTX, in tenths: the oldest that knows it, and 8.0 at least.
TARGETS = {80: 80, 86: 80, 89: 80, 90: 80, 100: 86, 120: 87}
TYPES = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}
SMALL_TILE = 4096  # values of a tile in a plan that needs little shared memory
MERGE_WARPS = 4
ALIGNED = [["tt.divisibility", 16]]  # the memory behind every pointer, in bytes


@dataclass(frozen=True)
class Attention:
    """What is compiled into the attention kernel: heads, their size, type of values, and rule."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    rule: MemoryRule

    def __post_init__(self):
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads}; it must be a multiple of kv_heads, {self.kv_heads}"
            )
        if not 16 <= self.head_dim <= 256 or self.head_dim % 8:
            raise ValueError(
                f"head_dim is {self.head_dim}; it must be a multiple of 8 from 16 to 256"
            )
        if self.dtype not in TYPES:
            raise ValueError(f"dtype is {self.dtype}; it must be one of {', '.join(TYPES)}")

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: entry name, PTX, threads per program, dynamic shared memory in bytes."""

    name: str
    ptx: str
    threads: int
    shared: int


def plans(attention: Attention) -> tuple[Plan, ...]:
    """Ways to cut up the attention that suit few, more and many query rows.

    First the launcher's own, then ones that need at most 48 KiB of shared memory, which every
    program may have without asking. All of them compute the same; which is fastest is for TensorRT
    to measure.
    """
    dim, bytes_each = attention.head_dim, 4 if attention.dtype == "fp32" else 2
    fast = [decode_plan(rows, dim, bytes_each) for rows in (16, 64)]
    fast.append(chunk_plan(512, dim, bytes_each))
    padded = head_constants(dim)["D_PAD"]
    rows, keys = SMALL_TILE // padded, max(16, SMALL_TILE // (padded * bytes_each) * 2)
    lean = [
        replace(
            plan,
            block_m=min(plan.block_m, max(16, rows)),
            block_n=min(plan.block_n, keys),
            warps=4,
            stages=2 if padded * bytes_each < 1024 else 1,
        )
        for plan in fast
    ]
    return tuple(dict.fromkeys(fast + lean))


def partial_constants(attention: Attention, plan: Plan) -> dict:
    """Compile-time arguments of `dense_partial_kernel`."""
    dot = TYPES[attention.dtype]
    constants = attention_constants(plan, attention.head_dim, attention.group, dot)
    rule = zip(RULE, rule_scalars(attention.rule), strict=True)
    return (
        constants | {name.upper(): value for name, value in rule} | {"KV_HEADS": attention.kv_heads}
    )


def merge_constants(head_dim: int, most_parts: int) -> dict[str, int]:
    """Compile-time arguments of `merge_kernel`."""
    return head_constants(head_dim) | {"PARTS_PAD": triton.next_power_of_2(most_parts)}


@cache
def compile_partial(attention: Attention, plan: Plan, sm: int) -> Kernel:
    """`dense_partial_kernel` for compute capability sm / 10.

    Parameters: q, k_new, v_new, memory_k, memory_v, rows, fed, times, kind; positions, capacity,
    parts; partial, lse. Indices are int32, outputs float32.
    """
    values = dict.fromkeys(["q", "k_new", "v_new", "memory_k", "memory_v"], f"*{attention.dtype}")
    indices = dict.fromkeys(["rows", "fed", "times", "kind"], "*i32")
    scalars = dict.fromkeys(["positions", "capacity", "parts"], "i32")
    types = values | indices | scalars | {"partial": "*fp32", "lse": "*fp32"}
    constants = partial_constants(attention, plan)
    return _compile(dense_partial_kernel, types, constants, sm, plan.warps, plan.stages)


@cache
def compile_merge(head_dim: int, dtype: str, most_parts: int, sm: int) -> Kernel:
    """`merge_kernel` for up to `most_parts` parts. Parameters: partial, lse; parts; out."""
    constants = merge_constants(head_dim, most_parts)
    types = {"partial": "*fp32", "lse": "*fp32", "parts": "i32", "out": f"*{dtype}"}
    return _compile(merge_kernel, types, constants, sm, MERGE_WARPS, 1)


def _compile(
    fn: triton.JITFunction, types: dict[str, str], constants: dict, sm: int, warps: int, stages: int
) -> Kernel:
    if sm not in TARGETS:
        raise ValueError(f"sm is {sm}; kernels are compiled for {', '.join(map(str, TARGETS))}")
    signature = {name: types.get(name, "constexpr") for name in fn.arg_names}
    aligned = {(i,): ALIGNED for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(fn, signature, constants, aligned)
    options = {
        "num_warps": warps,
        "num_stages": stages,
        "ptx_version": TARGETS[sm],
        "enable_fp_fusion": True,  # else the environment would decide
    }
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        triton.knobs.compilation.always_compile = True
        built = triton.compile(source, GPUTarget("cuda", sm, 32), options)
    name, shared = built.metadata.name, built.metadata.shared
    return Kernel(name, without_scratch(built.asm["ptx"], name, len(types)), warps * 32, shared)


def without_scratch(ptx: str, name: str, count: int) -> str:
    """PTX whose entry `name` has its first `count` parameters only; the others must be unused."""
    head, body = ptx.split(f".visible .entry {name}(", 1)
    parameters, body = body.split("\n)", 1)
    lines = parameters.strip().split("\n")
    used = [int(i) for i in re.findall(rf"{name}_param_(\d+)", body)]
    if len(lines) < count or max(used, default=0) >= count:
        raise RuntimeError(
            f"kernel {name} has {len(lines)} parameters and uses number {max(used, default=0)}; "
            f"TensorRT passes {count}"
        )
    kept = "\n".join(lines[:count]).rstrip(",")
    return f"{head}.visible .entry {name}(\n\t{kept}\n){body}"
