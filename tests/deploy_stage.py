"""A place to run the scripts of deploy/ in: the commands that they call, and what these were told.

`fake_triton.py` stands in for the servers that a launch line starts.
"""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import yaml

from masw.build.triton_server import free_ports
from masw.engines.recipe import recipe_folder

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
FAKE = ROOT / "tests" / "fake_triton.py"


class Stage:
    """A folder with a recipe on free ports, and the commands that the scripts call."""

    def __init__(self, folder: Path):
        assert shutil.which("curl"), "the scripts need curl: install it"
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        self.ports = free_ports(3)
        recipe = yaml.safe_load((recipe_folder() / "llama-3.1-70b-tp4-8b.yaml").read_text())
        names = ("http_port", "grpc_port", "metrics_port")
        recipe["serving"] |= dict(zip(names, self.ports, strict=True))
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(recipe))
        self.events_file = folder / "events"
        self.command("masw-build", 'echo "$@" >>"$FAKE_EVENTS"\ncase $1 in')
        self.append("masw-build", 'check) echo a table; exit "${CHECK_CODE:-0}" ;;')
        self.append(
            "masw-build", "launch) echo mpirun -n 1 tritonserver : -n 3 tritonserver ;;\nesac"
        )
        self.root = folder / "root"
        told = f"{self.ports[0]} {self.ports[2]} '{self.root / 'repository'}'"
        self.command("mpirun", f'exec "{sys.executable}" "{FAKE}" {told}')

    def command(self, name: str, body: str) -> None:
        """A command on the PATH, written in bash."""
        (self.bin / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (self.bin / name).chmod(0o755)

    def append(self, name: str, body: str) -> None:
        with (self.bin / name).open("a") as file:
            file.write(f"{body}\n")

    def environment(self, plan: str, **settings: object) -> dict[str, str]:
        own = {
            "PATH": f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FAKE_PLAN": plan,
            "FAKE_EVENTS": str(self.events_file),
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            "MASW_LOG": str(self.folder / "log"),
            "MASW_HTTP_PORT": str(self.ports[0]),
            "MASW_METRICS_PORT": str(self.ports[2]),
            "http_proxy": "http://127.0.0.1:9",  # must not be asked
        }
        return {**os.environ, **own, **{name: str(value) for name, value in settings.items()}}

    def launch(self, plan: str = "{}", script: str = "launch.sh", **settings: object):
        """launch.sh in the background; `stdout` tells all it and the server say."""
        words = [self.recipe, self.root]
        return subprocess.Popen(
            [DEPLOY / script, *(["leader"] if script == "node.sh" else []), *words],
            env=self.environment(plan, **settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, process: subprocess.Popen, limit: float = 20) -> tuple[int, str]:
        """Exit code and everything said."""
        try:
            said, _ = process.communicate(timeout=limit)
        finally:
            process.kill()
        return process.returncode, said

    def ask(self, script: str, *words: str) -> subprocess.CompletedProcess:
        """A script that asks the server, run to its end."""
        return subprocess.run(
            [DEPLOY / script, *words],
            env=self.environment("{}"),
            capture_output=True,
            text=True,
            timeout=20,
        )

    @property
    def events(self) -> list[str]:
        return self.events_file.read_text().splitlines() if self.events_file.exists() else []

    def is_gone(self) -> bool:
        """Whether no process of the server is left."""
        words = [str(FAKE), str(self.ports[0])]
        return not any(words == found[1:3] for found in command_lines())


def command_lines() -> list[list[str]]:
    """Of every process that still runs."""
    processes = psutil.process_iter(["cmdline", "status"])
    return [p.info["cmdline"] or [] for p in processes if p.info["status"] != "zombie"]


def wait_for_line(process: subprocess.Popen, text: str, seconds: float = 30) -> None:
    """Reads what a process says up to the first line with `text`; fails after `seconds`."""
    lines, patience = [], threading.Timer(seconds, process.kill)
    patience.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if text in line:
                return
    finally:
        patience.cancel()
    raise AssertionError(f"{text!r} was not said:\n{''.join(lines)}")
