"""Calls of the draft engine with buffers that stay where they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .draft_io import DraftIO
from .draft_numbers import Bucket, Layout
from .executor import Executor
from .memory import SlotMemory


class EngineCall:
    """The call of one profile with `layout.batch` sequences of `layout.positions` positions.

    numbers: (layout.size,) int32, all that describes a call; tensors: inputs and outputs by name,
    views of `numbers` and of the memory among them; lengths: (B,) int32 fed lengths afterwards.
    """

    def __init__(
        self, io: DraftIO, executor: Executor, profile: str, layout: Layout, memory: SlotMemory
    ):
        self.layout = layout
        device = executor.device
        self.numbers = torch.zeros(layout.size, dtype=torch.int32, device=device)
        views = {name: self._view(name, start) for name, start in layout.starts.items()}
        self.lengths = views.pop("lengths")
        for layer in range(io.layers):
            for tensor, whole in zip(io.memory(layer), (memory.k, memory.v), strict=True):
                views[tensor.name] = whole[layer]
        for tensor in io.outputs:
            shape = tensor.sized(layout.batch, layout.positions)
            dtype = getattr(torch, tensor.dtype)
            views[tensor.name] = torch.zeros(shape, dtype=dtype, device=device)
        self.tensors = views
        self.run = executor.bind(profile, views)

    def load(self, packed: np.ndarray) -> None:
        """Describes the next run; packed (size,) int32 on the host, free to change afterwards."""
        self.numbers.copy_(torch.from_numpy(packed), non_blocking=True)

    @property
    def placed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """rows, lengths, times and kind: where the new keys and values belong."""
        tensors = self.tensors
        return tensors["rows"], self.lengths, tensors["times"], tensors["kind"]

    def _view(self, name: str, start: int) -> Tensor:
        shape = self.layout.shape(name)
        return self.numbers[start : start + math.prod(shape)].view(shape)


@dataclass
class DraftingSteps:
    """The γ calls of a bucket, fed from each other on the device.

    first, later: the call of step 0 and that of all other steps. plans: (steps - 1, size) int32,
    what describes the later ones but for the ids. chosen: (steps, batch) int32 proposed ids.
    graph: all steps with their appends as a CUDA graph, once there is one.
    """

    bucket: Bucket
    first: EngineCall
    later: EngineCall
    plans: Tensor
    chosen: Tensor
    graph: torch.cuda.CUDAGraph | None = None

    @classmethod
    def make(cls, bucket: Bucket, first: EngineCall, later: EngineCall) -> DraftingSteps:
        """Allocates what the calls do not have."""
        plans = first.numbers.new_zeros(bucket.steps - 1, later.layout.size)
        chosen = first.numbers.new_zeros(bucket.steps, bucket.batch)
        return cls(bucket, first, later, plans, chosen)

    def load(self, first: np.ndarray, later: np.ndarray) -> None:
        """Describes all steps; first (1, size) and later (steps - 1, size) as `pack` gives them."""
        self.first.load(first[0])
        self.plans.copy_(torch.from_numpy(later), non_blocking=True)

    def call(self, step: int) -> EngineCall:
        """The call that makes a step."""
        return self.later if step else self.first

    def run(self, step: int) -> EngineCall:
        """Enqueues a step, which feeds the ids chosen in the step before, and its choice."""
        call = self.call(step)
        if step:
            call.numbers.copy_(self.plans[step - 1])
            ids = call.tensors["ids"]  # (B, N): a slot has the id of the raw token before it
            ids.copy_(self.chosen[step - 1][:, None].expand_as(ids))
        call.run()
        self.chosen[step].copy_(call.tensors["top_ids"][:, 0])
        return call
