"""What is asked of TensorRT-LLM's executor for one call of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from .messages import InvalidRequest, Sampling, TargetCall
from .trtllm_calls import TrtllmCalls, shortened
from .trtllm_folder import TargetEngine


@dataclass(frozen=True)
class Question:
    """What is asked of the engine for one call: ids (n,), up to `tokens` new ones, drafts (γ,).

    The engine ends at `end_ids[0]` itself; `banned` ids cannot come out at all.
    """

    ids: list[int]
    tokens: int
    drafts: list[int]
    logits: Tensor | None  # (γ, width of the engine's logits), adjusted
    sampling: Sampling
    seed: int
    min_tokens: int
    end_ids: tuple[int, ...]
    banned: tuple[int, ...] = ()

    @classmethod
    def of(cls, call: TargetCall, own_end_ids: tuple[int, ...], calls: TrtllmCalls) -> Question:
        """The question for a call; it may ask for fewer tokens than the call allows.

        Drafts and their logits are what `TrtllmCalls.proposal` leaves of the call's, and
        `shortened` of that while min_tokens lasts.
        """
        end_ids = own_end_ids if call.end_ids is None else call.end_ids
        tokens, proposal, banned = shortened(call, calls.proposal(call), end_ids)
        return cls(
            ids=call.ids.tolist(),
            tokens=tokens,
            drafts=list(proposal.ids),
            logits=proposal.logits,
            sampling=call.sampling,
            seed=call.seed,
            min_tokens=call.min_tokens if end_ids else 0,
            end_ids=end_ids,
            banned=banned,
        )


def executor_request(api: ModuleType, question: Question) -> Any:
    """The executor's Request for a question."""
    drafts = None
    if question.drafts:  # the executor refuses an empty list
        logits = None if question.logits is None else question.logits.cpu().contiguous()
        drafts = api.ExternalDraftTokensConfig(tokens=question.drafts, logits=logits)
    return api.Request(
        input_token_ids=question.ids,
        max_tokens=question.tokens,
        sampling_config=sampling_config(api, question),
        output_config=api.OutputConfig(exclude_input_from_output=True),
        end_id=question.end_ids[0] if question.end_ids else None,
        bad_words=[[token] for token in question.banned] or None,
        external_draft_tokens_config=drafts,
    )


def sampling_config(api: ModuleType, question: Question) -> Any:
    """The executor's SamplingConfig: top-k 1 is greedy; 0 takes all tokens into top-p."""
    minimum = {"min_tokens": question.min_tokens} if question.min_tokens > 0 else {}
    if question.sampling.greedy:
        return api.SamplingConfig(beam_width=1, top_k=1, **minimum)
    return api.SamplingConfig(
        beam_width=1,
        top_k=question.sampling.top_k,
        top_p=question.sampling.top_p,
        temperature=question.sampling.temperature,
        seed=question.seed,
        **minimum,
    )


def check(call: TargetCall, question: Question, engine: TargetEngine) -> None:
    """Refuses a bad call before it is sent, naming field and limit."""
    drafts, logits = call.proposal.ids, call.proposal.logits
    if not question.ids:
        raise InvalidRequest("input_ids is empty; give 1 or more ids")
    if call.output_tokens < 1:
        raise InvalidRequest(f"request_output_len is {call.output_tokens}; it must be 1 or more")
    if len(drafts) > engine.max_draft_len:
        raise InvalidRequest(
            f"draft_input_ids has {len(drafts)} ids; the engine's limit is {engine.max_draft_len} "
            "(trtllm-build --max_draft_len)"
        )
    total = len(question.ids) + question.tokens
    if total > engine.max_length:
        raise InvalidRequest(
            f"input_ids of {len(question.ids)} + request_output_len of {question.tokens} are "
            f"{total}; the engine's limit is {engine.max_length} (trtllm-build --max_seq_len, less "
            f"max_draft_len {engine.max_draft_len})"
        )
    _check_ids(engine.vocab_size, input_ids=question.ids, draft_input_ids=question.drafts)
    _check_ids(engine.vocab_size, end_id=question.end_ids)
    if logits is not None and (logits.ndim != 2 or logits.shape[0] != len(drafts)):
        raise InvalidRequest(
            f"draft_logits is {tuple(logits.shape)}; it must be {len(drafts)} x vocabulary"
        )


def _check_ids(vocab_size: int, **fields: Sequence[int]) -> None:
    for name, ids in fields.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequest(f"{name} has an id outside 0 to {vocab_size - 1}")
