"""The `masw_*` metrics, counted per iteration and handed to Triton a few times a second."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..engines.sequence import Statistics

FLUSH_SECONDS = 0.25
BUCKETS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
QUEUE_BUCKETS = [0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0]
PHASES = ("draft", "verify", "host")
COUNTERS = {
    "masw_drafts_total": "Iterations that verified a proposal",
    "masw_draft_tokens_total": "Tokens proposed by the draft",
    "masw_accepted_tokens_total": "Proposed tokens that the target accepted",
    "masw_emitted_tokens_total": "Tokens given to users",
    "masw_cancelled_total": "Requests whose client went away",
}
POSITION, INFLIGHT = "masw_accepted_tokens_per_pos_total", "masw_requests_inflight"
SECONDS, QUEUE = "masw_iteration_seconds", "masw_queue_seconds"
FAMILIES = {name: ("COUNTER", about) for name, about in COUNTERS.items()} | {
    POSITION: ("COUNTER", "Accepted tokens by draft position"),
    INFLIGHT: ("GAUGE", "Requests admitted"),
    SECONDS: ("HISTOGRAM", "Time of an iteration by phase"),
    QUEUE: ("HISTOGRAM", "Time an admitted request waited for a place"),
}


class Metrics:
    """All metric families of the loop model. `pb_utils` is Triton's module of the stub."""

    def __init__(self, pb_utils: Any, positions: int):
        families = self._families = {  # gone, they cannot count
            name: pb_utils.MetricFamily(
                name=name, description=about, kind=getattr(pb_utils.MetricFamily, kind)
            )
            for name, (kind, about) in FAMILIES.items()
        }
        self._counters = {name: families[name].Metric(labels={}) for name in COUNTERS}
        self._counters |= {
            (POSITION, place): families[POSITION].Metric(labels={"position": str(place)})
            for place in range(positions)
        }
        self._inflight = families[INFLIGHT].Metric(labels={})
        self._inflight.set(0)
        self._phases = {
            phase: families[SECONDS].Metric(labels={"phase": phase}, buckets=BUCKETS)
            for phase in PHASES
        }
        self._queue = families[QUEUE].Metric(labels={}, buckets=QUEUE_BUCKETS)
        self._pending: Counter = Counter()
        self._flushed = time.monotonic()

    def set_inflight(self, count: int) -> None:
        """The number of requests admitted and not yet answered."""
        self._inflight.set(count)

    def observe_queue(self, seconds: float) -> None:
        """How long an admitted request waited, whether it got a place or not."""
        self._queue.observe(seconds)

    def count_cancelled(self) -> None:
        """One request whose client went away."""
        self.add({"masw_cancelled_total": 1}, now=True)

    def track(self, statistics: Statistics) -> Track:
        """Follows the statistics of one request."""
        return Track(self, statistics)

    def add(self, counts: dict, now: bool = False) -> None:
        """Adds to counters; they reach Triton within FLUSH_SECONDS of activity, or `now`."""
        self._pending.update(counts)
        if now or time.monotonic() - self._flushed > FLUSH_SECONDS:
            for name, value in self._pending.items():
                if value:
                    self._counters[name].increment(value)
            self._pending.clear()
            self._flushed = time.monotonic()

    def observe(self, phase: str, seconds: float) -> None:
        """The time of one phase of one iteration."""
        self._phases[phase].observe(seconds)


@dataclass
class Track:
    """What of a request's statistics has been counted already."""

    metrics: Metrics
    statistics: Statistics

    def __post_init__(self):
        self._counted: Counter = Counter()
        self._times = dict.fromkeys(PHASES, 0.0)

    def update(self) -> None:
        """Counts what the last iteration added."""
        counts = self._counts()
        if counts == self._counted:
            return
        self.metrics.add({name: n - self._counted[name] for name, n in counts.items()})
        self._counted = counts
        for phase in PHASES:
            total = getattr(self.statistics, f"{phase}_ms")
            self.metrics.observe(phase, (total - self._times[phase]) / 1e3)
            self._times[phase] = total

    def finish(self) -> None:
        """Hands over what is counted so far."""
        self.update()
        self.metrics.add({}, now=True)

    def _counts(self) -> Counter:
        statistics = self.statistics
        counts = Counter(
            {
                "masw_drafts_total": statistics.drafted_at[0] if statistics.drafted_at else 0,
                "masw_draft_tokens_total": statistics.drafted,
                "masw_accepted_tokens_total": statistics.accepted,
                "masw_emitted_tokens_total": statistics.new_tokens,
            }
        )
        counts.update({(POSITION, i): n for i, n in enumerate(statistics.accepted_at)})
        return counts
