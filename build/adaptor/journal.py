"""Results of a long command, kept one by one so that a stopped command goes on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .lock import lock
from .samples import DataError


class Journal:
    """A JSON lines file: what the results belong to, then one result a line.

    path: made if it is not there; its results are then in `rows`, and a line that a kill cut short
    is dropped. belongs: settings that decide the results, JSON-ready. alone: no other process may
    use the file meanwhile; otherwise several may add to it at once. Raises DataError, and leaves
    the file as it is, if it is no journal, was begun with other settings (named) or is in use; one
    that is `alone` and has no result yet is begun anew.
    """

    def __init__(self, path: Path, belongs: dict[str, Any], alone: bool = False):
        if path.suffix == ".gz":
            raise DataError(f"{path} is kept as plain JSON lines; give a name without .gz")
        self.path, self._alone = path, alone
        self._file = path.open("a+b")
        try:
            if alone:
                lock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, self.path)
            with self._locked():
                self.rows: list[dict[str, Any]] = self._begun(json.loads(json.dumps(belongs)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets other processes have the file."""
        self._file.close()

    def append(self, row: dict[str, Any]) -> None:
        """Adds a result, to the file at once."""
        with self._locked():
            self._whole_lines()  # another process may have been killed in its row
            self._write(row)
        self.rows.append(row)

    def _begun(self, belongs: dict[str, Any]) -> list[dict[str, Any]]:
        """The results in the file; makes it a journal where it is empty."""
        self._file.seek(0)
        content = self._file.read()
        if not content:
            self._write(belongs)
            return []
        found = self._parsed(content[: content.rfind(b"\n") + 1])
        differ = differing(found[0], belongs)
        if differ and not self._holds_nothing(found, belongs):
            raise DataError(f"{self.path} was begun with other settings ({', '.join(differ)})")
        if differ:
            self._file.truncate(0)
            self._write(belongs)
        self._whole_lines()
        return found[1:]

    def _holds_nothing(self, found: list[dict[str, Any]], belongs: dict[str, Any]) -> bool:
        """Whether it is this command's, was left before the first result, and nobody else's now."""
        return self._alone and len(found) == 1 and found[0].keys() == belongs.keys()

    def _whole_lines(self) -> None:
        """Drops a line that was cut short."""
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, end - 1))
        if self._file.read(1) != b"\n":
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def _parsed(self, content: bytes) -> list[dict[str, Any]]:
        try:
            rows = [json.loads(line) for line in content.splitlines()]
        except ValueError:
            rows = []
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise DataError(f"{self.path} holds something else than this command's results")
        return rows

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Only this process reads and writes meanwhile."""
        if self._alone:
            yield
            return
        lock(self._file, fcntl.LOCK_EX, self.path)
        try:
            yield
        finally:
            lock(self._file, fcntl.LOCK_UN, self.path)


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of what two sets of settings do not share, in order."""
    absent = object()
    names = sorted(found.keys() | wanted.keys())
    return [name for name in names if found.get(name, absent) != wanted.get(name, absent)]
