"""The tensors that one rank of a TensorRT-LLM checkpoint holds: names, dtypes, shapes, bytes.

Every rank holds the same share of every layer; the first pipeline stage has the embedding besides,
the last one the final norm and the head. Linear weights are (out, in), as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..engines.config import DecoderConfig
from ..engines.recipe import TargetRecipe
from ..engines.trtllm_folder import padded_vocab
from .quantization import QUANTIZATIONS

BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "int8": 8, "uint8": 8}
FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True)
class RankTensor:
    """One tensor of one rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in the rank's file."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Shards:
    """How a model is cut over tensor- and pipeline-parallel ranks; rank = stage * TP + place."""

    model: DecoderConfig
    target: TargetRecipe

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head on one rank; the vocabulary is padded to a multiple of
        tensor_parallel."""
        ranks = self.target.tensor_parallel
        return padded_vocab(self.model.vocab_size, ranks) // ranks

    @property
    def kv_heads(self) -> int:
        """Key/value heads of one rank: its share, or a copy of one where ranks outnumber them."""
        return max(1, self.model.kv_heads // self.target.tensor_parallel)

    @property
    def layers(self) -> int:
        """Layers of one pipeline stage."""
        return self.model.layers // self.target.pipeline_parallel

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self.target.tensor_parallel

    def tensors(self, rank: int) -> list[RankTensor]:
        """All tensors of a rank's file; layers are numbered from 0 within the stage."""
        found = [tensor for layer in range(self.layers) for tensor in self.layer(layer)]
        if self.stage(rank) == 0:
            found += self.first_stage
        if self.stage(rank) == self.target.pipeline_parallel - 1:
            found += self.last_stage
        return found

    @property
    def first_stage(self) -> list[RankTensor]:
        """What ranks of the first pipeline stage have besides layers."""
        return [self._vocabulary("transformer.vocab_embedding")]

    @property
    def last_stage(self) -> list[RankTensor]:
        """What ranks of the last pipeline stage have besides layers."""
        norm = RankTensor("transformer.ln_f.weight", self.target.dtype, (self.model.hidden_size,))
        return [norm, self._vocabulary("lm_head")]

    def _vocabulary(self, name: str) -> RankTensor:
        shape = self.vocab_rows, self.model.hidden_size
        return RankTensor(f"{name}.weight", self.target.dtype, shape)

    def layer(self, number: int) -> Iterator[RankTensor]:
        """The tensors of one layer."""
        m, dtype, tp = self.model, self.target.dtype, self.target.tensor_parallel
        place = f"transformer.layers.{number}"
        heads, width = m.heads // tp * m.head_dim, m.hidden_size
        inner = m.intermediate_size // tp
        qkv = heads + 2 * self.kv_heads * m.head_dim
        for norm in ("input_layernorm", "post_layernorm"):
            yield RankTensor(f"{place}.{norm}.weight", dtype, (width,))
        for norm in ("q_layernorm", "k_layernorm") if m.qk_norm else ():
            yield RankTensor(f"{place}.attention.{norm}.weight", dtype, (m.head_dim,))
        yield from self._linear(f"{place}.attention.qkv", qkv, width)
        if m.qkv_bias:
            yield RankTensor(f"{place}.attention.qkv.bias", dtype, (qkv,))
        yield from self._linear(f"{place}.attention.dense", width, heads)
        for name in ("fc", "gate"):
            yield from self._linear(f"{place}.mlp.{name}", inner, width)
        yield from self._linear(f"{place}.mlp.proj", width, inner)
        for name in ("kv", "k", "v") if self.target.kv_cache == "fp8" else ():
            yield RankTensor(f"{place}.attention.{name}_cache_scaling_factor", "float32", (1,))

    def _linear(self, name: str, out: int, into: int) -> Iterator[RankTensor]:
        kind = self.target.quantization
        block = QUANTIZATIONS[kind].block
        scale, activation = f"{name}.weights_scaling_factor", f"{name}.activation_scaling_factor"
        if kind == "none":
            yield RankTensor(f"{name}.weight", self.target.dtype, (out, into))
        elif kind == "fp8":
            yield RankTensor(f"{name}.weight", FLOAT8, (out, into))
            yield RankTensor(scale, "float32", (1,))
            yield RankTensor(activation, "float32", (1,))
        elif kind == "int4_awq":  # two nibbles of neighbouring outputs in a byte
            yield RankTensor(f"{name}.weight", "int8", (out // 2, into))
            yield RankTensor(scale, "float32", (out, into // block))
            yield RankTensor(f"{name}.prequant_scaling_factor", self.target.dtype, (into,))
        else:  # nvfp4: two nibbles of neighbouring inputs in a byte
            yield RankTensor(f"{name}.weight", "uint8", (out, into // 2))
            yield RankTensor(scale, FLOAT8, (out, into // block))
            yield RankTensor(f"{scale}_2", "float32", ())
            yield RankTensor(activation, "float32", ())
