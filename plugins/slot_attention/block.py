"""The positions of one forward pass: raw tokens and slot tokens of a batch of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .reference import visibility_mask
from .rule import PADDING, RAW, SLOT, MemoryRule


@dataclass(frozen=True)
class Block:
    """New positions of B sequences, padded on the right to N positions each.

    rows: memory row of each sequence. fed: fed length n of each sequence before this block.
    ids (B, N) int64: token whose embedding enters; for a slot the raw token it follows.
    times (B, N) int64: raw number t. kind (B, N) uint8: PADDING, RAW or SLOT.
    on_host: where these tensors lie on a device, the same block on the CPU.
    """

    rule: MemoryRule
    rows: tuple[int, ...]
    fed: tuple[int, ...]
    ids: Tensor
    times: Tensor
    kind: Tensor
    raw_counts: tuple[int, ...]
    on_host: Block | None = None

    @classmethod
    def build(
        cls,
        rule: MemoryRule,
        rows: Sequence[int],
        fed: Sequence[int],
        new_ids: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> Block:
        """Lays out the stream raw b, slot b, raw b + 1, ... of every sequence's `new_ids`."""
        streams = [_stream(rule, n, ids) for n, ids in zip(fed, new_ids, strict=True)]
        shape = (len(streams), max(len(times) for _, times, _ in streams))
        ids, times = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        kind = torch.zeros(shape, dtype=torch.uint8)
        for i, stream in enumerate(streams):
            for whole, part in zip((ids, times, kind), stream, strict=True):
                whole[i, : len(part)] = part
        counts = tuple(len(x) for x in new_ids)
        block = cls(rule, tuple(rows), tuple(fed), ids, times, kind, counts)
        return block if torch.device(device).type == "cpu" else block.to(device)

    def to(self, device: torch.device | str) -> Block:
        """This block of the CPU with its tensors on a device, sent without waiting."""
        tensors = (x.to(device, non_blocking=True) for x in (self.ids, self.times, self.kind))
        return Block(self.rule, self.rows, self.fed, *tensors, self.raw_counts, self)

    @property
    def host(self) -> Block:
        """This block on the CPU: what is computed from it does not wait for a device."""
        return self.on_host or self

    @cached_property
    def is_slot(self) -> Tensor:
        """(B, N) bool: slot positions."""
        return self.kind == SLOT

    @cached_property
    def slot_index(self) -> tuple[Tensor, Tensor] | None:
        """(batch, position) indices of the slot positions; None without any."""
        return self._indices(self.host.is_slot)

    @cached_property
    def padding_index(self) -> tuple[Tensor, Tensor] | None:
        """(batch, position) indices of the padding positions; None without any."""
        return self._indices(self.host.kind == PADDING)

    def _indices(self, where: Tensor) -> tuple[Tensor, Tensor] | None:
        batch, position = where.nonzero(as_tuple=True)
        if not len(batch):
            return None
        device = self.kind.device
        return batch.to(device, non_blocking=True), position.to(device, non_blocking=True)

    @cached_property
    def positions(self) -> Tensor:
        """(B, N) int64 RoPE positions: t for raw token t, t + 1 for the slot that follows it."""
        return self.times + self.is_slot

    @cached_property
    def last_raw(self) -> Tensor:
        """(B,) int64: position in the block of each sequence's last raw token (-1: none)."""
        places = torch.arange(self.kind.shape[1], device=self.kind.device)
        return torch.where(self.kind == RAW, places, -1).amax(1)

    @cached_property
    def state(self) -> Tensor:
        """(3, >= B) int32 on the block's device: memory rows, fed lengths, and those after it.

        Padded on the right to a multiple of 4, so that each row is aligned to 16 bytes: kernels
        are compiled anew for another alignment.
        """
        after = [n + count for n, count in zip(self.fed, self.raw_counts, strict=True)]
        spare = (0,) * (-len(self.rows) % 4)
        numbers = [[*x, *spare] for x in (self.rows, self.fed, after)]
        return torch.tensor(numbers, dtype=torch.int32).to(self.kind.device, non_blocking=True)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Leading memory entries that hold anything, per sequence, before this block."""
        return tuple(self.rule.extent(n) for n in self.fed)

    @cached_property
    def masks(self) -> list[Tensor]:
        """Per sequence (N, extent + N) bool: what each query sees of memory, then of the block."""
        return [
            visibility_mask(self.rule, n, self.times[i], self.kind[i])
            for i, n in enumerate(self.fed)
        ]


def _stream(rule: MemoryRule, fed: int, ids: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """ids, times and kinds of one sequence's raw tokens with their slots in stream order."""
    new = torch.as_tensor(ids, dtype=torch.int64)
    times = torch.arange(fed, fed + len(new))
    if rule.slots(fed + len(new)) == rule.slots(fed):
        return new, times, torch.full((len(new),), RAW, dtype=torch.uint8)
    index = torch.repeat_interleave(1 + rule.is_boundary(times).long())
    is_slot = torch.cat([torch.zeros(1, dtype=torch.bool), index[1:] == index[:-1]])
    return new[index], times[index], torch.where(is_slot, SLOT, RAW).to(torch.uint8)
