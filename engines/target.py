"""The torch target: verification and plain decoding over a pool of full KV caches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..plugins.slot_attention.rule import MemoryRule
from .acceptance import accept, forbid_end, generator, next_token
from .decoder import Decoder
from .messages import InvalidRequest, Target, TargetCall, Verdict


@dataclass
class _Cache:
    """One full KV cache of the pool and the ids it holds."""

    row: int
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    last_used: float = 0.0


@dataclass
class _Turn:
    """One call in progress."""

    place: int
    call: TargetCall
    cache: _Cache
    end_ids: tuple[int, ...]
    random: torch.Generator | None
    output: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether a plain call has its tokens."""
        ended = bool(self.output) and self.output[-1] in self.end_ids
        return ended or len(self.output) >= self.call.output_tokens


class TorchTarget(Target):
    """A decoder with full KV. Prefixes are reused by content, as TensorRT-LLM reuses blocks.

    A call continues the cache whose ids are the start of its own; otherwise it takes the least
    recently used cache and copies the longest common prefix of any cache into it.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_sequences: int = 8,
        max_length: int = 8192,
        max_draft_tokens: int = 16,
        chunk: int = 512,
    ):
        self.decoder, self.chunk, self.max_draft_tokens = decoder, chunk, max_draft_tokens
        self.memory = decoder.new_memory(MemoryRule.full(max_length), max_sequences, max_length)
        self.fed_tokens = 0
        self._caches = [_Cache(row) for row in range(max_sequences)]

    def verify(self, calls: Sequence[TargetCall]) -> list[Verdict | Exception]:
        """See `Target.verify`. Batches beyond the number of caches are served in parts."""
        size = len(self._caches)
        parts = (calls[start : start + size] for start in range(0, len(calls), size))
        return [answer for part in parts for answer in self._verify(part)]

    @torch.inference_mode()
    def _verify(self, calls: Sequence[TargetCall]) -> list[Verdict | Exception]:
        answers: list[Verdict | Exception] = [Verdict(())] * len(calls)
        turns: list[_Turn] = []
        for place, call in enumerate(calls):
            try:
                self._check(call)
            except InvalidRequest as error:
                answers[place] = error
                continue
            turns.append(self._begin(place, call, [turn.cache for turn in turns]))
        for turn in turns:
            self._prefill(turn)
        self._first_step(turns)
        self._decode([turn for turn in turns if not turn.call.proposal.ids])
        for turn in turns:
            turn.cache.last_used = time.monotonic()
            answers[turn.place] = Verdict(tuple(turn.output))
        return answers

    def _check(self, call: TargetCall) -> None:
        """Refuses bad calls before any work, naming field and limit."""
        draft_ids, logits = call.proposal.ids, call.proposal.logits
        vocab, longest = self.decoder.config.vocab_size, self.memory.max_length
        if not len(call.ids):
            raise InvalidRequest("input_ids is empty; give 1 or more ids")
        if call.output_tokens < 1:
            raise InvalidRequest(
                f"request_output_len is {call.output_tokens}; it must be 1 or more"
            )
        if len(draft_ids) > self.max_draft_tokens:
            raise InvalidRequest(
                f"draft_input_ids has {len(draft_ids)} ids; the limit is {self.max_draft_tokens}"
            )
        needed = len(call.ids) + (len(draft_ids) or call.output_tokens - 1)
        if needed > longest:
            raise InvalidRequest(f"input_ids needs {needed} positions; the limit is {longest}")
        for name, ids in (("input_ids", call.ids), ("draft_input_ids", draft_ids)):
            if len(ids) and not 0 <= min(ids) <= max(ids) < vocab:
                raise InvalidRequest(f"{name} has an id outside 0 to {vocab - 1}")
        end_ids = call.end_ids or ()
        if any(not 0 <= x < vocab for x in end_ids):
            raise InvalidRequest(f"end_id is {end_ids}; it must be 0 to {vocab - 1}")
        if logits is not None and tuple(logits.shape) != (len(draft_ids), vocab):
            raise InvalidRequest(
                f"draft_logits is {tuple(logits.shape)}; it must be {(len(draft_ids), vocab)}"
            )
        if logits is not None and not torch.isfinite(logits.amax(-1)).all():
            raise InvalidRequest("draft_logits has a row without a finite maximum")

    def _begin(self, place: int, call: TargetCall, taken: Sequence[_Cache]) -> _Turn:
        end_ids = self.decoder.config.eos_ids if call.end_ids is None else call.end_ids
        device = self.memory.k.device
        random = None if call.sampling.greedy else generator(call.seed, device)
        free = [cache for cache in self._caches if cache not in taken]
        return _Turn(place, call, self._lease(call.ids, free), end_ids, random)

    def _lease(self, ids: np.ndarray, free: Sequence[_Cache]) -> _Cache:
        """A cache holding the longest prefix of `ids` that any holds, but for the last id.

        A cache with nothing beyond such a prefix is continued; else the least recently used one
        is overwritten. Where another cache holds more of the prefix, that is copied.
        """
        usable = ids[:-1]
        held = {cache.row: common_prefix(cache.ids, usable) for cache in self._caches}
        whole = [
            cache
            for cache in free
            if 0 < len(cache.ids) <= len(ids)
            and held[cache.row] == min(len(cache.ids), len(usable))
        ]
        if whole:
            cache = max(whole, key=lambda c: held[c.row])
        else:
            cache = min(free, key=lambda c: c.last_used)
        donor = max(self._caches, key=lambda c: held[c.row])
        length = held[donor.row]
        if length > held[cache.row]:
            self.memory.copy_prefix(donor.row, cache.row, length)
            cache.ids = donor.ids[:length]
        return self._truncate(cache, length)

    def _truncate(self, cache: _Cache, length: int) -> _Cache:
        self.memory.rollback(cache.row, length)
        cache.ids = cache.ids[:length]
        return cache

    def _prefill(self, turn: _Turn) -> None:
        """Feeds all ids but the last `chunk` ones or fewer, in chunks."""
        ids, row = turn.call.ids, turn.cache.row
        done = len(turn.cache.ids)
        while len(ids) - done > self.max_draft_tokens + 1:
            piece = ids[done : min(done + self.chunk, len(ids) - 1)]
            self._feed([row], [piece])
            done += len(piece)
        turn.cache.ids = ids[:done]

    def _first_step(self, turns: Sequence[_Turn]) -> None:
        """One batched forward over the rest of all prefixes and their drafts."""
        if not turns:
            return
        new = [
            [*turn.call.ids[len(turn.cache.ids) :].tolist(), *turn.call.proposal.ids]
            for turn in turns
        ]
        hidden = self._feed([turn.cache.row for turn in turns], new)
        for i, turn in enumerate(turns):
            drafts = len(turn.call.proposal.ids)
            self._judge(turn, hidden[i, len(new[i]) - drafts - 1 : len(new[i])])

    def _judge(self, turn: _Turn, hidden: Tensor) -> None:
        """Accepts or rejects the drafts of one call; hidden is (γ + 1, hidden)."""
        call = turn.call
        logits = forbid_end(self.decoder.logits(hidden), turn.end_ids, call.min_tokens)
        draft_ids, draft_logits = call.proposal.ids, call.proposal.logits
        if draft_logits is not None:
            draft_logits = draft_logits.to(logits.device)
        tokens = accept(logits, draft_ids, draft_logits, call.sampling, turn.random)
        turn.output = until_end(tokens, turn.end_ids)
        kept = common_prefix(np.array(turn.output), np.array(draft_ids))
        turn.cache.ids = np.concatenate([call.ids, np.array(draft_ids[:kept], np.int32)])
        self.memory.rollback(turn.cache.row, len(turn.cache.ids))

    def _decode(self, turns: Sequence[_Turn]) -> None:
        """Plain decoding after the first token, all calls in step."""
        turns = [turn for turn in turns if not turn.finished]
        while turns:
            rows = [turn.cache.row for turn in turns]
            hidden = self._feed(rows, [turn.output[-1:] for turn in turns])
            logits = self.decoder.logits(hidden[:, 0])  # (B, V)
            for turn, row_logits in zip(turns, logits, strict=True):
                self._append(turn, row_logits)
            turns = [turn for turn in turns if not turn.finished]

    def _append(self, turn: _Turn, logits: Tensor) -> None:
        turn.cache.ids = np.append(turn.cache.ids, np.int32(turn.output[-1]))
        still_forbidden = turn.call.min_tokens - len(turn.output)
        logits = forbid_end(logits[None], turn.end_ids, still_forbidden)[0]
        turn.output.append(next_token(logits, turn.call.sampling, turn.random))

    def _feed(self, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> Tensor:
        hidden, block = self.decoder.feed(self.memory, rows, new_ids)
        self.fed_tokens += sum(block.raw_counts)
        return hidden


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two id arrays."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def until_end(ids: Sequence[int], end_ids: Sequence[int]) -> list[int]:
    """`ids` up to and including the first end id."""
    for place, token in enumerate(ids):
        if token in end_ids:
            return list(ids[: place + 1])
    return list(ids)
