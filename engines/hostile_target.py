"""A target that behaves as badly as TensorRT-LLM's C++ backend may, for tests on the cpu lane.

It wraps another target and, at random by seed, uses fewer drafts or none, ends early, fails,
answers nothing or late, and lays its output out with or without the prompt and with padding. It
gives end ids no meaning of their own, and refuses calls that the C++ backend would not serve.
Whatever it does is allowed: the loop's output must stay that of plain decoding.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .messages import (
    InvalidRequest,
    Proposal,
    Target,
    TargetCall,
    TargetUnavailable,
    Verdict,
)
from .pair import Pair, load_target
from .patience import Patience
from .trtllm_folder import AWQ_VOCAB_MULTIPLE, padded_vocab

DOOMED_ID = 0  # of a pair's hostile target: the first id of a prompt that it never answers


@dataclass(frozen=True)
class Habits:
    """How often it does what, as a share of calls or rows, and what it does.

    failures: refusals and empty answers of one call in a row, at most. stalls: late answers in all,
    each `stall_seconds` late. doomed_id: calls whose ids begin with it always fail.
    """

    drop_all: float = 0.15
    drop_some: float = 0.2
    end_early: float = 0.15
    fail: float = 0.1
    answer_nothing: float = 0.05
    stall: float = 0.1
    echo: float = 0.5
    pad: float = 0.5
    failures: int = 2
    stalls: int = 1
    stall_seconds: float = 5.0
    doomed_id: int | None = None

    def __post_init__(self):
        for name in SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 to 1")
        for name in ("failures", "stalls", "stall_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")


SHARES = ("drop_all", "drop_some", "end_early", "fail", "answer_nothing", "stall", "echo", "pad")
# Outlasts the default habits: every failure of a call in a row, and the one stall there is.
HOSTILE_PATIENCE = Patience(attempts=5, call_seconds=4.0, pause=0.02)


class HostileTarget(Target):
    """Serves calls of the C++ backend's kind (`TrtllmCalls`) by way of another target.

    vocab: of the wrapped target. max_seq_len and max_draft_tokens: what the "engine" is built for.
    """

    def __init__(
        self,
        target: Target,
        vocab: int,
        *,
        max_seq_len: int,
        max_draft_tokens: int = 16,
        habits: Habits | None = None,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._target, self._vocab, self._sleep = target, vocab, sleep
        self._max_seq_len, self._max_draft_tokens = max_seq_len, max_draft_tokens
        self.habits, self._random = habits or Habits(), random.Random(seed)
        self._failed: Counter[bytes] = Counter()  # failures in a row by call
        self.done: Counter[str] = Counter()  # what it did how often, by the names of the habits

    def verify(self, calls: Sequence[TargetCall]) -> list[Verdict | Exception]:
        """See `Target.verify`; answers with TargetUnavailable where it fails on purpose."""
        self._maybe_stall()
        answers = [self._refusal(call) or self._failure(call) for call in calls]
        places = [place for place, answer in enumerate(answers) if answer is None]
        bent = [self._bend(calls[place]) for place in places]
        for place, call, answer in zip(places, bent, self._target.verify(bent), strict=True):
            answers[place] = answer if isinstance(answer, Exception) else self._end(call, answer)
        return answers

    def lay_out(self, ids: np.ndarray, new_ids: Sequence[int]) -> tuple[list[int], int]:
        """An output row for the prompt `ids` (n,) and how much of it counts; then padding.

        One id with nothing behind it is no prompt: nobody could tell it from an answer.
        """
        echo = self._does("echo") and (len(new_ids) or len(ids) > 1)
        row = [*ids.tolist(), *new_ids] if echo else list(new_ids)
        padding = self._random.randrange(1, 9) if self._does("pad") else 0
        return [*row, *(self._random.randrange(self._vocab) for _ in range(padding))], len(row)

    def _does(self, habit: str) -> bool:
        done = self._random.random() < getattr(self.habits, habit)
        self.done[habit] += done
        return done

    def _maybe_stall(self) -> None:
        if self.done["stall"] < self.habits.stalls and self._does("stall"):
            self._sleep(self.habits.stall_seconds)

    def _refusal(self, call: TargetCall) -> InvalidRequest | None:
        """What the C++ backend says to a call that it does not serve."""
        drafts, logits, width = (
            len(call.proposal.ids),
            call.proposal.logits,
            padded_vocab(self._vocab, AWQ_VOCAB_MULTIPLE),
        )
        needed = len(call.ids) + call.output_tokens + (drafts or self._max_draft_tokens)
        for broken, message in (
            (drafts and call.output_tokens != drafts + 1, "request_output_len is not drafts + 1"),
            (drafts > self._max_draft_tokens, f"{drafts} draft tokens; the limit is max_draft_len"),
            (needed > self._max_seq_len, f"{needed} tokens; max_seq_len is {self._max_seq_len}"),
            (len(call.end_ids or ()) > 1, "more than one end_id"),
            (call.min_tokens and not call.end_ids, "min_tokens without end_id"),
            (
                logits is not None and tuple(logits.shape) != (drafts, width),
                f"draft_logits is not {(drafts, width)}",
            ),
        ):
            if broken:
                return InvalidRequest(message)
        return None

    def _failure(self, call: TargetCall) -> TargetUnavailable | Verdict | None:
        """An error or an empty answer, as often in a row for one call as the habits allow."""
        if len(call.ids) and call.ids[0] == self.habits.doomed_id:
            return TargetUnavailable("out of order for good")
        key = hashlib.sha256(call.ids.tobytes() + call.seed.to_bytes(8)).digest()
        if self._failed[key] < self.habits.failures:
            self._failed[key] += 1
            if self._does("fail"):
                return TargetUnavailable("out of order for a moment")
            if self._does("answer_nothing"):
                return Verdict(())
        del self._failed[key]
        return None

    def _bend(self, call: TargetCall) -> TargetCall:
        """The call with all, some or none of its drafts; without any it decodes plainly."""
        proposal = call.proposal
        if not proposal.ids:
            return call
        if self._does("drop_all"):
            return replace(call, proposal=Proposal())
        if self._does("drop_some"):
            proposal = proposal.first(self._random.randrange(len(proposal.ids) + 1))
        if proposal.logits is not None:
            proposal = replace(proposal, logits=proposal.logits[:, : self._vocab])
        return replace(call, proposal=proposal)

    def _end(self, call: TargetCall, verdict: Verdict) -> Verdict:
        """The verdict, cut to a length drawn without looking at it, at least one token."""
        if not self._does("end_early"):
            return verdict
        return Verdict(verdict.ids[: self._random.randrange(1, call.output_tokens + 1)])


def load_hostile_target(directory: Path, max_sequences: int = 8) -> HostileTarget:
    """A pair's torch target behind `HostileTarget`; prompts that begin with `DOOMED_ID` fail."""
    pair, target = Pair.load(directory), load_target(directory, max_sequences)
    return HostileTarget(
        target,
        target.decoder.config.vocab_size,
        max_seq_len=pair.max_length + pair.max_draft_tokens,
        max_draft_tokens=pair.max_draft_tokens,
        habits=Habits(doomed_id=DOOMED_ID),
    )
