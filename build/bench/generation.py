"""One generation under the clock: by the loop without a server, by a bare loop, by Hugging Face."""

from __future__ import annotations

import asyncio
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ...engines.local import Batcher
from ...engines.messages import Draft, Target, TargetCall
from ...engines.sequence import GenerationRequest
from ...engines.speculative import LoopSettings, SpeculativeLoop


@dataclass(frozen=True)
class Run:
    """One generation.

    arrivals: (seconds since the start, new tokens) of each step that gave tokens. iterations:
    target steps; drafted and accepted: None where unknown. host_ms: per iteration, all but engines.
    """

    ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    iterations: int
    drafted: int | None = None
    accepted: int | None = None
    host_ms: tuple[float, ...] = ()

    @property
    def first_s(self) -> float:
        """Seconds to the first tokens."""
        return self.arrivals[0][0]

    @property
    def total_s(self) -> float:
        """Seconds to the last token."""
        return self.arrivals[-1][0]

    @property
    def tok_s(self) -> float | None:
        """Decode rate: tokens after the first arrival by the time since; None for one arrival."""
        tokens = len(self.ids) - self.arrivals[0][1]
        return tokens / (self.total_s - self.first_s) if tokens else None


@dataclass
class Stopwatch:
    """Adds up the seconds spent inside an engine."""

    seconds: float = 0.0

    def around(self, run: Callable[[Sequence], list]) -> Callable[[Sequence], list]:
        """`run`, timed."""

        def timed(calls: Sequence) -> list:
            started = time.perf_counter()
            try:
                return run(calls)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


@dataclass
class _Trace:
    """What a run notes while it goes."""

    started: float = field(default_factory=time.perf_counter)
    ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)

    def add(self, ids: Sequence[int]) -> None:
        self.arrivals.append((time.perf_counter() - self.started, len(ids)))
        self.ids.extend(ids)

    def finish(self, iterations: int, **counts) -> Run:
        host = tuple(self.host_ms)
        return Run(tuple(self.ids), tuple(self.arrivals), iterations, host_ms=host, **counts)


def run_loop(
    target: Target, draft: Draft | None, settings: LoopSettings, request: GenerationRequest
) -> Run:
    """One generation by the speculative loop in this process."""
    return asyncio.run(_run_loop(target, draft, settings, request))


async def _run_loop(
    target: Target, draft: Draft | None, settings: LoopSettings, request: GenerationRequest
) -> Run:
    engines = Stopwatch()
    port = None if draft is None else Batcher(engines.around(draft.propose))
    loop = SpeculativeLoop(Batcher(engines.around(target.verify)), port, settings)
    sequence, trace = loop.sequence(request), _Trace()
    async with aclosing(loop.run(sequence)) as stream:
        since, busy = time.perf_counter(), engines.seconds
        async for ids in stream:
            if ids:  # a prefill chunk gives none
                trace.add(ids)
                wall = time.perf_counter() - since
                trace.host_ms.append((wall - (engines.seconds - busy)) * 1e3)
            since, busy = time.perf_counter(), engines.seconds
    counts = sequence.statistics
    return trace.finish(counts.iterations, drafted=counts.drafted, accepted=counts.accepted)


def run_bare(target: Target, settings: LoopSettings, request: GenerationRequest) -> Run:
    """Plain decoding by the target alone, in the calls that the loop makes without a draft."""
    trace, committed = _Trace(), np.array(request.ids, np.int32)
    while (remaining := request.max_tokens - len(trace.ids)) > 0:
        tokens = min(settings.plain_tokens, remaining)
        [verdict] = target.verify([TargetCall(committed, tokens, end_ids=request.end_ids)])
        if isinstance(verdict, Exception):
            raise verdict
        trace.add(verdict.ids)
        committed = np.concatenate([committed, np.array(verdict.ids, np.int32)])
        if verdict.ids[-1] in request.end_ids:
            break
    return trace.finish(len(trace.ids))


class _Streamer(BaseStreamer):
    """Notes Hugging Face's tokens as they come; the first put is the prompt."""

    def __init__(self):
        self.trace, self._prompt_seen = _Trace(), False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.trace.add(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def run_hf(
    model: PreTrainedModel,
    request: GenerationRequest,
    assistant: PreTrainedModel | None = None,
    draft_tokens: int = 0,
) -> Run:
    """Greedy Hugging Face `generate`; an assistant drafts `draft_tokens` at a time."""
    if assistant is not None:
        assistant.generation_config = _constant_drafts(assistant, draft_tokens)
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=False, max_length=None, max_new_tokens=request.max_tokens)
    config.eos_token_id, config.pad_token_id = list(request.end_ids) or None, 0
    forwards: list[None] = []
    counter = model.register_forward_hook(lambda *_: forwards.append(None))
    ids = torch.tensor([request.ids])
    try:
        streamer = _Streamer()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            streamer=streamer,
            assistant_model=assistant,
        )
    finally:
        counter.remove()
    return streamer.trace.finish(len(forwards))


def _constant_drafts(assistant: PreTrainedModel, draft_tokens: int):
    """A generation config that drafts the same number of tokens every time."""
    config = copy.deepcopy(assistant.generation_config)
    config.num_assistant_tokens = draft_tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return config


@dataclass(frozen=True)
class Overhead:
    """Plain decoding by the loop against a bare loop: median ratio of pairs, and both medians."""

    ratio: float
    pairs: int
    loop_ms: float
    bare_ms: float


def measure_overhead(
    target: Target, settings: LoopSettings, request: GenerationRequest, pairs: int
) -> Overhead:
    """Times the loop without a draft and the bare loop by turns, on a target that holds the prompt.

    Raises ValueError where the two give different tokens.
    """
    loop_s, bare_s = [], []
    first = run_bare(target, settings, request)  # warms up, and leaves the prompt in the cache
    sides = (
        (loop_s, lambda: run_loop(target, None, settings, request)),
        (bare_s, lambda: run_bare(target, settings, request)),
    )
    for number in range(pairs):
        for seconds, run in sides if number % 2 else sides[::-1]:
            started = time.perf_counter()
            ids = run().ids
            seconds.append(time.perf_counter() - started)
            if ids != first.ids:
                raise ValueError("plain decoding by the loop differs from the target's own")
    ratio = statistics.median(a / b for a, b in zip(loop_s, bare_s, strict=True))
    return Overhead(ratio, pairs, statistics.median(loop_s) * 1e3, statistics.median(bare_s) * 1e3)
