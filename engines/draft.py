"""The torch draft: proposes γ tokens per call from slot memory, window or full KV."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..plugins.slot_attention.rule import MemoryRule
from .acceptance import adjust, draw
from .adaptor import Adaptor
from .decoder import Decoder
from .draft_turns import DraftTurns, Turn
from .messages import DraftCall, Proposal

BATCHED_TOKENS = 17  # backlogs up to this many tokens are fed in one batched forward
Hidden = dict[int, Tensor]  # place of a turn -> (hidden,) after its last fed token


class TorchDraft(DraftTurns):
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
        if rule.interval and adaptor is None:
            raise ValueError("a rule with slots needs an adaptor; copy_adaptor makes one")
        memory = decoder.new_memory(rule, max_sequences, max_length)
        super().__init__(memory, decoder.config.vocab_size, max_draft_tokens, idle_seconds)
        self.decoder, self.adaptor, self.chunk = decoder, adaptor, chunk

    @torch.inference_mode()
    def propose(self, calls: Sequence[DraftCall]) -> list[Proposal | Exception]:
        """See `Draft.propose`. Backlogs longer than a chunk are fed in chunks."""
        return self._serve(calls, time.monotonic())

    def _run(self, turns: Sequence[Turn]) -> None:
        hidden: Hidden = {}
        self._catch_up(turns, hidden)
        self._speculate([turn for turn in turns if turn.draft_tokens], hidden)

    def _catch_up(self, turns: Sequence[Turn], hidden: Hidden) -> None:
        """Feeds every backlog: long ones alone in chunks, the rest of all in one forward."""
        for turn in turns:
            while len(turn.backlog) > BATCHED_TOKENS:
                piece, turn.backlog = turn.backlog[: self.chunk], turn.backlog[self.chunk :]
                self._feed([turn], [piece], hidden)
        rest = [turn for turn in turns if turn.backlog]
        if rest:
            self._feed(rest, [turn.backlog for turn in rest], hidden)

    def _speculate(self, turns: Sequence[Turn], hidden: Hidden) -> None:
        """Proposes token after token, all sequences in step; the last one is never fed."""
        while turns:
            self._choose(turns, torch.stack([hidden[turn.place] for turn in turns]))
            turns = [turn for turn in turns if len(turn.ids) < turn.draft_tokens]
            if turns:
                self._feed(turns, [turn.ids[-1:] for turn in turns], hidden)

    def _choose(self, turns: Sequence[Turn], hidden: Tensor) -> None:
        logits = self.decoder.logits(hidden)  # (B, V)
        best = logits.argmax(-1).tolist()
        for i, turn in enumerate(turns):
            if turn.call.sampling.greedy:
                turn.ids.append(best[i])
                continue
            adjusted = adjust(logits[i], turn.call.sampling)
            turn.ids.append(draw(adjusted, turn.random))
            if turn.call.return_logits:
                turn.logits.append(adjusted)

    def _feed(self, turns: Sequence[Turn], pieces: Sequence[Sequence[int]], hidden: Hidden) -> None:
        rows = [turn.row for turn in turns]
        found, block = self.decoder.feed(self.memory, rows, pieces, self.adaptor)
        self.fed_tokens += sum(block.raw_counts)
        for i, turn in enumerate(turns):
            hidden[turn.place] = found[i, block.host.last_raw[i]]
            turn.sequence.fed.extend(pieces[i])
