"""Everything that decides the outcome of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

import torch

from ...engines.adaptor import LAST_TOKEN, AdaptorConfig
from ...engines.config import MOST_SIZE
from ...engines.decoder import Decoder
from ...plugins.slot_attention.rule import MemoryRule, SlotVisibility

TRAINING_DTYPES = ("float32", "bfloat16")  # gradients vanish in float16


class Initialisation(StrEnum):
    """How the mirrored projections begin: as copies of the backbone's, or at random."""

    COPY = "copy"
    RANDOM = "random"


class Loss(StrEnum):
    """Next token (the paper's), divergence from the same model with full KV, or from a target."""

    NEXT_TOKEN = "next-token"
    SELF = "kl-self"
    TARGET = "kl-target"


@dataclass(frozen=True)
class TrainSettings:
    """Memory, adaptor, loss and schedule of a run. Lengths and batches in raw tokens.

    intervals: the slot intervals r that steps take in turn. next_token: share of the next-token
    loss beside a divergence. prompt_weight: weight of predictions inside a prompt when tuning.
    batch_tokens per optimiser step over all ranks, micro_tokens per forward.
    """

    intervals: tuple[int, ...] = (8,)
    sink: int = 128
    window: int = 128
    visibility: SlotVisibility = SlotVisibility.EVICTED
    slot_embedding: str | int = LAST_TOKEN
    offset: bool = False
    low_rank: int = 0
    initialisation: Initialisation = Initialisation.COPY
    loss: Loss = Loss.SELF
    next_token: float = 0.0
    prompt_weight: float = 1.0
    lengths: tuple[int, ...] = (2048,)
    batch_tokens: int = 8192
    micro_tokens: int = 2048
    steps: int = 200
    learning_rate: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.0
    clip: float = 1.0
    dtype: str = "bfloat16"
    recompute: bool = False
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "initialisation", Initialisation(self.initialisation))
        object.__setattr__(self, "loss", Loss(self.loss))
        least = {"steps": 1, "batch_tokens": 1, "micro_tokens": 1, "warmup": 0, "seed": 0}
        for name, limit in least.items():
            if not limit <= getattr(self, name) <= MOST_SIZE:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be {limit} to {MOST_SIZE}"
                )
        if not 0 <= self.weight_decay < inf:
            raise ValueError(
                f"weight_decay is {self.weight_decay}; it must be 0 or more and finite"
            )
        for name in ("next_token", "prompt_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 to 1")
        if not self.intervals or not self.lengths:
            raise ValueError("give one or more intervals and one or more lengths")
        if self.dtype not in TRAINING_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; use one of {', '.join(TRAINING_DTYPES)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")
        if self.next_token and self.loss is Loss.NEXT_TOKEN:
            raise ValueError(f"next_token is {self.next_token}; loss next-token has no other share")
        for interval in self.intervals:
            self.adaptor_config("", interval, trained=False)  # raises for what it does not take
        first = max(self.rule(r).first_slot_time for r in self.intervals)
        if min(self.lengths) <= first:
            raise ValueError(
                f"lengths has {min(self.lengths)}; no slot is seen before token {first}"
            )

    def rule(self, interval: int) -> MemoryRule:
        """The memory rule of steps with slot interval r."""
        return MemoryRule(self.sink, self.window, interval=interval, visibility=self.visibility)

    def adaptor_config(self, base: str, interval: int, trained: bool) -> AdaptorConfig:
        """Header of the adaptor that the run makes for one slot interval."""
        return AdaptorConfig(
            base=base,
            sink=self.sink,
            window=self.window,
            interval=interval,
            visibility=self.visibility,
            slot_embedding=self.slot_embedding,
            offset=self.offset,
            low_rank=self.low_rank,
            trained=trained,
        )

    def new_adaptor(self, decoder: Decoder):
        """A fresh adaptor in float32 on the decoder's device."""
        config = self.adaptor_config(decoder.fingerprint(), self.intervals[0], trained=False)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)  # the low-rank updates' first factors
            adaptor = decoder.copy_adaptor(config).float()
        if self.initialisation is Initialisation.RANDOM:
            for mirror in adaptor.layers:
                for projection in (mirror.k_proj, mirror.v_proj):
                    noise = torch.randn(projection.weight.shape, generator=generator)
                    projection.weight.data.copy_(0.02 * noise)
        return adaptor
