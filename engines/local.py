"""Engines in this process as ports of the loop: concurrent calls are gathered into batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from .messages import Draft, Target
from .sequence import GenerationRequest, Statistics
from .speculative import LoopSettings, SpeculativeLoop


class Batcher:
    """An async callable that runs all calls made in one turn of the event loop as one batch."""

    def __init__(self, run: Callable[[Sequence], list]):
        self._run = run
        self._waiting: list[tuple[object, asyncio.Future]] = []

    async def __call__(self, call):
        """The answer to one call; an answer that is an exception is raised."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._flush)
        future = loop.create_future()
        self._waiting.append((call, future))
        return await future

    def _flush(self) -> None:
        batch, self._waiting = self._waiting, []
        try:
            answers = self._run([call for call, _ in batch])
        except Exception as error:
            answers = [error] * len(batch)
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.cancelled():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def local_loop(target: Target, draft: Draft | None, settings: LoopSettings) -> SpeculativeLoop:
    """A speculative loop over engines in this process."""
    port = None if draft is None else Batcher(draft.propose)
    return SpeculativeLoop(Batcher(target.verify), port, settings)


async def generate(
    loop: SpeculativeLoop, request: GenerationRequest
) -> tuple[list[int], Statistics]:
    """New ids and statistics of one generation."""
    sequence, ids = loop.sequence(request), []
    async with aclosing(loop.run(sequence)) as stream:
        async for new_ids in stream:
            ids.extend(new_ids)
    return ids, sequence.statistics


def generate_all(
    target: Target,
    draft: Draft | None,
    settings: LoopSettings,
    requests: Sequence[GenerationRequest],
) -> list[tuple[list[int], Statistics]]:
    """Runs many generations at once, batched; results in the order of `requests`."""

    async def run_all():
        loop = local_loop(target, draft, settings)
        return await asyncio.gather(*(generate(loop, request) for request in requests))

    return asyncio.run(run_all())
