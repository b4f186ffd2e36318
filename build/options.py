"""Lists in command-line options: words and whole numbers separated by commas."""

from __future__ import annotations

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
