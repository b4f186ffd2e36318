"""Ports, shared memory and MPI of the machine that serves."""

from __future__ import annotations

from pathlib import Path

from ...engines.recipe import Lane
from ..triton_install import ServerError
from ..triton_server import ServerConfig, check_ports
from .finding import Finding, failed, judged, ok, unknown
from .subject import Subject
from .versions import IN_CONTAINER

MIB = 2**20
STUBS = 5  # Python models; each begins with 1 MiB and grows
RANK = 64 * MIB  # a guess: what NCCL and MPI keep there for one rank


def system_findings(subject: Subject, host: str) -> list[Finding]:
    """What the recipe's server needs of the machine; MPI for the gpu lane only."""
    findings = [_ports(subject, host), _shared_memory(subject)]
    return findings if subject.recipe.lane == Lane.CPU else [_mpi(subject), *findings]


def shared_memory_needed(subject: Subject) -> int:
    """Bytes of /dev/shm: draft logits of all sequences from and to the loop, stubs, ranks."""
    recipe = subject.recipe
    needed = STUBS * MIB
    if recipe.lane == Lane.CPU:
        return needed
    limits, rows = recipe.limits, recipe.draft_config().vocab_size
    logits = 4 * limits.max_sequences * limits.max_draft_tokens * rows
    return needed + 2 * logits + recipe.target.ranks * RANK


def _ports(subject: Subject, host: str) -> Finding:
    serving = subject.recipe.serving
    numbers = serving.http_port, serving.grpc_port, serving.metrics_port
    try:
        check_ports(ServerConfig(Path(), host, *numbers))
    except (ServerError, ValueError) as error:
        found = str(error).partition("; ")[0]
        remedy = "free it, or state serving.http_port, grpc_port, metrics_port in the recipe"
        return failed("ports", found, remedy)
    return ok("ports", f"{', '.join(map(str, numbers))} are free")


def _shared_memory(subject: Subject) -> Finding:
    free, needed = subject.machine.shared_memory, shared_memory_needed(subject)
    if free is None:
        return unknown("shared memory", "no /dev/shm here")
    found = f"/dev/shm has {free / MIB:.0f} MiB free; needed about {needed / MIB:.0f}"
    size = -(-2 * needed // 2**30)
    remedy = f"docker run --shm-size={size}g, or an emptyDir of medium Memory in a pod"
    return judged("shared memory", free >= needed, found, remedy)


def _mpi(subject: Subject) -> Finding:
    recipe, machine = subject.recipe, subject.machine
    mode, ranks = recipe.serving.launch, recipe.target.ranks
    how = f"launch mode {mode}, {ranks} rank{'s' if ranks > 1 else ''}"
    if machine.mpirun is not None:
        return ok("MPI", f"{how}: {machine.mpirun}")
    if machine.gpus is None:
        return unknown("MPI", f"{how}: no mpirun here, and no GPU to use it", IN_CONTAINER)
    return failed("MPI", f"{how}: no mpirun on PATH", f"{IN_CONTAINER}, which has it")
