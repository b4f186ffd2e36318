"""Time of one draft step, memory and prefill time by prefix length, for every kind of memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ...engines.adaptor import Adaptor, AdaptorConfig
from ...engines.decoder import Decoder
from ...engines.draft import TorchDraft
from ...engines.memory import SlotMemory
from ...engines.messages import DraftCall, Proposal
from ...plugins.slot_attention.rule import MemoryRule
from .record import Tick, median, rounded

FULL, WINDOW = "full", "window"


@dataclass(frozen=True)
class StepSettings:
    """What is measured. Lengths in tokens.

    A round is `steps` draft steps of every mode at every prefix; every step is one token, with
    the slot token where one is due, so a multiple of the interval has them in proportion.
    """

    prefixes: tuple[int, ...] = (512, 1024, 2048, 4096, 8000)
    intervals: tuple[int, ...] = (8, 4)
    rounds: int = 9
    steps: int = 16
    chunk: int = 512
    memory: MemoryRule = field(default_factory=MemoryRule)

    def __post_init__(self):
        for name in ("prefixes", "intervals"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name} is {values}; give one or more numbers from 1 up")
        if self.rounds < 1 or self.chunk < 1:
            raise ValueError(f"rounds {self.rounds} and chunk {self.chunk} must be 1 or more")
        if not 1 <= self.steps <= self.memory.rollback:
            raise ValueError(
                f"steps is {self.steps}; the memory's rollback window allows 1 to "
                f"{self.memory.rollback}"
            )

    def rules(self, max_length: int) -> dict[str, MemoryRule]:
        """The memory rule of each mode."""
        slots = {slots_mode(r): replace(self.memory, interval=r) for r in self.intervals}
        window = replace(self.memory, interval=0)
        return slots | {WINDOW: window, FULL: MemoryRule.full(max_length)}

    def max_length(self, prefix: int) -> int:
        """Room for the prefix and all rounds, each of which commits one token."""
        return prefix + self.rounds + self.steps + 1


def slots_mode(interval: int) -> str:
    """Name of the mode with slots of this interval."""
    return f"slots r={interval}"


@dataclass(frozen=True)
class StepRow:
    """One mode at one prefix.

    step_ms: median over the rounds, the host's work included. graph_ms: a step as a CUDA graph,
    None on the CPU. entries: memory entries per layer that hold something at this
    prefix. capacity, bytes: what is allocated for `max_length`; formula_bytes: what it should be.
    """

    mode: str
    prefix: int
    step_ms: float
    prefill_ms: float
    prefill_ratio: float | None
    entries: int
    max_length: int
    capacity: int
    bytes: int
    formula_bytes: int
    graph_ms: float | None = None

    @property
    def device_ms(self) -> float:
        """A step without the host where that was measured."""
        return self.step_ms if self.graph_ms is None else self.graph_ms


class Cell:
    """A draft of one mode that holds one prefix and steps near it."""

    def __init__(self, mode: str, prefix: int, draft: TorchDraft, steps: int):
        self.mode, self.prefix, self.draft, self.steps = mode, prefix, draft, steps
        self.prefill_s = 0.0
        self.step_s: list[float] = []
        self._length, self._next = 0, 0

    def feed(self, ids: Sequence[int]) -> None:
        """Feeds a chunk of the prefix."""
        started = time.perf_counter()
        self._call(ids, 0)
        if self.draft.memory.k.is_cuda:
            torch.cuda.synchronize()
        self.prefill_s += time.perf_counter() - started
        self._next = ids[-1]

    def step(self) -> None:
        """Drafts `steps` tokens, all but the first of which the next call takes back."""
        started = time.perf_counter()
        proposal = self._call([self._next], self.steps)
        self.step_s.append((time.perf_counter() - started) / self.steps)
        self._next = proposal.ids[0]

    def _call(self, ids: Sequence[int], draft_tokens: int) -> Proposal:
        [answer] = self.draft.propose([DraftCall(1, self._length, ids, draft_tokens)])
        if isinstance(answer, Exception):
            raise answer
        self._length += len(ids)
        return answer


@dataclass(frozen=True)
class Decoders:
    """The decoder of the drafts, and the one of full KV where that is another.

    The adaptors are copies of the backbone's projections: times do not depend on their weights.
    """

    draft: Decoder
    full: Decoder
    _adaptors: dict[MemoryRule, Adaptor] = field(default_factory=dict)

    def of(self, mode: str) -> Decoder:
        """The decoder of a mode."""
        return self.full if mode == FULL else self.draft

    def adaptor(self, rule: MemoryRule) -> Adaptor | None:
        """The adaptor of a rule, made once; None for a rule without slots."""
        if rule.interval and rule not in self._adaptors:
            shape = rule.sink, rule.window, rule.interval, rule.visibility
            header = AdaptorConfig(self.draft.fingerprint(), *shape)
            self._adaptors[rule] = self.draft.copy_adaptor(header)
        return self._adaptors.get(rule)


def measure_steps(
    decoders: Decoders, ids: Sequence[int], settings: StepSettings, tick: Tick
) -> list[StepRow]:
    """Prefills and steps of all modes, interleaved. ids: at least the longest prefix of tokens."""
    for cell in _cells(decoders, settings, min(settings.prefixes)):  # warm up
        cell.feed(ids[: cell.prefix])
        cell.step()
    by_prefix = {prefix: _cells(decoders, settings, prefix) for prefix in settings.prefixes}
    for prefix, cells in by_prefix.items():
        tick(f"prefill of {prefix:,} tokens")
        _prefill(cells, ids[:prefix], settings.chunk)
    cells = [cell for group in by_prefix.values() for cell in group]
    for number in range(settings.rounds):
        tick(f"steps, round {number + 1} of {settings.rounds}")
        for cell in alternate(cells, number):
            cell.step()
    return [_row(cell, group) for group in by_prefix.values() for cell in group]


def ticks(settings: StepSettings) -> int:
    """How often `measure_steps` ticks."""
    return len(settings.prefixes) + settings.rounds


def alternate(items: Sequence, number: int) -> Sequence:
    """The items forwards and backwards by turns, so that drift favours none."""
    return items[::-1] if number % 2 else items


def _cells(decoders: Decoders, settings: StepSettings, prefix: int) -> list[Cell]:
    length = settings.max_length(prefix)
    return [
        Cell(mode, prefix, _draft(decoders, mode, rule, settings, length), settings.steps)
        for mode, rule in settings.rules(length).items()
    ]


def _draft(
    decoders: Decoders, mode: str, rule: MemoryRule, settings: StepSettings, max_length: int
) -> TorchDraft:
    return TorchDraft(
        decoders.of(mode),
        rule,
        decoders.adaptor(rule),
        max_sequences=1,
        max_length=max_length,
        max_draft_tokens=settings.steps,
        chunk=settings.chunk,
    )


def _prefill(cells: Sequence[Cell], ids: Sequence[int], chunk: int) -> None:
    """Feeds the prefix to all cells in step, chunk by chunk."""
    for number, start in enumerate(range(0, len(ids), chunk)):
        for cell in alternate(cells, number):
            cell.feed(ids[start : start + chunk])


def _row(cell: Cell, group: Sequence[Cell]) -> StepRow:
    memory = cell.draft.memory
    full = next((other.prefill_s for other in group if other.mode == FULL), None)
    return StepRow(
        mode=cell.mode,
        prefix=cell.prefix,
        step_ms=rounded(median(cell.step_s) * 1e3),
        prefill_ms=rounded(cell.prefill_s * 1e3, 1),
        prefill_ratio=rounded(cell.prefill_s / full) if full else None,
        entries=memory.rule.extent(cell.prefix),
        max_length=memory.max_length,
        capacity=memory.rule.capacity(memory.max_length),
        bytes=allocated_bytes(memory),
        formula_bytes=formula_bytes(cell.draft.decoder, memory.rule, memory.max_length),
        graph_ms=rounded(_graph_ms(cell)),
    )


def _graph_ms(cell: Cell) -> float | None:
    if not cell.draft.memory.k.is_cuda:
        return None
    from .step_graph import graph_step_ms  # needs Triton

    return graph_step_ms(cell.draft, cell.prefix)


def allocated_bytes(memory: SlotMemory) -> int:
    """Bytes behind the keys and values of a memory, per sequence."""
    storages = (memory.k.untyped_storage(), memory.v.untyped_storage())
    return sum(storage.nbytes() for storage in storages) // memory.k.shape[1]


def formula_bytes(decoder: Decoder, rule: MemoryRule, length: int) -> int:
    """Bytes of S + W + R + floor((N - S) / r) entries in all layers; of N entries if full."""
    config, entries = decoder.config, length
    if rule.window:
        slots = max(0, length - rule.sink) // rule.interval if rule.interval else 0
        raw = rule.sink + rule.window + rule.rollback
        entries = raw + slots if slots else min(length, raw)
    width = config.layers * config.kv_heads * config.head_dim
    return 2 * entries * width * decoder.embed_tokens.weight.element_size()
