"""Draft memories compared on the same samples: what `masw-train evaluate` prints and keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from ...engines.adaptor import Adaptor, AdaptorConfig
from ...engines.config import MOST_SIZE, DecoderConfig
from ...engines.decoder import Decoder
from ...plugins.slot_attention.rule import MemoryRule
from ..bench.record import Record, device_name, new_card, rounded
from .evaluation import DraftMemory, Evaluator, KeptOutcomes
from .journal import Journal
from .samples import DataError, Sample, check_vocabulary, located
from .snapkv import SnapKV
from .spread import beside_windows
from .summary import Summary, summaries

OWN_NAMES = ("window", "swa", "snapkv", "untrained")  # of memories but the adaptors'
MOST_DRAFTS = 1024  # tokens
SNAPKV_SHARE = 8  # the paper's 4,096 entries of 32K, scaled to shorter prefixes


@dataclass(frozen=True)
class Comparison:
    """Which memories are compared, beside full KV.

    adaptors: trained files, by the name to show. transferred: (S, W, r) of memories in which every
    adaptor is tried as it is, beside the one it was trained for. untrained: (W, r) of untrained
    copies. equal: slot intervals whose entries, beside `window` of W, a sink + window memory gets.
    windows: other sink + window memories, by entries. swa: plain sliding windows without a sink.
    sink: of all memories but the adaptors'. Raises ValueError for what tells nothing or is named
    like another kind of memory.
    """

    adaptors: dict[str, Path]
    transferred: tuple[tuple[int, int, int], ...] = ()
    untrained: tuple[tuple[int, int], ...] = ((128, 8),)
    equal: tuple[int, ...] = (8, 4)
    windows: tuple[int, ...] = ()
    swa: tuple[int, ...] = (1024,)
    snapkv: bool = True
    sink: int = 128
    window: int = 128
    draft_tokens: int = 5
    max_tokens: int = 128

    def __post_init__(self):
        for name in ("windows", "swa", "equal"):
            if wrong := [n for n in getattr(self, name) if not 1 <= n <= MOST_SIZE]:
                raise ValueError(f"{name} has {wrong[0]}; it must be 1 to {MOST_SIZE}")
        for name in self.adaptors:
            if name.startswith(OWN_NAMES):
                raise ValueError(
                    f"adaptor {name!r} is named like another memory; use none that begins with "
                    f"{', '.join(OWN_NAMES)}"
                )
        if self.transferred and not self.adaptors:
            raise ValueError("transferred tries adaptors in other memories; give adaptors")
        if not 1 <= self.draft_tokens <= MOST_DRAFTS:
            raise ValueError(f"draft_tokens is {self.draft_tokens}; it must be 1 to {MOST_DRAFTS}")


def memories(comparison: Comparison, decoder: Decoder, prefix: int) -> list[DraftMemory]:
    """All memories of a comparison at one prefix length, full KV first.

    Raises ValueError where two would have the same name.
    """
    c = comparison
    found = [DraftMemory("full", MemoryRule.full(decoder.config.max_positions))]
    found += [_window(f"window = r{r}", _slot_entries(c, r, prefix), c.sink) for r in c.equal]
    found += [_window(f"window-{entries}", entries, c.sink) for entries in c.windows]
    found += [DraftMemory(f"swa-{w}", MemoryRule.windowed(0, w)) for w in c.swa]
    if c.snapkv:
        capacity = max(64, prefix // SNAPKV_SHARE)
        found.append(DraftMemory("snapkv", snapkv=SnapKV(capacity)))
    found += [_untrained(c, decoder, *pair) for pair in c.untrained]
    for name, path in c.adaptors.items():
        found.append(trained := _trained(name, path, decoder))
        found += [_transferred(trained, *memory) for memory in c.transferred]
    for name, count in Counter(memory.name for memory in found).items():
        if count > 1:
            raise ValueError(f"{count} memories are named {name!r}; give each a name of its own")
    return found


def _slot_entries(c: Comparison, interval: int, prefix: int) -> int:
    rule = MemoryRule(c.sink, c.window, interval=interval)
    return DraftMemory("", rule).entries(prefix)


def _window(name: str, entries: int, sink: int) -> DraftMemory:
    """Sink + window with `entries` in all; the sink is at most half of them."""
    sink = min(sink, entries // 2)
    return DraftMemory(name, MemoryRule.windowed(sink, entries - sink))


def _untrained(c: Comparison, decoder: Decoder, window: int, interval: int) -> DraftMemory:
    config = AdaptorConfig(decoder.fingerprint(), c.sink, window, interval)
    adaptor = decoder.copy_adaptor(config).requires_grad_(False)
    return DraftMemory(f"untrained W{window} r{interval}", config.rule(), adaptor)


def _trained(name: str, path: Path, decoder: Decoder) -> DraftMemory:
    adaptor = Adaptor.load(path, decoder.config, decoder.fingerprint())
    if not adaptor.is_finite():
        raise ValueError(f"{path.name} has weights that are not finite; train it again")
    adaptor = adaptor.to(decoder.embed_tokens.weight).requires_grad_(False)
    return DraftMemory(name, adaptor.config.rule(), adaptor)


def _transferred(trained: DraftMemory, sink: int, window: int, interval: int) -> DraftMemory:
    name = f"{trained.name} S{sink} W{window} r{interval}"
    rule = replace(trained.rule, sink=sink, window=window, interval=interval)
    return DraftMemory(name, rule, trained.adaptor)


def check_samples(samples: Sequence[Sample], max_tokens: int, model: DecoderConfig) -> None:
    """Raises DataError if there are no samples, or for one, by its name, that has no Tok./Iter."""
    if not samples:
        raise DataError("there are no samples; the file is empty")
    for sample in samples:
        if wrong := _unusable(sample, max_tokens, model.max_positions):
            raise DataError(f"sample {sample.name!r} {wrong}")
        with located(f"sample {sample.name!r}"):
            check_vocabulary(sample.ids, model.vocab_size)


def _unusable(sample: Sample, max_tokens: int, max_positions: int) -> str | None:
    if sample.prefix < 1:
        return f"has prefix {sample.prefix}; it must be 1 or more"
    if not sample.answer:
        return "has no answer; run `masw-train answers`"
    if len(sample.answer) > max_tokens:
        return f"has an answer of {len(sample.answer)} tokens; max_tokens is {max_tokens}"
    if len(sample.ids) > max_positions:
        return f"and its answer have {len(sample.ids)} tokens; the model takes {max_positions}"
    return None


def compare(
    comparison: Comparison,
    decoder: Decoder,
    samples: Sequence[Sample],
    tick: Callable[[str], None],
    distances: bool = True,
    kept: Path | None = None,
) -> list[Summary]:
    """Runs every memory over every sample; one summary per prefix, kind and memory.

    kept: file of outcomes by sample and memory; those it holds are not made again. Raises
    ValueError for samples and memories that cannot be compared, before any forward.
    """
    check_samples(samples, comparison.max_tokens, decoder.config)
    memories(comparison, decoder, samples[0].prefix)  # what it refuses must not begin a file
    limits = comparison.draft_tokens, comparison.max_tokens
    evaluator = Evaluator(decoder, distances)
    with ExitStack() as stack:
        if kept is not None:
            journal = Journal(kept, _belongs(decoder, distances))
            evaluator = KeptOutcomes(evaluator, stack.enter_context(closing(journal)))
        return summaries(
            evaluator, samples, lambda prefix: memories(comparison, decoder, prefix), *limits, tick
        )


def _belongs(decoder: Decoder, distances: bool) -> dict:
    """What decides an outcome, beside the sample and the memory."""
    dtype = str(decoder.embed_tokens.weight.dtype)
    return {"model": decoder.fingerprint(), "dtype": dtype, "distances": distances}


def overall(rows: Sequence[Summary]) -> dict[str, dict[str, float]]:
    """Tok./Iter by prefix and memory over all kinds together, each kind with the same weight."""
    found: dict[str, dict[str, list[float]]] = {}
    for s in rows:
        found.setdefault(str(s.prefix), {}).setdefault(s.memory, []).append(s.tok_iter)
    return {
        prefix: {name: rounded(sum(values) / len(values)) for name, values in named.items()}
        for prefix, named in found.items()
    }


def first_of_each(
    samples: Sequence[Sample], count: int, prefixes: Sequence[int] = ()
) -> list[Sample]:
    """The first `count` samples of each kind and prefix; 0 and () mean all of them.

    Raises DataError, naming what there is, for a prefix that no sample has.
    """
    for prefix in sorted(set(prefixes) - {sample.prefix for sample in samples}):
        there = sorted({(sample.prefix, sample.kind) for sample in samples})
        known = ", ".join(f"{at} ({kind})" for at, kind in there)
        raise DataError(f"prefixes has {prefix}; the samples have {known or 'none'}")
    seen: Counter = Counter()
    chosen = []
    for sample in samples:
        if prefixes and sample.prefix not in prefixes:
            continue
        seen[sample.kind, sample.prefix] += 1
        if not count or seen[sample.kind, sample.prefix] <= count:
            chosen.append(sample)
    return chosen


def record(comparison: Comparison, dtype: str, device: str, rows: Sequence[Summary]) -> Record:
    """The outcome as committed: settings, one row per summary, means over kinds."""
    settings = asdict(comparison) | {"dtype": dtype, "device": device_name(device)}
    settings["adaptors"] = {name: path.name for name, path in comparison.adaptors.items()}
    ratios = {"tok_iter": overall(rows), "beside": beside_windows(rows)}
    return Record("evaluate", settings, rows, ratios=ratios)


def card(rows: Sequence[Summary]) -> Table:
    """Tok./Iter by memory (rows), and prefix and kind (columns)."""
    columns = sorted({(s.prefix, s.kind) for s in rows})
    names = list(dict.fromkeys(s.memory for s in rows))
    table = new_card("Tok./Iter", ["memory", *(f"{kind} {prefix}" for prefix, kind in columns)])
    at = {(s.memory, s.prefix, s.kind): s for s in rows}
    for name in names:
        cells = [at.get((name, prefix, kind)) for prefix, kind in columns]
        table.add_row(name, *("–" if s is None else f"{s.tok_iter:.2f}" for s in cells))
    return table
