"""Tok./Iter of any draft memory from one masked forward, exact for greedy decoding.

Verification keeps a drafted token iff it is the target's own greedy token, and a draft's memory
depends only on the tokens before it. So one forward of the draft over prompt + the target's greedy
answer, under the memory's mask, tells for every position whether the draft would have been right;
counting iterations along these hits gives what the running loop counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ...engines.adaptor import Adaptor
from ...engines.decoder import Attend, Decoder
from ...plugins.slot_attention.rule import MemoryRule
from .family import Family, FamilyStream, family_stream
from .journal import Journal
from .losses import divergence
from .samples import Sample
from .snapkv import SnapKV
from .stream import ChunkedAttention, causal_attention

DISTANCE = 512  # width of a bucket of distances beyond the window, in tokens
STRIDE = 8  # of the prompt positions whose distance is told
SLICE = 1024  # positions whose logits exist at once


@dataclass(frozen=True)
class DraftMemory:
    """What a draft keeps: a memory rule, with an adaptor if it has slots; or SnapKV's choice."""

    name: str
    rule: MemoryRule | None = None
    adaptor: Adaptor | None = None
    snapkv: SnapKV | None = None

    @cached_property
    def digest(self) -> str:
        """Hex digest of all but the name: rule, weights of the adaptor, what SnapKV may keep."""
        parts = (self.rule, self.adaptor and self.adaptor.config, self.snapkv)
        settings = [None if part is None else asdict(part) for part in parts]
        digest = hashlib.sha256(json.dumps(settings).encode())
        for weight in () if self.adaptor is None else self.adaptor.state_dict().values():
            digest.update(weight.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def entries(self, length: int) -> int:
        """Entries per layer that hold the memory of `length` tokens, without the rollback ring."""
        if self.snapkv is not None:
            return min(length, self.snapkv.capacity)
        rule = self.rule
        if rule.window == 0:
            return length
        return min(length, rule.sink + rule.window) + rule.slots(length)

    def stream(self, family: Family, device: torch.device) -> tuple[FamilyStream, Attend]:
        """A family as one stream, and the attention that this memory allows.

        SnapKV chooses by the prompt, so it takes one sample at a time.
        """
        if self.snapkv is not None:
            [sample] = family.samples
            full = MemoryRule.full(len(sample.ids))
            attention = self.snapkv.attention(len(sample.prompt))
            return family_stream(full, family, device), attention
        stream = family_stream(self.rule, family, device)
        if self.rule.window == 0 and len(family.samples) == 1:
            return stream, causal_attention
        return stream, ChunkedAttention(stream.block, stream.branch)


@dataclass(frozen=True)
class Outcome:
    """What a draft memory does on one sample.

    hits: per answer token, whether the draft's greedy token is it. distance: for buckets of tokens
    beyond the window, (positions, summed NLL, summed KL to full KV), nats.
    """

    hits: tuple[bool, ...]
    distance: dict[int, tuple[int, float, float]] = field(default_factory=dict)

    def as_dict(self) -> dict:
        """JSON-ready; hits as a text of 0 and 1."""
        hits = "".join("01"[hit] for hit in self.hits)
        return {"hits": hits, "distance": list(self.distance.items())}

    @classmethod
    def of(cls, row: dict) -> Outcome:
        """The outcome that `as_dict` described."""
        distance = {bucket: tuple(sums) for bucket, sums in row["distance"]}
        return cls(tuple(hit == "1" for hit in row["hits"]), distance)


class Evaluator:
    """Runs draft memories over samples whose answers are the target's own greedy tokens."""

    def __init__(self, draft: Decoder, distances: bool = True):
        self.draft, self.distances = draft, distances
        self.device = draft.embed_tokens.weight.device

    @torch.inference_mode()
    def run(self, family: Family, memories: Sequence[DraftMemory]) -> list[dict[str, Outcome]]:
        """Outcome of every memory, by name, on each sample of a family."""
        beyond = {m.name for m in memories if self.distances and m.rule and m.rule.window}
        full = self._hidden(DraftMemory("", self._full), family) if beyond else None
        outcomes: list[dict[str, Outcome]] = [{} for _ in family.samples]
        for memory in memories:
            hidden = self._hidden(memory, family)
            for number, sample in enumerate(family.samples):
                distance = {}
                if memory.name in beyond:
                    states = hidden[number], full[number]
                    distance = self._by_distance(memory.rule, sample, *states)
                outcome = Outcome(self._hits(sample, hidden[number]), distance)
                outcomes[number][memory.name] = outcome
        return outcomes

    @property
    def _full(self) -> MemoryRule:
        return MemoryRule.full(self.draft.config.max_positions)

    def _hidden(self, memory: DraftMemory, family: Family) -> list[Tensor]:
        """Each sample's hidden states, (n, hidden)."""
        if memory.snapkv is not None and len(family.samples) > 1:
            return [self._hidden(memory, Family.alone(sample))[0] for sample in family.samples]
        stream, attend = memory.stream(family, self.device)
        hidden = self.draft.run(stream.block, attend, memory.adaptor)[0][0]
        return [hidden[places] for places in stream.places]

    def _hits(self, sample: Sample, hidden: Tensor) -> tuple[bool, ...]:
        answer = torch.tensor(sample.answer, device=self.device)
        first = len(sample.prompt) - 1  # predicts the answer's first token
        guesses = self.draft.logits(hidden[first : first + len(answer)]).argmax(-1)
        return tuple((guesses == answer).tolist())

    def _by_distance(self, rule: MemoryRule, sample: Sample, hidden: Tensor, full: Tensor) -> dict:
        ids = torch.tensor(sample.ids, device=self.device)
        places = torch.arange(len(ids) - 1, device=self.device)[rule.sink + rule.window :: STRIDE]
        sums: dict[int, tuple[int, float, float]] = {}
        for part in places.split(SLICE):
            log_p = self.draft.logits(hidden[part]).log_softmax(-1)
            nll = -log_p.gather(1, ids[part + 1, None])[:, 0]
            kl = divergence(self.draft.logits(full[part]), log_p)
            bucket = (part - rule.sink - rule.window) // DISTANCE * DISTANCE
            for value in bucket.unique().tolist():
                at = bucket == value
                count, old_nll, old_kl = sums.get(value, (0, 0.0, 0.0))
                sums[value] = (
                    count + int(at.sum()),
                    old_nll + nll[at].sum().item(),
                    old_kl + kl[at].sum().item(),
                )
        return sums


class KeptOutcomes:
    """An evaluator that writes outcomes to a journal and does not make those in it again."""

    def __init__(self, evaluator: Evaluator, journal: Journal):
        self.evaluator, self.journal = evaluator, journal
        self._known = {
            (row["sample"], memory): outcome
            for row in journal.rows
            for memory, outcome in row["outcomes"].items()
        }

    def run(self, family: Family, memories: Sequence[DraftMemory]) -> list[dict[str, Outcome]]:
        """Outcome of every memory, by name, on each sample of a family."""
        for samples, lacking in self._lacking(family, memories):
            part = Family(samples, family.shared)
            for sample, found in zip(samples, self.evaluator.run(part, lacking), strict=True):
                self._keep(sample, {m.digest: found[m.name].as_dict() for m in lacking})
        return [
            {m.name: Outcome.of(self._known[sample.digest, m.digest]) for m in memories}
            for sample in family.samples
        ]

    def _lacking(
        self, family: Family, memories: Sequence[DraftMemory]
    ) -> list[tuple[tuple[Sample, ...], list[DraftMemory]]]:
        """Samples of the family with the memories whose outcomes they all lack."""
        groups: dict[tuple[Sample, ...], list[DraftMemory]] = {}
        for memory in memories:
            at = memory.digest
            lacking = tuple(s for s in family.samples if (s.digest, at) not in self._known)
            groups.setdefault(lacking, []).append(memory)
        return [(samples, lacking) for samples, lacking in groups.items() if samples]

    def _keep(self, sample: Sample, outcomes: dict[str, dict]) -> None:
        self.journal.append({"sample": sample.digest, "outcomes": outcomes})
        for memory, outcome in outcomes.items():
            self._known[sample.digest, memory] = outcome
