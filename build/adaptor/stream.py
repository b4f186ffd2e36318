"""A whole sequence as one block, and its attention without an n x n mask.

In training and evaluation nothing is incremental: all raw tokens and all slots of a sequence go
through the decoder at once. Storage order does not matter to attention, so the slots follow the raw
tokens instead of standing between them; then nearly all keys that a query cannot see lie in whole
blocks that are skipped.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engines.decoder import Attend
from ...plugins.slot_attention.block import Block
from ...plugins.slot_attention.reference import lifetimes, visible
from ...plugins.slot_attention.rule import RAW, SLOT, MemoryRule

CHUNK = 256  # raw queries per chunk
BLOCK = 128  # queries and keys of a block that FlexAttention skips or computes


def stream_block(rule: MemoryRule, ids: Tensor) -> Block:
    """The block of B whole sequences of n raw tokens each: raw tokens first, then their slots.

    ids (B, n) int64. Slots are numbered as in the memory; position t is raw token t.
    """
    batch, length = ids.shape
    slots = torch.arange(rule.slots(length), device=ids.device)
    boundaries = rule.sink + (slots + 1) * rule.interval - 1
    times = torch.cat([torch.arange(length, device=ids.device), boundaries])
    kind = torch.full_like(times, RAW, dtype=torch.uint8)
    kind[length:] = SLOT
    return Block(
        rule,
        rows=tuple(range(batch)),
        fed=(0,) * batch,
        ids=torch.cat([ids, ids[:, boundaries]], 1),
        times=times.expand(batch, -1),
        kind=kind.expand(batch, -1),
        raw_counts=(length,) * batch,
    )


class ChunkedAttention:
    """Dense attention of a stream block, a chunk of queries at a time over the keys it can see.

    Works on every device and in every precision, with gradients. branch (N,) int64: positions see
    those of branch 0 and of their own only; None: all are of one branch.
    """

    def __init__(self, block: Block, branch: Tensor | None = None, chunk: int = CHUNK):
        rule, length = block.rule, block.raw_counts[0]
        self._times, total = block.times[0], block.times.shape[1]
        self._branch = torch.zeros_like(self._times) if branch is None else branch
        self._birth, self._expiry = lifetimes(rule, self._times, block.kind[0])
        slot_chunk = max(1, chunk // (rule.interval or 1))
        starts = [*range(0, length, chunk), *range(length, total, slot_chunk), total]
        self._parts = [self._part(a, b) for a, b in pairwise(starts)]

    def _part(self, start: int, stop: int) -> tuple[slice, Tensor, Tensor]:
        """Queries [start, stop), the keys that any of them sees, and who sees which."""
        mask = visible(self._times[start:stop, None], self._birth[None], self._expiry[None])
        mask &= (self._branch == 0) | (self._branch == self._branch[start:stop, None])
        mask[:, start:stop].fill_diagonal_(True)  # every position sees itself
        keys = mask.any(0).nonzero()[:, 0]
        return slice(start, stop), keys, mask[:, keys]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat(
            [
                masked_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], mask)
                for queries, keys, mask in self._parts
            ],
            2,
        )


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """(B, H, N, D) attention of q over k, v (B, Hkv, M, D) under mask (..., N, M) bool."""
    return _attention(q, k, v, attn_mask=mask)


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full causal attention: what the target, and a draft with full KV, computes."""
    return _attention(q, k, v, is_causal=True)


def _attention(q: Tensor, k: Tensor, v: Tensor, **how) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda:  # not all fused CUDA kernels know grouped heads
        group, grouped = q.shape[1] // k.shape[1], False
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **how)


class FlexAttention:
    """Compiled block-sparse attention of a stream block on a CUDA device, with gradients."""

    def __init__(self, block: Block):
        self.mask = sparse_mask(visibility_function(block), block.times[0])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _compiled_flex_attention()(q, k, v, block_mask=self.mask, enable_gqa=True)


def visibility_function(block: Block):
    """FlexAttention's mask function of a stream block: the visibility rule by position."""
    times = block.times[0].contiguous()
    birth, expiry = lifetimes(block.rule, times, block.kind[0])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(times[query], birth[key], expiry[key]) | (query == key)

    return sees


def sparse_mask(sees, times: Tensor):
    """FlexAttention's BlockMask of the mask function `sees` over positions like times (N,).

    The same as torch's create_block_mask, which makes the N x N mask on the way, but in memory that
    grows with N: one row of blocks at a time.
    """
    from torch.nn.attention.flex_attention import BlockMask

    total, places = len(times), torch.arange(len(times), device=times.device)
    padding, counts = -total % BLOCK, []
    for queries in places.split(BLOCK):
        mask = sees(None, None, queries[:, None], places)  # (up to BLOCK, N)
        counts.append(F.pad(mask.sum(0), (0, padding)).unflatten(0, (-1, BLOCK)).sum(1))
    seen = torch.stack(counts)  # (N / BLOCK, N / BLOCK): pairs that see each other
    whole = seen == BLOCK * BLOCK
    return BlockMask.from_kv_blocks(
        *_ordered((seen > 0) & ~whole),
        *_ordered(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(total, total),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks (Q, K) bool: how many each row has, (1, 1, Q), and their order, (1, 1, Q, K)."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None]


@cache
def _compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def stream_attention(block: Block) -> Attend:
    """The attention to train a stream block with on its device."""
    return FlexAttention(block) if block.times.is_cuda else ChunkedAttention(block)
