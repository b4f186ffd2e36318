"""Feeds a slot memory as drafting does and compares every single forward with full recompute."""

from __future__ import annotations

import itertools

import torch

from masw.engines.adaptor import AdaptorConfig
from masw.plugins.slot_attention.rule import RAW
from tests.models import random_ids
from tests.oracle import LONGEST, recompute

TOLERANCE = 1e-4


def random_adaptor(decoder, rule, **header):
    """Mirrored projections far from the backbone's, so that a wrong slot shows."""
    config = AdaptorConfig(
        decoder.fingerprint(), rule.sink, rule.window, rule.interval, rule.visibility, **header
    )
    adaptor = decoder.copy_adaptor(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in adaptor.parameters():
        parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return adaptor


def live_entries(rule, length):
    """[(entry, stream item)] that a next token may see, by the table of places in the design."""
    sinks = [(t, ("raw", t)) for t in range(min(rule.sink, length))]
    window = range(max(rule.sink, length - rule.window + 1), length)
    ring = [(rule.sink + (t - rule.sink) % (rule.window + rule.rollback), t) for t in window]
    slots, boundary = [], rule.sink + rule.interval - 1
    while rule.interval and boundary < length:
        entry = rule.sink + rule.window + rule.rollback + len(slots)
        slots.append((entry, ("slot", boundary)))
        boundary += rule.interval
    return sinks + [(entry, ("raw", t)) for entry, t in ring] + slots


class Driver:
    """Feeds the rows of one memory and compares each forward with full recompute."""

    def __init__(self, pair, memory_rule, rows, max_length=LONGEST):
        self.decoder, self.model, self.adaptor = pair
        self.memory = self.decoder.new_memory(memory_rule, rows, max_length)
        self.rows = rows

    def feed(self, new, wanted):
        """Feeds {row: ids} in one forward; `wanted` {row: Recomputed} covers at least those."""
        starts = {row: self.memory.fed[row] for row in new}
        hidden, block = self.decoder.feed(self.memory, list(new), list(new.values()), self.adaptor)
        self.memory.check_integrity()
        for i, (row, ids) in enumerate(new.items()):
            end = starts[row] + len(ids)
            assert self.memory.fed[row] == end
            found = self.decoder.logits(hidden[i, block.kind[i] == RAW])
            expected = wanted[row].logits[starts[row] : end]
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
            self.compare_entries(row, wanted[row])

    def compare_entries(self, row, wanted):
        """Every live entry of `row` holds the keys and values that recompute gives."""
        live = live_entries(self.memory.rule, self.memory.fed[row])
        entries = [entry for entry, _ in live]
        places = [wanted.place[item] for _, item in live]
        for stored, expected in ((self.memory.k, wanted.k), (self.memory.v, wanted.v)):
            found = stored[:, row, :, entries]
            torch.testing.assert_close(found, expected[:, :, places], atol=TOLERANCE, rtol=0)

    def recompute(self, ids):
        return recompute(self.model, self.memory.rule, ids, self.adaptor)

    def feed_up_to(self, ids):
        """Feeds {row: whole committed ids}, whatever of them is missing, in one forward."""
        wanted = {row: self.recompute(whole) for row, whole in ids.items()}
        self.feed({row: whole[self.memory.fed[row] :] for row, whole in ids.items()}, wanted)

    def speculate(self, ids, drafts, accepted):
        """One iteration of several rows: backlog, drafts one by one, rollback to the kept length.

        ids {row: committed ids}, not all fed yet; drafts {row: proposed ids}; accepted {row: a}.
        The last proposal is never fed: it is what the last forward predicts.
        """
        wanted = {row: self.recompute(whole + drafts[row]) for row, whole in ids.items()}
        self.feed({row: whole[self.memory.fed[row] :] for row, whole in ids.items()}, wanted)
        for step in range(max(len(proposed) for proposed in drafts.values()) - 1):
            fed = {row: [d[step]] for row, d in drafts.items() if step < len(d) - 1}
            self.feed(fed, wanted)
        for row, whole in ids.items():
            kept = len(whole) + min(accepted[row], len(drafts[row]) - 1)
            assert self.memory.can_rollback(row, kept)
            self.memory.rollback(row, kept)
            self.compare_entries(row, wanted[row])
        self.memory.check_integrity()


class Requests:
    """Rows that take requests one after the other: one without room starts a new request."""

    def __init__(self, driver):
        self.driver = driver
        self.committed = {row: [] for row in range(driver.rows)}
        self.tokens = iter(random_ids(100_000))

    def draw(self, count):
        return list(itertools.islice(self.tokens, count))

    def clear(self, row):
        self.driver.memory.clear(row)
        self.driver.memory.check_integrity()
        self.committed[row] = []

    def commit(self, row, count):
        if len(self.committed[row]) + count > LONGEST:
            self.clear(row)
        self.committed[row] = self.committed[row] + self.draw(count)

    def chunk(self, sizes):
        for row, size in sizes.items():
            self.commit(row, size)
        self.driver.feed_up_to({row: self.committed[row] for row in sizes})

    def speculate(self, plans):
        for row in plans:
            if len(self.committed[row]) + self.driver.memory.rule.rollback + 2 > LONGEST:
                self.clear(row)
            if len(self.committed[row]) == self.driver.memory.fed[row]:
                self.commit(row, 1 if self.committed[row] else 47)
        drafts = {row: self.draw(length) for row, (length, _) in plans.items()}
        accepted = {row: min(share, length) for row, (length, share) in plans.items()}
        self.driver.speculate({row: self.committed[row] for row in plans}, drafts, accepted)
        for row in plans:  # what was accepted, and the target's own token
            self.committed[row] = self.committed[row] + drafts[row][: accepted[row]] + self.draw(1)
