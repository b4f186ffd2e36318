"""SnapKV as the memory of a draft (Li et al., arXiv 2404.14469).

The last tokens of the prompt vote: their attention to each earlier token, smoothed over
neighbours, decides which entries of the prompt every key head keeps. What is generated is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engines.decoder import Attend
from .stream import causal_attention, masked_attention


@dataclass(frozen=True)
class SnapKV:
    """Entries kept per key head, voting tokens, and the width of the smoothing window."""

    capacity: int = 4096
    observed: int = 32
    kernel: int = 7

    def __post_init__(self):
        if self.capacity <= self.observed:
            raise ValueError(
                f"capacity is {self.capacity}; it must exceed the {self.observed} voting tokens"
            )

    def select(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, Hkv, P) bool: the prompt entries kept, from q (B, H, P, D) and k (B, Hkv, P, D).

        Query heads that share a key head vote together. The voters themselves are always kept.
        """
        batch, kv_heads, length, dim = k.shape
        kept = torch.ones((batch, kv_heads, length), dtype=torch.bool, device=k.device)
        if length <= self.capacity:
            return kept
        earlier = length - self.observed
        voters = q[:, :, earlier:].unflatten(1, (kv_heads, -1))  # (B, Hkv, G, w, D)
        scores = voters @ k[:, :, None].transpose(-1, -2) / math.sqrt(dim)
        order = torch.arange(length, device=k.device)
        scores = scores.masked_fill(order > order[earlier:, None], -torch.inf)
        votes = scores.softmax(-1, dtype=torch.float32)[..., :earlier].sum(-2).mean(2)
        votes = F.avg_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)
        best = votes.topk(self.capacity - self.observed, -1).indices
        kept[..., :earlier] = False
        return kept.scatter(-1, best, True)

    def attention(self, prompt: int) -> Attend:
        """Attention of a whole sequence whose first `prompt` tokens are compressed for the rest."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            before = causal_attention(layer, q[:, :, :prompt], k[:, :, :prompt], v[:, :, :prompt])
            kept = self.select(q[:, :, :prompt], k[:, :, :prompt])
            after = q.shape[2] - prompt
            own = torch.ones((after, after), dtype=torch.bool, device=q.device).tril()
            own = own.expand(*kept.shape[:2], -1, -1)
            mask = torch.cat([kept[:, :, None].expand(-1, -1, after, -1), own], -1)
            group = q.shape[1] // k.shape[1]
            mask = mask.repeat_interleave(group, 1)  # (B, H, after, P + after)
            return torch.cat([before, masked_attention(q[:, :, prompt:], k, v, mask)], 2)

        return attend
