"""One draft step as a CUDA graph: what it takes once the host no longer holds it up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...engines.draft import TorchDraft
from ...plugins.slot_attention.block import Block
from ...plugins.slot_attention.launch import append
from .cuda import graph_us


@torch.inference_mode()
def graph_step_ms(draft: TorchDraft, length: int) -> float:
    """Milliseconds of a step of row 0 at about `length` fed tokens, averaged over a unit.

    One step in r has a slot token. A step is forward, append, logits and argmax; the graph is
    fixed, so it says what the device needs and is no engine.
    """
    rule = draft.memory.rule
    if rule.slots(length) == 0:
        return graph_us([_step(draft, length)], 0.2) / 1e3
    last = rule.boundary(rule.slots(length) - 1)  # a token of this number ends a unit
    with_slot = graph_us([_step(draft, last)], 0.2) / 1e3
    without = graph_us([_step(draft, last - 1)], 0.2) / 1e3 if rule.interval > 1 else 0.0
    return (with_slot + (rule.interval - 1) * without) / rule.interval


def _step(draft: TorchDraft, fed: int) -> Callable[[], torch.Tensor]:
    memory, decoder = draft.memory, draft.decoder
    block = Block.build(memory.rule, [0], [fed], [[7]], memory.k.device)

    def step() -> torch.Tensor:
        hidden, k, v = decoder(block, memory, draft.adaptor)
        append(memory.k, memory.v, block, k, v)
        return decoder.logits(hidden[:, 0]).argmax(-1)

    return step
