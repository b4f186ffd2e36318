"""The memory rule: how many raw tokens, slots and entries a sequence has after n fed tokens.

Everything here is arithmetic on one number, the fed length n (MASW, arXiv 2608.30252, section 4;
the lifetimes built on it are in `reference.py`). Raw tokens are numbered t = 0, 1, ... in the
sequence; memory is three dense regions, sink | ring of W + R raw entries | append-only slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PADDING, RAW, SLOT = 0, 1, 2  # what a position of a block is


class SlotVisibility(StrEnum):
    """When a slot is seen: at once, or once the last raw token of its unit left the window."""

    MATERIALIZED = "materialized"
    EVICTED = "evicted"


@dataclass(frozen=True)
class MemoryRule:
    """Sink S, window W, rollback window R, slot interval r (0: no slots) and slot visibility.

    `MemoryRule.full(N)` keeps every token (all are sinks) and `MemoryRule.windowed(S, W)` keeps
    sink and window only, so plain KV caches are cases of this rule and not other code.
    """

    sink: int = 128
    window: int = 128
    rollback: int = 16
    interval: int = 8
    visibility: SlotVisibility = SlotVisibility.EVICTED

    def __post_init__(self):
        object.__setattr__(self, "visibility", SlotVisibility(self.visibility))
        for name in ("sink", "window", "rollback", "interval"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.window == 0 and (self.rollback or self.interval):
            raise ValueError(
                "window is 0; only a rule that keeps every token (rollback = interval = 0) "
                "may have no window"
            )
        if self.window > 0 and self.rollback == 0:
            raise ValueError("rollback is 0; a rule with a window needs 1 or more for drafting")

    @classmethod
    def full(cls, max_length: int) -> MemoryRule:
        """The rule of an ordinary KV cache for sequences of up to `max_length` tokens."""
        return cls(sink=max_length, window=0, rollback=0, interval=0)

    @classmethod
    def windowed(cls, sink: int, window: int, rollback: int = 16) -> MemoryRule:
        """The rule of a sink + window cache without slots."""
        return cls(sink=sink, window=window, rollback=rollback, interval=0)

    @property
    def ring(self) -> int:
        """Raw entries that are overwritten in turn: W + R."""
        return self.window + self.rollback

    def is_boundary(self, time: int) -> bool:
        """Whether a slot token follows raw token `time` (elementwise for tensors if r > 0)."""
        if self.interval == 0:
            return False
        return (time >= self.sink) & ((time - self.sink + 1) % self.interval == 0)

    def slots(self, length: int) -> int:
        """Slots that exist after `length` fed tokens."""
        return max(0, length - self.sink) // self.interval if self.interval else 0

    def boundary(self, slot: int) -> int:
        """The raw token after which slot number `slot` (0-based) was processed."""
        return self.sink + (slot + 1) * self.interval - 1

    @property
    def first_slot_time(self) -> int:
        """The first raw token that sees a slot; every earlier one is computed as with full KV."""
        delay = 1 if self.visibility is SlotVisibility.MATERIALIZED else self.window
        return self.boundary(0) + delay

    def entry_of_raw(self, time: int) -> int:
        """The memory entry that raw token `time` is written to."""
        return time if time < self.sink else self.sink + (time - self.sink) % self.ring

    def entry_of_slot(self, slot: int) -> int:
        """The memory entry that slot number `slot` is written to."""
        return self.sink + self.ring + slot

    def capacity(self, max_length: int) -> int:
        """Entries per layer and sequence that hold up to `max_length` tokens."""
        if self.window == 0 and max_length > self.sink:
            raise ValueError(f"max_length is {max_length}; this rule keeps at most {self.sink}")
        return self.extent(max_length)

    def extent(self, length: int) -> int:
        """Leading entries that can hold anything after `length` fed tokens."""
        slots = self.slots(length)
        return self.entry_of_slot(slots) if slots else min(length, self.sink + self.ring)

    def can_rollback(self, peak: int, kept: int) -> bool:
        """Whether `kept` fed tokens still have their window after up to `peak` were fed."""
        return 0 <= kept <= peak and (peak <= self.sink + self.ring or peak - kept <= self.rollback)
