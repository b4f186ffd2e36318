"""What the loop, the draft and the target say to each other, in token ids only."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor


class InvalidRequest(ValueError):
    """Bad input; the message names the field and its limit."""


class DraftStateError(RuntimeError):
    """The draft does not hold this sequence at this length; send the prefix again."""


class DraftUnavailable(RuntimeError):
    """The draft does not answer now; decoding goes on without it."""


class TargetError(RuntimeError):
    """The target failed; the request cannot go on."""


class TargetUnavailable(TargetError):
    """The target failed in a way that may pass: the same call may be made again."""


@dataclass(frozen=True)
class Sampling:
    """Temperature (0: greedy), top-k (0: all, 1: greedy) and top-p (1: all)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequest(f"temperature is {self.temperature}; it must be 0 or more")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k is {self.top_k}; it must be 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax."""
        return self.temperature == 0 or self.top_k == 1

    @classmethod
    def from_request(
        cls, temperature: float | None, top_k: int | None, top_p: float | None
    ) -> Sampling:
        """Greedy where no field is given; a missing field beside a given one is neutral."""
        if temperature is None and top_k is None and top_p is None:
            return cls()
        return cls(
            1.0 if temperature is None else temperature,
            top_k or 0,
            1.0 if top_p is None else top_p,
        )


def derive_seed(seed: int, length: int, role: str) -> int:
    """The seed of one call: a replayed seed would make successive draws dependent."""
    text = f"{seed}/{length}/{role}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class DraftCall:
    """One call of the draft for one sequence.

    start_position: committed length before `new_ids` (0 starts the sequence anew). new_ids:
    newly committed ids. draft_tokens: γ, 0 to feed only. end: forget the sequence afterwards.
    """

    sequence_id: int
    start_position: int
    new_ids: Sequence[int]
    draft_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    return_logits: bool = False
    end: bool = False


@dataclass(frozen=True)
class Proposal:
    """Draft ids and, where asked for, the logits (γ, V) they were drawn from.

    The logits are those after temperature, top-k and top-p, masked tokens at -inf, so that their
    softmax is the draft's distribution.
    """

    ids: tuple[int, ...] = ()
    logits: Tensor | None = None

    def first(self, count: int) -> Proposal:
        """The first `count` draft ids with their logits; an empty proposal where there are none."""
        if count >= len(self.ids):
            return self
        kept = max(0, count)
        logits = None if self.logits is None or not kept else self.logits[:kept]
        return Proposal(self.ids[:kept], logits)


@dataclass(frozen=True)
class TargetCall:
    """One call of the target for one sequence: all committed ids, and a proposal to verify.

    With draft ids one verification step (1 ... γ + 1 tokens); without, plain decoding of up to
    `output_tokens`. Both end at an id of `end_ids` (None: the model's own), which is not allowed
    among the first `min_tokens` output tokens.
    """

    ids: np.ndarray  # (n,) int32
    output_tokens: int
    proposal: Proposal = field(default_factory=Proposal)
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    min_tokens: int = 0
    end_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Verdict:
    """The target's own next tokens, at least one: accepted drafts, then one token of its own."""

    ids: tuple[int, ...]


class Draft(ABC):
    """A draft engine: keeps sequences by id and proposes tokens for them."""

    @abstractmethod
    def propose(self, calls: Sequence[DraftCall]) -> list[Proposal | Exception]:
        """Serves a batch of calls, one answer each; one call's error leaves the others alone.

        Answers with DraftStateError where `start_position` is not the committed length it holds,
        and with InvalidRequest for bad fields. Modifies the sequences named.
        """


class Target(ABC):
    """A target engine: verifies proposals and decodes, stateless but for prefix reuse."""

    @abstractmethod
    def verify(self, calls: Sequence[TargetCall]) -> list[Verdict | Exception]:
        """Serves a batch of calls, one answer each; one call's error leaves the others alone."""
