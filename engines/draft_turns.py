"""What every draft does around its forward passes: calls in, sequences kept, answers out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .acceptance import generator
from .memory import CapacityError, SlotMemory
from .messages import Draft, DraftCall, DraftStateError, InvalidRequest, Proposal


@dataclass
class HeldSequence:
    """A sequence the draft holds: what it has fed, and how much of that is committed."""

    row: int
    fed: list[int] = field(default_factory=list)
    committed: int = 0
    last_used: float = 0.0


@dataclass
class Turn:
    """One call in progress. ids, logits: the proposal so far; logits (V,) after adjustment."""

    place: int
    call: DraftCall
    sequence: HeldSequence
    backlog: list[int]
    draft_tokens: int
    random: torch.Generator | None
    ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def row(self) -> int:
        """The memory row of its sequence."""
        return self.sequence.row


class DraftTurns(Draft):
    """A draft over slot memory, all but its forward passes."""

    def __init__(
        self, memory: SlotMemory, vocab_size: int, max_draft_tokens: int, idle_seconds: float
    ):
        rollback = memory.rule.rollback
        if rollback and max_draft_tokens > rollback:
            raise ValueError(
                f"max_draft_tokens is {max_draft_tokens}; the rollback window of the memory "
                f"allows {rollback}"
            )
        self.memory, self.vocab_size = memory, vocab_size
        self.max_draft_tokens, self.idle_seconds = max_draft_tokens, idle_seconds
        self.fed_tokens = 0
        self._sequences: dict[int, HeldSequence] = {}
        self._free_rows = list(range(len(memory.fed)))

    @abstractmethod
    def _run(self, turns: Sequence[Turn]) -> None:
        """Feeds every backlog, then proposes `draft_tokens` ids for each turn.

        Fills `ids` and, where a call asks for them, `logits`; the last proposed id is not fed.
        Modifies the memory, the turns, what their sequences have fed, and `fed_tokens`.
        """

    def _serve(self, calls: Sequence[DraftCall], now: float) -> list[Proposal | Exception]:
        """See `Draft.propose`. now: seconds of a monotonic clock."""
        answers: list[Proposal | Exception] = [Proposal()] * len(calls)
        turns = []
        seen: set[int] = set()
        for place, call in enumerate(calls):
            if call.end and not call.new_ids:
                continue
            try:
                if call.sequence_id in seen:
                    raise InvalidRequest(f"sequence_id {call.sequence_id} is twice in this batch")
                seen.add(call.sequence_id)
                turns.append(self._begin(place, call, now))
            except (InvalidRequest, DraftStateError, CapacityError) as error:
                answers[place] = error
        self._run(turns)
        for turn in turns:
            logits = torch.stack(turn.logits) if turn.logits else None  # (γ, V)
            answers[turn.place] = Proposal(tuple(turn.ids), logits)
        for call in calls:
            if call.end:
                self._forget(call.sequence_id)
        return answers

    def holds(self, sequence_id: int) -> bool:
        """Whether the draft has state for this id."""
        return sequence_id in self._sequences

    def _begin(self, place: int, call: DraftCall, now: float) -> Turn:
        """Checks a call, rolls its sequence back to the kept length, and says what to feed."""
        self._check(call)
        committed = call.start_position + len(call.new_ids)
        sequence = self._find(call, now)
        kept = self._kept_length(sequence, call)
        if not self.memory.can_rollback(sequence.row, kept):
            raise DraftStateError(f"sequence {call.sequence_id} cannot go back to {kept} tokens")
        self.memory.rollback(sequence.row, kept)
        sequence.fed = sequence.fed[:kept]
        sequence.committed, sequence.last_used = committed, now
        sampled = call.draft_tokens and not call.sampling.greedy
        return Turn(
            place,
            call,
            sequence,
            list(call.new_ids[kept - call.start_position :]),
            min(call.draft_tokens, self.memory.max_length - committed + 1),
            generator(call.seed, self.memory.k.device) if sampled else None,
        )

    def _check(self, call: DraftCall) -> None:
        """Refuses bad fields of a call, before its sequence is looked for."""
        if not 0 <= call.draft_tokens <= self.max_draft_tokens:
            raise InvalidRequest(
                f"num_draft_tokens is {call.draft_tokens}; this draft allows 0 to "
                f"{self.max_draft_tokens}"
            )
        if not call.new_ids:
            raise InvalidRequest("new_ids is empty; give 1 or more ids, or end the sequence")
        if not 0 <= min(call.new_ids) <= max(call.new_ids) < self.vocab_size:
            raise InvalidRequest(f"new_ids has an id outside 0 to {self.vocab_size - 1}")
        committed = call.start_position + len(call.new_ids)
        if committed > self.memory.max_length:
            raise CapacityError(
                f"sequence length {committed} exceeds max_length {self.memory.max_length}"
            )

    def _find(self, call: DraftCall, now: float) -> HeldSequence:
        """The sequence of a call; a start at 0 begins it anew."""
        if call.start_position == 0:
            self._forget(call.sequence_id)
            return self._open(call.sequence_id, now)
        sequence = self._sequences.get(call.sequence_id)
        if sequence is None:
            raise DraftStateError(f"sequence {call.sequence_id} is unknown to the draft")
        if sequence.committed != call.start_position:
            raise DraftStateError(
                f"sequence {call.sequence_id} has {sequence.committed} committed tokens, "
                f"not {call.start_position}"
            )
        return sequence

    def _open(self, sequence_id: int, now: float) -> HeldSequence:
        if not self._free_rows:
            self._expire(now)
        if not self._free_rows:
            raise DraftStateError(
                f"all {len(self.memory.fed)} sequences of the draft are in use (max_sequences)"
            )
        row = self._free_rows.pop()
        self.memory.clear(row)
        self._sequences[sequence_id] = HeldSequence(row)
        return self._sequences[sequence_id]

    def _expire(self, now: float) -> None:
        """Forgets sequences that nobody has called for a while."""
        oldest = now - self.idle_seconds
        for sequence_id, sequence in list(self._sequences.items()):
            if sequence.last_used < oldest:
                self._forget(sequence_id)

    def _forget(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self.memory.clear(sequence.row)
            self._free_rows.append(sequence.row)

    def _kept_length(self, sequence: HeldSequence, call: DraftCall) -> int:
        """Fed tokens that are committed too, leaving one new id to feed for its logits."""
        kept = call.start_position
        own = sequence.fed[kept:]
        for mine, theirs in zip(own, call.new_ids[:-1], strict=False):
            if mine != theirs:
                break
            kept += 1
        return kept
