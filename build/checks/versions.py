"""Versions of what serves: the container's libraries, or those of the cpu lane."""

from __future__ import annotations

from ...engines.trtllm_module import CONTAINER
from .finding import Finding, judged, unknown
from .machine import Machine

TENSORRT_LLM, TENSORRT, CUDA = "1.2", "10.14", (13, 0)
CONTAINERS = ("26.04", "26.05", "26.06", "26.07")  # those with TensorRT-LLM 1.2.1
IN_CONTAINER = f"run inside the container {CONTAINER}"


def gpu_versions(machine: Machine) -> list[Finding]:
    """TensorRT-LLM, TensorRT and the driver's CUDA, as engines of the gpu lane need them."""
    return [
        _container(machine),
        _library(machine, "TensorRT-LLM", "tensorrt-llm", TENSORRT_LLM),
        _library(machine, "TensorRT", "tensorrt", TENSORRT),
        _cuda(machine),
    ]


def cpu_versions(machine: Machine) -> list[Finding]:
    """Packages of the cpu lane."""
    return [
        _package(machine, "torch", "torch", "pip install 'masw[cpu]'"),
        _package(machine, "Triton server", "nvidia-pytriton", "pip install 'masw[cpu]'"),
    ]


def _container(machine: Machine) -> Finding:
    """The release of Triton's container; the libraries in it decide, so being elsewhere is open."""
    if machine.container is None:
        return unknown("container", "not inside a Triton container", IN_CONTAINER)
    found = f"release {machine.container}; needed {', '.join(CONTAINERS)}"
    return judged("container", machine.container in CONTAINERS, found, IN_CONTAINER)


def _library(machine: Machine, name: str, distribution: str, wanted: str) -> Finding:
    """The wanted major and minor version; unknown where neither it nor a GPU is."""
    version = machine.versions.get(distribution)
    if version is None and machine.gpus is None:
        return unknown(name, "not installed here, and no GPU to use it", IN_CONTAINER)
    holds = version is not None and version.split(".")[:2] == wanted.split(".")
    found = f"{version or 'not installed'}; needed {wanted}.x"
    return judged(name, holds, found, IN_CONTAINER)


def _cuda(machine: Machine) -> Finding:
    wanted = ".".join(map(str, CUDA))
    if machine.cuda is None:
        return unknown("CUDA driver", "no nvidia-smi that tells its version")
    found = f"{'.'.join(map(str, machine.cuda))}; needed {wanted} or newer"
    remedy = f"update the NVIDIA driver to one for CUDA {wanted}, or install its compat package"
    return judged("CUDA driver", machine.cuda >= CUDA, found, remedy)


def _package(machine: Machine, name: str, distribution: str, remedy: str) -> Finding:
    version = machine.versions.get(distribution)
    return judged(name, version is not None, version or "not installed", remedy)
