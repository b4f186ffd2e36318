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
from .trtllm_folder import padded_vocab


@dataclass(frozen=True)
class TrtllmCalls:
    """vocab: ids that the engine has. multiple: what its logits are padded to a multiple of."""

    vocab: int
    multiple: int = 1

    def __post_init__(self):
        padded_vocab(self.vocab, self.multiple)

    @property
    def width(self) -> int:
        """Columns of the engine's logits, of which `vocab` are ids."""
        return padded_vocab(self.vocab, self.multiple)

    def adapt(self, call: TargetCall) -> TargetCall:
        """A call of the same meaning, of perhaps fewer tokens, that the runtime answers exactly.

        It gives no end id, so that the output holds it and the loop cuts there; while min_tokens
        lasts it gives the one that is forbidden. With fewer tokens than the input has, an output
        row as long as that holds the prompt, and a shorter one does not.
        Raises InvalidRequest where min_tokens cannot be kept.
        """
        ends = call.end_ids or ()
        least = call.min_tokens if ends else 0
        proposal, most = self.proposal(call), max(1, len(call.ids) - 1)
        tokens, proposal, banned = shortened(call, proposal, ends, most)
        if banned:
            raise InvalidRequest(
                f"min_tokens is {least}; it needs end_id: TensorRT-LLM can forbid one end id, this "
                f"model has {len(ends)}"
            )
        return replace(
            call,
            output_tokens=tokens,
            proposal=proposal,
            min_tokens=least,
            end_ids=ends if least else (),
        )

    def proposal(self, call: TargetCall) -> Proposal:
        """Draft ids that the engine knows, with logits of its width; none without logits to
        sample by: the runtime would favour the draft's tokens."""
        proposal = call.proposal.first(self._known(call.proposal.ids))
        if call.sampling.greedy:
            return Proposal(proposal.ids)
        if not proposal.ids or proposal.logits is None:
            return Proposal()
        return Proposal(proposal.ids, self.logits(proposal.logits))

    def logits(self, logits: Tensor) -> Tensor:
        """(γ, V) -> (γ, width) float32; what is no id of both is as low as the dtype goes."""
        known = logits[:, : self.vocab].float()
        padded = pad(known, (0, self.width - known.shape[-1]), value=-torch.inf)
        return padded.clamp_min(torch.finfo(torch.float32).min)

    def _known(self, ids: tuple[int, ...]) -> int:
        """How many ids stand before the first that the target does not have."""
        unknown = (place for place, token in enumerate(ids) if token >= self.vocab)
        return next(unknown, len(ids))


def shortened(
    call: TargetCall, proposal: Proposal, end_ids: tuple[int, ...], most: int | None = None
) -> tuple[int, Proposal, tuple[int, ...]]:
    """(tokens to ask for, the drafts that fit, ids to ban) for a call with these drafts.

    At most `most` tokens, and while min_tokens lasts no more than it covers: so end ids are
    forbidden at every position, whether the runtime counts those of a step one by one or not. It
    forbids one end id; the others must be banned for the request, which then has no drafts.
    """
    tokens = len(proposal.ids) + 1 if proposal.ids else call.output_tokens
    tokens = tokens if most is None else min(tokens, most)
    if not (call.min_tokens and end_ids):
        return tokens, proposal.first(tokens - 1), ()
    tokens, banned = min(tokens, call.min_tokens), end_ids[1:]
    return tokens, Proposal() if banned else proposal.first(tokens - 1), banned


class AdaptedTarget:
    """A target port over one that leads to TensorRT-LLM's C++ runtime."""

    def __init__(self, target: TargetPort, calls: TrtllmCalls):
        self._target, self._calls = target, calls

    async def __call__(self, call: TargetCall) -> Verdict:
        """The verdict on the adapted call. Raises InvalidRequest, TargetError."""
        return await self._target(self._calls.adapt(call))
