"""Triton's `pb_utils` as far as calls between models go, over models that are async functions.

`TrtllmBackend` is a double of the `tensorrt_llm` model under TensorRT-LLM's C++ backend in external
draft mode. It holds to what is known of that: what it asserts about its inputs; that an end id is
not part of the output; that one step ends a call with drafts, while a call whose drafts the
scheduler drops decodes to request_output_len; that without draft logits it samples a rejected
place anew.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import numpy as np

from masw.engines.hostile_target import HostileTarget
from masw.engines.local import Batcher
from masw.engines.messages import Proposal, TargetCall
from masw.engines.target import TorchTarget
from masw.triton_repo.ports import target_call

Values = dict[str, np.ndarray]
Model = Callable[[Values], Awaitable[Values]]  # without the batch axis; may raise


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: np.ndarray):
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class Response:
    """The outputs of a call, or its error."""

    def __init__(self, outputs: Values, message: str = ""):
        self.output_tensors = lambda: [Tensor(n, array[None]) for n, array in outputs.items()]
        self._message = message

    def has_error(self) -> bool:
        return bool(self._message)

    def error(self) -> Response:
        return self

    def message(self) -> str:
        return self._message


class Logger:
    """Where models write to the server's log."""

    @staticmethod
    def log_warn(text: str) -> None:
        """Nobody reads it."""


class TritonDouble:
    """`pb_utils` with these models; `calls` are the inputs of all calls, without batch axis."""

    Logger = Logger

    Tensor = Tensor

    class TritonModelException(Exception):
        """What Triton raises."""

    def __init__(self, **models: Model):
        self.models, self.calls = models, []

    def InferenceRequest(self, model_name, requested_output_names, inputs):
        return Request(self, model_name, requested_output_names, inputs)


@dataclass
class Request:
    """One call of a model."""

    triton: TritonDouble
    model: str
    outputs: list[str]
    tensors: list[Tensor]

    async def async_exec(self) -> Response:
        values = {tensor.name(): tensor.as_numpy() for tensor in self.tensors}
        assert all(array.shape[0] == 1 and array.size for array in values.values()), values
        values = {name: array[0] for name, array in values.items()}
        self.triton.calls.append(values)
        try:
            outputs = await self.triton.models[self.model](values)
        except Exception as error:
            return Response({}, str(error))
        return Response({name: outputs[name] for name in self.outputs if name in outputs})


def output(row: list[int], length: int | None = None) -> Values:
    """The outputs of the target: a row of ids of which `length` count (None: all)."""
    length = len(row) if length is None else length
    return {
        "output_ids": np.array([row], np.int32),
        "sequence_length": np.array([length], np.int32),
    }


def hostile_model(target: HostileTarget) -> Model:
    """The cpu lane's hostile target behind its tensors."""
    verify = Batcher(target.verify)

    async def serve(values: Values) -> Values:
        call = target_call(values)
        answer = await verify(call)
        return output(*target.lay_out(call.ids, answer.ids))

    return serve


@dataclass
class TrtllmBackend:
    """The double described above. drop: share of calls whose drafts the scheduler drops.

    layout: "asked" obeys exclude_input_in_output, "both" does as it likes. logits_width: of the
    engine.
    """

    engine: TorchTarget
    logits_width: int
    max_seq_len: int
    max_draft_len: int = 16
    layout: str = "asked"
    drop: float = 0.2
    seed: int = 0
    done: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self._verify, self._random = Batcher(self.engine.verify), random.Random(self.seed)

    async def __call__(self, values: Values) -> Values:
        self._assert_inputs(values)
        call = replace(target_call(values), end_ids=self._end_ids(values))
        if call.proposal.logits is not None:
            vocab = self.engine.decoder.config.vocab_size
            logits = call.proposal.logits[:, :vocab].float()
            call = replace(call, proposal=Proposal(call.proposal.ids, logits))
        ids = list(await self._new_ids(call))
        if ids and ids[-1] in call.end_ids:
            self.done["ended"] += 1
            ids.pop()  # the length does not grow for an end id
        return self._lay_out(call, ids, bool(values["exclude_input_in_output"][0]))

    def _assert_inputs(self, values: Values) -> None:
        ids, drafts = values["input_ids"], values.get("draft_input_ids")
        asked, drafted = int(values["request_output_len"][0]), 0 if drafts is None else len(drafts)
        assert ids.dtype == np.int32 and values["input_lengths"].tolist() == [len(ids)]
        assert drafts is None or drafted, "Assertion failed: !mTokens.empty()"
        assert drafted <= self.max_draft_len, f"Number of draft tokens ({drafted}) > max"
        kept_back = drafted or self.max_draft_len
        assert len(ids) + asked + kept_back <= self.max_seq_len, "longer than max_seq_len"
        assert not drafted or asked == drafted + 1, "request_output_len is not drafts + 1"
        assert "end_id" in values, "no end_id"
        assert values["end_id"][0] >= 0 or not values["min_tokens"][0], "logits[-1] is masked"
        assert "draft_acceptance_threshold" not in values
        if "draft_logits" in values:
            shape = (drafted, self.logits_width)
            assert values["draft_logits"].shape == shape, "Incompatible buffer sizes"
            assert values["draft_logits"].dtype == np.float32, "logits type"
            assert np.isfinite(values["draft_logits"]).all()

    def _end_ids(self, values: Values) -> tuple[int, ...]:
        end_id = int(values["end_id"][0])
        return () if end_id < 0 else (end_id,)

    async def _new_ids(self, call: TargetCall) -> tuple[int, ...]:
        proposal = call.proposal
        if proposal.ids and self._random.random() < self.drop:
            self.done["dropped"] += 1
            return (await self._verify(replace(call, proposal=Proposal()))).ids
        if proposal.ids and proposal.logits is None and not call.sampling.greedy:
            return await self._sample_anew(call)
        return (await self._verify(call)).ids

    async def _sample_anew(self, call: TargetCall) -> tuple[int, ...]:
        """Exact match by the kernels: a token that differs is not the one that is emitted."""
        kept: tuple[int, ...] = ()
        for place in range(call.output_tokens):
            ids = np.array([*call.ids, *kept], np.int32)
            one = replace(call, ids=ids, output_tokens=1, proposal=Proposal())
            own, anew = [
                (await self._verify(replace(one, seed=call.seed + 2 * place + i))).ids
                for i in range(2)
            ]
            if place == len(call.proposal.ids) or own != call.proposal.ids[place : place + 1]:
                return (*kept, *anew)
            kept += own
        return kept

    def _lay_out(self, call: TargetCall, ids: list[int], exclude: bool) -> Values:
        without = exclude if self.layout == "asked" else self._random.random() < 0.5
        row = ids if without else [*call.ids.tolist(), *ids]
        padding = self._random.choice([0, 0, 5])
        return output([*row, *[7] * padding], len(row))
