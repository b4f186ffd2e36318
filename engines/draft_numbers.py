"""The integers that describe calls of the draft engine, laid out on the host.

One call takes seven int32 tensors: those of draft_io.py, and `lengths`, the fed lengths after the
call, for the append. They stand one behind the other in one flat buffer, each at a multiple of
TensorRT's 256 bytes, so that a call is described by one copy and its addresses never change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..plugins.slot_attention.rule import RAW, SLOT, MemoryRule
from .draft_io import DraftIO

ALIGNED = 64  # int32 numbers in 256 bytes
PER_SEQUENCE = ("rows", "fed", "last", "lengths")  # (B,)
PER_POSITION = ("ids", "times", "kind")  # (B, N)
CATCH_UP_TOKENS = 2  # raw tokens of the first call of a proposal: two after full acceptance


@dataclass(frozen=True)
class Bucket:
    """Sizes that calls are rounded up to, so that few buffers and CUDA graphs serve all.

    batch: sequences of each call; steps: calls, that is γ.
    """

    batch: int
    steps: int

    @classmethod
    def of(cls, sequences: int, draft_tokens: int, most: int) -> Bucket:
        """For `sequences` of at most `most`: the next power of two. γ is taken as it is.

        A sequence that is not there costs next to nothing, a step too many a pass over all weights.
        """
        return cls(rounded_up(sequences, most), draft_tokens)


def rounded_up(count: int, most: int) -> int:
    """The next power of two, but `most` at most."""
    return min(1 << (count - 1).bit_length(), most)


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a call of `batch` sequences and `positions` stand in its buffer."""

    batch: int
    positions: int

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return (self.batch,) if name in PER_SEQUENCE else (self.batch, self.positions)

    @property
    def starts(self) -> dict[str, int]:
        """The place of each tensor's first number."""
        starts, end = {}, 0
        for name in (*PER_SEQUENCE, *PER_POSITION):
            starts[name] = end
            end += _aligned(math.prod(self.shape(name)))
        return starts

    @property
    def size(self) -> int:
        """Numbers of one call."""
        return self.starts["kind"] + _aligned(self.batch * self.positions)

    def pack(self, numbers: dict[str, np.ndarray]) -> np.ndarray:
        """(calls, size) int32 of tensors with `calls` times at most `batch` sequences each.

        What is left over are sequences that consist of padding.
        """
        calls, sequences = numbers["rows"].shape
        packed = np.zeros((calls, self.size), np.int32)
        for name, start in self.starts.items():
            count = sequences * math.prod(self.shape(name)[1:])
            packed[:, start : start + count] = numbers[name].reshape(calls, count)
        return packed


def _aligned(count: int) -> int:
    return math.ceil(count / ALIGNED) * ALIGNED


def lay_out(
    rule: MemoryRule,
    rows: np.ndarray,
    fed: np.ndarray,
    counts: np.ndarray,
    ids: np.ndarray,
    positions: int,
) -> dict[str, np.ndarray]:
    """The tensors of calls that feed counts[c, b] raw tokens to rows[c, b] after fed[c, b].

    rows, fed, counts (C, B); ids (C, B, most). Each sequence's stream is raw t, its slot if there
    is one, raw t + 1, ..., then padding. Returns rows, fed, last, lengths (C, B) and ids, times,
    kind (C, B, positions).
    """
    number = np.arange(ids.shape[2])
    present = number < counts[..., None]  # (C, B, most)
    times = fed[..., None] + number
    slot = present & rule.is_boundary(times)
    place = number + np.cumsum(slot, 2) - slot  # of each raw token
    shape = (*rows.shape, positions)
    laid = {name: np.zeros(shape, np.int32) for name in PER_POSITION}
    for which, kind in ((present, RAW), (slot, SLOT)):
        call, batch, _ = index = which.nonzero()
        where = call, batch, place[index] + (kind == SLOT)
        laid["ids"][where], laid["times"][where] = ids[index], times[index]
        laid["kind"][where] = kind
    last = np.where(present, place, 0).max(2)
    return {"rows": rows, "fed": fed, "last": last, "lengths": fed + counts} | laid


@dataclass(frozen=True)
class DraftingPlan:
    """What the calls of one proposal feed: backlogs of one or two tokens, then token by token.

    rows: memory row of each sequence; fed: its fed length before; backlogs: raw ids to feed in
    the first call; draft_tokens: γ of each. Call s gives proposed id s and feeds id s - 1, and a
    sequence with fewer ids to propose is padding from then on.
    """

    rows: tuple[int, ...]
    fed: tuple[int, ...]
    backlogs: tuple[tuple[int, ...], ...]
    draft_tokens: tuple[int, ...]

    def __post_init__(self):
        if not all(1 <= len(ids) <= CATCH_UP_TOKENS for ids in self.backlogs):
            raise ValueError(f"backlogs have 1 to {CATCH_UP_TOKENS} ids, not {self.backlogs}")

    @property
    def steps(self) -> int:
        """Calls."""
        return max(self.draft_tokens)

    @property
    def fed_counts(self) -> tuple[int, ...]:
        """Raw tokens that all calls feed to each sequence; the last proposed id is not fed."""
        pairs = zip(self.backlogs, self.draft_tokens, strict=True)
        return tuple(len(ids) + count - 1 for ids, count in pairs)

    def counts(self) -> np.ndarray:
        """(steps, B): raw tokens of each call and sequence."""
        counts = np.arange(self.steps)[:, None] < np.array(self.draft_tokens)
        counts = counts.astype(np.int64)
        counts[0] = [len(ids) for ids in self.backlogs]
        return counts

    def fed_before(self) -> np.ndarray:
        """(steps, B): fed lengths before each call."""
        counts = self.counts()
        return np.array(self.fed) + np.cumsum(counts, 0) - counts

    def pack(self, io: DraftIO, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """The buffers of the first call (1, size) and of those after it (steps - 1, size)."""
        step, _, catch_up = io.profiles[0].positions
        counts, fed = self.counts(), self.fed_before()
        rows = np.broadcast_to(np.array(self.rows), counts.shape)
        ids = np.zeros((1, len(self.rows), CATCH_UP_TOKENS), np.int64)
        for i, backlog in enumerate(self.backlogs):
            ids[0, i, : len(backlog)] = backlog
        first = lay_out(io.rule, rows[:1], fed[:1], counts[:1], ids, catch_up)
        unknown = np.zeros((self.steps - 1, len(self.rows), 1), np.int64)
        later = lay_out(io.rule, rows[1:], fed[1:], counts[1:], unknown, step)
        return Layout(batch, catch_up).pack(first), Layout(batch, step).pack(later)


def pack_chunk(
    io: DraftIO, row: int, fed: int, ids: Sequence[int], most: int
) -> tuple[np.ndarray, Layout]:
    """The buffer (1, size) of a prefill call, and its layout.

    most: positions of a full chunk; a shorter piece is padded to the next power of two.
    """
    rule = io.rule
    positions = len(ids) + rule.slots(fed + len(ids)) - rule.slots(fed)
    layout = Layout(1, rounded_up(positions, most))
    one = (np.array([[number]]) for number in (row, fed, len(ids)))
    laid = lay_out(rule, *one, np.array([[list(ids)]]), layout.positions)
    return layout.pack(laid), layout
