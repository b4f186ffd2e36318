"""The draft engine's inputs, outputs and profiles: what its builder and its runtime agree on.

One call of the engine processes a block: the new positions of B sequences, N each, over the slot
memory of up to `max_sequences` sequences. It writes nothing to the memory; the caller appends the
keys and values it returns. Everything in between is computed by the engine from `fed`, `times` and
`kind`, so that γ steps need no more from the host than those numbers, known in advance; the ids of
a step are the `top_ids` of the step before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..plugins.slot_attention.rule import MemoryRule
from .config import DecoderConfig

DTYPES = ("float32", "float16", "bfloat16")
BATCH, POSITIONS = "batch", "positions"  # the two sizes that vary from call to call
ALIGNED_ENTRIES = 8  # makes each layer of a memory begin at a multiple of TensorRT's 256 bytes


@dataclass(frozen=True)
class IoTensor:
    """One input or output: name, dtype (torch's name), and shape with BATCH and POSITIONS."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape as TensorRT writes it: -1 for what varies."""
        return tuple(-1 if isinstance(size, str) else size for size in self.shape)

    def sized(self, batch: int, positions: int) -> tuple[int, ...]:
        """The shape in a call with `batch` sequences of `positions` positions each."""
        sizes = {BATCH: batch, POSITIONS: positions}
        return tuple(sizes.get(size, size) for size in self.shape)


@dataclass(frozen=True)
class Profile:
    """An optimization profile: (least, best, most) sequences, and positions of each."""

    name: str
    batch: tuple[int, int, int]
    positions: tuple[int, int, int]


@dataclass(frozen=True)
class DraftIO:
    """Sizes of a draft engine, and the tensors and profiles that follow from them.

    dtype: of weights, memory and activations. chunk: raw tokens of a prefill call. top: highest
    logits that are returned in order (1: the argmax). logits: whether all of them are returned.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rule: MemoryRule
    max_sequences: int
    max_length: int
    dtype: str = "float16"
    chunk: int = 512
    top: int = 1
    logits: bool = False

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}")
        for name in ("max_sequences", "max_length", "chunk", "top"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.top > self.vocab_size:
            raise ValueError(f"top is {self.top}; the model has {self.vocab_size} token ids")
        self.rule.capacity(self.max_length)  # refuses what the rule cannot hold

    @classmethod
    def of(cls, config: DecoderConfig, rule: MemoryRule, **sizes) -> DraftIO:
        """The table of a draft with this architecture; sizes: the fields from max_sequences on.

        Raises ValueError if max_length exceeds the model's positions.
        """
        io = cls(config.layers, config.kv_heads, config.head_dim, config.vocab_size, rule, **sizes)
        if io.max_length > config.max_positions:
            raise ValueError(
                f"max_length is {io.max_length}; the model has {config.max_positions} positions"
            )
        return io

    @property
    def capacity(self) -> int:
        """Entries allocated per layer and sequence: those of the rule, rounded up."""
        entries = self.rule.capacity(self.max_length)
        return math.ceil(entries / ALIGNED_ENTRIES) * ALIGNED_ENTRIES

    def positions(self, raw_tokens: int) -> int:
        """Positions that hold `raw_tokens` raw tokens and their slots, wherever they begin."""
        slots = math.ceil(raw_tokens / self.rule.interval) if self.rule.interval else 0
        return raw_tokens + slots

    @property
    def profiles(self) -> tuple[Profile, Profile]:
        """Drafting (one raw token, two after full acceptance), and a chunk of one sequence."""
        step, catch_up, chunk = 1, 2, self.positions(self.chunk)
        if self.rule.interval:
            step, catch_up = 2, 4  # each raw token with a slot, present or not
        return (
            Profile("decode", (1, self.max_sequences, self.max_sequences), (step, step, catch_up)),
            Profile("prefill", (1, 1, 1), (1, chunk, chunk)),
        )

    @property
    def inputs(self) -> tuple[IoTensor, ...]:
        """All inputs.

        rows: memory row of each sequence. fed: its fed length n before the call. ids: token whose
        embedding enters (for a slot the raw token it follows). times: raw number t. kind:
        PADDING, RAW or SLOT. last: the position whose logits are wanted.
        memory_k.0, memory_v.0, ...: keys and values of one layer, keys rotated; what an entry that
        holds nothing yet contains does not matter, as long as it is finite.
        """
        return (
            IoTensor("rows", "int32", (BATCH,)),
            IoTensor("fed", "int32", (BATCH,)),
            IoTensor("last", "int32", (BATCH,)),
            IoTensor("ids", "int32", (BATCH, POSITIONS)),
            IoTensor("times", "int32", (BATCH, POSITIONS)),
            IoTensor("kind", "int32", (BATCH, POSITIONS)),
            *(tensor for layer in range(self.layers) for tensor in self.memory(layer)),
        )

    def memory(self, layer: int) -> tuple[IoTensor, IoTensor]:
        """The inputs that hold the keys and the values of one layer of all sequences."""
        shape = (self.max_sequences, self.kv_heads, self.capacity, self.head_dim)
        return (
            IoTensor(f"memory_k.{layer}", self.dtype, shape),
            IoTensor(f"memory_v.{layer}", self.dtype, shape),
        )

    @property
    def outputs(self) -> tuple[IoTensor, ...]:
        """All outputs.

        new_k, new_v: keys (rotated) and values of the block in all layers, to be appended.
        top_ids, top_logits: the `top` highest logits at `last`, best first. logits: all of them.
        """
        block = (self.layers, BATCH, self.kv_heads, POSITIONS, self.head_dim)
        tensors = (
            IoTensor("new_k", self.dtype, block),
            IoTensor("new_v", self.dtype, block),
            IoTensor("top_ids", "int32", (BATCH, self.top)),
            IoTensor("top_logits", "float32", (BATCH, self.top)),
        )
        whole = IoTensor("logits", "float32", (BATCH, self.vocab_size))
        return (*tensors, whole) if self.logits else tensors
