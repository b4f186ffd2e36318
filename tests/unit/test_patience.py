"""A target that fails, answers nothing, or never answers: how often it is asked, what then."""

import asyncio
import warnings
from itertools import pairwise

import numpy as np
import pytest

from masw.engines.messages import (
    InvalidRequest,
    TargetCall,
    TargetError,
    TargetUnavailable,
    Verdict,
)
from masw.engines.patience import Patience, PatientTarget
from masw.engines.sequence import GenerationRequest
from masw.engines.speculative import LoopSettings, SpeculativeLoop

CALL = TargetCall(np.array([1, 2], np.int32), 4, seed=9)
GOOD = Verdict((5, 6))


class Moody:
    """A target port that answers from a list: a verdict, an exception, or None for never."""

    def __init__(self, *moods):
        self.moods, self.calls = list(moods), []

    async def __call__(self, call):
        self.calls.append(call)
        mood = self.moods.pop(0)
        if mood is None:
            await asyncio.Event().wait()
        if isinstance(mood, Exception):
            raise mood
        return mood


def ask(target, **patience):
    patience = Patience(**{"pause": 0.0, "call_seconds": 0.05} | patience)
    reports = []
    answer = asyncio.run(PatientTarget(target, patience, reports.append)(CALL))
    return answer, reports


PASSING = [TargetUnavailable("busy"), Verdict(()), None]


@pytest.mark.parametrize("mood", PASSING, ids=["error", "nothing", "silence"])
@pytest.mark.parametrize("failures", [1, 2])
def test_a_failure_that_passes_is_asked_again_with_the_same_call(mood, failures):
    target = Moody(*[mood] * failures, GOOD)
    answer, reports = ask(target)
    assert answer is GOOD and len(reports) == failures
    assert target.calls == [CALL] * (failures + 1)


@pytest.mark.parametrize(
    ("mood", "words"),
    list(zip(PASSING, ["busy", "no token", r"no answer within 0\.05 s"], strict=True)),
    ids=["error", "nothing", "silence"],
)
@pytest.mark.parametrize("attempts", [1, 3])
def test_after_the_last_attempt_the_error_says_what_happened(mood, words, attempts):
    target = Moody(*[mood] * attempts, GOOD)
    with pytest.raises(TargetError, match=f"in {attempts} attempts.*{words}") as caught:
        ask(target, attempts=attempts)
    assert not isinstance(caught.value, TargetUnavailable)
    assert len(target.calls) == attempts


@pytest.mark.parametrize("error", [TargetError("gone"), InvalidRequest("input_ids is empty")])
def test_a_failure_that_lasts_is_not_asked_again(error):
    target = Moody(error, GOOD)
    with pytest.raises(type(error), match=str(error)):
        ask(target)
    assert len(target.calls) == 1


def test_pauses_double():
    now = []

    class Timed(Moody):
        async def __call__(self, call):
            now.append(asyncio.get_running_loop().time())
            return await super().__call__(call)

    ask(Timed(*[PASSING[0]] * 3, GOOD), attempts=4, pause=0.02)
    waits = [b - a for a, b in pairwise(now)]
    assert all(wait >= least for wait, least in zip(waits, (0.02, 0.04, 0.08), strict=True))


def test_an_answer_that_comes_too_late_is_dropped_and_its_error_no_warning():
    late = []

    async def scenario():
        gate = asyncio.Event()

        async def slow(call):
            late.append(call)
            if len(late) == 1:
                await gate.wait()
                raise TargetError("late")
            return GOOD

        target = PatientTarget(slow, Patience(call_seconds=0.02, pause=0.0))
        answer = await target(CALL)
        assert len(target._attempts) == 1, "the first attempt still runs"
        gate.set()
        await asyncio.sleep(0.01)
        assert not target._attempts
        return answer

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(scenario()) is GOOD


def test_a_caller_that_goes_away_leaves_the_call_to_its_end():
    """The server would carry it out anyway; cancelling it there is not safe."""

    async def scenario():
        gate, ended = asyncio.Event(), []

        async def slow(call):
            await gate.wait()
            ended.append(call)
            return GOOD

        target = PatientTarget(slow, Patience())
        caller = asyncio.create_task(target(CALL))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert caller.cancelled() and len(target._attempts) == 1
        gate.set()
        await asyncio.sleep(0.01)
        return ended == [CALL] and not target._attempts

    assert asyncio.run(scenario())


def test_a_generation_over_a_failing_target_emits_nothing_twice():
    """Every second attempt is lost after the target has worked: its answer is given once."""
    asked = []

    async def counting(call):
        asked.append(call)
        start = len(call.ids)
        if len(asked) % 2:
            raise TargetUnavailable("the answer was lost")
        return Verdict(tuple(range(start, start + call.output_tokens)))

    port = PatientTarget(counting, Patience(pause=0.0))
    loop = SpeculativeLoop(port, None, LoopSettings(64, plain_tokens=3))

    async def collect():
        sequence = loop.sequence(GenerationRequest((7,), 20))
        return [token async for ids in loop.run(sequence) for token in ids]

    assert asyncio.run(collect()) == list(range(1, 21))
    assert [call.seed for call in asked[::2]] == [call.seed for call in asked[1::2]]


@pytest.mark.parametrize("fields", [{"attempts": 0}, {"call_seconds": 0.0}, {"pause": -1.0}])
def test_bad_patience_is_refused_by_name(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Patience(**fields)
