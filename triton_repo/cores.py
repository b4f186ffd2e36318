"""Whose turn it is on the cores of a CPU-only machine."""

from __future__ import annotations

import fcntl
from pathlib import Path


class Cores:
    """A lock between the draft's and the target's process, each of which uses all cores.

    Two of them at once would wait for each other inside every layer: four clients then got a
    fraction of the tokens of one. The kernel frees the lock of a process that dies.
    """

    def __init__(self, repository: Path):
        self._file = (repository / ".cores").open("w")

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
