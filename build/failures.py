"""How the commands of `masw-build` end when something is wrong."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from safetensors import SafetensorError


@contextmanager
def failures() -> Iterator[None]:
    """What keeps something from being built ends the command with one line and code 1.

    SIGTERM is like Ctrl-C meanwhile: what has begun is cleaned up.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (ValueError, ImportError, OSError, RuntimeError, SafetensorError) as error:
        typer.echo(f"masw-build: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)
