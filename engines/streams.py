"""Two CUDA streams, so that long prefills and drafting run at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Streams:
    """One stream for prefill, one of higher priority for drafting; none on the CPU.

    Drafting waits for the prefills of its own rows only. The other way round nothing needs to
    wait, because drafting ends with the host reading its ids.
    """

    def __init__(self, device: torch.device):
        on_gpu = device.type == "cuda"
        self._prefill = torch.cuda.Stream(device) if on_gpu else None
        self._draft = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        self._prefilled: dict[int, torch.cuda.Event] = {}

    @contextmanager
    def prefilling(self, row: int) -> Iterator[None]:
        """Enqueues prefill of a memory row."""
        if self._prefill is None:
            yield
            return
        with torch.cuda.stream(self._prefill):
            yield
            self._prefilled[row] = self._prefill.record_event()

    @contextmanager
    def drafting(self, rows: Sequence[int]) -> Iterator[None]:
        """Enqueues drafting of memory rows, after their prefill."""
        if self._draft is None:
            yield
            return
        with torch.cuda.stream(self._draft):
            for row in rows:
                if row in self._prefilled:
                    self._draft.wait_event(self._prefilled.pop(row))
            yield

    @staticmethod
    def hand_over(tensor: Tensor) -> None:
        """Says that a tensor made while drafting is used by the caller's stream as well."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.default_stream(tensor.device))
