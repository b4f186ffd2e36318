"""One lean decoder for every role: full KV as target, slot memory as draft, both in training.

Covers Llama 2/3.x, Mistral, Qwen2/2.5 and Qwen3. Parameter names are Hugging Face's, so weight
files load as they are. A forward pass takes a `Block` and the memory it continues, and returns
the block's own keys and values; it writes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..plugins.slot_attention.block import Block
from ..plugins.slot_attention.op import slot_attention
from ..plugins.slot_attention.rule import MemoryRule
from .adaptor import Adaptor, AdaptorConfig, KeyValueMirror
from .config import DecoderConfig, UnsupportedModelError
from .linear import Linear
from .memory import SlotMemory
from .rotary import RotaryTable, rotate
from .weights import read_weights

# (layer, q (B, H, N, D), k, v (B, Hkv, N, D), all rotated) -> (B, H, N, D)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
SlotIndex = tuple[Tensor, Tensor] | None


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query projections, with mirrored ones for slots; the caller gives the attention."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.head_dim = config.head_dim
        q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        hidden, bias = config.hidden_size, config.qkv_bias
        self.q_proj = Linear(hidden, q_width, bias=bias)
        self.k_proj = Linear(hidden, kv_width, bias=bias)
        self.v_proj = Linear(hidden, kv_width, bias=bias)
        self.o_proj = Linear(q_width, hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        block: Block,
        rotary: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        mirror: KeyValueMirror | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        slots = None if mirror is None else block.slot_index
        q, (k, v) = (
            self._split(self._queries(x, slots, mirror)),
            self._keys_values(x, slots, mirror),
        )
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rotary), rotate(k, rotary)
        out = attend(q, k, v).transpose(1, 2).flatten(2)  # (B, N, H * D)
        return self._outputs(out, slots, mirror), k, v

    def _queries(self, x: Tensor, slots: SlotIndex, mirror: KeyValueMirror | None) -> Tensor:
        q = self.q_proj(x)
        if slots is None or mirror.query is None:
            return q
        return q.index_put(slots, (q[slots] + mirror.query(x[slots])).to(q.dtype))

    def _outputs(self, out: Tensor, slots: SlotIndex, mirror: KeyValueMirror | None) -> Tensor:
        y = self.o_proj(out)
        if slots is None or mirror.output is None:
            return y
        return y.index_put(slots, (y[slots] + mirror.output(out[slots])).to(y.dtype))

    def _keys_values(
        self, x: Tensor, slots: SlotIndex, mirror: KeyValueMirror | None
    ) -> tuple[Tensor, Tensor]:
        k, v = self.k_proj(x), self.v_proj(x)
        if slots is not None:
            inputs = x[slots]
            k = k.index_put(slots, mirror.k_proj(inputs))
            v = v.index_put(slots, mirror.v_proj(inputs))
        return self._split(k), self._split(v)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, N, D)


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=False)
        self.up_proj = Linear(hidden, inner, bias=False)
        self.down_proj = Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, *context) -> tuple[Tensor, Tensor, Tensor]:
        out, k, v = self.self_attn(self.input_layernorm(x), *context)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), k, v


class Decoder(nn.Module):
    """Embedding, layers, final norm and head of a Llama-like model."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = RotaryTable(config)
        if config.tied_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, block: Block, memory: SlotMemory, adaptor: Adaptor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states of a block that continues `memory`. Modifies nothing.

        Returns hidden (B, N, hidden) after the final norm, and the block's keys and values
        (L, B, Hkv, N, D), rotated, to be written with `memory.write`.
        """

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return slot_attention(q, k, v, memory.k[number], memory.v[number], block)

        hidden, pairs = self.run(block, attend, adaptor)
        return hidden, torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])

    def run(
        self,
        block: Block,
        attend: Attend,
        adaptor: Adaptor | None = None,
        recompute: bool = False,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Hidden states (B, N, hidden) of a block under any attention, and each layer's k and v.

        k, v (B, Hkv, N, D), rotated. recompute: keep no activations of a layer for the backward
        pass but compute them again there.
        """
        x = self._embed(block, adaptor)
        rotary = self.rotary(block.positions, x.dtype)
        pairs = []
        for number, layer in enumerate(self.layers):
            mirror = None if adaptor is None else adaptor.layers[number]
            context = (block, rotary, partial(attend, number), mirror)
            if recompute:
                x, k, v = checkpoint(layer, x, *context, use_reentrant=False)
            else:
                x, k, v = layer(x, *context)
            pairs.append((k, v))
        return self.norm(x), pairs

    def _embed(self, block: Block, adaptor: Adaptor | None) -> Tensor:
        x = self.embed_tokens(block.ids)
        if adaptor is None or block.slot_index is None:
            return x
        slots = adaptor.embed(block.ids[block.slot_index], self.embed_tokens)
        return x.index_put(block.slot_index, slots)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits (..., vocab) of hidden states (..., hidden)."""
        return self.lm_head(hidden).float()

    def feed(
        self,
        memory: SlotMemory,
        rows: Sequence[int],
        new_ids: Sequence[Sequence[int]],
        adaptor: Adaptor | None = None,
    ) -> tuple[Tensor, Block]:
        """Processes and appends `new_ids` of `rows` in one forward; returns hidden and block."""
        block = memory.block(rows, new_ids)
        hidden, k, v = self(block, memory, adaptor)
        memory.write(block, k, v)
        return hidden, block

    def new_memory(self, rule: MemoryRule, rows: int, max_length: int) -> SlotMemory:
        """An empty memory of this model's shape, dtype and device.

        Raises ValueError if max_length exceeds the model's positions.
        """
        if max_length > self.config.max_positions:
            raise ValueError(
                f"max_length is {max_length}; the model has {self.config.max_positions} positions"
            )
        weight = self.embed_tokens.weight
        return SlotMemory(
            rule,
            layers=self.config.layers,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
            rows=rows,
            max_length=max_length,
            dtype=weight.dtype,
            device=weight.device,
        )

    def copy_adaptor(self, config: AdaptorConfig) -> Adaptor:
        """An untrained adaptor: copies of this model's own key and value projections."""
        adaptor = Adaptor(config, self.config).to(self.embed_tokens.weight)
        for mirror, layer in zip(adaptor.layers, self.layers, strict=True):
            mirror.k_proj.load_state_dict(layer.self_attn.k_proj.state_dict())
            mirror.v_proj.load_state_dict(layer.self_attn.v_proj.state_dict())
        return adaptor

    def fingerprint(self) -> str:
        """Hex digest of the architecture and of samples of every weight.

        The same for the same weights in float32, bfloat16 or float16 storage of bfloat16 values.
        """
        architecture = asdict(self.config) | {"eos_ids": None}
        digest = hashlib.sha256(json.dumps(architecture, sort_keys=True).encode())
        for name, weight in sorted(self.named_parameters()):
            sample = weight.detach().flatten()[:: max(1, weight.numel() // 1024)]
            digest.update(name.encode())
            digest.update(sample.bfloat16().view(torch.int16).cpu().numpy().tobytes())
        return digest.hexdigest()

    @classmethod
    def load(
        cls,
        directory: Path,
        dtype: torch.dtype | None = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Decoder:
        """Loads a Hugging Face directory (config.json + safetensors), strictly.

        dtype None keeps the precision of the files.
        """
        config = DecoderConfig.load(directory)
        with torch.device("meta"):
            decoder = cls(config)
        tensors = read_weights(directory, dtype, device)
        if config.tied_embeddings:
            tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        try:
            decoder.load_state_dict(tensors, strict=True, assign=True)
        except RuntimeError as error:
            raise UnsupportedModelError(f"weights of {directory} do not fit: {error}") from error
        decoder.rotary = RotaryTable(config).to(device)
        return decoder.requires_grad_(False).eval()
