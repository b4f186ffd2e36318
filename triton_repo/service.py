"""The endpoint for people, without the server: admission, the loop, replies, statistics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from ..engines.sequence import Sequence
from ..engines.speculative import SpeculativeLoop
from ..engines.text import TextCodec, TextStream
from .generation import Ask, Values, read_ask
from .metrics import Metrics
from .wire import Overloaded, batched, text

LOOK_SECONDS = 0.25  # how often a waiting request looks whether its client is still there


@dataclass(frozen=True)
class ServiceLimits:
    """Requests running and waiting at once; seconds a request may take."""

    max_sequences: int = 8
    max_waiting: int = 64
    time_limit: float = 600.0


@dataclass(frozen=True)
class Reply:
    """Output tensors by name, as they go to Triton."""

    outputs: dict[str, np.ndarray]
    final: bool


class Service:
    """Serves the requests of `tensorrt_llm_bls`, many at once, on one event loop."""

    def __init__(
        self,
        loop: SpeculativeLoop,
        codec: TextCodec,
        metrics: Metrics,
        limits: ServiceLimits,
        vocab: int,
        end_ids: tuple[int, ...],
    ):
        self._loop, self._codec, self._metrics, self._limits = loop, codec, metrics, limits
        self._vocab, self._end_ids = vocab, end_ids
        self._admitted = 0
        self._running = asyncio.Semaphore(limits.max_sequences)

    async def serve(self, values: Values, is_cancelled: Callable[[], bool]) -> AsyncIterator[Reply]:
        """Replies to one request, the last one final; none more once it is cancelled.

        Raises InvalidRequest before any work, Overloaded, TargetError.
        """
        arrival = time.time_ns()
        ask = read_ask(values, self._codec, self._vocab, self._end_ids)
        sequence = self._loop.sequence(ask.generation)
        deadline = time.monotonic() + min(ask.time_limit, self._limits.time_limit)
        self._admit()
        try:
            if not await self._wait_in_line(is_cancelled, deadline):
                return
            try:
                answer = Answer(ask, sequence, self._codec, arrival)
                replies = self._generate(answer, is_cancelled, deadline)
                async with aclosing(replies):
                    async for reply in replies:
                        yield reply
            finally:
                self._running.release()
        finally:
            self._admitted -= 1
            self._metrics.set_inflight(self._admitted)

    def _admit(self) -> None:
        limits = self._limits
        if self._admitted >= limits.max_sequences + limits.max_waiting:
            raise Overloaded(
                f"{self._admitted} requests are admitted; the limit is max_sequences "
                f"{limits.max_sequences} + max_waiting {limits.max_waiting}; try again later"
            )
        self._admitted += 1
        self._metrics.set_inflight(self._admitted)

    async def _wait_in_line(self, is_cancelled: Callable[[], bool], deadline: float) -> bool:
        """As `_take_place`; counts how long it took."""
        began = time.monotonic()
        try:
            return await self._take_place(is_cancelled, deadline)
        finally:
            self._metrics.observe_queue(time.monotonic() - began)

    async def _take_place(self, is_cancelled: Callable[[], bool], deadline: float) -> bool:
        """Waits for a place among the running; False if the client went away meanwhile.

        Raises Overloaded when the request's time is up before it could start.
        """
        place, taken = asyncio.ensure_future(self._running.acquire()), False
        try:
            while not (await asyncio.wait({place}, timeout=LOOK_SECONDS))[0]:
                if is_cancelled():
                    self._metrics.count_cancelled()
                    return False
                if time.monotonic() > deadline:
                    raise Overloaded("no place became free within the time_limit; try again later")
            taken = True
            return True
        finally:
            if not taken and not place.cancel():
                self._running.release()  # it came at the very moment of giving up

    async def _generate(
        self, answer: Answer, is_cancelled: Callable[[], bool], deadline: float
    ) -> AsyncIterator[Reply]:
        statistics = answer.sequence.statistics
        track = self._metrics.track(statistics)
        async with aclosing(self._loop.run(answer.sequence)) as stream:
            async for ids in stream:
                if is_cancelled():
                    self._metrics.count_cancelled()
                    return
                answer.add(ids)
                track.update()
                if not answer.finished and time.monotonic() > deadline:
                    statistics.finish_reason = "time_limit"
                if answer.finished:
                    break
                if answer.ask.stream and answer.has_news:
                    yield Reply(answer.take(final=False), final=False)
        track.finish()
        yield Reply(answer.take(final=True), final=True)


class Answer:
    """What a generation has produced and what of it the user has been given."""

    def __init__(self, ask: Ask, sequence: Sequence, codec: TextCodec, arrival: int):
        self.ask, self.sequence = ask, sequence
        self._codec = codec
        self._arrival, self._scheduled = arrival, time.time_ns()
        self._first = self._last = 0  # when the first and the last tokens came, ns
        self._text: TextStream | None = None
        if ask.by_text or ask.stop_words:
            self._text = codec.stream(ask.stop_words)
        prompt = list(ask.generation.ids) if ask.echo else []
        self._piece = codec.decode(prompt) if ask.by_text else ""
        self._ids, self._emitted = prompt, 0

    @property
    def finished(self) -> bool:
        """Whether the generation is over: by the loop, or by a stop word."""
        return self.sequence.finished

    @property
    def has_news(self) -> bool:
        """Whether there is anything new to send."""
        return bool(self._piece) if self.ask.by_text else len(self._ids) > self._emitted

    def add(self, ids: list[int]) -> None:
        """Takes the new ids of one iteration."""
        if not ids:
            return
        self._last = time.time_ns()
        self._first = self._first or self._last
        self._ids.extend(ids)
        if self._text is not None:
            self._piece += self._text.push(ids, final=self.sequence.finished)
            if self._text.stopped:
                self.sequence.statistics.finish_reason = "stop_words"

    def take(self, final: bool) -> dict[str, np.ndarray]:
        """Output tensors of what is new; with the statistics, where wanted, when `final`."""
        if final and self._text is not None:
            self._piece += self._text.push([], final=True)
        outputs = self._text_outputs() if self.ask.by_text else self._id_outputs(final)
        self._piece, self._emitted = "", len(self._ids)
        return outputs | (self._perf_outputs() if final and self.ask.statistics else {})

    def _text_outputs(self) -> dict[str, np.ndarray]:
        return {
            "text_output": text(self._piece),
            "sequence_length": batched(self.sequence.new_tokens, np.int32),
        }

    def _id_outputs(self, final: bool) -> dict[str, np.ndarray]:
        return {
            "output_ids": np.array([[self._ids]], np.int32),
            "sequence_length": batched(len(self._ids), np.int32),
            "emitted_length": batched(self._emitted, np.int32),
            "is_final": batched(final, np.bool_),
            "stop_words_dict": text(*self.ask.stop_words)[None],
        }

    def _perf_outputs(self) -> dict[str, np.ndarray]:
        statistics = self.sequence.statistics
        rate = statistics.accepted / statistics.drafted if statistics.drafted else 0.0
        times = {
            "arrival_time_ns": self._arrival,
            "first_scheduled_time_ns": self._scheduled,
            "first_token_time_ns": self._first,
            "last_token_time_ns": self._last,
        }
        return {
            "acceptance_rate": batched(rate, np.float32),
            "total_accepted_draft_tokens": batched(statistics.accepted, np.int32),
            "total_draft_tokens": batched(statistics.drafted, np.int32),
            "statistics": text(json.dumps(statistics.as_dict()))[None],
        } | {name: batched(value, np.int64) for name, value in times.items()}
