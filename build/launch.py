"""The command that starts a deployment: leader or orchestrator mode, or `masw-serve` on a CPU.

leader: one server per rank under one mpirun. Rank 0 serves all models; the others load only
`tensorrt_llm`, stay in its loading for good and so never open a port. Ranks may span nodes.
orchestrator: one server whose backend spawns a worker per rank, on this node.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ..engines.recipe import Lane, Launch, Recipe
from .repository import TARGET
from .triton_server import KEEPALIVE

TRITONSERVER = "/opt/tritonserver/bin/tritonserver"


@dataclass(frozen=True)
class LaunchPlan:
    """A command and what its environment needs beside what it inherits."""

    mode: str
    command: tuple[str, ...]
    environment: dict[str, str]

    def shell(self) -> str:
        """One line for a shell, the environment in front."""
        names = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words = [word if word == ":" else shlex.quote(word) for word in self.command]
        return " ".join([*names, *words])

    def as_dict(self) -> dict:
        """The plan for machines."""
        return {
            "mode": self.mode,
            "environment": self.environment,
            "command": list(self.command),
            "shell": self.shell(),
        }


def launch_plan(
    recipe: Recipe,
    repository: Path,
    mode: Launch | None = None,
    host: str = "0.0.0.0",
    tritonserver: str = TRITONSERVER,
) -> LaunchPlan:
    """How to serve a recipe's repository; mode: the recipe's own when None (gpu lane)."""
    if recipe.lane == Lane.CPU:
        return _supervised(recipe, repository, host)
    mode = Launch(mode or recipe.serving.launch)
    server = [tritonserver, f"--model-repository={repository}", *_addresses(recipe, host)]
    if mode == Launch.LEADER:
        return LaunchPlan(mode, _leader(recipe, server), _environment(recipe))
    switches = {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}
    return LaunchPlan(mode, _orchestrator(recipe, server), _environment(recipe) | switches)


def visible_devices(recipe: Recipe) -> tuple[int, ...]:
    """Devices from 0 to the last one in use: so a recipe's numbers hold inside the server."""
    return tuple(range(max(*recipe.target.gpus, recipe.draft.gpu) + 1))


def _supervised(recipe: Recipe, repository: Path, host: str) -> LaunchPlan:
    serving = recipe.serving
    command = (
        "masw-serve",
        f"--model-repository={repository}",
        f"--host={host}",
        f"--http-port={serving.http_port}",
        f"--grpc-port={serving.grpc_port}",
        f"--metrics-port={serving.metrics_port}",
    )
    return LaunchPlan("supervised", command, {})


def _leader(recipe: Recipe, server: list[str]) -> tuple[str, ...]:
    command = ["mpirun", "--allow-run-as-root"]
    for rank in range(recipe.target.ranks):
        command += [] if rank == 0 else [":"]
        command += ["-n", "1", *server, *_models("*" if rank == 0 else TARGET), *_flags(rank)]
    return tuple(command)


def _orchestrator(recipe: Recipe, server: list[str]) -> tuple[str, ...]:
    """Server-side memory pools are off: the orchestrator itself computes nothing on a GPU."""
    pools = [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in visible_devices(recipe)]
    pools += ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]
    start = ["mpirun", "--allow-run-as-root", "-n", "1"]
    return (*start, *server, *_models("*"), *_flags(0), *pools)


def _addresses(recipe: Recipe, host: str) -> list[str]:
    serving = recipe.serving
    flags = []
    for name in ("http", "grpc", "metrics"):
        flags += [f"--{name}-address={host}", f"--{name}-port={getattr(serving, f'{name}_port')}"]
    return flags


def _models(which: str) -> list[str]:
    """Explicit control, so that a drain can unload the loop before the server ends."""
    return ["--model-control-mode=explicit", f"--load-model={which}"]


def _flags(rank: int) -> list[str]:
    regions = f"--backend-config=python,shm-region-prefix-name=masw-rank{rank}-"
    keepalive = [f"--{name}={value}" for name, value in KEEPALIVE.items()]
    return ["--disable-auto-complete-config", regions, *keepalive]


def _environment(recipe: Recipe) -> dict[str, str]:
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, visible_devices(recipe))),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
