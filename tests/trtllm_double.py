"""TensorRT-LLM's executor bindings, as far as they serve an engine with external draft tokens.

Requests are checked as the C++ classes check them. Behind them is a torch target that gives one
token for each plain step, or verifies drafts once, as the engine's decoder does. What the executor
may do differently from call to call is a field of `Behaviour`.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from masw.engines.messages import Proposal, Sampling, TargetCall
from masw.engines.target import TorchTarget

ModelType = Enum("ModelType", "DECODER_ONLY ENCODER_ONLY ENCODER_DECODER")
CommunicationType = Enum("CommunicationType", "MPI")
CommunicationMode = Enum("CommunicationMode", "ORCHESTRATOR LEADER")
FinishReason = Enum("FinishReason", "NOT_FINISHED END_ID STOP_WORDS LENGTH TIMED_OUT CANCELLED")


class TllmException(RuntimeError):
    """What a failed check of the C++ library becomes in Python."""


def require(condition: Any, message: str) -> None:
    """TLLM_CHECK."""
    if not condition:
        raise TllmException(f"[TensorRT-LLM][ERROR] Assertion failed: {message}")


@dataclass(kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    free_gpu_memory_fraction: float | None = None


@dataclass
class OrchestratorConfig:
    is_orchestrator: bool = True
    worker_executable_path: str = ""


@dataclass(kw_only=True)
class ParallelConfig:
    communication_type: CommunicationType = CommunicationType.MPI
    communication_mode: CommunicationMode = CommunicationMode.LEADER
    device_ids: list[int] | None = None
    orchestrator_config: OrchestratorConfig | None = None


@dataclass(kw_only=True)
class ExecutorConfig:
    max_beam_width: int = 1
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_context: bool = False
    parallel_config: ParallelConfig | None = None


@dataclass(kw_only=True)
class OutputConfig:
    exclude_input_from_output: bool = False


@dataclass(kw_only=True)
class SamplingConfig:
    beam_width: int = 1
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None

    def __post_init__(self):
        require(self.top_k is None or self.top_k >= 0, "topK")
        require(self.top_p is None or 0 < self.top_p <= 1, "topP")
        require(self.seed is None or 0 <= self.seed < 2**64, "seed")
        require(self.temperature is None or self.temperature > 0, "temperature")
        require(self.min_tokens is None or self.min_tokens >= 1, "minTokens")

    @property
    def sampling(self) -> Sampling:
        """Neither top-k nor top-p is top-k 1."""
        if not self.top_k and self.top_p is None:
            return Sampling()
        return Sampling(self.temperature or 1.0, self.top_k or 0, self.top_p or 1.0)


@dataclass
class ExternalDraftTokensConfig:
    tokens: list[int]
    logits: torch.Tensor | None = None
    acceptance_threshold: float | None = None

    def __post_init__(self):
        require(type(self.tokens) is list and self.tokens, "!mTokens.empty()")
        if self.logits is not None:
            require(self.logits.dim() == 2, "logits must be 2-D")
            require(self.logits.shape[0] == len(self.tokens), "one row of logits for each token")
            require(self.logits.device.type == "cpu" and self.logits.is_contiguous(), "layout")


@dataclass
class Request:
    input_token_ids: list[int]
    max_tokens: int
    streaming: bool = field(default=False, kw_only=True)
    sampling_config: SamplingConfig = field(default_factory=SamplingConfig, kw_only=True)
    output_config: OutputConfig = field(default_factory=OutputConfig, kw_only=True)
    end_id: int | None = field(default=None, kw_only=True)
    bad_words: list[list[int]] | None = field(default=None, kw_only=True)
    external_draft_tokens_config: ExternalDraftTokensConfig | None = field(
        default=None, kw_only=True
    )

    def __post_init__(self):
        ids = self.input_token_ids
        require(type(ids) is list and all(type(x) is int for x in ids), "inputTokenIds")
        require(ids, "!mInputTokenIds.empty()")
        require(self.max_tokens > 0, "mMaxNewTokens > 0")

    @property
    def drafts(self) -> list[int]:
        """Its draft tokens."""
        config = self.external_draft_tokens_config
        return config.tokens if config else []


@dataclass
class Result:
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    is_final: bool = True


@dataclass
class Response:
    request_id: int
    result: Result | None = None
    error_msg: str = ""

    def has_error(self) -> bool:
        return self.result is None


@dataclass
class Behaviour:
    """What an executor may do. Functions get the number of the request, from 0, and the request.

    echo: outputs begin with the prompt whatever is asked. end_in_output: the end id is part of the
    output, which TensorRT-LLM 1.x leaves out. kept_drafts: how many drafts the scheduler uses; with
    none the request decodes to its end. error: a message instead of an answer. silent: no answer
    until it is cancelled. whole_steps: min_tokens forbids the end id at all positions of a step.
    """

    echo: bool = False
    end_in_output: bool = False
    kept_drafts: Callable[[int, Request], int] = lambda number, request: len(request.drafts)
    error: Callable[[int, Request], str] = lambda number, request: ""
    silent: Callable[[int, Request], bool] = lambda number, request: False
    whole_steps: bool = False
    leader: bool = True


class Executor:
    """One engine. It answers a request when somebody waits for it or for one that came later."""

    def __init__(
        self,
        target: TorchTarget,
        behaviour: Behaviour,
        model_path: Path,
        model_type: ModelType,
        executor_config: ExecutorConfig,
    ):
        require(model_type is ModelType.DECODER_ONLY, "model type")
        model = json.loads((model_path / "config.json").read_text())["pretrained_config"]
        parts = model["mapping"]["tp_size"]
        self.logits_width = model["vocab_size"] + -model["vocab_size"] % parts
        self.target, self.behaviour, self.config = target, behaviour, executor_config
        self.requests: list[Request] = []
        self.open: dict[int, Request] = {}
        self.ready: dict[int, Response] = {}
        self.cancelled: list[int] = []
        self.is_shut_down = False
        self._numbers = count()

    def can_enqueue_requests(self) -> bool:
        return self.behaviour.leader

    def enqueue_request(self, request: Request) -> int:
        require(not self.is_shut_down, "executor was shut down")
        self._check(request)
        number = next(self._numbers)
        self.requests.append(request)
        self.open[number] = request
        return number

    def _check(self, request: Request) -> None:
        """What LlmRequest::validate checks against the engine."""
        limit, vocab = self.target.max_draft_tokens, self.target.decoder.config.vocab_size
        drafts, length = request.drafts, len(request.input_token_ids)
        require(len(drafts) <= limit, f"draft tokens {len(drafts)} exceed the maximum {limit}")
        step = len(drafts) or limit
        longest = self.target.memory.max_length
        require(length + request.max_tokens + step <= longest, "maximum sequence length")
        require(request.end_id is None or -1 <= request.end_id < vocab, "end id")
        config = request.external_draft_tokens_config
        if config is not None and config.logits is not None:
            require(config.logits.shape[1] == self.logits_width, "Incompatible buffer sizes")
            require(config.logits.dtype is torch.float32, "logits type")
            require(config.acceptance_threshold is None, "thresholds hold for a whole batch")

    def await_responses(
        self, *, id: int, timeout: datetime.timedelta | None = None
    ) -> list[Response]:
        if id in self.open and not self.behaviour.silent(id, self.open[id]):
            self.ready[id] = self._answer(id, self.open.pop(id))
        if id in self.ready:
            return [self.ready.pop(id)]
        if id in self.open:
            time.sleep(timeout.total_seconds())
            return []
        return [Response(id, error_msg=f"request {id} was already answered")]

    def cancel_request(self, id: int) -> None:
        self.cancelled.append(id)
        self.open.pop(id)
        self.ready[id] = Response(id, Result([[]], [FinishReason.CANCELLED]))

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _answer(self, number: int, request: Request) -> Response:
        if message := self.behaviour.error(number, request):
            return Response(number, error_msg=message)
        drafts = self.behaviour.kept_drafts(number, request)
        ids = self._verify(request, drafts) if drafts else self._decode(request)
        reason = FinishReason.LENGTH
        if request.end_id is not None and ids[-1] == request.end_id:
            reason = FinishReason.END_ID
            ids = ids if self.behaviour.end_in_output else ids[:-1]
        if self.behaviour.echo or not request.output_config.exclude_input_from_output:
            ids = request.input_token_ids + ids
        return Response(number, Result([ids], [reason]))

    def _verify(self, request: Request, drafts: int) -> list[int]:
        """One step over the first `drafts` draft tokens."""
        require(not request.bad_words, "the double bans ids in plain decoding only")
        config = request.external_draft_tokens_config
        vocab = self.target.decoder.config.vocab_size  # columns beyond are the ranks' padding
        logits = None if config.logits is None else config.logits[:drafts, :vocab]
        proposal = Proposal(tuple(config.tokens[:drafts]), logits)
        minimum = request.sampling_config.min_tokens or 0
        if minimum and self.behaviour.whole_steps:
            minimum = drafts + 1
        ends = () if request.end_id is None else (request.end_id,)
        return self._ask(request, request.input_token_ids, proposal, minimum, ends)

    def _decode(self, request: Request) -> list[int]:
        """Token after token up to the end id or max_tokens."""
        ids: list[int] = []
        banned = [word for (word,) in request.bad_words or []]
        while len(ids) < request.max_tokens and request.end_id not in ids[-1:]:
            early = len(ids) < (request.sampling_config.min_tokens or 0)
            forbidden = banned + [request.end_id] * (early and request.end_id is not None)
            known = request.input_token_ids + ids
            ids += self._ask(request, known, Proposal(), 1, tuple(forbidden), len(ids))
        return ids

    def _ask(self, request, ids, proposal, minimum, ends, step=0) -> list[int]:
        config = request.sampling_config
        seed = (config.seed or 0) + step
        call = TargetCall(
            np.array(ids, np.int32), 1, proposal, config.sampling, seed, minimum, ends
        )
        (answer,) = self.target.verify([call])
        if isinstance(answer, Exception):
            raise answer
        return list(answer.ids)


def install(monkeypatch, target: TorchTarget, behaviour: Behaviour | None = None) -> list[Executor]:
    """Puts the bindings over a torch target in place; returns the executors that are made."""
    made: list[Executor] = []
    behaviour = behaviour or Behaviour()

    def executor(model_path, model_type, executor_config):
        made.append(Executor(target, behaviour, model_path, model_type, executor_config))
        return made[-1]

    kinds = (
        *(KvCacheConfig, OrchestratorConfig, ParallelConfig, ExecutorConfig, OutputConfig),
        *(SamplingConfig, ExternalDraftTokensConfig, Request),
        *(ModelType, CommunicationType, CommunicationMode, FinishReason),
    )
    api = ModuleType("tensorrt_llm.bindings.executor")
    vars(api).update({kind.__name__: kind for kind in kinds}, Executor=executor)
    bindings, package = ModuleType("tensorrt_llm.bindings"), ModuleType("tensorrt_llm")
    package.__file__ = "/opt/tensorrt_llm/__init__.py"
    for module in (package, bindings, api):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def write_engine(directory: Path, target: TorchTarget, ranks: int = 1, **build) -> Path:
    """An engine folder that states what `target` allows; `build` changes its build_config."""
    config = target.decoder.config
    stated = {
        "max_input_len": 1024,
        "max_seq_len": target.memory.max_length,
        "max_draft_len": target.max_draft_tokens,
        "speculative_decoding_mode": 2,
        "kv_cache_type": "PAGED",
        "plugin_config": {"use_paged_context_fmha": True, "tokens_per_block": 32},
    }
    mapping = {"world_size": ranks, "tp_size": ranks, "pp_size": 1}
    data = {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "logits_dtype": "float32",
            "vocab_size": config.vocab_size,
            "mapping": mapping,
        },
        "build_config": stated | build,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(data))
    for rank in range(ranks):
        (directory / f"rank{rank}.engine").write_bytes(b"engine")
    return directory
