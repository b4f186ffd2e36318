"""How the commands of `masw-build` end when something is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def failures() -> Iterator[None]:
    """What keeps something from being built ends the command with one line and code 1."""
    try:
        yield
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        typer.echo(f"masw-build: {error}", err=True)
        raise typer.Exit(1) from None
