"""TensorRT-LLM's PyTorch backend, as far as it serves a user-provided drafter.

Three generations of the `Drafter` base class, the config and resource manager classes, and an
executor loop that schedules requests, lets the drafter set their draft tokens, verifies them with a
torch target by exact match, and frees what is finished.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, final

import numpy as np

from masw.engines.messages import Proposal, TargetCall
from masw.engines.target import TorchTarget, until_end


class Drafter10(ABC):
    """Of 1.0: the executor does not pad."""

    def __init__(self, max_concurrency: int | None = None) -> None:
        self.max_concurrency = max_concurrency

    @abstractmethod
    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None) -> None:
        raise NotImplementedError


class Drafter12(Drafter10):
    """Of 1.1 and 1.2: pads to an attribute that the subclass must set."""

    @final
    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests) -> None:
        for request in scheduled_requests.generation_requests:
            missing = self.max_draft_len - len(request.py_draft_tokens)
            request.py_draft_tokens.extend(0 for _ in range(missing))


class Drafter13(ABC):
    """Of 1.3 on: takes the draft length, and pads to the one that was given first."""

    def __init__(
        self,
        max_draft_len: int | None = None,
        max_total_draft_tokens: int | None = None,
        max_concurrency: int | None = None,
        draft_len_schedule: dict[int, int] | None = None,
    ) -> None:
        self.max_draft_len = max_draft_len
        self.max_total_draft_tokens = max_total_draft_tokens
        self._static_max_total_draft_tokens = max_total_draft_tokens
        self.max_concurrency = max_concurrency
        self.draft_len_schedule = draft_len_schedule

    @abstractmethod
    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None) -> None:
        raise NotImplementedError

    @final
    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests, resource_manager=None) -> None:
        for request in scheduled_requests.generation_requests:
            missing = self._static_max_total_draft_tokens - len(request.py_draft_tokens)
            request.py_draft_tokens.extend(0 for _ in range(missing))

    def update_max_total_draft_tokens(self, new_max_total_draft_tokens: int) -> None:
        self.max_total_draft_tokens = self.max_draft_len = new_max_total_draft_tokens


DRAFTERS = {"1.0": Drafter10, "1.2": Drafter12, "1.3": Drafter13}


class BaseResourceManager(ABC):
    @abstractmethod
    def get_max_resource_count(self) -> int:
        raise NotImplementedError

    @abstractmethod
    def get_needed_resource_to_completion(self, request) -> int:
        raise NotImplementedError

    def prepare_resources(self, scheduled_batch) -> None:
        return

    def update_resources(self, scheduled_batch) -> None:
        return

    def free_resources(self, request) -> None:
        return

    def shutdown(self) -> None:
        return


@dataclass(kw_only=True)
class UserProvidedDecodingConfig:
    max_draft_len: int
    drafter: Any
    resource_manager: Any = None


@dataclass
class LlmRequest:
    """A request of the backend; its ids are copied out, as from C++."""

    request_id: int
    prompt: tuple[int, ...]
    py_max_new_tokens: int
    py_end_id: int | None = -1
    py_draft_tokens: list[int] | None = None
    py_disable_speculative_decoding: bool = False
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.py_orig_prompt_len = len(self.prompt)
        self.tokens = list(self.prompt)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)

    @property
    def output(self) -> list[int]:
        """New ids."""
        return self.tokens[len(self.prompt) :]

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.py_max_new_tokens or self.py_end_id in self.output[-1:]


@dataclass(frozen=True)
class Drafted:
    """One step of one request: ids before, and what the drafter set."""

    request_id: int
    ids: tuple[int, ...]
    drafts: tuple[int, ...]


class Backend:
    """PyExecutor's loop with one rank and greedy sampling."""

    def __init__(self, target: TorchTarget, config: UserProvidedDecodingConfig, batch_size: int):
        self.target, self.config, self.batch_size = target, config, batch_size
        self.active: list[LlmRequest] = []
        self.steps: list[list[Drafted]] = []

    def run(self, requests: list[LlmRequest], steps: int | None = None) -> None:
        """Serves requests to their end, or for a number of steps."""
        waiting = [r for r in requests if r not in self.active]
        while (waiting or self.active) and steps != 0:
            room = self.batch_size - len(self.active)
            context, waiting = waiting[:room], waiting[room:]
            self._step(context)
            self.active += context
            for request in [r for r in self.active if r.finished]:
                self.finish(request)
            steps = steps and steps - 1

    def finish(self, request: LlmRequest) -> None:
        """A request is done or cancelled."""
        self.active.remove(request)
        if self.config.resource_manager is not None:
            self.config.resource_manager.free_resources(request)

    def _step(self, context: list[LlmRequest]) -> None:
        limit, drafter = self.config.max_draft_len, self.config.drafter
        scheduled = SimpleNamespace(context_requests=context, generation_requests=list(self.active))
        for request in self.active:
            off = request.py_disable_speculative_decoding
            request.py_draft_tokens = [] if off else [0] * limit
        resources = self.config.resource_manager
        if resources is not None:
            resources.prepare_resources(scheduled)
        drafter.prepare_draft_tokens(scheduled, None)
        self.steps.append(
            [Drafted(r.request_id, tuple(r.tokens), tuple(r.py_draft_tokens)) for r in self.active]
        )
        if hasattr(drafter, "pad_draft_tokens_for_cuda_graph"):
            drafter.pad_draft_tokens_for_cuda_graph(scheduled)
        for request in (*context, *self.active):
            self._forward(request)
        if resources is not None:
            resources.update_resources(scheduled)

    def _forward(self, request: LlmRequest) -> None:
        """The target's step: its own token, or the drafts it agrees with and one more."""
        drafts = request.py_draft_tokens or []
        assert type(drafts) is list and all(type(x) is int for x in drafts)
        assert len(drafts) <= self.config.max_draft_len
        proposal = Proposal(tuple(drafts))
        ids = np.array(request.tokens, np.int32)
        (answer,) = self.target.verify([TargetCall(ids, 1, proposal, end_ids=())])
        room = request.py_max_new_tokens - len(request.output)
        request.tokens += until_end(answer.ids[:room], (request.py_end_id,))


def install(monkeypatch, version: str) -> None:
    """Puts the modules of a version's PyTorch backend in place."""
    contents = {
        "tensorrt_llm": {},
        "tensorrt_llm.llmapi": {"UserProvidedDecodingConfig": UserProvidedDecodingConfig},
        "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.speculative": {},
        "tensorrt_llm._torch.speculative.drafter": {"Drafter": DRAFTERS[version]},
        "tensorrt_llm._torch.pyexecutor": {},
        "tensorrt_llm._torch.pyexecutor.resource_manager": {
            "BaseResourceManager": BaseResourceManager
        },
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
