"""Timing on a CUDA device: graphs of calls over rotating buffers, and the measured copy rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .record import BenchError, median

ROTATED_BYTES = 2**28  # buffers in turn hold at least this, so that no cache holds them all
MOST_BUFFERS = 128
ROUNDS = 5


def require_cuda() -> torch.device:
    """The current CUDA device; raises BenchError without one."""
    if not torch.cuda.is_available():
        raise BenchError("no CUDA device; this measurement needs one (torch sees none)")
    return torch.device("cuda", torch.cuda.current_device())


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name, multiprocessors and software of the device, for the record."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def buffers_for(bytes_each: int) -> int:
    """How many buffers a measurement goes round."""
    return max(1, min(MOST_BUFFERS, -(-ROTATED_BYTES // max(1, bytes_each))))


def graph_us(calls: Sequence[Callable[[], Any]], seconds: float = 0.02) -> float:
    """Microseconds per call: the calls as one CUDA graph, replayed; median of the rounds.

    The first call is made twice before, so that compiling and lazy initialisation are over.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (calls[0], *calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    once = _replay_ms(graph, 1)
    replays = max(1, min(200, int(seconds * 1e3 / ROUNDS / max(once, 1e-3))))
    times = [_replay_ms(graph, replays) / replays for _ in range(ROUNDS)]
    return median(times) * 1e3 / len(calls)


def _replay_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def copy_rate(device: torch.device) -> float:
    """GB/s, read and written together, of a large copy on the device."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    us = graph_us([lambda: target.copy_(source)] * 4)
    return 2 * source.nbytes / us / 1e3
