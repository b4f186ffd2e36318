"""A folder that a build makes: it appears whole or not at all, and says where it came from."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..engines.whole_file import whole_file
from .bench.record import machine, versions, without_folder

PROVENANCE = "provenance.json"
GIB = 2**30


def is_used(folder: Path) -> bool:
    """Whether something stands where the folder is to be made."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def check_unused(folder: Path) -> None:
    """Raises ValueError where the folder exists and is not empty."""
    if is_used(folder):
        raise ValueError(f"{folder} is not empty; remove it or give another --root")


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raises ValueError where the file system of `folder` lacks `needed` bytes."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ValueError(
            f"{what} needs about {needed / GIB:,.1f} GiB on disk, {place} has {free / GIB:,.1f} "
            "GiB free; make room or give another --root"
        )


@contextmanager
def staged(out: Path, replace: bool = False) -> Iterator[Path]:
    """Yields a folder beside `out` that takes its place at the end; an error leaves nothing new.

    Relative links in it hold in both places; everyone may read its files, whatever their writer
    thought. Raises OSError where `out` is not empty at the end, unless it is to be replaced.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        stage.chmod(0o755)
        yield stage
        for path in stage.rglob("*"):
            if path.is_file() and not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o444)
        if out.exists():
            shutil.rmtree(out) if replace else out.rmdir()
        stage.rename(out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write_json(path: Path, record: dict[str, Any], indent: int | None = 2) -> None:
    """Writes a JSON file, atomically. indent: None for one line."""
    with whole_file(path) as part:
        part.write_text(json.dumps(record, indent=indent) + "\n")


def write_provenance(stage: Path, started: datetime, **facts: Any) -> None:
    """Writes command, times, machine and versions, with `facts` about the inputs."""
    record = {
        "command": " ".join([Path(sys.argv[0]).name, *map(without_folder, sys.argv[1:])]),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 1),
        "machine": machine(),
        "versions": versions(),
    }
    write_json(stage / PROVENANCE, record | facts)
