"""Results of a long command, kept one by one so that a stopped command goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .samples import DataError, read_rows


class Journal:
    """A JSON lines file: what the results belong to, then one result a line.

    path: made if it is not there; its results are then in `rows`, and a line that a kill cut short
    is dropped. belongs: settings that decide the results, JSON-ready. Raises DataError naming what
    differs if the file was begun with other settings.
    """

    def __init__(self, path: Path, belongs: dict[str, Any]):
        self.path, belongs = path, json.loads(json.dumps(belongs))
        if path.is_file():
            self._drop_unfinished_line()
        found = [row for row, _ in read_rows(path)] if path.is_file() else []
        if not found:
            path.write_text(_line(belongs), encoding="utf-8")
        elif found[0] != belongs:
            keys = sorted(found[0].keys() | belongs.keys())
            differ = [key for key in keys if found[0].get(key) != belongs.get(key)]
            raise DataError(f"{path} was begun with other settings ({', '.join(differ)})")
        self.rows: list[dict[str, Any]] = found[1:]

    def append(self, row: dict[str, Any]) -> None:
        """Adds a result, to the file at once."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        self.rows.append(row)

    def _drop_unfinished_line(self) -> None:
        content = self.path.read_bytes()
        if not content.endswith(b"\n"):
            self.path.write_bytes(content[: content.rfind(b"\n") + 1])


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"
