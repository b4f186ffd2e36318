"""Attention of a block over slot memory and itself: as our plugin, or of TensorRT's own layers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...engines.draft_io import DraftIO
from .graph import Graph, ITensor
from .visibility import BlockInputs, block_mask, is_padding


class Attention(ABC):
    """How a network attends; made once per network, called once per layer."""

    def __init__(self, graph: Graph, io: DraftIO, block: BlockInputs):
        self.graph, self.io, self.block = graph, io, block

    @abstractmethod
    def __call__(
        self, q: ITensor, k: ITensor, v: ITensor, memory_k: ITensor, memory_v: ITensor
    ) -> ITensor:
        """q (B, H, N, D); k, v (B, Hkv, N, D), rotated; memory_k, memory_v (rows, Hkv, M, D).

        Returns (B, N, H, D); padding rows are zeros.
        """


AttentionMaker = Callable[[Graph, DraftIO, BlockInputs], Attention]


class PluginAttention(Attention):
    """Reads memory in place: the plugins and their kernels become part of the engine.

    device: the `Device` of plugins/slot_attention/tensorrt.py that the kernels are compiled for.
    """

    def __init__(self, graph: Graph, io: DraftIO, block: BlockInputs, device: Any):
        super().__init__(graph, io, block)
        self.device = device

    def __call__(self, q, k, v, memory_k, memory_v):
        from ...plugins.slot_attention.tensorrt import add_slot_attention

        block = self.block
        return add_slot_attention(
            self.graph.network,
            (q, k, v, memory_k, memory_v, block.rows, block.fed, block.times, block.kind),
            self.io.rule,
            self.device,
        )


class JoinedAttention(Attention):
    """Memory and new keys are joined and attended to under a mask, by plain operations."""

    def __init__(self, graph: Graph, io: DraftIO, block: BlockInputs):
        super().__init__(graph, io, block)
        self.mask = block_mask(graph, io, block)  # (B, 1, N, M + N)
        self.padding = is_padding(graph, block)  # (B, 1, N, 1)

    def __call__(self, q, k, v, memory_k, memory_v):
        graph = self.graph
        k = graph.join([graph.take(memory_k, self.block.rows), k], 2)  # (B, Hkv, M + N, D)
        v = graph.join([graph.take(memory_v, self.block.rows), v], 2)
        q = graph.multiply(q, graph.number(1 / math.sqrt(self.io.head_dim), q))
        out = self._attend(q, k, v)
        out = graph.select(self.padding, graph.number(0, out), out)
        return graph.reshape(out, after=(0, 2, 1, 3))

    def _attend(self, q: ITensor, k: ITensor, v: ITensor) -> ITensor:
        """(B, H, N, D) of scaled queries; k, v (B, Hkv, M + N, D)."""
        graph, heads = self.graph, q.shape[1]
        k, v = (self._repeat(x, heads // self.io.kv_heads) for x in (k, v))
        scores = graph.cast(graph.multiply_matrices(q, k, transpose=True), "float32")
        scores = graph.select(self.mask, scores, graph.number(-math.inf, scores))
        weights = graph.cast(graph.softmax(scores), self.io.dtype)
        return graph.multiply_matrices(weights, v)

    def _repeat(self, x: ITensor, times: int) -> ITensor:
        """(B, Hkv * times, ...) of (B, Hkv, ...): each head `times` times in a row."""
        if times == 1:
            return x
        heads = [head for head in range(self.io.kv_heads) for _ in range(times)]
        return self.graph.take(x, self.graph.integers(heads), axis=1)


class NativeAttention(JoinedAttention):
    """The same by TensorRT's attention layer, which fuses it and shares keys among heads."""

    def _attend(self, q, k, v):
        softmax = self.graph.trt.AttentionNormalizationOp.SOFTMAX
        layer = self.graph.network.add_attention(q, k, v, softmax, False)
        layer.mask = self.mask
        layer.decomposable = True  # float32 and small heads have no fused kernel
        return layer.get_output(0)


def plugin_attention(device: Any) -> AttentionMaker:
    """Attention by the plugins, their kernels compiled for `device`."""
    return lambda graph, io, block: PluginAttention(graph, io, block, device)


def native_attention(trt: ModuleType) -> AttentionMaker:
    """The best attention of TensorRT's own layers that a module has."""
    has_layer = hasattr(trt.INetworkDefinition, "add_attention")  # 10.16 and newer, and RTX
    return NativeAttention if has_layer else JoinedAttention
