"""A file that appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields the path to write, beside `path`, which it replaces at the end unless that fails."""
    part = path.with_name(path.name + ".part")
    yield part
    part.replace(path)
