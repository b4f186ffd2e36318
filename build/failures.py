"""How the commands of this package end when something is wrong."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from safetensors import SafetensorError

EXPECTED = (
    *(ValueError, ImportError, OSError, EOFError, RuntimeError, ArithmeticError),
    *(SafetensorError, MemoryError),
)


@contextmanager
def failures(tool: str, interrupted: str = "interrupted") -> Iterator[None]:
    """What keeps a command of `tool` from being done ends it with one line and code 1.

    Ctrl-C is code 130.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has left; typer ends quietly
    except EXPECTED as error:
        typer.echo(f"{tool}: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(f"{tool}: {interrupted}", err=True)
        raise typer.Exit(130) from None


@contextmanager
def cleaned_up() -> Iterator[None]:
    """SIGTERM, what `docker stop` sends, is like Ctrl-C meanwhile: what has begun is cleaned up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
