"""Slot attention in its plainest form: the visibility rule, and a dense oracle to test it with.

Every entry of the memory, and every position of the block that is being processed, has a lifetime
[birth, expiry) in raw-token time. A query at time t sees exactly the entries alive at t, and
itself. That one rule serves prefill, catch-up, drafting and training masks:

    entry                              birth    expiry
    sink token j < S                   j        never
    raw token j >= S                   j        j + W
    slot at boundary b, materialized   b + 1    never
    slot at boundary b, evicted        b + W    never
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rule import PADDING, SLOT, MemoryRule, SlotVisibility

NEVER = 2**62


def visible(time: Tensor, birth: Tensor, expiry: Tensor) -> Tensor:
    """The visibility rule: a query at `time` sees an entry iff birth <= time < expiry."""
    return (birth <= time) & (time < expiry)


def raw_lifetimes(rule: MemoryRule, times: Tensor) -> tuple[Tensor, Tensor]:
    """Birth and expiry of raw tokens `times` (any shape, int64)."""
    return times, torch.where(times < rule.sink, NEVER, times + rule.window)


def slot_lifetimes(rule: MemoryRule, boundaries: Tensor) -> tuple[Tensor, Tensor]:
    """Birth and expiry of the slots at `boundaries` (any shape, int64)."""
    delay = 1 if rule.visibility is SlotVisibility.MATERIALIZED else rule.window
    return boundaries + delay, torch.full_like(boundaries, NEVER)


def lifetimes(rule: MemoryRule, times: Tensor, kind: Tensor) -> tuple[Tensor, Tensor]:
    """Birth and expiry of positions with `times` and `kind` (same shape); padding is never born."""
    raw_birth, raw_expiry = raw_lifetimes(rule, times)
    slot_birth, slot_expiry = slot_lifetimes(rule, times)
    birth = torch.where(kind == SLOT, slot_birth, raw_birth)
    birth = torch.where(kind == PADDING, NEVER, birth)
    return birth, torch.where(kind == SLOT, slot_expiry, raw_expiry)


def stored_times(rule: MemoryRule, length: int, device: torch.device | str = "cpu") -> Tensor:
    """(extent,) int64: the raw token or boundary each entry holds after `length` fed tokens.

    An entry that holds nothing yet gives -1.
    """
    sinks = torch.arange(min(length, rule.sink), device=device)
    if length <= rule.sink:
        return sinks
    fed = length - rule.sink  # raw tokens beyond the sink
    slots = rule.slots(length)
    place = torch.arange(rule.ring if slots else min(fed, rule.ring), device=device)
    ring = (
        rule.sink
        + place
        + torch.div(fed - 1 - place, rule.ring, rounding_mode="floor") * (rule.ring)
    )
    ring = torch.where(place < fed, ring, -1)
    if not slots:
        return torch.cat([sinks, ring])
    numbers = torch.arange(1, slots + 1, device=device)
    return torch.cat([sinks, ring, rule.sink + numbers * rule.interval - 1])


def memory_lifetimes(
    rule: MemoryRule, length: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Birth and expiry, (extent,) int64 each, of the memory entries after `length` fed tokens."""
    times = stored_times(rule, length, device)
    raw = min(len(times), rule.sink + rule.ring)
    births, expiries = raw_lifetimes(rule, times[:raw])
    births = torch.where(times[:raw] < 0, NEVER, births)
    slot_births, slot_expiries = slot_lifetimes(rule, times[raw:])
    return torch.cat([births, slot_births]), torch.cat([expiries, slot_expiries])


def visibility_mask(rule: MemoryRule, length: int, times: Tensor, kind: Tensor) -> Tensor:
    """(N, extent + N) bool: what N new positions see of the memory, then of each other.

    times (N,) int64 and kind (N,) uint8 (PADDING, RAW, SLOT) describe the new positions of
    one sequence with `length` fed tokens. Padding is seen by nothing but itself.
    """
    birth, expiry = lifetimes(rule, times, kind)
    memory_birth, memory_expiry = memory_lifetimes(rule, length, times.device)
    seen = visible(
        times[:, None],
        torch.cat([memory_birth, birth])[None],
        torch.cat([memory_expiry, expiry])[None],
    )
    seen[:, len(memory_birth) :].fill_diagonal_(True)  # every position sees itself
    return seen


def slot_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, padding: Tensor | None = None
) -> Tensor:
    """Plain softmax attention of one sequence. Modifies nothing.

    q (H, N, D); k, v (Hkv, M, D); mask (N, M) bool; padding (N,) bool rows that output zeros.
    Returns (H, N, D). Query head h uses key head h // (H / Hkv).
    """
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2)) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask, -torch.inf)
    out = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
    return out if padding is None else out.masked_fill(padding[None, :, None], 0)


def dense_oracle(rule: MemoryRule, length: int) -> tuple[list[tuple[str, int]], list[list[bool]]]:
    """The whole stream of `length` raw tokens and its mask, written down token by token.

    Returns the stream, pairs ("raw", t) or ("slot", b), and mask[i][j]: whether position i sees
    position j. It follows the words of the paper (sinks, the last W raw tokens, one slot for each
    completed unit of r tokens) and shares nothing with the lifetimes above, so that either checks
    the other. For tests only: it is quadratic.
    """
    stream: list[tuple[str, int]] = []
    in_unit = 0
    for t in range(length):
        stream.append(("raw", t))
        in_unit += t >= rule.sink
        if rule.interval and in_unit == rule.interval:
            stream.append(("slot", t))
            in_unit = 0
    mask = [
        [j <= i and _sees(rule, stream, i, j) for j in range(len(stream))]
        for i in range(len(stream))
    ]
    return stream, mask


def _sees(rule: MemoryRule, stream: list[tuple[str, int]], i: int, j: int) -> bool:
    """Whether stream position i sees the earlier or equal position j, told in words."""
    now, (kind, then) = stream[i][1], stream[j]
    if i == j:
        return True
    is_sink = kind == "raw" and then < rule.sink
    in_window = kind == "raw" and now - then < rule.window
    if rule.visibility is SlotVisibility.EVICTED:
        last_of_unit_left = now - then >= rule.window
        return is_sink or in_window or (kind == "slot" and last_of_unit_left)
    return is_sink or in_window or kind == "slot"
