"""Locks between processes that write the same results."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from .samples import DataError


def lock(file: IO, how: int, path: Path) -> None:
    """`fcntl.flock` of a file open for writing (as NFS wants it); path: what to name in an error.

    Raises DataError where another process has it (how: with LOCK_NB) or there are no locks.
    """
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        raise DataError(f"{path} is in use: the same command runs already") from None
    except OSError as error:
        raise DataError(f"{path} cannot be locked ({error}); use a local disk") from None
