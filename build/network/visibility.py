"""The visibility rule inside a network: the mask of a block, made once and used by every layer.

The same lifetimes as in plugins/slot_attention/reference.py, for sequences of different fed
lengths at once. Each memory entry is four numbers that never change: the smallest raw number (or
boundary) it can hold, the period after which it holds the next one, how long after its time it is
first seen, and for how long. What it holds after n fed tokens follows from them and n.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...engines.draft_io import DraftIO
from ...plugins.slot_attention.rule import PADDING, SLOT, MemoryRule, SlotVisibility
from .graph import Graph, ITensor

FOREVER = 2**30  # longer than any sequence, and twice as much still fits 32 bits


@dataclass(frozen=True)
class BlockInputs:
    """What describes a block: rows, fed (B,) and ids, times, kind (B, N), int32 each."""

    rows: ITensor
    fed: ITensor
    ids: ITensor
    times: ITensor
    kind: ITensor


def slot_delay(rule: MemoryRule) -> int:
    """Raw tokens between a boundary and the first one that sees its slot."""
    return 1 if rule.visibility is SlotVisibility.MATERIALIZED else rule.window


def entry_numbers(rule: MemoryRule, capacity: int) -> torch.Tensor:
    """(4, capacity) int32: first time, period, delay and life of each memory entry.

    Entries behind the last region (capacity is rounded up) never hold anything.
    """
    sinks = [(t, FOREVER, 0, FOREVER) for t in range(rule.sink)]
    ring = [(rule.sink + p, rule.ring, 0, rule.window) for p in range(rule.ring)]
    spare = capacity - len(sinks) - len(ring)
    if rule.interval:
        slots = [(rule.boundary(m), FOREVER, slot_delay(rule), FOREVER) for m in range(spare)]
    else:
        slots = [(FOREVER, FOREVER, 0, 0)] * spare
    # Short sequences do not reach all of the sinks and the ring.
    return torch.tensor((sinks + ring + slots)[:capacity], dtype=torch.int32).T


def block_mask(graph: Graph, io: DraftIO, block: BlockInputs) -> ITensor:
    """(B, 1, N, capacity + N) bool: what each query sees of memory, then of its block."""
    memory = _memory_mask(graph, io, block)
    return graph.join([memory, _own_mask(graph, io.rule, block)], 3)


def is_padding(graph: Graph, block: BlockInputs) -> ITensor:
    """(B, 1, N, 1) bool: queries that stand for nothing."""
    return graph.equal(_as_queries(graph, block.kind), graph.integers([PADDING], 4))


def _as_queries(graph: Graph, x: ITensor) -> ITensor:
    """(B, 1, N, 1) of (B, N)."""
    return graph.reshape(x, 0, 1, -1, 1)


def _as_keys(graph: Graph, x: ITensor) -> ITensor:
    """(B, 1, 1, N) of (B, N)."""
    return graph.reshape(x, 0, 1, 1, -1)


def _memory_mask(graph: Graph, io: DraftIO, block: BlockInputs) -> ITensor:
    """(B, 1, N, capacity) bool: what the queries see of the entries, filled as `fed` says."""
    numbers = entry_numbers(io.rule, io.capacity).tolist()
    first, period, delay, life = (graph.integers(row, 4) for row in numbers)
    fed = graph.reshape(block.fed, 0, 1, 1, 1)
    behind = graph.subtract(graph.subtract(fed, graph.integers([1], 4)), first)
    rounds = graph.floor_divide(behind, period)
    held = graph.add(first, graph.multiply(rounds, period))  # (B, 1, 1, capacity) raw numbers
    alive = _alive(graph, held, delay, life, _as_queries(graph, block.times))
    return graph.both(graph.less(first, fed), alive)


def _own_mask(graph: Graph, rule: MemoryRule, block: BlockInputs) -> ITensor:
    """(B, 1, N, N) bool: what the queries see of each other, and of themselves."""
    times, kind = _as_queries(graph, block.times), _as_queries(graph, block.kind)
    key_times, key_kind = _as_keys(graph, block.times), _as_keys(graph, block.kind)
    number = {n: graph.integers([n], 4) for n in {0, rule.window, FOREVER, slot_delay(rule)}}
    slot = graph.equal(key_kind, graph.integers([SLOT], 4))
    stays = graph.either(slot, graph.less(key_times, graph.integers([rule.sink], 4)))
    life = graph.select(stays, number[FOREVER], number[rule.window])
    delay = graph.select(slot, number[slot_delay(rule)], number[0])
    present = graph.less(graph.integers([PADDING], 4), key_kind)
    seen = graph.both(present, _alive(graph, key_times, delay, life, times))
    same = graph.both(graph.equal(times, key_times), graph.equal(kind, key_kind))
    return graph.either(seen, same)  # every position sees itself; padding sees padding


def _alive(graph: Graph, times: ITensor, delay: ITensor, life: ITensor, now: ITensor) -> ITensor:
    """times + delay <= now < times + life, for integers."""
    born = graph.less(graph.add(times, delay), graph.add(now, graph.integers([1], 4)))
    return graph.both(born, graph.less(now, graph.add(times, life)))
