"""Time and bandwidth of the slot-attention kernels on a GPU, beside torch's attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ...plugins.slot_attention.block import Block
from ...plugins.slot_attention.op import slot_attention
from ...plugins.slot_attention.rule import MemoryRule, SlotVisibility
from .cuda import buffers_for, copy_rate, device_facts, graph_us, require_cuda
from .record import Check, Record, Tick, new_card, rounded, shown

SHAPES = {"1b": (32, 8, 64), "3b": (24, 8, 128), "8b": (32, 8, 128)}  # H, Hkv, D
RULE = MemoryRule(128, 128, 16, 8, SlotVisibility.MATERIALIZED)
SMALL_LIMIT_US = 8.0  # batch 1, 4K entries
LARGE_LIMIT = 0.75  # of the copy rate, from this many entries in the batch up
LARGE = 65_536
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class KernelSettings:
    """What is measured: decode over `entries` x `batches`, a prefill chunk over `prefixes`.

    A decode step has two positions, the last of a unit and its slot.
    """

    shapes: tuple[str, ...] = tuple(SHAPES)
    entries: tuple[int, ...] = (512, 2048, 4096, 8192, 32768)
    batches: tuple[int, ...] = (1, 8, 32)
    prefixes: tuple[int, ...] = (8192, 32768)
    chunk: int = 512
    dtype: str = "bfloat16"

    def __post_init__(self):
        unknown = [name for name in self.shapes if name not in SHAPES]
        if unknown or not self.shapes:
            raise ValueError(f"shapes is {self.shapes}; choose from {', '.join(SHAPES)}")
        if self.dtype not in TYPES:
            raise ValueError(f"dtype is {self.dtype!r}; use one of {', '.join(TYPES)}")
        raw = RULE.sink + RULE.ring
        if min(self.entries, default=raw + 1) <= raw:
            raise ValueError(f"entries is {self.entries}; give numbers above {raw} (S + W + R)")
        if not self.batches or min((*self.batches, *self.prefixes, self.chunk)) < 1:
            raise ValueError("batches, prefixes and chunk must be 1 or more")


@dataclass(frozen=True)
class KernelRow:
    """One measurement. us: per layer and call. gb_s: bytes that must move / time.

    case: "decode", or "prefill" with the memory's mode. length: memory entries (decode) or prefix
    tokens (prefill) per sequence. of_copy: gb_s / the copy rate; decode only. tflops: prefill
    only. sdpa_us: torch's attention over as many entries (decode) or causal over the whole prefix
    (prefill). flashinfer_us: where it is importable, batch 1.
    """

    case: str
    shape: str
    batch: int
    length: int
    us: float
    gb_s: float | None
    of_copy: float | None
    tflops: float | None
    sdpa_us: float
    flashinfer_us: float | None


class Arena:
    """Keys and values that all measurements take their views of."""

    def __init__(self, values: int, dtype: torch.dtype, device: torch.device):
        self.k = torch.empty(values, dtype=dtype, device=device).normal_()
        self.v = torch.empty(values, dtype=dtype, device=device).normal_()

    def memory(self, *shape: int) -> tuple[Tensor, Tensor]:
        """k and v of a shape (rows, Hkv, M, D)."""
        count = torch.Size(shape).numel()
        return self.k[:count].view(shape), self.v[:count].view(shape)


def measure_kernels(settings: KernelSettings, tick: Tick) -> tuple[list[KernelRow], float]:
    """All rows, and the copy rate in GB/s. Raises BenchError without a CUDA device."""
    device = require_cuda()
    tick("copy rate")
    rate, dtype = copy_rate(device), TYPES[settings.dtype]
    arena = Arena(_arena_values(settings), dtype, device)
    rows = []
    for name in settings.shapes:
        tick(f"{name}: decode")
        for batch, entries in _decode_cases(settings):
            rows.append(_decode_row(name, batch, entries, arena, rate))
        tick(f"{name}: prefill")
        for prefix in settings.prefixes:
            rows += _prefill_rows(name, prefix, settings.chunk, arena)
    return rows, rate


def ticks(settings: KernelSettings) -> int:
    """How often `measure_kernels` ticks."""
    return 1 + 2 * len(settings.shapes)


def _decode_cases(settings: KernelSettings) -> Iterator[tuple[int, int]]:
    return ((batch, entries) for batch in settings.batches for entries in settings.entries)


def _arena_values(settings: KernelSettings) -> int:
    """Values of the largest memory of any case, all its buffers included."""
    sizes = []
    for name in settings.shapes:
        _, kv_heads, dim = SHAPES[name]
        for batch, entries in _decode_cases(settings):
            one = batch * kv_heads * entries * dim
            sizes.append(one * buffers_for(4 * one))
        sizes += [kv_heads * (prefix + settings.chunk) * dim * 2 for prefix in settings.prefixes]
    return max(sizes)


def _decode_row(name: str, batch: int, entries: int, arena: Arena, rate: float) -> KernelRow:
    """A step of two positions, each buffer a group of rows of one memory."""
    _, kv_heads, dim = SHAPES[name]
    fed = RULE.boundary(entries - RULE.sink - RULE.ring)  # the next token ends a unit
    one = batch * kv_heads * entries * dim
    count = buffers_for(4 * one)
    memory = arena.memory(count * batch, kv_heads, entries, dim)
    q, new_k, new_v = _new(batch, 2, SHAPES[name], arena.k)
    blocks = [_block(RULE, range(i * batch, (i + 1) * batch), fed, 1, q) for i in range(count)]
    us = graph_us([_caller(slot_attention, q, new_k, new_v, *memory, block) for block in blocks])
    groups = [tuple(x[i * batch : (i + 1) * batch] for x in memory) for i in range(count)]
    sdpa_us = graph_us([_caller(_sdpa, q, *group) for group in groups])
    live = entries - RULE.rollback - 1  # what the step sees of them
    moved = 2 * q.element_size() * (batch * kv_heads * (live + 2) * dim + q.numel())
    gb_s = moved / us / 1e3
    return KernelRow(
        "decode", name, batch, entries, rounded(us, 2), rounded(gb_s, 1), rounded(gb_s / rate),
        None, rounded(sdpa_us, 2), rounded(_flashinfer_us(q, groups), 2),
    )  # fmt: skip


def _prefill_rows(name: str, prefix: int, chunk: int, arena: Arena) -> Iterator[KernelRow]:
    """A chunk after the prefix, over slots and over everything."""
    heads, kv_heads, dim = SHAPES[name]
    q, _, _ = _new(1, chunk, SHAPES[name], arena.k)
    k, v = arena.memory(1, kv_heads, prefix + chunk, dim)
    sdpa_us = graph_us([_caller(_causal, q, k, v)] * 4)
    for mode, rule in (("slots", RULE), ("full", MemoryRule.full(prefix + chunk))):
        block = _block(rule, range(1), prefix, chunk, q)
        positions = block.kind.shape[1]
        q_all, new_k, new_v = _new(1, positions, SHAPES[name], arena.k)
        memory = arena.memory(1, kv_heads, rule.capacity(prefix + chunk), dim)
        us = graph_us([_caller(slot_attention, q_all, new_k, new_v, *memory, block)] * 4)
        seen = sum(int(mask.sum()) for mask in block.host.masks)
        yield KernelRow(
            f"prefill {mode}", name, 1, prefix, rounded(us, 2), None, None,
            rounded(4 * heads * dim * seen / us / 1e6, 1), rounded(sdpa_us, 2), None,
        )  # fmt: skip


def _caller(function: Callable, *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _block(rule: MemoryRule, rows: range, fed: int, new: int, like: Tensor) -> Block:
    """A block of `new` raw tokens for each row, with what its kernels need already there."""
    block = Block.build(rule, rows, [fed] * len(rows), [range(new)] * len(rows), like.device)
    assert block.state.device == like.device
    return block


def _new(batch: int, positions: int, shape: tuple[int, int, int], like: Tensor) -> list[Tensor]:
    """q, k and v of new positions, strided as the decoder's are."""
    heads, kv_heads, dim = shape
    sizes = [(batch, positions, count, dim) for count in (heads, kv_heads, kv_heads)]
    return [like.new_empty(size).normal_().transpose(1, 2) for size in sizes]


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def _flashinfer_us(q: Tensor, groups: list[tuple[Tensor, Tensor]]) -> float | None:
    """FlashInfer's attention of a single sequence; None where it is not installed."""
    if q.shape[0] > 1 or importlib.util.find_spec("flashinfer") is None:
        return None
    from flashinfer import single_prefill_with_kv_cache

    query = q[0].transpose(0, 1).contiguous()  # (N, H, D)
    return graph_us(
        [
            lambda k=k, v=v: single_prefill_with_kv_cache(query, k[0], v[0], kv_layout="HND")
            for k, v in groups
        ]
    )


def kernel_record(rows: list[KernelRow], rate: float, settings: KernelSettings) -> Record:
    """Rows, the copy rate, and the limits of decode."""
    decode = [row for row in rows if row.case == "decode"]
    small = [row.us for row in decode if row.batch == 1 and row.length == 4096]
    large = [row.of_copy for row in decode if row.batch * row.length >= LARGE]
    checks = (
        Check(
            "decode us, batch 1, 4096 entries, worst shape",
            max(small, default=None),
            SMALL_LIMIT_US,
        ),
        Check(
            f"copy rate / decode rate from {LARGE} entries up, worst",
            1 / min(large) if large else None,
            round(1 / LARGE_LIMIT, 4),
        ),
    )
    ratios = {
        "copy_gb_s": rounded(rate, 1),
        "vs_sdpa": {
            f"{row.case} {row.shape} {row.batch}x{row.length}": rounded(row.sdpa_us / row.us, 2)
            for row in rows
        },
    }
    common = device_facts(require_cuda()) | {"rule": asdict(RULE)} | asdict(settings)
    return Record("kernel", common, rows, ratios, checks)


def kernel_card(record: Record) -> Table:
    """Every measurement, one per line."""
    settings = record.settings
    card = new_card(
        f"slot attention, {settings['device']}, {settings['dtype']}, "
        f"copy {record.ratios['copy_gb_s']:,.0f} GB/s",
        ("case", "shape", "batch", "length", "us", "GB/s", "/ copy", "TFLOP/s", "SDPA us", "x"),
    )
    for row in record.rows:
        card.add_row(
            row.case,
            row.shape,
            f"{row.batch}",
            f"{row.length:,}",
            shown(row.us, ".1f"),
            shown(row.gb_s, ",.0f"),
            shown(row.of_copy, ".0%"),
            shown(row.tflops, ".0f"),
            shown(row.sdpa_us, ".1f"),
            shown(row.sdpa_us / row.us, ".2f"),
        )
    return card
