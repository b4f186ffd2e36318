"""Losses over raw positions: next token, and divergence from a model with full KV.

Logits over a vocabulary are the largest tensors of training, so they are made for a slice of
positions at a time and made again in the backward pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...engines.decoder import Decoder

SLICE = 4096  # positions whose logits exist at once


def weighted_loss(
    student: Decoder,
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    next_token: float,
    teacher: Decoder | None = None,
    teacher_hidden: Tensor | None = None,
) -> Tensor:
    """Sum over positions of weight x (next_token x NLL + (1 - next_token) x KL(teacher, student)).

    hidden, teacher_hidden (P, hidden) after the final norm; targets (P,) int64 the next tokens;
    weight (P,). Without a teacher only the first term. A scalar in float32.
    """
    total = hidden.new_zeros((), dtype=torch.float32)
    for part in torch.arange(len(hidden), device=hidden.device).split(SLICE):
        goal = None
        if teacher is not None and next_token < 1:
            with torch.no_grad():
                goal = teacher.logits(teacher_hidden[part])
        arguments = student, hidden[part], targets[part], weight[part], goal, next_token
        total = total + checkpoint(_slice_loss, *arguments, use_reentrant=False)
    return total


def _slice_loss(
    student: Decoder,
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    goal: Tensor | None,
    next_token: float,
) -> Tensor:
    log_p = student.logits(hidden).log_softmax(-1)
    loss = 0.0
    if next_token or goal is None:
        scale = 1.0 if goal is None else next_token
        loss = loss + scale * F.nll_loss(log_p, targets, reduction="none")
    if goal is not None:
        loss = loss + (1 - next_token) * divergence(goal, log_p)
    return (loss * weight).sum()


def divergence(goal: Tensor, log_p: Tensor) -> Tensor:
    """(P,) KL(goal || p) in nats of logits `goal` (P, vocab) from log-probabilities (P, vocab)."""
    log_goal = goal.log_softmax(-1)
    return (log_goal.exp() * (log_goal - log_p)).sum(-1)
