"""A file that appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields the path to write, beside `path`, which it replaces at the end.

    A failure leaves nothing behind. The file can be read by whom the umask lets, also where its
    writer (safetensors) would keep it to itself. A pipe or a device is written as it is.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # of a process that was killed
    part.touch()
    mode = part.stat().st_mode
    try:
        yield part
        part.chmod(mode)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
