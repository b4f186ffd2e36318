"""The slot-attention operator that the engines call."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .block import Block

# Up to this many new positions the keys of memory are read in place and only the scores are
# joined; beyond it one fused attention over joined keys is faster (measured on two CPU cores).
IN_PLACE_POSITIONS = 64


def slot_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, memory_k: Tensor, memory_v: Tensor, block: Block
) -> Tensor:
    """Attention of a block over its sequences' memory and itself. Modifies nothing.

    q (B, H, N, D); k_new, v_new (B, Hkv, N, D), rotated; memory_k, memory_v (rows, Hkv, M, D) of
    one layer, where sequence i uses row block.rows[i]. Returns (B, H, N, D); padding rows are
    zeros. The caller writes k_new and v_new to the memory afterwards. On CUDA the kernels do it,
    unless gradients are needed.
    """
    if q.is_cuda and not _needs_gradient(q, k_new, v_new):
        from .launch import attend  # Triton is there where CUDA is

        return attend(q, k_new, v_new, memory_k, memory_v, block)
    out = torch.stack(
        [
            _attend(
                q[i],
                k_new[i],
                v_new[i],
                memory_k[row, :, :extent],
                memory_v[row, :, :extent],
                block.masks[i],
            )
            for i, (row, extent) in enumerate(zip(block.rows, block.extents, strict=True))
        ]
    )
    if block.padding_index is not None:
        batch, position = block.padding_index
        out[batch, :, position] = 0
    return out


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _attend(q, k_new, v_new, memory_k, memory_v, mask) -> Tensor:
    """(H, N, D) attention of one sequence."""
    if q.shape[1] > IN_PLACE_POSITIONS or q.requires_grad:
        return _attend_joined(q, k_new, v_new, memory_k, memory_v, mask)
    return _attend_in_place(q, k_new, v_new, memory_k, memory_v, mask)


def _attend_joined(q, k_new, v_new, memory_k, memory_v, mask) -> Tensor:
    k, v = torch.cat([memory_k, k_new], 1), torch.cat([memory_v, v_new], 1)
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)
    return out[0]


def _attend_in_place(q, k_new, v_new, memory_k, memory_v, mask) -> Tensor:
    """Reads memory without copying it: scores are joined, keys and values are not."""
    heads, n, dim = q.shape
    kv_heads, extent = memory_k.shape[:2]
    grouped = (q * (1 / math.sqrt(dim))).reshape(kv_heads, -1, dim)  # (Hkv, G * N, D)
    scores = torch.cat(
        [grouped @ memory_k.transpose(1, 2), grouped @ k_new.transpose(1, 2)], -1
    ).view(heads, n, extent + n)
    weights = scores.masked_fill_(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
    weights = weights.to(q.dtype).view(kv_heads, -1, extent + n)
    out = torch.bmm(weights[..., :extent], memory_v)
    return torch.baddbmm(out, weights[..., extent:], v_new).view(heads, n, dim)
