"""Draft and target behind Triton as ports of the loop, called by BLS from one event loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..engines.messages import (
    DraftCall,
    DraftStateError,
    DraftUnavailable,
    InvalidRequest,
    Proposal,
    Sampling,
    TargetCall,
    TargetError,
    TargetUnavailable,
    Verdict,
)
from .wire import DRAFT_STATE, batched

NO_END = -1
TARGET_OUTPUTS = ["output_ids", "sequence_length"]
# What the same call would meet again: a refusal, or a model whose process is gone.
LASTING = (
    "INVALID_ARGUMENT",
    "healthy",
    "unknown model",
    "not ready",
    "no available version",
)


class ModelPort:
    """Calls one non-decoupled model; an error comes back as its message."""

    def __init__(self, pb_utils: Any, model: str):
        self._pb_utils, self._model = pb_utils, model

    async def call(
        self, inputs: dict[str, np.ndarray], outputs: list[str]
    ) -> tuple[dict[str, np.ndarray], str]:
        """Outputs by name without the batch axis, and the error message ("" without one)."""
        tensors = [self._pb_utils.Tensor(name, array) for name, array in inputs.items()]
        request = self._pb_utils.InferenceRequest(
            model_name=self._model, requested_output_names=outputs, inputs=tensors
        )
        try:
            answer = await request.async_exec()
        except self._pb_utils.TritonModelException as error:
            return {}, str(error)
        if answer.has_error():
            return {}, answer.error().message()
        return {t.name(): t.as_numpy()[0] for t in answer.output_tensors()}, ""


class DraftModel:
    """The draft port over `masw_draft`; every input is always sent, so that calls join."""

    def __init__(self, pb_utils: Any, model: str = "masw_draft"):
        self._port = ModelPort(pb_utils, model)

    async def __call__(self, call: DraftCall) -> Proposal:
        inputs = {
            "sequence_id": batched(call.sequence_id, np.uint64),
            "start_position": batched(call.start_position, np.int32),
            "new_ids": batched(call.new_ids, np.int32),
            "num_draft_tokens": batched(call.draft_tokens, np.int32),
            "temperature": batched(call.sampling.temperature, np.float32),
            "top_p": batched(call.sampling.top_p, np.float32),
            "top_k": batched(call.sampling.top_k, np.int32),
            "seed": batched(call.seed, np.uint64),
            "return_draft_logits": batched(call.return_logits, np.bool_),
            "end": batched(call.end, np.bool_),
        }
        outputs, error = await self._port.call(inputs, ["draft_input_ids", "draft_logits"])
        if DRAFT_STATE in error:
            raise DraftStateError(error)
        if error:
            raise DraftUnavailable(error)
        logits = outputs["draft_logits"]
        return Proposal(
            tuple(outputs["draft_input_ids"].tolist()),
            torch.from_numpy(logits.copy()) if logits.size else None,
        )


class TargetModel:
    """The target port over `tensorrt_llm`, with the tensors of its C++ backend.

    own_end_ids: what the target ends at when a call names none; None: it is always told.
    vocab: ids it may answer with.
    """

    def __init__(
        self,
        pb_utils: Any,
        own_end_ids: tuple[int, ...] | None,
        vocab: int,
        model: str = "tensorrt_llm",
    ):
        self._port = ModelPort(pb_utils, model)
        self._own_end_ids, self._vocab = own_end_ids, vocab

    async def __call__(self, call: TargetCall) -> Verdict:
        """The verdict. Raises TargetUnavailable for a failure that may pass, else TargetError."""
        outputs, error = await self._port.call(self._inputs(call), TARGET_OUTPUTS)
        if error:
            kind = TargetError if any(words in error for words in LASTING) else TargetUnavailable
            raise kind(f"the target failed: {error}")
        missing = [name for name in TARGET_OUTPUTS if name not in outputs]
        if missing:
            raise TargetUnavailable(f"the target answered without {', '.join(missing)}")
        row, length = outputs["output_ids"][0], int(outputs["sequence_length"][0])
        new_ids = _new_ids(row, length, call)
        if len(new_ids) and not 0 <= new_ids.min() <= new_ids.max() < self._vocab:
            raise TargetUnavailable(f"output_ids has an id outside 0 to {self._vocab - 1}")
        return Verdict(tuple(new_ids.tolist()))

    def _inputs(self, call: TargetCall) -> dict[str, np.ndarray]:
        sampling, proposal = call.sampling, call.proposal
        inputs = {
            "input_ids": batched(call.ids, np.int32),
            "input_lengths": batched(len(call.ids), np.int32),
            "request_output_len": batched(call.output_tokens, np.int32),
            "temperature": batched(sampling.temperature or 1.0, np.float32),
            "runtime_top_k": batched(1 if sampling.greedy else sampling.top_k, np.int32),
            "runtime_top_p": batched(sampling.top_p, np.float32),
            "seed": batched(call.seed, np.uint64),
            "min_tokens": batched(call.min_tokens, np.int32),
            "exclude_input_in_output": batched(True, np.bool_),
        }
        if call.end_ids is not None and call.end_ids != self._own_end_ids:
            inputs["end_id"] = batched(call.end_ids[0] if call.end_ids else NO_END, np.int32)
        if proposal.ids:
            inputs["draft_input_ids"] = batched(proposal.ids, np.int32)
        if proposal.logits is not None:
            logits = proposal.logits.numpy()
            inputs["draft_logits"] = batched(logits, logits.dtype)
        return inputs


def _new_ids(row: np.ndarray, length: int, call: TargetCall) -> np.ndarray:
    """The new ids of an output row (n,) of which `length` count, the rest being padding.

    More ids than were asked for begin with the prompt, or the row is no answer to this call.
    """
    if not 0 <= length <= len(row):
        raise TargetError(f"sequence_length is {length}; output_ids has {len(row)} ids")
    ids, prompt = row[:length], len(call.ids)
    if length <= call.output_tokens:
        return ids
    if length > prompt + call.output_tokens or not np.array_equal(ids[:prompt], call.ids):
        raise TargetError(
            f"output_ids has {length} ids; request_output_len is {call.output_tokens}, and they "
            f"are not the {prompt} of input_ids followed by as many"
        )
    return ids[prompt:]


def sampling_of(values: dict[str, np.ndarray], prefix: str = "") -> Sampling:
    """Sampling of a draft or target call from its tensors."""
    given = [values.get(name) for name in ("temperature", f"{prefix}top_k", f"{prefix}top_p")]
    temperature, top_k, top_p = (None if v is None else v[0].item() for v in given)
    return Sampling.from_request(temperature, top_k, top_p)


def draft_call(values: dict[str, np.ndarray]) -> DraftCall:
    """A draft call from the tensors that `DraftModel` sends."""
    return DraftCall(
        sequence_id=int(values["sequence_id"][0]),
        start_position=int(values["start_position"][0]),
        new_ids=values["new_ids"].tolist(),
        draft_tokens=int(values["num_draft_tokens"][0]),
        sampling=sampling_of(values),
        seed=int(values["seed"][0]),
        return_logits=bool(values["return_draft_logits"][0]),
        end=bool(values["end"][0]),
    )


def target_call(values: dict[str, np.ndarray]) -> TargetCall:
    """A target call from the tensors that `TargetModel` or a TensorRT-LLM client sends.

    Raises InvalidRequest naming the field.
    """
    if values.get("beam_width", np.ones(1))[0] != 1:
        raise InvalidRequest(f"beam_width is {values['beam_width'][0]}; it must be 1")
    ids, length = values["input_ids"], int(values["input_lengths"][0])
    if length != len(ids):
        raise InvalidRequest(f"input_lengths is {length}; input_ids has {len(ids)} ids")
    logits = values.get("draft_logits")
    draft_ids = tuple(values.get("draft_input_ids", np.empty(0)).tolist())
    return TargetCall(
        ids=ids,
        output_tokens=int(values["request_output_len"][0]),
        proposal=Proposal(draft_ids, None if logits is None else torch.from_numpy(logits.copy())),
        sampling=sampling_of(values, "runtime_"),
        seed=int(values["seed"][0]) if "seed" in values else 0,
        min_tokens=int(values["min_tokens"][0]) if "min_tokens" in values else 0,
        end_ids=_end_ids(values.get("end_id")),
    )


def _end_ids(value: np.ndarray | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    return () if value[0] == NO_END else (int(value[0]),)
