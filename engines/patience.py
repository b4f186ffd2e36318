"""How long a target is waited for, and how often the same call is made again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .messages import TargetCall, TargetError, TargetUnavailable, Verdict
from .speculative import TargetPort


@dataclass(frozen=True)
class Patience:
    """attempts: how often one call is made at most. Times in seconds: call_seconds for one attempt,
    pause before the second attempt; it doubles before each further one."""

    attempts: int = 3
    call_seconds: float = 120.0
    pause: float = 0.1

    def __post_init__(self):
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; it must be 1 or more")
        if not self.call_seconds > 0:
            raise ValueError(f"call_seconds is {self.call_seconds}; it must be above 0")
        if not self.pause >= 0:
            raise ValueError(f"pause is {self.pause}; it must be 0 or more")


class PatientTarget:
    """A target port that makes a call again where its failure may pass, a bounded number of times.

    A call carries all ids and its seed, so a repetition asks the same question: nothing is emitted
    twice or lost, and what is drawn does not depend on how often it was asked. An attempt that ran
    out of time is left behind, not cancelled: its answer, if it ever comes, is dropped.
    """

    def __init__(
        self,
        target: TargetPort,
        patience: Patience,
        report: Callable[[str], None] = lambda message: None,
    ):
        self._target, self.patience, self._report = target, patience, report
        self._attempts: set[asyncio.Task] = set()  # the event loop itself holds them weakly

    async def __call__(self, call: TargetCall) -> Verdict:
        """The verdict, at least one token. Raises TargetError when all attempts failed."""
        pause, last = self.patience.pause, self.patience.attempts
        for attempt in range(1, last + 1):
            try:
                return await self._attempt(call)
            except TargetUnavailable as error:
                self._report(f"target call, attempt {attempt} of {last}: {error}")
                if attempt == last:
                    raise TargetError(
                        f"the target failed in {last} attempts; the last error: {error}"
                    ) from error
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("attempts is 1 or more")

    async def _attempt(self, call: TargetCall) -> Verdict:
        attempt = asyncio.ensure_future(self._target(call))
        self._attempts.add(attempt)
        attempt.add_done_callback(self._forget)
        await asyncio.wait({attempt}, timeout=self.patience.call_seconds)
        if not attempt.done():
            raise TargetUnavailable(f"no answer within {self.patience.call_seconds:g} s")
        verdict = attempt.result()
        if not verdict.ids:
            raise TargetUnavailable("the target gave no token")
        return verdict

    def _forget(self, attempt: asyncio.Task) -> None:
        self._attempts.discard(attempt)
        if not attempt.cancelled():
            attempt.exception()  # looked at, so that a late failure is no warning
