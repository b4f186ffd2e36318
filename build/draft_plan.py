"""What a compiled draft will need, told before anything slow: shapes, memory, and the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ..engines.config import DecoderConfig
from ..engines.draft_io import DraftIO, IoTensor, Profile
from ..engines.recipe import Recipe
from ..plugins.slot_attention.rule import MemoryRule
from .bench.record import new_card
from .draft_scheme import NONE, Scheme, find_scheme, linear_shapes
from .output_folder import GIB

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
LENGTHS = (8_192, 32_768, 131_072)  # of the memory table


@dataclass(frozen=True)
class MemoryRow:
    """Memory of one sequence of `length` tokens: entries, and bytes of keys and values."""

    length: int
    entries: int
    bytes: int
    full_bytes: int

    @property
    def saved(self) -> float:
        """Share of a full cache that slot memory does without."""
        return 1 - self.bytes / self.full_bytes


@dataclass(frozen=True)
class DraftPlan:
    """A draft engine to be built: architecture, sizes, the largest γ, and the quantisation of its
    linear layers ("none", "fp8" or "int4_awq")."""

    model: DecoderConfig
    io: DraftIO
    draft_tokens: int = 5
    quantization: str = NONE

    def __post_init__(self):
        if self.scheme is not None:
            self.scheme.check_model(self.model)
        limit = self.io.rule.rollback
        if not 1 <= self.draft_tokens <= limit:
            raise ValueError(
                f"draft_tokens is {self.draft_tokens}; the rollback window R = {limit} allows 1 "
                f"to {limit}: lower --draft-tokens or raise --rollback"
            )

    @classmethod
    def of(cls, recipe: Recipe) -> DraftPlan:
        """The draft of a gpu recipe; raises ValueError for limits that it cannot have."""
        draft, limits, model = recipe.draft, recipe.limits, recipe.draft_config()
        io = DraftIO.of(
            model,
            recipe.memory,
            max_sequences=limits.max_sequences,
            max_length=limits.max_length,
            dtype=draft.dtype,
            chunk=limits.chunk,
            logits=True,
        )
        return cls(model, io, limits.max_draft_tokens, draft.quantization)

    @property
    def scheme(self) -> Scheme | None:
        """How linear layers are quantised; None: not at all."""
        return find_scheme(self.quantization)

    @property
    def weight_count(self) -> int:
        """Parameters of the model, mirrored projections included."""
        m = self.model
        q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
        attention = m.hidden_size * (2 * q + 2 * kv) + (q + 2 * kv) * m.qkv_bias
        norms = 2 * m.hidden_size + 2 * m.head_dim * m.qk_norm
        layer = attention + 3 * m.hidden_size * m.intermediate_size + norms
        embeddings = m.vocab_size * m.hidden_size * (1 if m.tied_embeddings else 2)
        mirror = 2 * kv * (m.hidden_size + m.qkv_bias) if self.io.rule.interval else 0
        return m.layers * (layer + mirror) + embeddings + m.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; quantised ones with their scales, the others in io's dtype."""
        itemsize = BYTES[self.io.dtype]
        if self.scheme is None:
            return self.weight_count * itemsize
        linear = self.model.layers * sum(a * b for a, b in linear_shapes(self.model))
        quantized = self.scheme.linear_bytes(self.model, itemsize)
        return (self.weight_count - linear) * itemsize + quantized

    @property
    def memory_bytes(self) -> int:
        """Bytes of the slot memory of all sequences."""
        return self.io.max_sequences * self._bytes(self.io.capacity)

    @property
    def activation_bytes(self) -> int:
        """An estimate: the widest tensors of a prefill chunk, and the logits of a full batch."""
        m, positions = self.model, self.io.positions(self.io.chunk)
        widths = 4 * m.hidden_size + 3 * m.intermediate_size
        keys = 4 * m.layers * m.kv_heads * m.head_dim
        logits = 4 * self.io.max_sequences * m.vocab_size
        return positions * (widths + keys) * BYTES[self.io.dtype] + logits

    @property
    def total_bytes(self) -> int:
        """Device memory that the draft needs: weights, slot memory, activations."""
        return self.weight_bytes + self.memory_bytes + self.activation_bytes

    def memory_rows(self, lengths: Sequence[int] = LENGTHS) -> list[MemoryRow]:
        """Memory of one sequence at several lengths, beside a full KV cache."""
        return [
            MemoryRow(n, e, self._bytes(e), self._bytes(n))
            for n in lengths
            for e in [self.io.rule.capacity(n)]
        ]

    def _bytes(self, entries: int) -> int:
        m = self.model
        return 2 * m.layers * m.kv_heads * m.head_dim * entries * BYTES[self.io.dtype]

    def check_device(self, free_bytes: int, name: str) -> None:
        """Refuses a device that cannot hold the draft, before the build."""
        if self.total_bytes > free_bytes:
            raise ValueError(
                f"the draft needs about {self.total_bytes / GIB:.1f} GiB, {name} has "
                f"{free_bytes / GIB:.1f} GiB free; lower --max-sequences or --max-length"
            )

    def as_dict(self) -> dict:
        """The plan for machines."""
        return {
            "weights": self.weight_count,
            "quantization": self.quantization,
            "weight_bytes": self.weight_bytes,
            "memory_bytes": self.memory_bytes,
            "activation_bytes": self.activation_bytes,
            "total_bytes": self.total_bytes,
            "capacity": self.io.capacity,
            "profiles": [
                {"name": p.name, "batch": p.batch, "positions": p.positions}
                for p in self.io.profiles
            ],
            "memory": [
                {
                    "length": row.length,
                    "entries": row.entries,
                    "bytes": row.bytes,
                    "full_bytes": row.full_bytes,
                }
                for row in self.memory_rows()
            ],
        }


def shape_card(plan: DraftPlan) -> Table:
    """Inputs and outputs with their dtypes and the shapes of both profiles."""
    profiles = plan.io.profiles
    card = new_card("inputs and outputs", ("tensor", "dtype", *(p.name for p in profiles)))
    for tensor in _one_layer(plan.io.inputs):
        card.add_row(tensor.name, tensor.dtype, *(_shape(tensor, p) for p in profiles))
    for tensor in plan.io.outputs:
        card.add_row(f"-> {tensor.name}", tensor.dtype, *(_shape(tensor, p) for p in profiles))
    return card


def _one_layer(tensors: Sequence[IoTensor]) -> list[IoTensor]:
    """All tensors, those of every layer but the first left out."""
    return [t for t in tensors if "." not in t.name or t.name.endswith(".0")]


def _shape(tensor: IoTensor, profile: Profile) -> str:
    least = tensor.sized(profile.batch[0], profile.positions[0])
    most = tensor.sized(profile.batch[2], profile.positions[2])
    sizes = [f"{a}" if a == b else f"{a}–{b}" for a, b in zip(least, most, strict=True)]
    return " × ".join(sizes)


def memory_card(plan: DraftPlan) -> Table:
    """Slot memory of one sequence beside a full cache, at several lengths."""
    rule: MemoryRule = plan.io.rule
    title = f"memory of one sequence, S {rule.sink}, W {rule.window}, r {rule.interval}"
    card = new_card(title, ("length", "entries", "MiB", "full MiB", "saved"))
    for row in plan.memory_rows():
        mib, full = row.bytes / 2**20, row.full_bytes / 2**20
        card.add_row(
            f"{row.length:,}", f"{row.entries:,}", f"{mib:,.0f}", f"{full:,.0f}", f"{row.saved:.0%}"
        )
    return card


def summary(plan: DraftPlan) -> str:
    """One line: what the device must hold."""
    kind = "" if plan.scheme is None else f" ({plan.quantization})"
    return (
        f"device memory: weights {plan.weight_bytes / GIB:.2f}{kind} + slot memory of "
        f"{plan.io.max_sequences} sequences of {plan.io.max_length:,} tokens "
        f"{plan.memory_bytes / GIB:.2f} + activations about {plan.activation_bytes / GIB:.2f} "
        f"= {plan.total_bytes / GIB:.2f} GiB"
    )
