"""How sure a comparison of draft memories is: intervals over the prompts that were drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..bench.record import rounded
from .summary import Summary

RESAMPLES = 2000
LIMITS = (2.5, 97.5)  # percent


def beside_windows(rows: Sequence[Summary]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Tok./Iter of every memory divided by each window's, with the limits of a 95% interval.

    By prefix, window and memory: [ratio, low, high], kinds of text weighted alike. The interval is
    the bootstrap's: prompts of each kind are drawn again with replacement, the same ones for both
    memories, so that what is common to a prompt cancels.
    """
    found = {}
    for prefix in sorted({row.prefix for row in rows}):
        means = _means([row for row in rows if row.prefix == prefix])
        found[str(prefix)] = {
            window: {name: _ratio(of / base) for name, of in means.items() if name != window}
            for window, base in means.items()
            if window.startswith("window")
        }
    return found


def _means(rows: Sequence[Summary]) -> dict[str, np.ndarray]:
    """Tok./Iter over all kinds by memory: of the prompts themselves, then of each resample."""
    sums: dict[str, np.ndarray] = {}
    kinds = sorted({row.kind for row in rows})
    for number, kind in enumerate(kinds):
        of_kind = [row for row in rows if row.kind == kind]
        draws = _draws(of_kind[0].samples, number)
        for row in of_kind:
            totals = np.array(row.each)[draws].sum(1)
            sums[row.memory] = sums.get(row.memory, 0) + totals[:, 0] / totals[:, 1] / len(kinds)
    return sums


def _draws(samples: int, seed: int) -> np.ndarray:
    """(RESAMPLES + 1, samples) indices; the first row is the samples as they are."""
    drawn = np.random.default_rng(seed).integers(0, samples, (RESAMPLES, samples))
    return np.concatenate([np.arange(samples)[None], drawn])


def _ratio(values: np.ndarray) -> list[float]:
    return [rounded(float(value)) for value in (values[0], *np.percentile(values[1:], LIMITS))]
