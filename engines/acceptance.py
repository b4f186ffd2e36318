"""The acceptance rule of speculative decoding, in one place.

p is the target's distribution, q the draft's. Greedy: a draft token is kept iff it is the target's
argmax. Sampling: draft token x is kept with probability min(1, p(x) / q(x)); a rejection samples
from the normalised max(0, p - q) instead, so that the output follows p exactly (Leviathan et al.
2023; Chen et al. 2023). Without q: kept iff the token sampled from p is the draft token, which
follows p as well and accepts less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .messages import Sampling

COLDEST = 1e-6  # 1 / temperature must not overflow


def adjust(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits (..., V) after temperature, top-k and top-p, in that order; masked tokens -inf."""
    logits = logits / max(sampling.temperature, COLDEST)
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probability = ordered.softmax(-1)
        beyond = probability.cumsum(-1) - probability >= sampling.top_p
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A random stream of its own for one call."""
    return torch.Generator(device).manual_seed(seed)


def draw(logits: Tensor, random: torch.Generator) -> int:
    """One token from the softmax of adjusted logits (V,)."""
    return int(sample(logits, random))


def sample(logits: Tensor, random: torch.Generator) -> Tensor:
    """`draw` that stays on the device: (1,) int64."""
    return torch.multinomial(logits.softmax(-1), 1, generator=random)


def next_token(logits: Tensor, sampling: Sampling, random: torch.Generator | None) -> int:
    """One token of plain decoding from raw logits (V,)."""
    return int(logits.argmax()) if sampling.greedy else draw(adjust(logits, sampling), random)


def forbid_end(logits: Tensor, end_ids: Sequence[int], positions: int) -> Tensor:
    """Logits (N, V) with the end ids at -inf in the first `positions` rows."""
    if positions <= 0 or not end_ids:
        return logits
    logits = logits.clone()
    logits[:positions, list(end_ids)] = -torch.inf
    return logits


def accept(
    logits: Tensor,
    draft_ids: Sequence[int],
    draft_logits: Tensor | None,
    sampling: Sampling,
    random: torch.Generator | None,
) -> list[int]:
    """The tokens one verification step emits: the accepted drafts and one of the target's own.

    logits (γ + 1, V): the target's raw logits after the prefix and after each draft token.
    draft_logits (γ, V): the draft's adjusted logits, None for exact match.
    """
    if sampling.greedy:
        return _accept_match(logits.argmax(-1).tolist(), draft_ids)
    p = adjust(logits, sampling).softmax(-1)
    if draft_logits is None:
        sampled = torch.multinomial(p, 1, generator=random)[:, 0].tolist()
        return _accept_match(sampled, draft_ids)
    return _accept_sampling(p, draft_ids, draft_logits.softmax(-1), random)


def _accept_match(own: list[int], draft_ids: Sequence[int]) -> list[int]:
    count = 0
    while count < len(draft_ids) and own[count] == draft_ids[count]:
        count += 1
    return own[: count + 1]


def _accept_sampling(
    p: Tensor, draft_ids: Sequence[int], q: Tensor, random: torch.Generator
) -> list[int]:
    chances = torch.rand(len(draft_ids), generator=random, device=p.device)
    for i, token in enumerate(draft_ids):
        if chances[i] * q[i, token] >= p[i, token]:
            residual = (p[i] - q[i]).clamp_min(0)
            weights = residual if residual.sum() > 0 else p[i]
            return [*draft_ids[:i], int(torch.multinomial(weights, 1, generator=random))]
    return [*draft_ids, int(torch.multinomial(p[-1], 1, generator=random))]
