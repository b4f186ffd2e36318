"""What a load measurement came to: one row per run, as table and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from rich import box
from rich.table import Table

from .messages import Statistics


@dataclass(frozen=True)
class Served:
    """One measured request; `tokens` by tokenising its text again, `*_ns` on one clock.

    `first_ns` and `last_ns` are the first and last response with text, `end_ns` the last of all.
    """

    sent_ns: int
    first_ns: int
    last_ns: int
    end_ns: int
    tokens: int
    responses: int
    statistics: Statistics | None

    @property
    def ttft_s(self) -> float:
        return (self.first_ns - self.sent_ns) / 1e9

    @property
    def latency_s(self) -> float:
        return (self.end_ns - self.sent_ns) / 1e9

    @property
    def time_per_output_token_s(self) -> float | None:
        """None for a single token or a single response, which have no time in between."""
        if self.tokens < 2 or self.last_ns <= self.first_ns:
            return None
        return (self.last_ns - self.first_ns) / 1e9 / (self.tokens - 1)


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile; None where there was nothing to measure."""

    p50: float | None
    p95: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        if not values:
            return cls(None, None)
        p50, p95 = np.percentile(values, [50, 95])
        return cls(round(float(p50), 3), round(float(p95), 3))


@dataclass(frozen=True)
class ServingRow:
    """One run: one draft length at one concurrency. `*_ms` in milliseconds.

    `server_tokens` is the server's own count; it, `prefix_tokens` (mean), `tok_per_iter`,
    `acceptance_rate` and `drafted_per_iter` are None where it sends no statistics.
    """

    num_draft_tokens: int | None
    concurrency: int
    requests: int
    responses: int
    tokens: int
    tok_s: float
    requests_s: float
    ttft_ms: Spread
    time_per_output_token_ms: Spread
    latency_ms: Spread
    server_tokens: int | None
    prefix_tokens: float | None
    tok_per_iter: float | None
    acceptance_rate: float | None
    drafted_per_iter: float | None

    @classmethod
    def of(cls, draft_length: int | None, concurrency: int, served: Sequence[Served]) -> Self:
        """Summarise the requests of one run; there is at least one."""
        span = (max(item.end_ns for item in served) - min(item.sent_ns for item in served)) / 1e9
        tokens = sum(item.tokens for item in served)
        between = [item.time_per_output_token_s for item in served]
        return cls(
            num_draft_tokens=draft_length,
            concurrency=concurrency,
            requests=len(served),
            responses=sum(item.responses for item in served),
            tokens=tokens,
            tok_s=round(tokens / span, 3),
            requests_s=round(len(served) / span, 4),
            ttft_ms=Spread.of([1e3 * item.ttft_s for item in served]),
            time_per_output_token_ms=Spread.of([1e3 * each for each in between if each]),
            latency_ms=Spread.of([1e3 * item.latency_s for item in served]),
            **_acceptance([item.statistics for item in served if item.statistics]),
        )


@dataclass(frozen=True)
class ServingReport:
    """All runs of one load on one server."""

    url: str
    model: str
    max_tokens: int
    texts: int
    rows: tuple[ServingRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists and numbers."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows]}

    def to_json(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(self.to_dict())

    def table(self) -> Table:
        """The main numbers as a rich table of 80 columns; times are p50 / p95."""
        title = f"{self.model} at {self.url}, {self.max_tokens} tokens at most"
        table = Table(title=title, box=box.SIMPLE, collapse_padding=True, pad_edge=False)
        for name in _COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*_cells(row))
        return table


def _acceptance(statistics: list[Statistics]) -> dict[str, float | None]:
    """The run's share of a row that the server's statistics give."""
    names = ("server_tokens", "prefix_tokens", "tok_per_iter", "acceptance_rate")
    if not statistics:
        return dict.fromkeys((*names, "drafted_per_iter"))
    new, iterations, drafted, accepted, prefix = (
        sum(getattr(item, name) for item in statistics)
        for name in ("new_tokens", "iterations", "drafted", "accepted", "prefix_tokens")
    )
    return {
        "server_tokens": new,
        "prefix_tokens": round(prefix / len(statistics), 1),
        "tok_per_iter": round(new / iterations, 3) if iterations else None,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
        "drafted_per_iter": round(drafted / iterations, 3) if iterations else None,
    }


_COLUMNS = (
    "draft",
    "clients",
    "tok/s",
    "TTFT ms",
    "ms/token",
    "Tok./Iter",
    "accepted",
)


def _cells(row: ServingRow) -> list[str]:
    return [
        "default" if row.num_draft_tokens is None else str(row.num_draft_tokens),
        str(row.concurrency),
        f"{row.tok_s:.1f}",
        _pair(row.ttft_ms),
        _pair(row.time_per_output_token_ms),
        "–" if row.tok_per_iter is None else f"{row.tok_per_iter:.2f}",
        "–" if not row.drafted_per_iter else f"{row.acceptance_rate:.0%}",
    ]


def _pair(spread: Spread) -> str:
    return "–" if spread.p50 is None else f"{_short(spread.p50)} / {_short(spread.p95)}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
