"""Which rows every step takes, and its learning rate: functions of the step number alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .rows import Rows
from .samples import DataError
from .settings import TrainSettings


@dataclass(frozen=True)
class Batch:
    """Rows of one optimiser step on one rank. ids (B, n) int32, weight (B, n) float32.

    total_weight is that of the whole batch over all ranks; tokens counts its raw tokens.
    """

    ids: np.ndarray
    weight: np.ndarray
    interval: int
    total_weight: float
    tokens: int


class Schedule:
    """Batches by step. Every set of rows is gone through in a new order each time.

    Each step takes rows of one length; lengths come in proportion to their tokens.
    """

    def __init__(
        self, rows: Sequence[Rows], settings: TrainSettings, rank: int = 0, world: int = 1
    ):
        self.settings, self.rank, self.world = settings, rank, world
        first = {r: settings.rule(r).first_slot_time for r in settings.intervals}
        self.rows = [_useful(part, max(first.values())) for part in rows]
        self.rows = [part for part in self.rows if len(part)]
        if not self.rows:
            raise DataError("no row has a weighted position that a slot can reach")
        tokens = np.array([part.ids.size for part in self.rows], float)
        generator = np.random.default_rng(settings.seed)
        self.choice = generator.choice(len(tokens), settings.steps, p=tokens / tokens.sum())

    def batch_size(self, part: int) -> int:
        """Rows per step over all ranks."""
        wanted = max(1, self.settings.batch_tokens // self.rows[part].length)
        return -(-wanted // self.world) * self.world

    def batch(self, step: int) -> Batch:
        """This rank's rows of a step (0-based)."""
        part = self.choice[step]
        rows, size = self.rows[part], self.batch_size(part)
        start = int((self.choice[:step] == part).sum()) * size
        chosen = self._rows(part, start, size)
        interval = self.settings.intervals[step % len(self.settings.intervals)]
        weight = rows.weight[chosen].copy()
        weight[:, : self.settings.rule(interval).first_slot_time] = 0
        mine = slice(self.rank, None, self.world)
        return Batch(
            rows.ids[chosen[mine]], weight[mine], interval, float(weight.sum()), size * rows.length
        )

    def _rows(self, part: int, start: int, count: int) -> np.ndarray:
        """Numbers of the `count` rows from place `start` on, counted over all epochs."""
        places, length = np.arange(start, start + count), len(self.rows[part])
        epochs = range(start // length, places[-1] // length + 1)
        orders = [
            np.random.default_rng((self.settings.seed, int(part), epoch)).permutation(length)
            for epoch in epochs
        ]
        return np.concatenate(orders)[places - epochs[0] * length]

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to a tenth."""
        settings = self.settings
        if step < settings.warmup:
            return settings.learning_rate * (step + 1) / settings.warmup
        done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
        return settings.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def _useful(rows: Rows, first: int) -> Rows:
    """The rows with weight on a position that can see a slot."""
    useful = rows.weight[:, first:].sum(1) > 0
    return Rows(rows.ids[useful], rows.weight[useful])
