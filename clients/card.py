"""The card at the end of a generation: one small table, the same for `masw-generate` and demos."""

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .compare import Comparison
from .messages import GenerationResult, Statistics


def generation_card(
    result: GenerationResult, comparison: Comparison | None = None, *, title: str = "masw"
) -> Panel:
    """A rich panel of what one answer took; with `comparison` also plain decoding beside it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in card_rows(result, comparison):
        table.add_row(name, Text(value))  # Text: a difference may hold markup
    return Panel(table, title=title, title_align="left", expand=False)


def card_rows(
    result: GenerationResult, comparison: Comparison | None = None
) -> list[tuple[str, str]]:
    """The card's lines as (name, value); a line whose numbers are unknown is left out."""
    rows = _statistics_rows(result.statistics) if result.statistics else []
    rows.append(("Speed", _speed(result)))
    if comparison is not None:
        rows.append(("Plain decoding", _speed(comparison.plain)))
        ratio = f"{comparison.speedup:.2f}x" if comparison.speedup else "unknown"
        rows.append(("Ratio of tok/s", ratio))
        verdict = "yes" if comparison.equal else f"NO, {comparison.difference}"
        rows.append(("Equal to plain", verdict))
    return rows


def _statistics_rows(numbers: Statistics) -> list[tuple[str, str]]:
    rows = [
        ("Tokens", f"{numbers.prefix_tokens:,} prefix, {numbers.new_tokens:,} new"),
        ("Iterations", f"{numbers.iterations:,} (Tok./Iter {numbers.tok_per_iter:.2f})"),
    ]
    if numbers.drafted:
        rows += [("Acceptance", _acceptance(numbers)), ("By position", _by_position(numbers))]
    if numbers.slots_materialized:
        slots = f"{numbers.slots_materialized:,} written, {numbers.slots_discarded:,} discarded"
        rows.append(("Slots", f"{slots} in {numbers.rollbacks:,} rollbacks"))
    if numbers.draft_failures:
        rows.append(("Draft failures", f"{numbers.draft_failures:,}"))
    return [*rows, ("Time", _split(numbers)), ("Finished by", numbers.finish_reason)]


def _acceptance(numbers: Statistics) -> str:
    drafted = numbers.drafted / numbers.iterations if numbers.iterations else 0.0
    counts = f"{numbers.accepted:,} of {numbers.drafted:,}"
    return f"{numbers.acceptance_rate:.1%} ({counts}; {drafted:.1f} drafted per iteration)"


def _by_position(numbers: Statistics) -> str:
    return "  ".join(f"{rate:.0%}" for rate in numbers.acceptance_by_position)


def _split(numbers: Statistics) -> str:
    parts = (("draft", numbers.draft_ms), ("verify", numbers.verify_ms), ("host", numbers.host_ms))
    total = sum(ms for _, ms in parts)
    shares = [f"{name} {_ms(ms)}" + (f" ({ms / total:.0%})" if total else "") for name, ms in parts]
    return f"prefill {_ms(numbers.prefill_ms)}, " + ", ".join(shares)


def _ms(value: float) -> str:
    return f"{value / 1e3:.2f} s" if value >= 1e3 else f"{value:.1f} ms"


def _speed(result: GenerationResult) -> str:
    parts = [f"{result.tok_s:.1f} tok/s"] if result.tok_s else []
    if result.ttft_s is not None:
        parts.append(f"TTFT {_ms(result.ttft_s * 1e3)}")
    return ", ".join([*parts, f"total {_ms(result.elapsed_s * 1e3)}"])
