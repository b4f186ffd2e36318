"""Samples whose prompts begin alike, such as two questions about one document, as one stream.

What a memory holds depends only on the tokens before, so the common beginning is computed once and
every sample's own rest continues it, unseen by the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from ...plugins.slot_attention.block import Block
from ...plugins.slot_attention.rule import RAW, MemoryRule
from .samples import Sample
from .stream import stream_block

LARGEST = 8  # samples in one stream


@dataclass(frozen=True)
class Family:
    """Samples of one prefix length, and how many tokens all of them begin with."""

    samples: tuple[Sample, ...]
    shared: int

    @classmethod
    def alone(cls, sample: Sample) -> Family:
        """A sample by itself."""
        return cls((sample,), len(sample.ids))

    def joined(self, sample: Sample) -> Family | None:
        """The family with one more sample; None if too little of its prompt would be shared."""
        shared = min(self.shared, _alike(self.samples[0].ids, sample.ids))
        if len(self.samples) == LARGEST or shared < len(sample.prompt) // 2:
            return None
        return Family((*self.samples, sample), shared)


def families(samples: Sequence[Sample]) -> list[Family]:
    """The samples in families, in the order of each one's first sample."""
    found: list[Family] = []
    for sample in samples:
        for place, family in enumerate(found):
            if (joined := family.joined(sample)) is not None:
                found[place] = joined
                break
        else:
            found.append(Family.alone(sample))
    return found


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@dataclass(frozen=True)
class FamilyStream:
    """All positions of a family as one block: raw tokens first, then slots.

    branch (N,) int64: 0 for what all samples share, i + 1 for the rest of sample i; a position sees
    its own branch and branch 0. places: of each sample's raw tokens, in order.
    """

    block: Block
    branch: Tensor
    places: tuple[Tensor, ...]


def family_stream(rule: MemoryRule, family: Family, device: torch.device | str) -> FamilyStream:
    """The stream of a family under a memory rule."""
    ids = [torch.tensor([sample.ids], device=device) for sample in family.samples]
    blocks = [stream_block(rule, sequence) for sequence in ids]
    parts = [(blocks[0], blocks[0].times[0] < family.shared)]
    parts += [(block, block.times[0] >= family.shared) for block in blocks]
    sizes = torch.tensor([int(kept.sum()) for _, kept in parts], device=device)
    kind = torch.cat([block.kind[0, kept] for block, kept in parts])
    order = kind.argsort(stable=True)  # raw tokens first
    branch = torch.arange(len(parts), device=device).repeat_interleave(sizes)[order]
    block = Block(
        rule,
        rows=(0,),
        fed=(0,),
        ids=torch.cat([block.ids[0, kept] for block, kept in parts])[order][None],
        times=torch.cat([block.times[0, kept] for block, kept in parts])[order][None],
        kind=kind[order][None],
        raw_counts=(int((kind == RAW).sum()),),
    )
    raw = block.kind[0] == RAW
    places = [
        (raw & ((branch == 0) | (branch == number))).nonzero()[:, 0]
        for number in range(1, len(parts))
    ]
    return FamilyStream(block, branch, tuple(places))
