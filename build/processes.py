"""Processes and shared memory of Triton servers: found, ended, swept up."""

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from .triton_install import STUB

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = re.compile(r"\bmasw-(\d+)-[0-9a-f]{8}-")  # of a server, by its owner


def stubs(prefix: str, model: str | None = None) -> list[psutil.Process]:
    """The live processes of Python models (of one model) of the server with this prefix."""
    return [
        process
        for process, words in _processes()
        if STUB in words[0]
        and any(word.startswith(prefix) for word in words)
        and (model is None or _stub_model(words) == model)
    ]


def sweep_orphans() -> None:
    """End servers and stubs whose owner was killed before it could, with their shared memory."""
    orphans: dict[str, list[psutil.Process]] = {}
    for process, words in _processes():
        match = _PREFIX.search(" ".join(words))
        ours = STUB in words[0] or Path(words[0]).name == "tritonserver"
        if match and ours and not psutil.pid_exists(int(match[1])):
            orphans.setdefault(match[0], []).append(process)
    for prefix, processes in orphans.items():
        end_processes(processes)
        remove_shared_memory(prefix)


def _processes() -> Iterator[tuple[psutil.Process, list[str]]]:
    """Every process that this user may look into, with its command line."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if words := process.cmdline():
                yield process, words


def is_running(process: psutil.Process) -> bool:
    """Whether the process still runs; one that only waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end_processes(processes: list[psutil.Process], limit: float = 5.0) -> None:
    """Kill the processes and wait, at most `limit` seconds, until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + limit
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def remove_shared_memory(prefix: str) -> None:
    """Remove the regions of the server with this prefix."""
    for region in SHARED_MEMORY.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def _stub_model(words: list[str]) -> str | None:
    """The model that a stub serves, from its command line: …/<model>/<version>/model.py."""
    code = next((word for word in words if word.endswith("/model.py")), None)
    return Path(code).parent.parent.name if code else None
