"""Cases for the slot-attention kernels and what they must give, by the dense oracle alone.

Memory is filled token by token at the places the design names, everything that holds no seen token
is poisoned with NaN, and the expected output is a float64 softmax under the oracle's mask. So the
kernels share neither lifetimes nor entry arithmetic with what they are compared to.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from masw.plugins.slot_attention.block import Block
from masw.plugins.slot_attention.reference import dense_oracle
from masw.plugins.slot_attention.rule import PADDING, RAW, SLOT, MemoryRule

BOTH = ("materialized", "evicted")
LONGEST = 640  # raw tokens of any sequence in a case
SIZES = (1, 3, 17, 63, 129, 257)
# Windows shorter and longer than a tile, no sink, window 1, intervals that do not divide them.
RULES = (
    *(MemoryRule(0, 1, 1, 1, visibility) for visibility in BOTH),
    *(MemoryRule(5, 7, 3, 4, visibility) for visibility in BOTH),
    *(MemoryRule(16, 33, 16, 8, visibility) for visibility in BOTH),
    *(MemoryRule(40, 100, 16, 3, visibility) for visibility in BOTH),
    MemoryRule.windowed(4, 70, 8),
    MemoryRule.full(LONGEST),
)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# (dtype, head_dim, query heads, key heads): every dtype and head size, groups of 1 to 8.
SHAPES = (
    (torch.float32, 64, 4, 2),
    (torch.float32, 80, 3, 1),
    (torch.float32, 128, 3, 1),
    (torch.float32, 256, 2, 1),
    (torch.float16, 64, 4, 1),
    (torch.float16, 96, 3, 3),
    (torch.float16, 128, 6, 2),
    (torch.float16, 256, 4, 2),
    (torch.bfloat16, 64, 8, 1),
    (torch.bfloat16, 80, 4, 1),
    (torch.bfloat16, 96, 2, 2),
    (torch.bfloat16, 128, 4, 1),
)


@dataclass(frozen=True)
class Case:
    """Sequences with their fed lengths and numbers of new raw tokens under one rule."""

    rule: MemoryRule
    dtype: torch.dtype
    dim: int
    heads: int
    kv_heads: int
    fed: tuple[int, ...]
    new: tuple[int, ...]
    seed: int = 0

    @classmethod
    def sample(cls, size: int, seed: int) -> Case:
        """A case whose first sequence gets `size` new tokens; seeds go round shapes and rules."""
        draw = random.Random(size * 1000 + seed)
        shape, rule = SHAPES[seed % len(SHAPES)], draw.choice(RULES)
        batch = draw.choice((1, 2, 3)) if size < 129 else draw.choice((1, 2))
        new = (size, *(draw.choice((0, 1, 2, size)) for _ in range(batch - 1)))
        fed = tuple(draw.choice((0, 1, 15, 16, 47, 130, 137, 300)) for _ in new)
        return cls(rule, *shape, fed, new, seed)

    def on(self, device: str) -> Inputs:
        """The tensors of the case."""
        return _build(self, device)


@dataclass(frozen=True)
class Inputs:
    """Arguments of the operator in its order, and the float64 output (B, H, N, D) it should give.

    k_new and v_new are strided as the decoder's are.
    """

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    memory_k: Tensor
    memory_v: Tensor
    block: Block
    expected: Tensor

    @property
    def arguments(self) -> tuple:
        """What the operator is called with."""
        return self.q, self.k_new, self.v_new, self.memory_k, self.memory_v, self.block

    @property
    def contiguous(self) -> list[Tensor]:
        """Inputs of the TensorRT plugin in its order: no strides, and all numbers int32."""
        rows, fed, _ = self.block.state[:, : len(self.block.rows)]
        numbers = [rows, fed, self.block.times, self.block.kind]
        return [x.contiguous() for x in self.arguments[:5]] + [
            x.int().contiguous() for x in numbers
        ]

    def check(self, out: Tensor) -> None:
        """Compares an output with the oracle's; padding must be exactly zero."""
        assert out.shape == self.expected.shape and out.dtype == self.q.dtype
        torch.testing.assert_close(
            out.double().cpu(), self.expected, atol=TOLERANCE[out.dtype], rtol=0
        )
        padding = (self.block.kind == PADDING)[:, None, :, None].expand_as(out)
        assert not out[padding].any()


@cache
def oracle(rule: MemoryRule) -> tuple[list[tuple[str, int]], Tensor]:
    """Stream and mask of `LONGEST` raw tokens; those of fewer are its beginning."""
    stream, mask = dense_oracle(rule, LONGEST)
    return stream, torch.tensor(mask)


def place_of(rule: MemoryRule, kind: str, time: int) -> int:
    """The entry of a stream item, by the table of regions in the design."""
    ring = rule.window + rule.rollback
    if kind == "slot":
        return rule.sink + ring + (time - rule.sink + 1) // rule.interval - 1
    return time if time < rule.sink else rule.sink + (time - rule.sink) % ring


def _build(case: Case, device: str) -> Inputs:
    rule, rows = case.rule, list(range(len(case.fed) + 1))[::-1][: len(case.fed)]
    block = Block.build(rule, rows, case.fed, [range(count) for count in case.new], device)
    batch, positions = block.kind.shape
    random_stream = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random_stream).to(case.dtype)

    q = normal(batch, positions, case.heads, case.dim).transpose(1, 2)
    new = normal(2, batch, positions, case.kv_heads, case.dim).transpose(2, 3)
    shape = (2, len(rows) + 1, case.kv_heads, rule.capacity(LONGEST), case.dim)
    memory = torch.full(shape, math.nan, dtype=case.dtype)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    stream, mask = oracle(rule)
    for i, row in enumerate(rows):
        before = [item for item in stream if item[1] < case.fed[i]]
        mine = [item for item in stream if case.fed[i] <= item[1] < case.fed[i] + case.new[i]]
        held = normal(2, case.kv_heads, len(before), case.dim)
        for place, item in enumerate(before):
            memory[:, row, :, place_of(rule, *item)] = held[:, :, place]
        for time in range(case.fed[i], min(case.fed[i] + rule.rollback, LONGEST)):
            memory[:, row, :, place_of(rule, "raw", time)] = math.nan  # rolled back
        first, count = len(before), len(mine)
        k, v = torch.cat([held, new[:, i, :, :count]], 2).double()
        rows_seen = mask[first : first + count, : first + count]
        expected[i, :, :count] = _softmax(q[i, :, :count].double(), k, v, rows_seen)
    tensors = (x.to(device) for x in (q, *new, *memory))
    return Inputs(*tensors, block, expected)


def _softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """(H, n, D) attention of (H, n, D) over (Hkv, m, D) under mask (n, m)."""
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def kinds(block: Block) -> set[int]:
    """What positions a block has."""
    return set(block.kind.unique().tolist()) & {RAW, SLOT, PADDING}
