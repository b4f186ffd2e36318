"""The layers of engines/decoder.py as a network, with the same names and the same arithmetic.

Queries, keys and values are one product with packed weights, and the mirrored keys and values of
slots with them: those are computed for every position and selected by kind. Gate and up projection
are two: TensorRT joins them itself, and if they were packed it would store them twice, once for
each profile. Quantised layers are products of their own, because each has scales of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...engines.adaptor import LAST_TOKEN, Adaptor, KeyValueMirror
from ...engines.decoder import MLP, Decoder, Layer, RMSNorm
from ...engines.decoder import Attention as Projections
from ...engines.draft_io import BATCH, POSITIONS, DraftIO
from ...plugins.slot_attention.rule import SLOT
from .attention import Attention
from .graph import Graph, ITensor
from .quantized import QuantizedLinear
from .visibility import BlockInputs


class NetworkDecoder:
    """Adds a decoder with slot memory to a graph."""

    def __init__(
        self,
        graph: Graph,
        io: DraftIO,
        decoder: Decoder,
        adaptor: Adaptor | None,
        block: BlockInputs,
        attention: Attention,
        quantized: Mapping[str, QuantizedLinear],
    ):
        self.graph, self.io, self.decoder, self.adaptor = graph, io, decoder, adaptor
        self.quantized = {decoder.get_submodule(name): q for name, q in quantized.items()}
        self.block, self.attention = block, attention
        self.dtype = getattr(torch, io.dtype)
        self.is_slot = graph.equal(block.kind, graph.integers([SLOT], 2))  # (B, N) bool
        self.slot_rows = graph.reshape(self.is_slot, 0, 0, 1)  # (B, N, 1)
        self.slot_heads = graph.reshape(self.is_slot, 0, 0, 1, 1)  # (B, N, 1, 1)
        self.table = self._weight(decoder.embed_tokens.weight)  # (V, hidden)
        self.rotary = self._rotary()

    def run(self, memory: list[tuple[ITensor, ITensor]]) -> tuple[ITensor, ITensor, ITensor]:
        """Hidden states (B, N, hidden) before the final norm; new k, v (L, B, Hkv, N, D).

        memory: the memory_k and memory_v of each layer, (rows, Hkv, M, D).
        """
        x, keys, values = self._embed(), [], []
        for number, layer in enumerate(self.decoder.layers):
            mirror = None if self.adaptor is None else self.adaptor.layers[number]
            x, k, v = self._layer(x, layer, mirror, memory[number])
            keys.append(k)
            values.append(v)
        return x, self._stack(keys), self._stack(values)

    def logits(self, x: ITensor, last: ITensor) -> ITensor:
        """(B, V) float32 logits after position `last` (B,) of x (B, N, hidden)."""
        graph, config = self.graph, self.decoder.config
        x = graph.take(x, graph.reshape(last, 0, 1), axis=1, batch_axes=1)  # (B, 1, hidden)
        x = graph.reshape(self._norm(x, self.decoder.norm), 0, config.hidden_size)
        head = self.table if config.tied_embeddings else self._weight(self.decoder.lm_head.weight)
        return graph.cast(graph.multiply_matrices(x, head, transpose=True), "float32")

    def _weight(self, values: Tensor) -> ITensor:
        return self.graph.constant(values.to(self.dtype))

    def _embed(self) -> ITensor:
        """(B, N, hidden) input embeddings, those of slots as the adaptor's header states."""
        graph, ids = self.graph, self.block.ids
        if self.adaptor is None:
            return graph.take(self.table, ids)
        fixed, offset = self.adaptor.config.slot_embedding, self.adaptor.offset
        if fixed != LAST_TOKEN:
            ids = graph.select(self.is_slot, graph.integers([fixed], 2), ids)
        x = graph.take(self.table, ids)
        if offset is None:
            return x
        return graph.select(self.slot_rows, graph.add(x, self._weight(offset[None, None])), x)

    def _rotary(self) -> tuple[ITensor, ITensor]:
        """cos and sin (B, N, 1, D / 2) at t for raw token t and t + 1 for its slot."""
        graph, half = self.graph, self.io.head_dim // 2
        tables = self.decoder.rotary.cos, self.decoder.rotary.sin
        positions = graph.add(self.block.times, graph.cast(self.is_slot, "int32"))
        cos, sin = (
            graph.take(self._weight(table[: self.io.max_length + 1, half:]), positions)
            for table in tables
        )
        return graph.reshape(cos, 0, 0, 1, half), graph.reshape(sin, 0, 0, 1, half)

    def _layer(
        self, x: ITensor, layer: Layer, mirror: KeyValueMirror | None, memory
    ) -> tuple[ITensor, ITensor, ITensor]:
        """One transformer layer of x (B, N, hidden); also its new k and v (B, Hkv, N, D)."""
        graph = self.graph
        q, k, v = self._project(self._norm(x, layer.input_layernorm), layer.self_attn, mirror)
        out = self.attention(q, k, v, *memory)  # (B, N, H, D)
        out = graph.reshape(out, 0, 0, self.decoder.config.heads * self.io.head_dim)
        x = graph.add(x, self._linear(out, [layer.self_attn.o_proj]))
        x = graph.add(x, self._mlp(self._norm(x, layer.post_attention_layernorm), layer.mlp))
        return x, k, v

    def _project(
        self, x: ITensor, own: Projections, mirror: KeyValueMirror | None
    ) -> tuple[ITensor, ITensor, ITensor]:
        """q (B, H, N, D) and k, v (B, Hkv, N, D), rotated, those of slots from the mirror."""
        graph, config = self.graph, self.decoder.config
        mirrored = [] if mirror is None else [mirror.k_proj, mirror.v_proj]
        packed = self._linear(x, [own.q_proj, own.k_proj, own.v_proj, *mirrored])
        sizes = [config.heads, *[config.kv_heads] * (2 + len(mirrored))]
        packed = graph.reshape(packed, 0, 0, sum(sizes), config.head_dim)
        q, k, v, *slots = graph.split(packed, 2, sizes)  # (B, N, heads, D)
        if slots:
            k, v = (
                graph.select(self.slot_heads, slot, raw)
                for slot, raw in zip(slots, (k, v), strict=True)
            )
        if own.q_norm is not None:
            q, k = self._norm(q, own.q_norm), self._norm(k, own.k_norm)
        q, k = self._rotate(q), self._rotate(k)
        return tuple(graph.reshape(y, before=(0, 2, 1, 3)) for y in (q, k, v))

    def _rotate(self, x: ITensor) -> ITensor:
        """Rotary embedding of x (B, N, heads, D), halves layout."""
        graph, half = self.graph, self.io.head_dim // 2
        cos, sin = self.rotary
        a, b = graph.split(x, 3, [half, half])
        first = graph.subtract(graph.multiply(a, cos), graph.multiply(b, sin))
        second = graph.add(graph.multiply(b, cos), graph.multiply(a, sin))
        return graph.join([first, second], 3)

    def _mlp(self, x: ITensor, mlp: MLP) -> ITensor:
        """SwiGLU feed-forward."""
        graph = self.graph
        gate, up = self._linear(x, [mlp.gate_proj]), self._linear(x, [mlp.up_proj])
        return self._linear(graph.multiply(graph.silu(gate), up), [mlp.down_proj])

    def _linear(self, x: ITensor, layers: list[nn.Linear]) -> ITensor:
        """(B, N, all outputs) of x (B, N, inputs); quantised layers must precede the others."""
        plain = [layer for layer in layers if layer not in self.quantized]
        parts = [self._quantized_linear(x, layer) for layer in layers[: len(layers) - len(plain)]]
        parts += [self._plain_linear(x, plain)] if plain else []
        return parts[0] if len(parts) == 1 else self.graph.join(parts, 2)

    def _plain_linear(self, x: ITensor, layers: list[nn.Linear]) -> ITensor:
        """Several linear layers as one product."""
        weight = torch.cat([layer.weight for layer in layers])[None]  # (1, outputs, inputs)
        y = self.graph.multiply_matrices(x, self._weight(weight), transpose=True)
        return self._add_bias(y, layers)

    def _quantized_linear(self, x: ITensor, layer: nn.Linear) -> ITensor:
        return self._add_bias(self.quantized[layer].product(self.graph, x, self.dtype), [layer])

    def _add_bias(self, y: ITensor, layers: list[nn.Linear]) -> ITensor:
        if layers[0].bias is None:
            return y
        bias = torch.cat([layer.bias for layer in layers])[None, None]
        return self.graph.add(y, self._weight(bias))

    def _norm(self, x: ITensor, norm: RMSNorm) -> ITensor:
        """Root mean square norm over the last axis, computed in float32."""
        graph, wide = self.graph, self.graph.cast(x, "float32")
        mean = graph.mean(graph.multiply(wide, wide))
        root = graph.sqrt(graph.add(mean, graph.number(norm.eps, mean)))
        weight = self._weight(norm.weight.view(*(1,) * (len(x.shape) - 1), -1))
        return graph.multiply(graph.cast(graph.divide(wide, root), self.io.dtype), weight)

    def _stack(self, layers: list[ITensor]) -> ITensor:
        """(L, B, Hkv, N, D) of L times (B, Hkv, N, D)."""
        io = self.io
        joined = self.graph.join(layers, 0)  # (L * B, Hkv, N, D)
        return self.graph.reshape_to(
            joined, (io.layers, BATCH, io.kv_heads, POSITIONS, io.head_dim)
        )
