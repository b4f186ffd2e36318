"""One generation: what was asked for, how far it is, and what it did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np

from ..plugins.slot_attention.rule import MemoryRule
from .messages import Proposal, Sampling, Verdict
from .target import common_prefix, until_end


@dataclass(frozen=True)
class GenerationRequest:
    """One generation. draft_tokens: γ (0: plain decoding, None: the loop's default)."""

    ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    draft_tokens: int | None = None
    use_draft_logits: bool = True
    adaptive: bool = False
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()


@dataclass
class Statistics:
    """What a request did; times in milliseconds, counts in tokens unless said."""

    prefix_tokens: int = 0
    new_tokens: int = 0
    iterations: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    rollbacks: int = 0
    slots_materialized: int = 0
    slots_discarded: int = 0
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    host_ms: float = 0.0
    draft_failures: int = 0
    finish_reason: str = ""

    def observe(self, drafted: int, accepted: int, new_tokens: int) -> None:
        """Counts one target step, `accepted` of `drafted` tokens kept; plain tokens one each."""
        self.iterations += 1 if drafted else new_tokens
        self.new_tokens += new_tokens
        self.drafted += drafted
        self.accepted += accepted
        self.rollbacks += accepted < drafted
        for places, reached in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            places.extend([0] * (drafted - len(places)))
            for place in range(reached):
                places[place] += 1

    def as_dict(self) -> dict:
        """The statistics as plain values, JSON-ready."""
        return asdict(self)


class DraftLength:
    """γ of the next iteration; adaptive: two more after full acceptance, else one fewer."""

    def __init__(self, start: int, limit: int, adaptive: bool):
        self.value, self.limit, self.adaptive = start, limit, adaptive

    def observe(self, drafted: int, accepted: int) -> None:
        """Learns from an iteration that drafted something."""
        if self.adaptive and drafted:
            step = 2 if accepted == drafted else -1
            self.value = min(max(1, self.value + step), self.limit)


class Sequence:
    """A generation in progress: the committed ids and how much of them the draft has."""

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        draft_length: DraftLength,
        rule: MemoryRule | None = None,
    ):
        self.number, self.request, self.draft_length = number, request, draft_length
        self.rule = rule or MemoryRule.full(0)
        self.statistics = Statistics(prefix_tokens=len(request.ids))
        self._ids = np.empty(len(request.ids) + request.max_tokens, np.int32)
        self._ids[: len(request.ids)] = request.ids
        self.length = len(request.ids)
        self.draft_committed = 0
        self.draft_called = False
        self.draft_fed = 0  # its own proposals included
        self.draft_lost_at: float | None = None
        self.draft_retry_at = 0.0
        self.drafting = draft_length.value > 0

    @property
    def committed(self) -> np.ndarray:
        """(n,) int32: prompt and output so far."""
        return self._ids[: self.length]

    @property
    def new_tokens(self) -> int:
        """Output tokens so far."""
        return self.length - len(self.request.ids)

    @property
    def remaining(self) -> int:
        """Output tokens that may still come."""
        return self.request.max_tokens - self.new_tokens

    @property
    def finished(self) -> bool:
        """Whether a finish reason is set."""
        return bool(self.statistics.finish_reason)

    def commit(self, proposal: Proposal, verdict: Verdict) -> list[int]:
        """Appends a verdict's tokens up to an end id or the token limit and returns them."""
        ids = until_end(verdict.ids[: self.remaining], self.request.end_ids)
        self._ids[self.length : self.length + len(ids)] = ids
        accepted = common_prefix(np.array(ids), np.array(proposal.ids))
        known = min(accepted, len(ids) - 1)  # the draft feeds the last new id again
        self._note_rollback(min(self.length + known, self.draft_fed))
        self.length += len(ids)
        self.statistics.observe(len(proposal.ids), accepted, len(ids))
        self.draft_length.observe(len(proposal.ids), accepted)
        if ids and ids[-1] in self.request.end_ids:
            self.statistics.finish_reason = "end_id"
        elif self.remaining == 0:
            self.statistics.finish_reason = "length"
        return ids

    def note_drafted(self, committed: int, drafted: int) -> None:
        """The draft now has `committed` tokens and fed its proposal, all but the last token."""
        fed = committed + max(0, drafted - 1)
        made = self.rule.slots(fed) - self.rule.slots(self.draft_fed)
        self.statistics.slots_materialized += made
        self.draft_committed, self.draft_fed = committed, fed

    def forget_draft(self) -> None:
        """The draft failed or lost its state; it needs the whole prefix again."""
        self.statistics.draft_failures += 1
        self.draft_committed = self.draft_fed = 0

    def _note_rollback(self, kept: int) -> None:
        """The draft will go back to `kept` fed tokens, as it does at its next call."""
        discarded = self.rule.slots(self.draft_fed) - self.rule.slots(kept)
        self.statistics.slots_discarded += discarded
        self.draft_fed = kept
