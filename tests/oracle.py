"""Full recompute: a sequence with its slots under the dense mask, on Hugging Face's own modules.

Nothing here is incremental and nothing is shared with the decoder or the memory: the whole stream
of raw and slot tokens goes through the model at once, as the paper describes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from masw.plugins.slot_attention.reference import dense_oracle
from masw.plugins.slot_attention.rule import MemoryRule

LONGEST = 160  # dense masks are made once per rule for this length; shorter ones are its corner


@dataclass(frozen=True)
class Recomputed:
    """logits (raw tokens, vocab) and, by stream position, keys and values (L, Hkv, n, D)."""

    logits: Tensor
    k: Tensor
    v: Tensor
    place: dict[tuple[str, int], int]  # ("raw", t) or ("slot", b) -> stream position


@cache
def dense_stream(rule: MemoryRule) -> tuple[list[tuple[str, int]], Tensor]:
    """Stream and mask of `LONGEST` raw tokens. Those of fewer tokens are a prefix of them."""
    stream, mask = dense_oracle(rule, LONGEST)
    return stream, torch.tensor(mask)


@torch.no_grad()
def recompute(model, rule: MemoryRule, ids: Sequence[int], adaptor=None) -> Recomputed:
    """Runs raw tokens `ids` and their slots through a Hugging Face model in one pass."""
    whole, mask = dense_stream(rule)
    stream = [item for item in whole if item[1] < len(ids)]
    mask = mask[: len(stream), : len(stream)]
    is_slot = torch.tensor([kind == "slot" for kind, _ in stream])
    times = torch.tensor([time for _, time in stream])
    x = _embed(model, torch.tensor(ids)[times], is_slot, adaptor)[None]
    rotary = model.model.rotary_emb(x, (times + is_slot)[None])
    keys, values = [], []
    for number, layer in enumerate(model.model.layers):
        mirror = layer.self_attn if adaptor is None else adaptor.layers[number]
        q, k, v = _project(layer.self_attn, mirror, layer.input_layernorm(x), is_slot)
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        x = x + _output(layer.self_attn, mirror, _attention(q, k, v, mask), is_slot)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        keys.append(k[0])
        values.append(v[0])
    logits = model.lm_head(model.model.norm(x[:, ~is_slot]))[0]
    place = {item: i for i, item in enumerate(stream)}
    return Recomputed(logits, torch.stack(keys), torch.stack(values), place)


def _embed(model, ids: Tensor, is_slot: Tensor, adaptor) -> Tensor:
    """(n, hidden) input embeddings, those of slots as the adaptor's header states."""
    if adaptor is not None and adaptor.config.slot_embedding != "last_token":
        ids = torch.where(is_slot, adaptor.config.slot_embedding, ids)
    x = model.model.embed_tokens.weight[ids]
    if adaptor is not None and adaptor.offset is not None:
        x = x + is_slot[:, None] * adaptor.offset
    return x


def _project(attention, mirror, x: Tensor, is_slot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, heads, n, D), not rotated; keys and values of slots come from the mirror."""

    def split(y: Tensor) -> Tensor:
        return y.view(*y.shape[:2], -1, attention.head_dim)

    chosen = is_slot[None, :, None]
    q = attention.q_proj(x)
    if getattr(mirror, "query", None) is not None:
        q = q + chosen * (x @ mirror.query[0].weight.T @ mirror.query[1].weight.T)
    q = split(q)
    k = split(torch.where(chosen, mirror.k_proj(x), attention.k_proj(x)))
    v = split(torch.where(chosen, mirror.v_proj(x), attention.v_proj(x)))
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _output(attention, mirror, heads: Tensor, is_slot: Tensor) -> Tensor:
    """(1, n, hidden) output projection, with the mirror's low-rank update for slots."""
    out = attention.o_proj(heads)
    if getattr(mirror, "output", None) is None:
        return out
    update = heads @ mirror.output[0].weight.T @ mirror.output[1].weight.T
    return out + is_slot[None, :, None] * update


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """(1, n, H * D) softmax attention under a dense mask."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)
