"""Launches the kernels from torch: tile sizes, the number of key parts, and grids."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .block import Block
from .kernels import append_kernel, merge_kernel, partial_kernel, whole_kernel
from .rule import MemoryRule, SlotVisibility

DECODE_ROWS = 256  # more packed query rows (positions x G) of a sequence count as a chunk
MOST_PARTS = 128
START_TILES = 2  # what starting a program costs, in key tiles
SPLIT_ROWS = 40  # rows whose partial outputs cost as much as a key tile to write and merge
APPEND_ROWS = 16  # positions per program of the append
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Plan:
    """How a launch is cut up.

    unmasked: whether keys that every row of a tile sees have a loop without a mask. per_sm:
    programs that a multiprocessor holds at once (bounded by registers and shared memory).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    unmasked: bool = False
    per_sm: int = 2
    parts: int = 1


def plan_launch(q: Tensor, block: Block, kv_heads: int, sm_count: int) -> Plan:
    """The plan for q (B, H, N, D) over the memory of `block`."""
    entries = triton.cdiv(max(block.extents), 32) * 32  # fewer different plans
    return _plan(*q.shape, q.element_size(), kv_heads, entries, sm_count)


@lru_cache(maxsize=4096)
def _plan(
    batch: int, heads: int, positions: int, dim: int,
    bytes_each: int, kv_heads: int, entries: int, sm_count: int,
) -> Plan:  # fmt: skip
    rows = positions * heads // kv_heads
    cut = decode_plan if rows <= DECODE_ROWS else chunk_plan
    plan = cut(rows, dim, bytes_each)
    programs = batch * kv_heads * triton.cdiv(rows, plan.block_m)
    tiles = triton.cdiv(entries, plan.block_n) + triton.cdiv(positions, plan.block_n)
    parts = count_parts(programs, tiles, plan.block_m, sm_count * plan.per_sm)
    return replace(plan, parts=parts)


def count_parts(programs: int, tiles: int, block_m: int, resident: int) -> int:
    """Parts of the key tiles, so that the device is busy and programs are not too short.

    programs: how many run without splitting; tiles: key tiles of one; resident: programs that
    run at once. Minimises rounds x (key tiles of a program + what it costs besides).
    """

    def cost(parts: int) -> int:
        besides = START_TILES + (block_m // SPLIT_ROWS if parts > 1 else 0)
        return triton.cdiv(programs * parts, resident) * (triton.cdiv(tiles, parts) + besides)

    return min(range(1, min(tiles, MOST_PARTS) + 1), key=cost)


def decode_plan(rows: int, dim: int, bytes_each: int) -> Plan:
    """The plan, not yet split, for few query rows per key head (positions x G)."""
    if bytes_each == 4:  # exact products hold their operands in registers
        return Plan(16, 32, 8, 2)
    block_m = min(max(16, triton.next_power_of_2(rows)), 64)
    if dim > 128:
        return Plan(block_m, 32, 4, 2)
    if block_m == 64:
        return Plan(64, 64, 4, 2)
    return Plan(block_m, 64, 4, 3, per_sm=4 if dim <= 64 else 3)


def chunk_plan(rows: int, dim: int, bytes_each: int) -> Plan:
    """The plan, not yet split, for many query rows per key head."""
    if bytes_each == 4:
        return Plan(32, 32, 4, 2, True) if dim <= 64 else Plan(16, 32, 8, 2, True)
    if dim > 128:
        return Plan(64, 32, 4, 2, True)
    return Plan(128, 64, 8, 3, True, per_sm=1)


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    memory_k: Tensor,
    memory_v: Tensor,
    block: Block,
    plan: Plan | None = None,
) -> Tensor:
    """`op.slot_attention` by kernels. Returns (B, H, N, D), a view of (B, N, H, D)."""
    batch, heads, positions, dim = q.shape
    kv_heads, capacity = memory_k.shape[1:3]
    _check_memory(memory_k, memory_v)
    plan = plan or plan_launch(q, block, kv_heads, multiprocessors(q.device))
    q, k_new, v_new = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k_new, v_new))
    rows, fed, _ = block.state
    strides = [x.stride(i) for x in (q, k_new, v_new) for i in range(3)]
    inputs = (q, k_new, v_new, memory_k, memory_v, rows, fed, block.times, block.kind)
    out = q.new_empty(batch, positions, heads, dim)
    constants = attention_constants(plan, dim, heads // kv_heads, dot_type(q.dtype)) | {
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }
    tiles = triton.cdiv(positions * heads // kv_heads, plan.block_m)
    rule = rule_scalars(block.rule)
    if plan.parts == 1:
        grid = (tiles, kv_heads, batch)
        whole_kernel[grid](*inputs, positions, capacity, *strides, *rule, out, **constants)
        return out.transpose(1, 2)
    shape = (batch, positions, heads, plan.parts)
    partial = q.new_empty((*shape, dim), dtype=torch.float32)
    lse = q.new_empty(shape, dtype=torch.float32)
    grid = (tiles * plan.parts, kv_heads, batch)
    partial_kernel[grid](
        *inputs, positions, capacity, plan.parts, *strides, *rule, partial, lse, **constants
    )
    merge(partial, lse, out)
    return out.transpose(1, 2)


def merge(partial: Tensor, lse: Tensor, out: Tensor) -> None:
    """Joins partial (B, N, H, parts, D) by lse (B, N, H, parts) into out (B, N, H, D)."""
    parts, dim = partial.shape[-2:]
    padded = triton.next_power_of_2(parts)
    merge_kernel[(out.numel() // dim,)](
        partial, lse, parts, out, **head_constants(dim), PARTS_PAD=padded, num_warps=4
    )


def append(memory_k: Tensor, memory_v: Tensor, block: Block, k: Tensor, v: Tensor) -> None:
    """Writes k, v (L, B, Hkv, N, D) of a block to memory (L, rows, Hkv, M, D) in one launch."""
    rows, _, lengths = block.state
    append_to(memory_k, memory_v, block.rule, (rows, lengths, block.times, block.kind), k, v)


def append_to(
    memory_k: Tensor,
    memory_v: Tensor,
    rule: MemoryRule,
    numbers: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
) -> None:
    """`append` of a block that only the device knows; reads nothing on the host.

    numbers: rows, lengths after the block (B,), times, kind (B, N), integers on the device.
    """
    layers, batch, kv_heads, positions, dim = k.shape
    _check_memory(memory_k, memory_v)
    grid = (triton.cdiv(positions, APPEND_ROWS), kv_heads, layers * batch)
    append_kernel[grid](
        k.contiguous(), v.contiguous(), *numbers,
        batch, memory_k.shape[1], positions, memory_k.shape[3], *rule_scalars(rule)[:4],
        memory_k, memory_v, **head_constants(dim), BLOCK=APPEND_ROWS, num_warps=2,
    )  # fmt: skip


def rule_scalars(rule: MemoryRule) -> tuple[int, int, int, int, int]:
    """sink, window, ring, interval and the delay from a slot's boundary to its birth."""
    delay = 1 if rule.visibility is SlotVisibility.MATERIALIZED else rule.window
    return rule.sink, rule.window, rule.ring, rule.interval, delay


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type products are made of; Triton's interpreter cannot multiply bfloat16."""
    interpreted = triton.knobs.runtime.interpret
    return tl.float32 if interpreted and dtype == torch.bfloat16 else TYPES[dtype]


def attention_constants(plan: Plan, dim: int, group: int, dot: tl.dtype) -> dict:
    """Compile-time arguments of the attention kernels; `group` is query heads per key head."""
    return head_constants(dim) | {
        "G": group,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "SCALE": math.log2(math.e) / math.sqrt(dim),
        "DOT": dot,
        "UNMASKED": plan.unmasked,
    }


def head_constants(dim: int) -> dict[str, int]:
    """Compile-time arguments that say the size of a head."""
    return {"D": dim, "D_PAD": max(16, triton.next_power_of_2(dim))}


def _check_memory(memory_k: Tensor, memory_v: Tensor) -> None:
    if not (memory_k.is_contiguous() and memory_v.is_contiguous()):
        raise ValueError("the kernels need contiguous memory_k and memory_v")
    if math.prod(memory_k.shape[-2:]) >= 2**31:
        raise ValueError(
            f"memory has {memory_k.shape[-2]} entries of {memory_k.shape[-1]} values per head; "
            "the kernels address fewer than 2**31 values"
        )
