"""The target as a TensorRT-LLM engine, called through its executor API, without Triton.

Each call is a new request with all ids. With draft tokens the engine answers after one step, with
the accepted ones and one of its own; without, it decodes plainly. Reused blocks of the paged KV
cache make up for sending the prefix again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from .messages import InvalidRequest, Sampling, Target, TargetCall, TargetError, Verdict
from .target import until_end
from .trtllm_calls import TrtllmCalls
from .trtllm_folder import TargetEngine
from .trtllm_module import load_executor, load_trtllm
from .trtllm_request import Question, check, executor_request

PROBE = (0, 0)  # ids of the request that is made on opening


@dataclass(frozen=True)
class ExecutorSettings:
    """How the engine runs. time_limit: seconds for one batch of calls, waiting included.

    kv_fraction: of the GPU memory that is free once the engine is loaded; gpus: the device of each
    rank, empty for the first ones.
    """

    time_limit: float = 120.0
    kv_fraction: float = 0.9
    gpus: tuple[int, ...] = ()

    def __post_init__(self):
        if not (math.isfinite(self.time_limit) and self.time_limit > 0):
            raise ValueError(f"time_limit is {self.time_limit}; it must be above 0 seconds")
        if not 0 < self.kv_fraction < 1:
            raise ValueError(f"kv_fraction is {self.kv_fraction}; it must be between 0 and 1")


class TrtllmTarget(Target):
    """A TensorRT-LLM engine folder as target.

    end_ids: the model's own, for calls that state none. Raises EngineFolderError for an engine that
    cannot verify drafts, ImportError naming the container where TensorRT-LLM is missing, and
    TargetError where the engine does not answer a first request.
    """

    def __init__(
        self,
        directory: Path,
        end_ids: tuple[int, ...] = (),
        settings: ExecutorSettings = ExecutorSettings(),
    ):
        self.engine = TargetEngine.load(directory)
        self.end_ids, self.settings = end_ids, settings
        self._calls = TrtllmCalls(self.engine.vocab_size, self.engine.tensor_parallel)
        self._api = load_executor()
        config = executor_config(self._api, self.engine, settings)
        self._executor = self._api.Executor(directory, self._api.ModelType.DECODER_ONLY, config)
        self._cancelled: set[int] = set()
        try:
            self._prompt_in_output = self._probe()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the engine and its ranks; the target cannot be used afterwards."""
        self._executor.shutdown()

    def verify(self, calls: Sequence[TargetCall]) -> list[Verdict | Exception]:
        """See `Target.verify`. All requests of a batch are in flight together.

        A verdict may have fewer tokens than the call allows, always at least one. A call that is
        not answered within the time limit is cancelled and answered by TargetError.
        """
        self._forget_cancelled()
        deadline = time.monotonic() + self.settings.time_limit
        sent = [self._send(call) for call in calls]
        return [
            each if isinstance(each, Exception) else self._verdict(*each, deadline) for each in sent
        ]

    def _send(self, call: TargetCall) -> tuple[int, Question] | Exception:
        """Enqueues a call: its request id and question, or what is wrong with it."""
        question = Question.of(call, self.end_ids, self._calls)
        try:
            check(call, question, self.engine)
            request = executor_request(self._api, question)
            return self._executor.enqueue_request(request), question
        except InvalidRequest as error:
            return error
        except RuntimeError as error:
            return TargetError(f"TensorRT-LLM refused the request: {error}")

    def _verdict(self, number: int, question: Question, deadline: float) -> Verdict | Exception:
        try:
            return Verdict(tuple(self._new_tokens(self._await(number, deadline), question)))
        except TargetError as error:
            return error
        except RuntimeError as error:
            return TargetError(f"TensorRT-LLM failed: {error}")

    def _await(self, number: int, deadline: float) -> Any:
        """The final result of a request; cancels it at the deadline."""
        while True:
            left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
            for response in self._executor.await_responses(id=number, timeout=left):
                if response.has_error():
                    raise TargetError(f"TensorRT-LLM failed: {response.error_msg}")
                if response.result.is_final:
                    return response.result
            if time.monotonic() >= deadline:
                break
        self._executor.cancel_request(number)
        self._cancelled.add(number)
        raise TargetError(
            f"the target did not answer within time_limit {self.settings.time_limit} s; the "
            "request was cancelled"
        )

    def _new_tokens(self, result: Any, question: Question) -> list[int]:
        """The new tokens of a result up to and including an end id, which TensorRT-LLM omits."""
        ids = list(result.output_token_ids[0])
        if self._prompt_in_output:
            ids = ids[len(question.ids) :]
        if len(ids) > question.tokens:
            raise TargetError(f"the target gave {len(ids)} tokens; {question.tokens} were asked")
        ids = until_end(ids, question.end_ids)
        reason = result.finish_reasons[0] if result.finish_reasons else None
        if reason == self._api.FinishReason.END_ID and not set(ids[-1:]) & set(question.end_ids):
            ids.append(question.end_ids[0])
        if not ids:
            raise TargetError(f"the target gave no token; it finished with {reason}")
        return ids

    def _forget_cancelled(self) -> None:
        """Takes the late answers of cancelled requests, which the executor keeps till then."""
        for number in sorted(self._cancelled):
            late = self._executor.await_responses(id=number, timeout=timedelta(0))
            if any(response.has_error() or response.result.is_final for response in late):
                self._cancelled.discard(number)

    def _probe(self) -> bool:
        """Whether outputs begin with the prompt; proves that the engine answers."""
        if not self._executor.can_enqueue_requests():
            raise TargetError("this process is no leader of the engine's ranks; call from rank 0")
        question = Question(list(PROBE), 1, [], None, Sampling(), 0, 0, ())
        request = executor_request(self._api, question)
        deadline = time.monotonic() + self.settings.time_limit
        result = self._await(self._executor.enqueue_request(request), deadline)
        length = len(result.output_token_ids[0])
        if length not in (1, len(PROBE) + 1):
            raise TargetError(f"the target gave {length} tokens for a first request of 1")
        return length > 1


def executor_config(api: ModuleType, engine: TargetEngine, settings: ExecutorSettings) -> Any:
    """Reused blocks, prompts in chunks, and ranks that are spawned if there are several."""
    cache = api.KvCacheConfig(
        enable_block_reuse=True, free_gpu_memory_fraction=settings.kv_fraction
    )
    devices = list(settings.gpus or range(engine.ranks))
    if len(devices) != engine.ranks:
        raise ValueError(f"gpus is {devices}; the engine has {engine.ranks} ranks, one GPU each")
    if engine.ranks == 1:
        parallel = api.ParallelConfig(device_ids=devices)
    else:
        package = Path(load_trtllm("tensorrt_llm").__file__).parent
        worker = package / "bin" / "executorWorker"
        parallel = api.ParallelConfig(
            communication_type=api.CommunicationType.MPI,
            communication_mode=api.CommunicationMode.ORCHESTRATOR,
            device_ids=devices,
            orchestrator_config=api.OrchestratorConfig(True, str(worker)),
        )
    return api.ExecutorConfig(
        max_beam_width=1,
        kv_cache_config=cache,
        enable_chunked_context=True,
        parallel_config=parallel,
    )
