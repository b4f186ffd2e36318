"""What a measurement leaves behind: a card for people and, as the last line, one JSON object."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...engines.whole_file import whole_file

Tick = Callable[[str], None]


class BenchError(RuntimeError):
    """A measurement that cannot be made; the message says why and what to change."""


def median(values: Sequence[float]) -> float | None:
    """The median, None of nothing."""
    return statistics.median(values) if values else None


def rounded(value: float | None, digits: int = 4) -> float | None:
    """A number short enough for JSON; None stays None."""
    return None if value is None else round(value, digits)


@dataclass(frozen=True)
class Check:
    """A measured number beside the most it may be; measured None: not measured in this run."""

    name: str
    measured: float | None
    limit: float

    @property
    def within(self) -> bool | None:
        """Whether the limit is kept; None where nothing was measured."""
        return None if self.measured is None else self.measured <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Name, number, limit and verdict for JSON."""
        return asdict(self) | {"measured": rounded(self.measured), "within": self.within}

    def __str__(self) -> str:
        if self.measured is None:
            return f"{self.name}: not measured (limit {self.limit:g})"
        verdict = "within" if self.within else "ABOVE"
        return f"{self.name}: {self.measured:.3f}, {verdict} {self.limit:g}"


@dataclass(frozen=True)
class Record:
    """The outcome of one command: settings and rows as plain values, ratios, checks."""

    command: str
    settings: dict[str, Any]
    rows: Sequence[Any]
    ratios: dict[str, Any] = field(default_factory=dict)
    checks: Sequence[Check] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with machine, versions and date of now."""
        return {
            "command": self.command,
            "arguments": [without_folder(word) for word in sys.argv[1:]],
            **origin(),
            "settings": self.settings,
            "rows": [asdict(row) for row in self.rows],
            "ratios": self.ratios,
            "checks": [check.as_dict() for check in self.checks],
        }


def origin() -> dict[str, Any]:
    """When and where a result came to be: date of now, machine, versions."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "machine": machine(), "versions": versions()}


def machine() -> dict[str, Any]:
    """CPU model, cores this process may use, and compute threads."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "thread_wait": os.environ.get("OMP_WAIT_POLICY", "active").lower(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def device_name(device: str) -> str:
    """The card's name for a CUDA device, else "cpu"."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def versions() -> dict[str, str | None]:
    """Python, the libraries that matter, masw, and masw's commit where it runs from a checkout."""
    found = {name: _version(name) for name in ("torch", "transformers", "masw")}
    return {"python": platform.python_version(), **found, "commit": commit()}


def _version(name: str) -> str | None:
    """An installed distribution's version; None for a checkout on the path."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, with "-dirty" for changes that are not in it; None elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


def emit(record: Record, card: Table, json_file: Path | None = None) -> None:
    """Prints the card, the checks and, as the last line, the JSON object; writes it to a file.

    Either is done where the other fails.
    """
    text = json.dumps(record.as_dict())
    try:
        _print(record, card, text)
    finally:
        if json_file is not None:
            with whole_file(json_file) as part:
                part.write_text(text + "\n")


def _print(record: Record, card: Table, text: str) -> None:
    console = Console(highlight=False, markup=False)  # names are no markup
    console.print(card)
    for check in record.checks:
        console.print(str(check))
    where = machine()
    print(f"{where['cpu']}, {where['cores']} cores, {where['threads']} threads")
    print(text, flush=True)


def new_card(title: str, columns: Sequence[str]) -> Table:
    """An empty table in the manner of all cards, right-aligned but for the first column."""
    card = Table(title=title, box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for number, name in enumerate(columns):
        card.add_column(name, justify="right" if number else "left", no_wrap=True)
    return card


def shown(value: float | None, form: str = ".2f") -> str:
    """A cell of a card."""
    return "–" if value is None else format(value, form)


@contextmanager
def progress(total: int) -> Iterator[Tick]:
    """Yields tick(what comes next), to be called `total` times; a bar, or lines, on stderr."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        done = iter(range(1, total + 1))
        yield lambda text: console.print(f"{next(done, total)}/{total} {text}", markup=False)
        return
    columns = BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda text: bar.update(task, description=text, advance=1)


def without_folder(word: str) -> str:
    """An absolute path, behind NAME= too, by its name alone: where a file lay says nothing."""
    name, equals, path = word.rpartition("=")
    return name + equals + (Path(path).name if path.startswith("/") else path)
