"""Slot memory: preallocated keys and values of many sequences, addressed by one number each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..plugins.slot_attention.block import Block
from ..plugins.slot_attention.reference import memory_lifetimes, stored_times
from ..plugins.slot_attention.rule import RAW, MemoryRule


class CapacityError(ValueError):
    """A sequence would not fit into its memory; raised before any work."""


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on the CPU pages nobody has written yet cost no memory."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


class SlotMemory:
    """Keys and values of up to `rows` sequences under one memory rule.

    k, v: (L, rows, Hkv, capacity, D). A row's state is its fed length `fed[row]`; which entry
    holds what follows from it (reference.py). Entries are stored after RoPE. With
    `MemoryRule.full` this is an ordinary KV cache. `capacity` may ask for more entries than the
    rule needs.
    """

    def __init__(
        self,
        rule: MemoryRule,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        capacity: int = 0,
    ):
        if rows < 1:
            raise ValueError(f"rows is {rows}; a memory holds 1 or more sequences")
        self.rule, self.max_length = rule, max_length
        self.capacity = max(capacity, rule.capacity(max_length))
        shape = (layers, rows, kv_heads, self.capacity, head_dim)
        self.k, self.v = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        self.fed = [0] * rows
        self._peak = [0] * rows  # most tokens ever fed; what lies beyond the ring is overwritten
        # What was really written where; read only by check_integrity.
        self._written = torch.full((rows, self.capacity), -1)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of keys and values allocated for one sequence."""
        return 2 * self.k[:, 0].numel() * self.k.element_size()

    def check_room(self, row: int, raw_tokens: int) -> None:
        """Refuses, before any work, raw tokens that would pass the maximum length."""
        length = self.fed[row] + raw_tokens
        if length > self.max_length:
            raise CapacityError(
                f"sequence length {length} exceeds max_length {self.max_length}; "
                "shorten the prompt or serve with a larger max_length"
            )

    def _check_rows(self, rows: Sequence[int]) -> None:
        if not rows or len(set(rows)) < len(rows):
            raise ValueError(f"rows are {list(rows)}; give one or more, each once")
        if not 0 <= min(rows) <= max(rows) < len(self.fed):
            raise ValueError(
                f"rows are {list(rows)}; this memory has rows 0 to {len(self.fed) - 1}"
            )

    def block(self, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> Block:
        """The block that feeds `new_ids` to `rows`, slots included. Modifies nothing."""
        self._check_rows(rows)
        if not any(map(len, new_ids)):
            raise ValueError("new_ids is empty for every row; give 1 or more ids")
        for row, ids in zip(rows, new_ids, strict=True):
            self.check_room(row, len(ids))
        return Block.build(self.rule, rows, [self.fed[r] for r in rows], new_ids, self.k.device)

    def write(self, block: Block, k: Tensor, v: Tensor) -> None:
        """Appends a processed block: raw tokens, evicting the oldest of the ring, and slots.

        k, v: (L, B, Hkv, N, D) of the block's positions. Advances `fed`. On CUDA one kernel
        writes all of it, and nothing here waits for it.
        """
        self._check_fed(block)
        self.store(block, k, v)
        self.advance(block)

    def store(self, block: Block, k: Tensor, v: Tensor) -> None:
        """The part of `write` that concerns keys and values. Does not advance `fed`.

        k, v may have more sequences and positions than the block; those are left out.
        """
        if self.k.is_cuda:
            from ..plugins.slot_attention.launch import append  # Triton is there where CUDA is

            append(self.k, self.v, block, k, v)
            return
        for i, row in enumerate(block.rows):
            places, entries = self._entries(block, i, block.fed[i] + block.raw_counts[i])
            self.k[:, row, :, entries] = k[:, i, :, places]
            self.v[:, row, :, entries] = v[:, i, :, places]

    def advance(self, block: Block) -> None:
        """The part of `write` that concerns lengths: the block's tokens count as fed.

        Several blocks that were stored one after the other may be one here.
        """
        self._check_fed(block)
        for i, row in enumerate(block.rows):
            length = block.fed[i] + block.raw_counts[i]
            places, entries = self._entries(block.host, i, length)
            self._written[row, entries] = block.host.times[i, places]
            self.fed[row] = length
            self._peak[row] = max(self._peak[row], length)

    def _check_fed(self, block: Block) -> None:
        for row, fed in zip(block.rows, block.fed, strict=True):
            if self.fed[row] != fed:
                raise ValueError(f"row {row} holds {self.fed[row]} tokens, not {fed}")

    def _entries(self, block: Block, i: int, length: int) -> tuple[Tensor, Tensor]:
        """Positions of sequence i of a block that are kept, and the entries they go to."""
        rule, times, is_slot = self.rule, block.times[i], block.is_slot[i]
        overwritten = (times >= rule.sink) & (times < length - rule.ring)
        kept = is_slot | ((block.kind[i] == RAW) & ~overwritten)
        places = kept.nonzero()[:, 0]
        times, is_slot = times[places], is_slot[places]
        entries = times.clone()
        if rule.ring:
            in_ring = rule.sink + (times - rule.sink) % rule.ring
            entries = torch.where(times < rule.sink, entries, in_ring)
        if rule.interval:
            slot = torch.div(times - rule.sink, rule.interval, rounding_mode="floor")
            entries = torch.where(is_slot, rule.entry_of_slot(0) + slot, entries)
        return places, entries

    def can_rollback(self, row: int, kept: int) -> bool:
        """Whether `row` can go back to `kept` fed tokens with its window intact."""
        return kept <= self.fed[row] and self.rule.can_rollback(self._peak[row], kept)

    def rollback(self, row: int, kept: int) -> None:
        """Discards raw tokens j >= kept and slots b >= kept of `row`; their entries go stale."""
        if not self.can_rollback(row, kept):
            raise ValueError(
                f"row {row} cannot go back from {self.fed[row]} to {kept} tokens; "
                f"the rollback window is {self.rule.rollback}"
            )
        self.fed[row] = kept

    def clear(self, row: int) -> None:
        """Forgets the sequence of `row`."""
        self.fed[row] = self._peak[row] = 0

    def copy_prefix(self, source: int, destination: int, length: int) -> None:
        """Makes `destination` hold the first `length` tokens of `source` (plain KV only)."""
        if length > min(self.rule.sink, self.fed[source]):
            raise ValueError(f"only {self.fed[source]} tokens of plain KV can be copied")
        for whole in (self.k, self.v):
            whole[:, destination, :, :length] = whole[:, source, :, :length]
        self._written[destination, :length] = self._written[source, :length]
        self.fed[destination] = self._peak[destination] = length

    def check_integrity(self) -> None:
        """Raises AssertionError unless every entry a next token sees holds what it should."""
        for row, length in enumerate(self.fed):
            assert 0 <= length <= self.max_length, f"row {row}: length {length}"
            expected = stored_times(self.rule, length)
            birth, expiry = memory_lifetimes(self.rule, length)
            live = (birth < expiry) & (length < expiry)  # seen by the next token or later
            found = self._written[row, : len(expected)]
            wrong = (live & (found != expected)).nonzero()
            assert not len(wrong), (
                f"row {row}: entry {wrong[0].item()} holds {found[wrong[0]].item()} "
                f"instead of {expected[wrong[0]].item()}"
            )
