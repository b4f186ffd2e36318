"""Command-line options: words and whole numbers separated by commas, files to be written."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def numbers(text: str, least: int = 1) -> tuple[int, ...]:
    """Whole numbers separated by commas, `least` or more of them."""
    try:
        found = tuple(int(part.replace("_", "")) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give whole numbers separated by commas") from None
    if len(found) < least:
        raise typer.BadParameter(f"{text!r}: give at least {least} of them, separated by commas")
    return found


def words(text: str) -> tuple[str, ...]:
    """Words separated by commas; none of an empty text."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def new_file(path: Path | None) -> Path | None:
    """A file that can be written; refuses a folder, and a place in none, before any work."""
    if path is None:
        return None
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise typer.BadParameter(f"{str(path)!r}: give a file in a folder that can be written")
    return path
