"""A file that appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields the path to write, beside `path`, which it replaces at the end.

    A failure leaves nothing behind; of processes that write at once, the last one's file stays.
    The file can be read by whom the umask lets, also where its writer (safetensors) would keep it
    to itself. A link still leads to the file; a pipe or a device is written as it is.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
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
