"""What a call must look like for TensorRT-LLM's C++ runtime to answer it exactly.

The loop speaks of target calls as it means them; `TrtllmCalls.adapt` turns one into a call of the
same meaning that the runtime serves without a loss. docs/target.md has the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .messages import InvalidRequest, Proposal, TargetCall, Verdict
from .speculative import TargetPort

LOGITS_DTYPES = {"float32": torch.float32, "float16": torch.float16}


def padded_vocab(vocab: int, multiple: int) -> int:
    """The width of an engine's logits: the vocabulary padded to a multiple (of TP, or 64 for AWQ).

    Raises ValueError for sizes below 1.
    """
    if vocab < 1 or multiple < 1:
        raise ValueError(f"vocab is {vocab}, multiple is {multiple}; both must be 1 or more")
    return -(-vocab // multiple) * multiple


@dataclass(frozen=True)
class TrtllmCalls:
    """width: of the engine's logits (`padded_vocab`). logits_dtype: the engine's `logits_dtype`."""

    width: int
    logits_dtype: str = "float32"

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"width is {self.width}; it must be 1 or more")
        if self.logits_dtype not in LOGITS_DTYPES:
            raise ValueError(
                f"logits_dtype is {self.logits_dtype!r}; use one of {', '.join(LOGITS_DTYPES)}"
            )

    def adapt(self, call: TargetCall) -> TargetCall:
        """A call of the same meaning, of perhaps fewer tokens, that the runtime answers exactly.

        Raises InvalidRequest where min_tokens cannot be kept.
        """
        call = _with_end_ids_known(call)
        call = replace(call, proposal=self._proposal(call))
        return _shortened(call, max(1, len(call.ids) - 1))

    def _proposal(self, call: TargetCall) -> Proposal:
        """Draft ids that the engine knows, with logits of its width; none without logits to
        sample by: the runtime would favour the draft's tokens."""
        proposal = call.proposal
        if call.sampling.greedy:
            return Proposal(_known(proposal.ids, self.width))
        if proposal.logits is None:
            return Proposal()
        proposal = proposal.first(len(_known(proposal.ids, self.width)))
        return Proposal(proposal.ids, self._logits(proposal.logits))

    def _logits(self, logits: Tensor | None) -> Tensor | None:
        """(γ, V) -> (γ, width); what the draft cannot say is as low as the dtype goes."""
        if logits is None:
            return None
        dtype = LOGITS_DTYPES[self.logits_dtype]
        missing = max(0, self.width - logits.shape[-1])
        logits = pad(logits[:, : self.width], (0, missing), value=-torch.inf)
        return logits.clamp_min(torch.finfo(dtype).min).to(dtype)


def _known(ids: tuple[int, ...], width: int) -> tuple[int, ...]:
    """The ids before the first that the target does not have."""
    unknown = (place for place, token in enumerate(ids) if token >= width)
    return ids[: next(unknown, len(ids))]


def _with_end_ids_known(call: TargetCall) -> TargetCall:
    """No end id, so that the output holds it and the loop cuts there; while min_tokens lasts the
    end id, forbidden at every position of a call that goes no further."""
    ends = call.end_ids or ()
    if not call.min_tokens or not ends:
        return replace(call, end_ids=(), min_tokens=0)
    if len(ends) > 1:
        raise InvalidRequest(
            f"min_tokens is {call.min_tokens}; it needs end_id: TensorRT-LLM can forbid one end "
            f"id, this model has {len(ends)}"
        )
    return _shortened(call, call.min_tokens)


def _shortened(call: TargetCall, limit: int) -> TargetCall:
    """The call with at most `limit` output tokens, the drafts clipped to match.

    With a limit below the input's own length, an output row as long as that holds the prompt, and
    a shorter one does not.
    """
    output = min(call.output_tokens, limit)
    proposal = call.proposal.first(output - 1)
    output = len(proposal.ids) + 1 if proposal.ids else output
    return replace(call, output_tokens=output, proposal=proposal)


class AdaptedTarget:
    """A target port over one that leads to TensorRT-LLM's C++ runtime."""

    def __init__(self, target: TargetPort, calls: TrtllmCalls):
        self._target, self._calls = target, calls

    async def __call__(self, call: TargetCall) -> Verdict:
        """The verdict on the adapted call. Raises InvalidRequest, TargetError."""
        return await self._target(self._calls.adapt(call))
