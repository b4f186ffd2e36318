"""The speculative loop: prefill -> propose -> verify -> commit -> emit, over token ids only.

It knows no server. Draft and target are ports, async callables of one call each; many sequences
run at once as coroutines on one event loop, and their calls are batched behind the ports.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import count

from ..plugins.slot_attention.rule import MemoryRule
from .memory import CapacityError
from .messages import (
    DraftCall,
    DraftStateError,
    DraftUnavailable,
    InvalidRequest,
    Proposal,
    TargetCall,
    TargetError,
    Verdict,
    derive_seed,
)
from .sequence import DraftLength, GenerationRequest, Sequence

DraftPort = Callable[[DraftCall], Awaitable[Proposal]]
TargetPort = Callable[[TargetCall], Awaitable[Verdict]]


@dataclass(frozen=True)
class LoopSettings:
    """Limits and granularity of the loop; lengths in tokens, times in seconds.

    max_length: prompt + output. max_draft_tokens: the target engine's max_draft_len, or less.
    max_seq_len: the engine's limit on input + output + draft tokens of one call, of which it keeps
    max_draft_len back where there are no drafts; None for an engine of max_length.
    plain_tokens: tokens per target call without drafts, so of streaming and cancellation then.
    target_chunk: a long prefix reaches the target in calls of this many tokens (0: in one call).
    draft_retry: how long after its first failure a lost draft is tried again.
    rule: the draft's memory rule, for the slot statistics.
    """

    max_length: int
    max_seq_len: int | None = None
    max_draft_tokens: int = 16
    draft_tokens: int = 5
    draft_chunk: int = 512
    target_chunk: int = 0
    plain_tokens: int = 16
    draft_retry: float = 30.0
    retry_pause: float = 0.25
    concurrent_prefill: bool = False
    rule: MemoryRule | None = None

    def __post_init__(self):
        if not 0 <= self.draft_tokens <= self.max_draft_tokens:
            raise ValueError(
                f"draft_tokens is {self.draft_tokens}; the limit is {self.max_draft_tokens}"
            )
        for name in ("draft_chunk", "plain_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        needed = self.max_length + self.max_draft_tokens
        if self.max_seq_len is not None and self.max_seq_len < needed:
            raise ValueError(
                f"max_seq_len is {self.max_seq_len}; max_length {self.max_length} + "
                f"max_draft_tokens {self.max_draft_tokens} is {needed}: lower one of them, or "
                "build the target for longer sequences"
            )

    def most_drafts(self, length: int) -> int:
        """Draft tokens that fit in one target call after `length` committed ones.

        γ drafts come with γ + 1 output tokens, and the target counts both.
        """
        return ((self.max_seq_len or self.max_length) - length - 1) // 2


class SpeculativeLoop:
    """Runs generations over a target port and, unless plain decoding is wanted, a draft port."""

    def __init__(self, target: TargetPort, draft: DraftPort | None, settings: LoopSettings):
        self.target, self.draft, self.settings = target, draft, settings
        self._numbers = count(time.time_ns())  # unknown to a draft that outlived this process

    def sequence(self, request: GenerationRequest) -> Sequence:
        """Checks a request before any work. Raises InvalidRequest with field and limit."""
        settings = self.settings
        gamma = settings.draft_tokens if request.draft_tokens is None else request.draft_tokens
        _check(request, gamma, settings)
        limit = settings.max_draft_tokens
        length = DraftLength(0 if self.draft is None else gamma, limit, request.adaptive)
        return Sequence(next(self._numbers), request, length, settings.rule)

    async def run(self, sequence: Sequence) -> AsyncIterator[list[int]]:
        """Yields the new ids of each iteration, and nothing new (`[]`) after each prefill chunk.

        `sequence.statistics` is complete at the end. Closing the iterator early ends the sequence
        at the draft. Raises TargetError.
        """
        statistics, started = sequence.statistics, time.perf_counter()
        try:
            async for _ in self._prefill(sequence):
                yield []
            statistics.prefill_ms = (time.perf_counter() - started) * 1e3
            while not sequence.finished:
                started = time.perf_counter()
                busy = statistics.draft_ms + statistics.verify_ms
                proposal = await self._propose(sequence)
                verdict = await self._verify(sequence, proposal)
                ids = sequence.commit(proposal, verdict)
                busy = statistics.draft_ms + statistics.verify_ms - busy
                statistics.host_ms += (time.perf_counter() - started) * 1e3 - busy
                yield ids
        finally:
            statistics.finish_reason = statistics.finish_reason or "cancelled"
            await self._release(sequence)

    async def _prefill(self, sequence: Sequence) -> AsyncIterator[None]:
        """Brings target and draft all ids but the last; yields after each chunk."""
        parts = self._prefill_target(sequence), self._prefill_draft(sequence)
        if self.settings.concurrent_prefill:
            await asyncio.gather(*map(_exhaust, parts))
            yield
            return
        for part in parts:
            async for _ in part:
                yield

    async def _prefill_target(self, sequence: Sequence) -> AsyncIterator[None]:
        chunk, last = self.settings.target_chunk, sequence.length - 1
        ends = [*range(chunk, last, chunk), last] if chunk and last else ()
        for end in ends:
            await self.target(TargetCall(sequence.committed[:end], 1, end_ids=()))
            yield

    async def _prefill_draft(self, sequence: Sequence) -> AsyncIterator[None]:
        while self._may_draft(sequence) and sequence.draft_committed < sequence.length - 1:
            await self._guarded(sequence, self._feed_chunk(sequence))
            if sequence.draft_lost_at is not None:
                return
            yield

    async def _propose(self, sequence: Sequence) -> Proposal:
        """The draft's proposal; empty where drafting is off, useless or not possible now."""
        fitting = self.settings.most_drafts(sequence.length)
        gamma = min(sequence.draft_length.value, sequence.remaining - 1, fitting)
        if gamma < 1 or not self._may_draft(sequence):
            return Proposal()
        started = time.perf_counter()
        proposal = await self._guarded(sequence, self._draft(sequence, gamma))
        sequence.statistics.draft_ms += (time.perf_counter() - started) * 1e3
        return proposal or Proposal()

    async def _draft(self, sequence: Sequence, gamma: int) -> Proposal:
        """Sends what the draft lacks, the last part with γ; from the start if it lost its state."""
        try:
            return await self._catch_up_and_draft(sequence, gamma)
        except DraftStateError:
            sequence.forget_draft()
            return await self._catch_up_and_draft(sequence, gamma)

    async def _catch_up_and_draft(self, sequence: Sequence, gamma: int) -> Proposal:
        while sequence.length - sequence.draft_committed > self.settings.draft_chunk:
            await self._feed_chunk(sequence)
        return await self._call_draft(sequence, sequence.length, gamma)

    async def _feed_chunk(self, sequence: Sequence) -> None:
        """One chunk of what the draft lacks, so that others draft in between."""
        end = sequence.draft_committed + self.settings.draft_chunk
        await self._call_draft(sequence, min(end, sequence.length - 1), 0)

    async def _call_draft(self, sequence: Sequence, upto: int, gamma: int) -> Proposal:
        """One call that brings the draft to `upto` committed tokens and asks for γ drafts."""
        start, request = sequence.draft_committed, sequence.request
        sequence.draft_called = True
        proposal = await self.draft(
            DraftCall(
                sequence.number,
                start,
                sequence.committed[start:upto].tolist(),
                gamma,
                request.sampling,
                derive_seed(request.seed, sequence.length, "draft"),
                request.use_draft_logits and not request.sampling.greedy,
            )
        )
        sequence.note_drafted(upto, len(proposal.ids))
        return proposal

    async def _guarded(
        self, sequence: Sequence, drafting: Awaitable[Proposal | None]
    ) -> Proposal | None:
        """Awaits work of the draft; its failure costs drafts for a while, nothing else."""
        try:
            answer = await drafting
            sequence.draft_lost_at = None
            return answer
        except (DraftUnavailable, DraftStateError, CapacityError):
            now, settings = time.monotonic(), self.settings
            sequence.forget_draft()
            sequence.draft_lost_at = sequence.draft_lost_at or now
            sequence.draft_retry_at = now + settings.retry_pause
            sequence.drafting = now - sequence.draft_lost_at < settings.draft_retry
            return None

    def _may_draft(self, sequence: Sequence) -> bool:
        return sequence.drafting and time.monotonic() >= sequence.draft_retry_at

    async def _verify(self, sequence: Sequence, proposal: Proposal) -> Verdict:
        """One verification step, or a few plain tokens where there is nothing to verify."""
        request = sequence.request
        plain = min(self.settings.plain_tokens, sequence.remaining)
        started = time.perf_counter()
        verdict = await self.target(
            TargetCall(
                sequence.committed,
                len(proposal.ids) + 1 if proposal.ids else plain,
                proposal,
                request.sampling,
                derive_seed(request.seed, sequence.length, "target"),
                max(0, request.min_tokens - sequence.new_tokens),
                request.end_ids,
            )
        )
        sequence.statistics.verify_ms += (time.perf_counter() - started) * 1e3
        if not verdict.ids:
            raise TargetError("the target gave no token")
        return verdict

    async def _release(self, sequence: Sequence) -> None:
        """Tells the draft to forget the sequence; a draft that is away has forgotten it."""
        if sequence.draft_called:
            try:
                await self.draft(DraftCall(sequence.number, 0, (), end=True))
            except (DraftUnavailable, DraftStateError):
                sequence.draft_committed = 0


async def _exhaust(part: AsyncIterator[None]) -> None:
    async for _ in part:
        pass


def _check(request: GenerationRequest, gamma: int, settings: LoopSettings) -> None:
    if not request.ids:
        raise InvalidRequest("input_ids is empty; give 1 or more ids")
    if not 0 <= min(request.ids) <= max(request.ids) < 2**31:
        raise InvalidRequest("input_ids has an id outside 0 to 2**31 - 1")
    if request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {request.max_tokens}; it must be 1 or more")
    total = len(request.ids) + request.max_tokens
    if total > settings.max_length:
        raise InvalidRequest(
            f"prompt of {len(request.ids)} tokens + max_tokens {request.max_tokens} is {total}; "
            f"the limit is {settings.max_length}"
        )
    if not 0 <= gamma <= settings.max_draft_tokens:
        raise InvalidRequest(
            f"num_draft_tokens is {gamma}; it must be 0 to {settings.max_draft_tokens}"
        )
    if not 0 <= request.min_tokens <= request.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.min_tokens}; it must be 0 to max_tokens {request.max_tokens}"
        )
