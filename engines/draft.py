"""The torch draft: proposes γ tokens per call from slot memory, window or full KV."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..plugins.slot_attention.rule import MemoryRule
from .acceptance import adjust, draw, generator
from .adaptor import Adaptor
from .decoder import Decoder
from .memory import CapacityError
from .messages import Draft, DraftCall, DraftStateError, InvalidRequest, Proposal

BATCHED_TOKENS = 17  # backlogs up to this many tokens are fed in one batched forward


@dataclass
class _Sequence:
    """A sequence the draft holds: what it has fed, and how much of that is committed."""

    row: int
    fed: list[int] = field(default_factory=list)
    committed: int = 0
    last_used: float = 0.0


@dataclass
class _Turn:
    """One call in progress."""

    place: int
    call: DraftCall
    sequence: _Sequence
    backlog: list[int]
    draft_tokens: int
    random: torch.Generator | None
    hidden: Tensor | None = None  # (hidden,) after the last fed token
    ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class TorchDraft(Draft):
    """A decoder over `SlotMemory` as draft; the memory rule decides the mode."""

    def __init__(
        self,
        decoder: Decoder,
        rule: MemoryRule,
        adaptor: Adaptor | None = None,
        *,
        max_sequences: int = 8,
        max_length: int = 8192,
        max_draft_tokens: int = 16,
        chunk: int = 512,
        idle_seconds: float = 600.0,
    ):
        if rule.rollback and max_draft_tokens > rule.rollback:
            raise ValueError(
                f"max_draft_tokens is {max_draft_tokens}; the rollback window of the memory "
                f"allows {rule.rollback}"
            )
        if rule.interval and adaptor is None:
            raise ValueError("a rule with slots needs an adaptor; copy_adaptor makes one")
        self.decoder, self.adaptor = decoder, adaptor
        self.max_draft_tokens, self.chunk = max_draft_tokens, chunk
        self.idle_seconds = idle_seconds
        self.memory = decoder.new_memory(rule, max_sequences, max_length)
        self.fed_tokens = 0
        self._sequences: dict[int, _Sequence] = {}
        self._free_rows = list(range(max_sequences))

    @torch.inference_mode()
    def propose(self, calls: Sequence[DraftCall]) -> list[Proposal | Exception]:
        """See `Draft.propose`. Backlogs longer than a chunk are fed in chunks."""
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
                turns.append(self._begin(place, call))
            except (InvalidRequest, DraftStateError, CapacityError) as error:
                answers[place] = error
        self._catch_up(turns)
        self._speculate([turn for turn in turns if turn.draft_tokens])
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

    def _begin(self, place: int, call: DraftCall) -> _Turn:
        """Checks a call, rolls its sequence back to the kept length, and says what to feed."""
        if not 0 <= call.draft_tokens <= self.max_draft_tokens:
            raise InvalidRequest(
                f"num_draft_tokens is {call.draft_tokens}; this draft allows 0 to "
                f"{self.max_draft_tokens}"
            )
        if not call.new_ids:
            raise InvalidRequest("new_ids is empty; give 1 or more ids, or end the sequence")
        self._check_ids(call.new_ids)
        committed = call.start_position + len(call.new_ids)
        if committed > self.memory.max_length:
            raise CapacityError(
                f"sequence length {committed} exceeds max_length {self.memory.max_length}"
            )
        sequence = self._find(call)
        kept = self._kept_length(sequence, call)
        if not self.memory.can_rollback(sequence.row, kept):
            raise DraftStateError(f"sequence {call.sequence_id} cannot go back to {kept} tokens")
        self.memory.rollback(sequence.row, kept)
        sequence.fed = sequence.fed[:kept]
        sequence.committed, sequence.last_used = committed, time.monotonic()
        sampled = call.draft_tokens and not call.sampling.greedy
        return _Turn(
            place,
            call,
            sequence,
            list(call.new_ids[kept - call.start_position :]),
            min(call.draft_tokens, self.memory.max_length - committed + 1),
            generator(call.seed, self.memory.k.device) if sampled else None,
        )

    def _check_ids(self, ids: Sequence[int]) -> None:
        vocab = self.decoder.config.vocab_size
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise InvalidRequest(f"new_ids has an id outside 0 to {vocab - 1}")

    def _find(self, call: DraftCall) -> _Sequence:
        """The sequence of a call; a start at 0 begins it anew."""
        if call.start_position == 0:
            self._forget(call.sequence_id)
            return self._open(call.sequence_id)
        sequence = self._sequences.get(call.sequence_id)
        if sequence is None:
            raise DraftStateError(f"sequence {call.sequence_id} is unknown to the draft")
        if sequence.committed != call.start_position:
            raise DraftStateError(
                f"sequence {call.sequence_id} has {sequence.committed} committed tokens, "
                f"not {call.start_position}"
            )
        return sequence

    def _open(self, sequence_id: int) -> _Sequence:
        if not self._free_rows:
            self._expire()
        if not self._free_rows:
            raise DraftStateError(
                f"all {len(self.memory.fed)} sequences of the draft are in use (max_sequences)"
            )
        row = self._free_rows.pop()
        self.memory.clear(row)
        self._sequences[sequence_id] = _Sequence(row)
        return self._sequences[sequence_id]

    def _expire(self) -> None:
        """Forgets sequences that nobody has called for a while."""
        oldest = time.monotonic() - self.idle_seconds
        for sequence_id, sequence in list(self._sequences.items()):
            if sequence.last_used < oldest:
                self._forget(sequence_id)

    def _forget(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self.memory.clear(sequence.row)
            self._free_rows.append(sequence.row)

    def _kept_length(self, sequence: _Sequence, call: DraftCall) -> int:
        """Fed tokens that are committed too, leaving one new id to feed for its logits."""
        kept = call.start_position
        own = sequence.fed[kept:]
        for mine, theirs in zip(own, call.new_ids[:-1], strict=False):
            if mine != theirs:
                break
            kept += 1
        return kept

    def _catch_up(self, turns: Sequence[_Turn]) -> None:
        """Feeds every backlog: long ones alone in chunks, the rest of all in one forward."""
        for turn in turns:
            while len(turn.backlog) > BATCHED_TOKENS:
                piece, turn.backlog = turn.backlog[: self.chunk], turn.backlog[self.chunk :]
                self._feed([turn], [piece])
        rest = [turn for turn in turns if turn.backlog]
        if rest:
            self._feed(rest, [turn.backlog for turn in rest])

    def _speculate(self, turns: Sequence[_Turn]) -> None:
        """Proposes token after token, all sequences in step; the last one is never fed."""
        while turns:
            self._choose(turns)
            turns = [turn for turn in turns if len(turn.ids) < turn.draft_tokens]
            if turns:
                self._feed(turns, [turn.ids[-1:] for turn in turns])

    def _choose(self, turns: Sequence[_Turn]) -> None:
        logits = self.decoder.logits(torch.stack([turn.hidden for turn in turns]))  # (B, V)
        best = logits.argmax(-1).tolist()
        for i, turn in enumerate(turns):
            if turn.call.sampling.greedy:
                turn.ids.append(best[i])
                continue
            adjusted = adjust(logits[i], turn.call.sampling)
            turn.ids.append(draw(adjusted, turn.random))
            if turn.call.return_logits:
                turn.logits.append(adjusted)

    def _feed(self, turns: Sequence[_Turn], pieces: Sequence[Sequence[int]]) -> None:
        rows = [turn.sequence.row for turn in turns]
        hidden, block = self.decoder.feed(self.memory, rows, pieces, self.adaptor)
        self.fed_tokens += sum(block.raw_counts)
        for i, turn in enumerate(turns):
            turn.hidden = hidden[i, block.host.last_raw[i]]
            turn.sequence.fed.extend(pieces[i])
