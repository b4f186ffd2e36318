"""Drafts for the requests of a batch that somebody else schedules: a draft sequence for each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .messages import Draft, DraftCall, DraftStateError, Proposal
from .pair import DraftMode, Pair, PairError, load_draft
from .target import until_end

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrafterSettings:
    """Which draft, and how much it does. max_draft_len: γ; max_sequences: requests it holds.

    prefill_chunks: chunks of its prompt that a request may feed in one step, so that the others
    of the batch wait no longer than that for theirs.
    """

    pair: Path
    max_draft_len: int
    mode: DraftMode = DraftMode.SLOTS
    max_sequences: int = 8
    prefill_chunks: int = 8

    def __post_init__(self):
        for name in ("max_draft_len", "max_sequences", "prefill_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if DraftMode(self.mode) == DraftMode.NONE:
            raise ValueError("mode is 'none'; a drafter needs slots, full or window")


@dataclass(frozen=True)
class Wanted:
    """A request's committed ids (n,) and how many drafts it can use; end_id: nothing after it."""

    request_id: int
    ids: list[int]
    draft_tokens: int
    end_id: int | None = None


@dataclass
class _Held:
    """What the draft has of a request, and what it proposed last for exactly these ids."""

    ids: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


class RequestDrafts:
    """Keeps a sequence of the pair's draft for each request, and proposes for a batch of them.

    Drafts depend on the requests and their ids only: they are greedy and nothing depends on the
    clock, so that all ranks of a tensor-parallel target get the same ones. Pickling takes the
    settings along; each process opens the draft when it is first asked. Raises PairError for a
    pair that does not allow `max_draft_len`.
    """

    def __init__(self, settings: DrafterSettings):
        pair = Pair.load(settings.pair)
        if settings.max_draft_len > pair.max_draft_tokens:
            raise PairError(
                f"max_draft_len is {settings.max_draft_len}; the pair {settings.pair} allows "
                f"{pair.max_draft_tokens} (max_draft_tokens)"
            )
        self.settings, self._chunk = settings, pair.chunk
        self._draft: Draft | None = None
        self._held: dict[int, _Held] = {}  # the one used last is last
        self._failed: set[int] = set()

    def __reduce__(self):
        return RequestDrafts, (self.settings,)

    @property
    def draft(self) -> Draft:
        """The pair's draft, opened at the first use in this process."""
        if self._draft is None:
            settings = self.settings
            self._draft = load_draft(settings.pair, settings.mode, settings.max_sequences)
        return self._draft

    @property
    def held(self) -> tuple[int, ...]:
        """Ids of the requests whose sequences the draft holds."""
        return tuple(self._held)

    def propose(self, batch: Sequence[Wanted]) -> dict[int, list[int]]:
        """Draft ids by request id; no entry where the draft has none (yet).

        A request has none while its prompt is being fed, beyond `max_sequences` requests, and from
        an error of its own on. Modifies the sequences of the batch.
        """
        found: dict[int, list[int]] = {}
        behind = self._admit(sorted(batch, key=lambda wanted: wanted.request_id))
        for _ in range(self.settings.prefill_chunks):
            behind = self._feed(behind, found)
            if not behind:
                break
        return found

    def forget(self, request_id: int) -> None:
        """Frees what is held for a request; unknown ids are no error."""
        self._failed.discard(request_id)
        if self._held.pop(request_id, None) is not None:
            self.draft.propose([DraftCall(request_id, 0, (), end=True)])

    def close(self) -> None:
        """Lets the draft and all sequences go; the next use opens it again."""
        self._draft = None
        self._held.clear()
        self._failed.clear()

    def _admit(self, batch: Sequence[Wanted]) -> list[Wanted]:
        """The requests of the batch that have a sequence or get one now."""
        batch = [w for w in batch if w.draft_tokens > 0 and w.request_id not in self._failed]
        named = {wanted.request_id for wanted in batch}
        admitted = []
        for wanted in batch:
            held = self._held.pop(wanted.request_id, None)
            if held is None and not self._make_room(named):
                continue
            if held is None or wanted.ids[: len(held.ids)] != held.ids:
                held = _Held()  # a new request, or another text under the same id
            self._held[wanted.request_id] = held
            admitted.append(wanted)
        return admitted

    def _make_room(self, named: set[int]) -> bool:
        """Whether another sequence fits; forgets the one unused longest and not in the batch."""
        if len(self._held) < self.settings.max_sequences:
            return True
        idle = next((number for number in self._held if number not in named), None)
        if idle is not None:
            self.forget(idle)
        return idle is not None

    def _feed(self, batch: Sequence[Wanted], found: dict[int, list[int]]) -> list[Wanted]:
        """One call for each request, the last of it with γ; returns those with ids left to feed."""
        calls, asked = [], []
        for wanted in batch:
            held = self._held[wanted.request_id]
            if len(held.ids) == len(wanted.ids):  # the step before had no effect
                found[wanted.request_id] = held.drafts[: wanted.draft_tokens]
                continue
            calls.append(self._call(wanted, held))
            asked.append(wanted)
        answers = self._ask(calls)
        for wanted, call, answer in zip(asked, calls, answers, strict=True):
            if isinstance(answer, Exception):
                self._note_failure(wanted.request_id, call, answer)
                continue
            held = self._held[wanted.request_id]
            held.ids = wanted.ids[: call.start_position + len(call.new_ids)]
            if call.draft_tokens:
                ends = () if wanted.end_id is None else (wanted.end_id,)
                held.drafts = until_end(answer.ids, ends)
                found[wanted.request_id] = list(held.drafts)
        return [w for w in asked if w.request_id in self._held and w.request_id not in found]

    def _call(self, wanted: Wanted, held: _Held) -> DraftCall:
        start = len(held.ids)
        new_ids = wanted.ids[start : start + self._chunk]
        last = start + len(new_ids) == len(wanted.ids)
        return DraftCall(wanted.request_id, start, new_ids, wanted.draft_tokens if last else 0)

    def _ask(self, calls: Sequence[DraftCall]) -> Sequence[Proposal | Exception]:
        if not calls:
            return []
        draft = self.draft
        try:
            return draft.propose(calls)
        except RuntimeError as error:  # of the device: nothing of this batch can be trusted
            return [error] * len(calls)

    def _note_failure(self, request_id: int, call: DraftCall, error: Exception) -> None:
        """A lost state is fed again from the start; anything else ends drafting for the request."""
        if isinstance(error, DraftStateError) and call.start_position > 0:
            self._held[request_id] = _Held()
            return
        LOG.warning("request %s goes on without drafts: %s", request_id, error)
        self.forget(request_id)
        self._failed.add(request_id)
