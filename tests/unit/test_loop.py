"""The speculative loop over fake ports: failures, odd verdicts, limits, statistics, and stress."""

import asyncio
import random
import time
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from masw.engines import speculative
from masw.engines.local import Batcher, generate, local_loop
from masw.engines.messages import (
    DraftCall,
    DraftStateError,
    DraftUnavailable,
    InvalidRequest,
    Proposal,
    TargetError,
    Verdict,
)
from masw.engines.sequence import GenerationRequest
from masw.engines.speculative import LoopSettings, SpeculativeLoop
from tests.models import VOCAB, random_ids
from tests.pairs import (
    MAX_LENGTH,
    Kind,
    loop_settings,
    new_draft,
    new_target,
    reference,
)

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tuple(range(3, 13))
KINDS = [Kind("slots", 1, "materialized"), Kind(), Kind("slots", 8, "evicted"), Kind("window")]


# --- ports without models -----------------------------------------------------------------------


def following(ids, count):
    """The text that the fake target gives after `ids`."""
    ids, start = list(map(int, ids)), len(ids)
    for _ in range(count):
        ids.append((ids[-1] * 31 + len(ids) * 17 + sum(ids[-3:])) % 97 + 3)
    return ids[start:]


class FakeTarget:
    """A target port; `shape` may bend its verdicts: shape(number of the call, call, ids) -> ids."""

    def __init__(self, shape=lambda number, call, ids: ids):
        self.shape, self.calls = shape, []

    async def __call__(self, call):
        self.calls.append(replace(call, ids=tuple(call.ids.tolist())))
        drafts = call.proposal.ids
        own = following(call.ids, len(drafts) + 1 if drafts else call.output_tokens)
        kept = next((i for i, x in enumerate(drafts) if x != own[i]), len(drafts))
        ids = own[: kept + 1] if drafts else own
        await asyncio.sleep(0)
        return Verdict(tuple(self.shape(len(self.calls), call, ids)))


class FakeDraft:
    """A draft port that holds to the contract of `Draft.propose` and proposes `right` good ids.

    fail(number of the call, call) may give an exception to raise, before the call has any effect.
    """

    def __init__(self, right=3, fail=lambda number, call: None):
        self.right, self.fail, self.calls, self.texts = right, fail, [], {}

    @property
    def feeds(self):
        """The calls that bring ids."""
        return [call for call in self.calls if not call.end]

    async def __call__(self, call):
        self.calls.append(call)
        await asyncio.sleep(0)
        error = self.fail(len(self.calls), call)
        if error is not None:
            raise error
        if call.end:
            self.texts.pop(call.sequence_id, None)
            return Proposal()
        assert call.new_ids, "a call without ids"
        if call.start_position == 0:
            self.texts[call.sequence_id] = []
        text = self.texts.get(call.sequence_id)
        if text is None or len(text) != call.start_position:
            raise DraftStateError("another length")
        text += call.new_ids
        ids = following(text, call.draft_tokens)
        return Proposal(tuple(x if i < self.right else 1 for i, x in enumerate(ids)))


def run_fake(draft, target=None, request=None, **settings):
    """(new ids by iteration, statistics) of one request over fake ports."""
    request = request or GenerationRequest(PROMPT, 30)
    loop = SpeculativeLoop(target or FakeTarget(), draft, loop_settings(**settings))
    sequence = loop.sequence(request)

    async def collect():
        return [ids async for ids in loop.run(sequence) if ids]

    return asyncio.run(asyncio.wait_for(collect(), 10)), sequence.statistics


def joined(parts):
    return [x for part in parts for x in part]


# --- the plain course ---------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0, 1, 4, 5])
def test_the_output_is_the_targets_text(right):
    parts, stats = run_fake(FakeDraft(right))
    assert joined(parts) == following(PROMPT, 30)
    assert stats.finish_reason == "length" and stats.draft_failures == 0
    assert max(map(len, parts)) == right + 1


def test_the_prompt_reaches_the_draft_in_chunks_without_drafting():
    draft = FakeDraft()
    request = GenerationRequest(tuple(random_ids(100)), 10)
    run_fake(draft, request=request, draft_chunk=24)
    prefill = [call for call in draft.calls if call.draft_tokens == 0 and not call.end]
    assert [len(call.new_ids) for call in prefill] == [24, 24, 24, 24, 3]
    assert all(len(call.new_ids) <= 24 for call in draft.calls)
    fed = joined(call.new_ids for call in draft.calls)
    assert fed[:100] == list(request.ids)
    assert draft.calls[len(prefill)].new_ids == [request.ids[-1]]


def test_every_id_is_sent_to_the_draft_once():
    draft = FakeDraft()
    parts, _ = run_fake(draft)
    fed = joined(call.new_ids for call in draft.calls)
    text = [*PROMPT, *joined(parts)]
    assert fed == text[: len(fed)] and len(text) - len(fed) <= 6
    assert [call.end for call in draft.calls] == [False] * (len(draft.calls) - 1) + [True]


@pytest.mark.parametrize("chunk", [0, 1, 4, 9, 50])
@pytest.mark.parametrize("concurrent", [False, True])
def test_the_prompt_reaches_the_target_in_chunks(chunk, concurrent):
    target = FakeTarget()
    parts, _ = run_fake(FakeDraft(), target, target_chunk=chunk, concurrent_prefill=concurrent)
    assert joined(parts) == following(PROMPT, 30)
    prefill = [call for call in target.calls if len(call.ids) < len(PROMPT)]
    ends = [*range(chunk, 9, chunk), 9] if chunk else []
    assert [len(call.ids) for call in prefill] == ends
    assert all(call.end_ids == () and call.output_tokens == 1 for call in prefill)


def test_mode_none_streams_in_chunks_of_plain_tokens():
    parts, stats = run_fake(None, plain_tokens=8)
    assert list(map(len, parts)) == [8, 8, 8, 6]
    assert joined(parts) == following(PROMPT, 30)
    assert (stats.iterations, stats.drafted, stats.draft_ms) == (30, 0, 0)


def test_draft_tokens_zero_is_plain_decoding():
    draft, target = FakeDraft(), FakeTarget()
    request = GenerationRequest(PROMPT, 30, draft_tokens=0)
    parts, _ = run_fake(draft, target, request)
    assert joined(parts) == following(PROMPT, 30)
    assert draft.calls == []
    assert [call.output_tokens for call in target.calls] == [16, 14]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6, 7])
def test_draft_length_is_clipped_near_the_end(max_tokens):
    """γ never exceeds what remains less the target's own token, so the output fits exactly."""
    draft, target = FakeDraft(right=9), FakeTarget()
    parts, stats = run_fake(draft, target, GenerationRequest(PROMPT, max_tokens))
    assert joined(parts) == following(PROMPT, max_tokens)
    assert stats.finish_reason == "length"
    remaining = max_tokens
    gammas = [call.draft_tokens for call in draft.calls if call.draft_tokens]
    for ids in parts:
        if remaining > 1:
            assert gammas.pop(0) == min(5, remaining - 1)
        remaining -= len(ids)
    assert not gammas
    assert all(len(call.proposal.ids) < max_tokens for call in target.calls)


@pytest.mark.parametrize(("spare", "longest"), [(None, 1), (16, 3)])
def test_draft_length_is_clipped_near_the_targets_longest_sequence(spare, longest):
    """Input, output (one more than the drafts) and drafts fit in what the engine was built for."""
    limit, target = len(PROMPT) + 30, FakeTarget(lambda number, call, ids: ids[:1])
    built = limit + (spare or 0)
    settings = {"max_length": limit, "max_seq_len": built if spare else None}
    parts, _ = run_fake(FakeDraft(), target, **settings)
    assert joined(parts) == following(PROMPT, 30)
    for call in target.calls:
        drafts = len(call.proposal.ids)
        assert len(call.ids) + call.output_tokens + drafts <= built
    (last,) = [call for call in target.calls if len(call.ids) == limit - 4]
    assert len(last.proposal.ids) == longest


def test_adaptive_draft_length_follows_acceptance():
    def gammas(right):
        draft = FakeDraft(right)
        run_fake(draft, request=GenerationRequest(PROMPT, 90, draft_tokens=4, adaptive=True))
        return [call.draft_tokens for call in draft.calls if call.draft_tokens]

    assert gammas(99)[:8] == [4, 6, 8, 10, 12, 14, 16, 12]  # the last is what remains
    assert gammas(0)[:6] == [4, 3, 2, 1, 1, 1]


def test_seeds_of_calls_are_never_the_users_and_never_repeat():
    draft, target = FakeDraft(), FakeTarget()
    run_fake(draft, target, GenerationRequest(PROMPT, 60, seed=77))
    seeds = [call.seed for call in draft.calls if call.draft_tokens]
    seeds += [call.seed for call in target.calls]
    assert 77 not in seeds and len(set(seeds)) == len(seeds)


# --- a draft that fails -------------------------------------------------------------------------


def test_a_draft_that_is_always_away_costs_only_speed():
    draft = FakeDraft(fail=lambda number, call: DraftUnavailable("away"))
    parts, stats = run_fake(draft, retry_pause=0.0)
    assert joined(parts) == following(PROMPT, 30)
    assert stats.drafted == 0 and stats.draft_failures == len(draft.feeds) > 1


def test_with_no_retry_time_the_first_failure_ends_drafting():
    draft = FakeDraft(fail=lambda number, call: DraftUnavailable("away"))
    parts, _ = run_fake(draft, draft_retry=0.0)
    assert joined(parts) == following(PROMPT, 30)
    assert len(draft.feeds) == 1


@pytest.mark.parametrize("first", [1, 2, 3, 5])
@pytest.mark.parametrize("failures", [1, 3])
def test_a_draft_that_comes_back_gets_the_whole_prefix(first, failures):
    away = range(first, first + failures)
    draft = FakeDraft(
        fail=lambda number, call: DraftUnavailable("away") if number in away else None
    )
    target, request = FakeTarget(), GenerationRequest(tuple(random_ids(60)), 120)
    parts, stats = run_fake(draft, target, request, retry_pause=0.0, plain_tokens=4)
    assert joined(parts) == following(request.ids, 120)
    assert stats.draft_failures == failures and stats.drafted > 0
    assert draft.calls[first + failures - 1].start_position == 0
    assert all(len(call.new_ids) <= 24 for call in draft.calls)


def test_a_lost_draft_is_not_asked_again_during_the_pause():
    fail_at_second = FakeDraft(fail=lambda n, call: DraftUnavailable("away") if n == 2 else None)
    parts, stats = run_fake(fail_at_second, retry_pause=60.0)
    assert joined(parts) == following(PROMPT, 30)
    assert len(fail_at_second.feeds) == 2
    assert stats.draft_failures == 1


@pytest.fixture
def ticking(monkeypatch):
    """A target of which each call takes one second of the loop's clock."""
    target = FakeTarget()
    clock = SimpleNamespace(
        monotonic=lambda: float(len(target.calls)),
        perf_counter=time.perf_counter,
        time_ns=time.time_ns,
    )
    monkeypatch.setattr(speculative, "time", clock)
    return target


PATIENCE = {"draft_retry": 10.0, "retry_pause": 3.0, "plain_tokens": 1}


def test_it_gives_up_after_draft_retry(ticking):
    draft = FakeDraft(fail=lambda n, call: DraftUnavailable("away") if n >= 3 else None)
    parts, stats = run_fake(draft, ticking, GenerationRequest(PROMPT, 60), **PATIENCE)
    assert joined(parts) == following(PROMPT, 60)
    # Lost at second 1; asked again at 4, 7, 10 and 13, where more than ten seconds have passed.
    assert stats.draft_failures == 5


def test_a_draft_that_came_back_has_all_of_draft_retry_again(ticking):
    away, asked = (5, 40), []

    def fail(number, call):
        asked.append(len(ticking.calls))
        return DraftUnavailable("away") if asked[-1] in away else None

    request = GenerationRequest(PROMPT, 60)
    parts, stats = run_fake(FakeDraft(right=0, fail=fail), ticking, request, **PATIENCE)
    assert joined(parts) == following(PROMPT, 60) and stats.draft_failures == 2
    assert {*range(5), 5, *range(8, 40), 40, *range(43, 59)} == set(asked) - {60}


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6])
def test_lost_state_costs_one_repetition_of_the_prefix(number):
    """DraftStateError, in the prompt's chunks (calls 1 to 3) or while drafting."""

    def forget(count, call):
        if count == number:
            draft.texts.clear()

    draft = FakeDraft(fail=forget)
    request = GenerationRequest(tuple(random_ids(60)), 60)
    settings = {"draft_chunk": 24, "retry_pause": 0.0, "plain_tokens": 4}
    parts, stats = run_fake(draft, request=request, **settings)
    untroubled, usual = run_fake(FakeDraft(), request=request, **settings)
    assert joined(parts) == joined(untroubled) == following(request.ids, 60)
    assert [call.start_position for call in draft.feeds].count(0) == 2
    assert all(len(call.new_ids) <= 24 for call in draft.calls)
    assert stats.draft_failures == 1
    if number > 3:  # sent again within the same iteration
        assert parts == untroubled and stats.drafted == usual.drafted


def test_state_errors_without_end_lead_to_plain_decoding():
    draft = FakeDraft(fail=lambda n, call: None if n == 1 else DraftStateError("lost"))
    parts, stats = run_fake(draft, retry_pause=60.0)
    assert joined(parts) == following(PROMPT, 30)
    assert stats.drafted == 0


def test_other_requests_are_unaffected_by_one_that_lost_its_draft():
    lost = []

    def fail(number, call):
        lost[:] = lost or [call.sequence_id]
        return DraftUnavailable("away") if call.sequence_id == lost[0] else None

    loop = SpeculativeLoop(FakeTarget(), FakeDraft(fail=fail), loop_settings(retry_pause=0.0))
    requests = [GenerationRequest((*PROMPT, i), 40) for i in range(5)]

    async def run_all():
        return await asyncio.gather(*(generate(loop, request) for request in requests))

    answers = asyncio.run(run_all())
    assert [ids for ids, _ in answers] == [following(r.ids, 40) for r in requests]
    assert [stats.draft_failures > 0 for _, stats in answers] == [True] + [False] * 4


# --- a target that answers otherwise ------------------------------------------------------------


def test_a_target_that_gives_single_tokens():
    parts, stats = run_fake(FakeDraft(), FakeTarget(lambda number, call, ids: ids[:1]))
    assert joined(parts) == following(PROMPT, 30)
    assert set(map(len, parts)) == {1} and stats.accepted <= stats.drafted


def test_a_target_that_uses_fewer_drafts():
    target = FakeTarget(lambda number, call, ids: ids[: 1 + number % 3])
    draft = FakeDraft(right=5)
    parts, stats = run_fake(draft, target)
    assert joined(parts) == following(PROMPT, 30)
    assert stats.draft_failures == 0


def test_a_target_that_gives_more_than_asked_for():
    def more(number, call, ids):
        return [*ids, *following([*call.ids, *ids], 7)]

    for draft in (FakeDraft(), None):
        parts, stats = run_fake(draft, FakeTarget(more))
        assert joined(parts) == following(PROMPT, 30), "clipped at max_tokens"
        assert stats.finish_reason == "length" and stats.draft_failures == 0


@pytest.mark.parametrize("place", [0, 3, 4, 11, 29])
@pytest.mark.parametrize("right", [0, 5])
def test_an_end_id_ends_the_text_wherever_it_stands(place, right):
    """The fake target does not know end ids, so the loop must cut behind the first."""
    text = following(PROMPT, 30)
    request = GenerationRequest(PROMPT, 30, end_ids=(text[place], 1000))
    for draft in (FakeDraft(right), None):
        parts, stats = run_fake(draft, request=request)
        assert joined(parts) == text[: text.index(text[place]) + 1]
        assert stats.finish_reason == "end_id"
        assert stats.new_tokens == len(joined(parts))


def test_a_target_that_ends_early_in_plain_decoding():
    text = following(PROMPT, 30)
    target = FakeTarget(lambda number, call, ids: ids[:5] if number == 1 else ids)
    parts, stats = run_fake(None, target, GenerationRequest(PROMPT, 30, end_ids=(text[4],)))
    assert joined(parts) == text[:5] and stats.finish_reason == "end_id"


def test_an_empty_verdict_is_an_error_and_no_endless_loop():
    """`Verdict` promises at least one token; a target that breaks it must not hang a client."""
    target = FakeTarget(lambda number, call, ids: [] if number > 2 else ids)
    with pytest.raises(TargetError):
        run_fake(FakeDraft(), target)


def test_a_failing_target_ends_the_request_and_frees_the_draft():
    def fail(number, call, ids):
        if number == 3:
            raise TargetError("gone")
        return ids

    draft = FakeDraft()
    with pytest.raises(TargetError, match="gone"):
        run_fake(draft, FakeTarget(fail))
    assert draft.calls[-1].end and not draft.texts


def test_min_tokens_counts_down_and_end_ids_are_passed_on():
    target = FakeTarget()
    request = GenerationRequest(PROMPT, 30, min_tokens=12, end_ids=(1000,))
    run_fake(FakeDraft(), target, request)
    for call in target.calls:
        assert call.min_tokens == max(0, 12 - (len(call.ids) - len(PROMPT)))
        assert call.end_ids == (1000,)


# --- ending early -------------------------------------------------------------------------------


def close_after(steps, draft, request=None, **settings):
    """Statistics of a stream that is closed after that many of its items."""
    loop = SpeculativeLoop(FakeTarget(), draft, loop_settings(**settings))
    sequence = loop.sequence(request or GenerationRequest(tuple(random_ids(100)), 30))

    async def start():
        async with aclosing(loop.run(sequence)) as stream:
            for _ in range(steps):
                await anext(stream)

    asyncio.run(start())
    return sequence.statistics


@pytest.mark.parametrize("steps", range(1, 9))
def test_closing_the_stream_sends_the_end_to_the_draft(steps):
    draft = FakeDraft()
    stats = close_after(steps, draft)
    assert draft.calls[-1].end and draft.calls[-1].new_ids == ()
    assert not draft.texts
    assert stats.finish_reason == "cancelled"


def test_closing_while_the_draft_is_away_is_no_error():
    draft = FakeDraft(fail=lambda n, call: DraftUnavailable("away") if n > 6 else None)
    assert close_after(7, draft).finish_reason == "cancelled"


async def cancelled_at(loop, request, turns):
    """Cancels a generation after so many turns of the event loop."""
    task = asyncio.create_task(generate(loop, request))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(5):
        await asyncio.sleep(0)


def test_cancelling_at_any_moment_frees_the_draft():
    """In its first call too, when the loop does not know yet whether the draft has opened it."""
    for turns in range(1, 40):
        draft = FakeDraft()
        loop = SpeculativeLoop(FakeTarget(), Batched(draft), loop_settings())
        asyncio.run(cancelled_at(loop, GenerationRequest(tuple(random_ids(60)), 20), turns))
        assert not draft.texts, f"left behind when cancelled after {turns} turns"


class Batched:
    """A port whose call is carried out even if the caller no longer waits, as a server's is."""

    def __init__(self, port):
        self.port, self.tasks = port, set()

    async def __call__(self, call):
        task = asyncio.create_task(self.port(call))
        self.tasks.add(task)
        return await asyncio.shield(task)


def test_a_lost_answer_leaves_nothing_at_the_draft():
    """The draft opened the sequence, its answer never came, and the request ends without it."""
    draft = FakeDraft()

    async def losing(call):
        await draft(call)
        if not call.end:
            raise DraftUnavailable("the answer was lost")
        return Proposal()

    parts, _ = run_fake(losing)
    assert joined(parts) == following(PROMPT, 30)
    assert not draft.texts


def test_a_batch_that_fails_as_a_whole_is_an_error_for_each_caller():
    """An engine that raises must not leave its callers waiting for ever."""

    def broken(calls):
        raise RuntimeError("engine is broken")

    async def ask():
        batcher = Batcher(broken)
        answers = asyncio.gather(batcher(1), batcher(2), return_exceptions=True)
        return await asyncio.wait_for(answers, 2)

    assert [str(error) for error in asyncio.run(ask())] == ["engine is broken"] * 2


def test_calls_of_one_turn_are_one_batch():
    batches = []

    def run(calls):
        batches.append(list(calls))
        return [ValueError("odd") if call % 2 else call for call in calls]

    async def ask():
        batcher = Batcher(run)
        first = await asyncio.gather(*map(batcher, range(4)), return_exceptions=True)
        return [*first, await batcher(8)]

    answers = asyncio.run(ask())
    assert batches == [[0, 1, 2, 3], [8]]
    assert [a for a in answers if not isinstance(a, ValueError)] == [0, 2, 8]
    assert isinstance(answers[1], ValueError)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ids": ()}, "input_ids is empty; give 1"),
        ({"ids": (1, -1)}, "input_ids"),
        ({"ids": (1, 2**40)}, "input_ids"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be 1"),
        ({"max_tokens": -3}, "max_tokens is -3; it must be 1"),
        ({"max_tokens": 279}, f"tokens .* max_tokens 279 is 289; the limit is {MAX_LENGTH}"),
        ({"ids": (1,) * 400}, f"prompt of 400 tokens .*; the limit is {MAX_LENGTH}"),
        ({"draft_tokens": 17}, "num_draft_tokens is 17; it must be 0 to 16"),
        ({"draft_tokens": -1}, "num_draft_tokens is -1; it must be 0 to 16"),
        ({"min_tokens": 31}, "min_tokens is 31; it must be 0 to max_tokens 30"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be 0 to"),
    ],
)
def test_bad_requests_are_refused_before_any_work(fields, message):
    draft, target = FakeDraft(), FakeTarget()
    request = GenerationRequest(**({"ids": PROMPT, "max_tokens": 30} | fields))
    with pytest.raises(InvalidRequest, match=message):
        SpeculativeLoop(target, draft, loop_settings()).sequence(request)
    assert not draft.calls and not target.calls


def test_the_longest_request_is_served():
    parts, _ = run_fake(FakeDraft(), request=GenerationRequest(PROMPT, MAX_LENGTH - len(PROMPT)))
    assert len(joined(parts)) == MAX_LENGTH - len(PROMPT)


@pytest.mark.parametrize(
    "fields",
    [
        {"draft_tokens": 17},
        {"draft_tokens": -1},
        {"draft_chunk": 0},
        {"plain_tokens": 0},
        {"max_seq_len": MAX_LENGTH + 15},
    ],
    ids=str,
)
def test_bad_settings_are_refused_at_construction(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=name):
        LoopSettings(MAX_LENGTH, **fields)


# --- statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0, 2, 5])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_statistics_add_up(right, gamma):
    target = FakeTarget()
    request = GenerationRequest(PROMPT, 50, draft_tokens=gamma)
    parts, stats = run_fake(FakeDraft(right), target, request)
    proposals = [call.proposal.ids for call in target.calls]
    assert stats.prefix_tokens == len(PROMPT)
    assert stats.new_tokens == len(joined(parts)) == 50
    assert stats.drafted == sum(map(len, proposals)) == sum(stats.drafted_at)
    assert stats.accepted == sum(stats.accepted_at) == 50 - stats.iterations
    assert stats.iterations == len(parts) == len(target.calls)
    kept = [(len(ids) - 1, len(drafts)) for ids, drafts in zip(parts, proposals, strict=True)]
    for place in range(gamma):
        assert stats.drafted_at[place] == sum(drafted > place for _, drafted in kept)
        assert stats.accepted_at[place] == sum(accepted > place for accepted, _ in kept)
    assert len(stats.drafted_at) == len(stats.accepted_at) == gamma
    assert stats.rollbacks == sum(accepted < drafted for accepted, drafted in kept)


def test_times_are_parts_of_the_whole():
    async def slow_target(call):
        await asyncio.sleep(0.004)
        return await FakeTarget()(call)

    fake = FakeDraft()

    async def slow_draft(call):
        await asyncio.sleep(0.002)
        return await fake(call)

    started = time.perf_counter()
    _, stats = run_fake(slow_draft, slow_target, GenerationRequest(tuple(random_ids(60)), 20))
    whole = (time.perf_counter() - started) * 1e3
    assert stats.prefill_ms >= 3 * 2
    assert stats.draft_ms >= 2 * sum(stats.drafted_at[:1])
    assert stats.verify_ms >= 4 * stats.iterations
    assert stats.host_ms >= 0
    assert stats.prefill_ms + stats.draft_ms + stats.verify_ms + stats.host_ms <= whole


class SlotCounter:
    """A draft port over an engine that counts, boundary by boundary, what its memory does."""

    def __init__(self, draft):
        self.draft, self.made, self.discarded = draft, 0, 0
        self.port, self._write = Batcher(draft.propose), draft.memory.write
        self._rollback = draft.memory.rollback
        draft.memory.write, draft.memory.rollback = self.write, self.rollback

    def write(self, block, k, v):
        self.made += int(block.is_slot.sum())
        self._write(block, k, v)

    def rollback(self, row, kept):
        self.discarded += self.boundaries(kept, self.draft.memory.fed[row])
        self._rollback(row, kept)

    def boundaries(self, start, stop):
        rule = self.draft.memory.rule
        return sum(bool(rule.is_boundary(t)) for t in range(start, stop))

    async def __call__(self, call: DraftCall) -> Proposal:
        return await self.port(call)

    def finish(self, call_id, text):
        """What the draft would still discard: all behind the first id that is not committed."""
        fed = self.draft._sequences[call_id].fed
        kept = next((i for i, x in enumerate(fed) if x != text[i]), len(fed))
        self.discarded += self.boundaries(kept, len(fed))


@pytest.mark.parametrize(("name", "gamma"), [("near", 1), ("near", 5), ("near", 16), ("other", 5)])
@pytest.mark.parametrize("kind", [*KINDS, Kind("full")], ids=str)
def test_slot_statistics_equal_what_the_memory_did(pair, kind, name, gamma):
    counter = SlotCounter(new_draft(pair.drafts[name], kind))
    target = Batcher(new_target(pair.target).verify)
    settings = loop_settings(rule=counter.draft.memory.rule)
    ids = random_ids(41, seed=gamma)

    async def count():
        loop = SpeculativeLoop(target, counter, settings)
        sequence = loop.sequence(GenerationRequest(tuple(ids), 40, draft_tokens=gamma))
        async with aclosing(loop.run(sequence)) as stream:
            while not sequence.finished:
                await anext(stream)
            counter.finish(sequence.number, sequence.committed.tolist())
        return sequence.statistics

    stats = asyncio.run(count())
    assert (stats.slots_materialized, stats.slots_discarded) == (counter.made, counter.discarded)
    if kind.interval == 1 and name == "other" and gamma > 1:
        assert stats.slots_discarded > 0


def test_slot_statistics_with_a_target_that_uses_fewer_drafts(pair):
    """The draft keeps one id fewer than was accepted, if the verdict ends with that id."""
    counter = SlotCounter(new_draft(pair.target, Kind("slots", 1, "evicted")))
    engine = Batcher(new_target(pair.target).verify)

    async def hesitant(call):
        verdict = await engine(call)
        return Verdict(verdict.ids[: 1 + len(call.ids) % 3])

    async def count():
        loop = SpeculativeLoop(hesitant, counter, loop_settings(rule=counter.draft.memory.rule))
        sequence = loop.sequence(GenerationRequest(tuple(random_ids(41)), 50))
        async with aclosing(loop.run(sequence)) as stream:
            while not sequence.finished:
                await anext(stream)
            counter.finish(sequence.number, sequence.committed.tolist())
        return sequence

    sequence = asyncio.run(count())
    text = sequence.committed.tolist()
    assert text[:41] == random_ids(41) and sequence.statistics.draft_failures == 0
    assert text[41:] == reference(pair.hf, text[:41], 50)
    stats = sequence.statistics
    assert (stats.slots_materialized, stats.slots_discarded) == (counter.made, counter.discarded)


# --- the real engines ---------------------------------------------------------------------------


def test_ids_outside_the_vocabulary_are_refused_and_leave_nothing_behind(pair):
    for draft in (None, new_draft(pair.target)):
        loop = local_loop(new_target(pair.target), draft, loop_settings())
        for bad in (VOCAB, 9999):
            with pytest.raises(InvalidRequest, match="_ids has an id outside 0 to"):
                asyncio.run(generate(loop, GenerationRequest((1, bad, 2), 4)))
        assert draft is None or len(draft._free_rows) == 4


def test_a_draft_with_shorter_memory_than_the_target_costs_only_speed(pair):
    ids = random_ids(50)
    draft = new_draft(pair.target, max_length=64)
    loop = local_loop(new_target(pair.target), draft, loop_settings())
    new_ids, stats = asyncio.run(generate(loop, GenerationRequest(tuple(ids), 40)))
    assert new_ids == reference(pair.hf, ids, 40)
    assert stats.drafted > 0


class Troubled:
    """A draft port that is now and then away, loses its state, or loses its answer."""

    def __init__(self, draft, rng):
        self.draft, self.rng, self.port = draft, rng, Batcher(draft.propose)

    async def __call__(self, call):
        chance = 1.0 if call.end else self.rng.random()
        if chance < 0.03:
            raise DraftUnavailable("away")
        if chance < 0.05:
            for number in list(self.draft._sequences):
                self.draft._forget(number)
        answer = await self.port(call)
        if chance > 0.98 and not call.end:
            raise DraftUnavailable("the answer was lost")
        return answer


@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_stress(pair, seed):
    """Random prompts, draft lengths, limits, cancellations and failures over scarce engines."""
    rng, stems = random.Random(seed), [random_ids(70, seed=s) for s in range(3)]
    kind, name = rng.choice([*KINDS, Kind("full")]), rng.choice(["same", "near"])
    draft, target = new_draft(pair.drafts[name], kind), new_target(pair.target)
    settings = loop_settings(
        retry_pause=0.0,
        draft_chunk=rng.choice([1, 7, 24]),
        target_chunk=rng.choice([0, 24]),
        plain_tokens=4,
        rule=draft.memory.rule,
    )
    loop = SpeculativeLoop(Batcher(target.verify), Troubled(draft, rng), settings)
    requests = [random_request(rng, stems, number) for number in range(24)]
    expected = [reference(pair.hf, r.ids, r.max_tokens, r.end_ids) for r in requests]

    async def one(request):
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        ids, limit = [], rng.choice([1, 3, 10, None, None, None])
        async with aclosing(loop.run(loop.sequence(request))) as stream:
            async for new_ids in stream:
                ids += new_ids
                if limit is not None and len(ids) >= limit:
                    return ids, False
        return ids, True

    async def impatient(request):
        """Half of the requests have a client that may go away at any moment."""
        task = asyncio.create_task(one(request))
        if rng.random() < 0.5:
            for _ in range(rng.randrange(200)):
                await asyncio.sleep(0)
            task.cancel()
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        return answer

    async def everything():
        return await asyncio.wait_for(asyncio.gather(*map(impatient, requests)), 60)

    answers = asyncio.run(everything())
    finished = 0
    for whole, answer in zip(expected, answers, strict=True):
        if isinstance(answer, asyncio.CancelledError):
            continue
        ids, complete = answer
        assert ids == (whole if complete else whole[: len(ids)])
        finished += complete
    assert finished >= 4
    draft.memory.check_integrity()
    target.memory.check_integrity()
    assert sorted(draft._free_rows) == [0, 1, 2, 3] and not draft._sequences


def random_request(rng, stems, number):
    """A prompt that may share its beginning with others, and random limits."""
    stem = rng.choice(stems)[: rng.randrange(1, 71)]
    ids = stem + random_ids(rng.randrange(0, 40), seed=1000 + number)
    return GenerationRequest(
        tuple(ids),
        rng.randrange(1, 30),
        draft_tokens=rng.choice([0, 1, 3, 5, 16]),
        adaptive=rng.random() < 0.3,
        end_ids=tuple(rng.sample(range(VOCAB), 8)) if rng.random() < 0.3 else (),
    )
