"""This machine as the checks see it, found without importing anything heavy."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..processes import SHARED_MEMORY
from ..quantization import sm_of

DISTRIBUTIONS = ("tensorrt-llm", "tensorrt", "torch", "nvidia-pytriton")
QUERY = ("index", "name", "compute_cap", "memory.free")

Run = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class Gpu:
    """One device: compute capability as "9.0"; free memory in GiB."""

    index: int
    name: str
    compute_capability: str
    free: float

    @property
    def sm(self) -> int:
        """The compute capability as one number: 90 for "9.0"."""
        return sm_of(self.compute_capability)


@dataclass(frozen=True)
class Machine:
    """gpus: None without a driver. cuda: the newest CUDA that the driver runs, as (13, 0).

    container: release of the Triton container, as "26.04". shared_memory: free bytes of /dev/shm.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] | None = None
    cuda: tuple[int, int] | None = None
    container: str | None = None
    mpirun: str | None = None
    shared_memory: int | None = None

    def gpu(self, index: int) -> Gpu | None:
        """The device of this number."""
        return next((gpu for gpu in self.gpus or () if gpu.index == index), None)

    @classmethod
    def probe(cls) -> Machine:
        """Looks at this machine."""
        gpus = read_gpus(run)
        return cls(
            versions=_versions(),
            gpus=gpus,
            cuda=None if gpus is None else read_cuda(run),
            container=os.environ.get("NVIDIA_TRITON_SERVER_VERSION"),
            mpirun=shutil.which("mpirun"),
            shared_memory=_free_bytes(SHARED_MEMORY),
        )


def run(command: Sequence[str]) -> str | None:
    """What a program prints; None where it is absent, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def read_gpus(run: Run) -> tuple[Gpu, ...] | None:
    """All devices by nvidia-smi; None without it."""
    text = run(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"])
    return None if text is None else tuple(map(_gpu, filter(str.strip, text.splitlines())))


def read_cuda(run: Run) -> tuple[int, int] | None:
    """The CUDA version in the head of nvidia-smi's table."""
    match = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", run(["nvidia-smi"]) or "")
    return (int(match[1]), int(match[2])) if match else None


def _gpu(line: str) -> Gpu:
    index, name, capability, free = (word.strip() for word in line.split(","))
    return Gpu(int(index), name, capability, float(free) / 1024)


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
