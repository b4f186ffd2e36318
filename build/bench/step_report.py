"""What `masw-perf draft-step` reports: growth of the step, memory, and the limits they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from ...engines.decoder import Decoder
from ...engines.memory import SlotMemory
from .draft_step import FULL, WINDOW, StepRow, StepSettings, allocated_bytes, slots_mode
from .record import Check, Record, new_card, rounded, shown

GROWTH_LIMITS = {8: 1.15, 4: 1.25}  # step at 8K / at 1K, by slot interval
PREFILL_LIMIT = 1.2  # slots / full at 8K
CUDA_GROWTH_LIMITS = {8: 1.10, 4: 1.10}  # step at 32K / at 1K
CUDA_PREFILL_LIMIT = 1.0  # slots / full at 32K
BYTES_LIMIT = 1.02  # measured / formula
LONG = 32_768  # a length at which memory is told by allocation alone


def long_memory(decoder: Decoder, settings: StepSettings) -> dict[str, dict[str, float]]:
    """Entries and bytes of each mode's memory for LONG tokens, and the share saved against full."""
    weight, config = decoder.embed_tokens.weight, decoder.config
    shape = {"layers": config.layers, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    found = {}
    for mode, rule in settings.rules(LONG).items():
        memory = SlotMemory(rule, **shape, rows=1, max_length=LONG, dtype=weight.dtype)
        saved = rounded(1 - memory.capacity / LONG)
        found[mode] = {
            "entries": memory.capacity,
            "bytes": allocated_bytes(memory),
            "saved": saved,
        }
    return found


def growth(rows: Sequence[StepRow], mode: str) -> tuple[int, int, float | None]:
    """The longest prefix, the one nearest to 1,024, and the ratio of their step times.

    The device's own times where they were measured. The ratio is None where both are the same
    prefix.
    """
    mine = [row for row in rows if row.mode == mode]
    long = max(mine, key=lambda row: row.prefix)
    short = min(mine, key=lambda row: abs(row.prefix - 1024))
    ratio = None if long is short else long.device_ms / short.device_ms
    return long.prefix, short.prefix, ratio


def steps_record(
    decoder: Decoder, rows: Sequence[StepRow], settings: StepSettings, common: dict
) -> Record:
    """Rows with step growth, memory at LONG, and the limits that slots should keep."""
    modes = list(dict.fromkeys(row.mode for row in rows))
    grown = {mode: growth(rows, mode) for mode in modes}
    long, short, _ = grown[FULL]
    on_cuda = decoder.embed_tokens.weight.is_cuda
    prefill_limit = CUDA_PREFILL_LIMIT if on_cuda else PREFILL_LIMIT
    growth_limits = CUDA_GROWTH_LIMITS if on_cuda else GROWTH_LIMITS
    checks = [
        Check(f"{slots_mode(r)}: step at {long} / at {short}", grown[slots_mode(r)][2], limit)
        for r, limit in growth_limits.items()
        if r in settings.intervals
    ]
    checks += [
        Check(f"{row.mode}: prefill / full at {long}", row.prefill_ratio, prefill_limit)
        for row in rows
        if row.prefix == long and row.mode not in (FULL, WINDOW)
    ]
    worst = max(abs(row.bytes / row.formula_bytes - 1) for row in rows) + 1
    ratios = {
        "step_growth": {mode: rounded(ratio) for mode, (_, _, ratio) in grown.items()},
        "step_growth_prefixes": [long, short],
        f"memory_at_{LONG}": long_memory(decoder, settings),
    }
    shape = {"batch": 1, "draft_tokens": settings.steps, "adaptor": "untrained copies"}
    return Record(
        "draft-step",
        common | shape | asdict(settings),
        rows,
        ratios,
        [*checks, Check("bytes of memory, measured / formula", worst, BYTES_LIMIT)],
    )


def steps_card(record: Record) -> Table:
    """Step time, memory and prefill of every mode at every prefix."""
    card = new_card(
        f"one draft step, {record.settings['dtype']}, batch 1",
        ("mode", "prefix", "step ms", "graph ms", "entries", "MiB", "prefill s", "/ full"),
    )
    for row in sorted(record.rows, key=lambda row: (row.mode, row.prefix)):
        card.add_row(
            row.mode,
            f"{row.prefix:,}",
            shown(row.step_ms),
            shown(row.graph_ms),
            f"{row.entries:,}",
            shown(row.bytes / 2**20, ".1f"),
            shown(row.prefill_ms / 1e3),
            shown(row.prefill_ratio),
        )
    growths = ", ".join(f"{mode} {shown(x)}" for mode, x in record.ratios["step_growth"].items())
    long, short = record.ratios["step_growth_prefixes"]
    card.caption = f"step at {long:,} / at {short:,}: {growths}"
    return card
