"""What the commands of `masw-train` share: options, the model's folder, how they end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..engines.pair import DTYPES
from ..engines.recipes import EMBEDDED
from .embedded_pair import embedded_model

Model = Annotated[str, typer.Option(help="'embedded' or a Hugging Face model folder.")]
Device = Annotated[str, typer.Option(help="'cpu' or 'cuda'.")]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
Numbers = Annotated[str, typer.Option(help="Whole numbers separated by commas.")]


def say(text: str) -> None:
    """Tells a person what is happening."""
    typer.echo(text, err=True)


@contextmanager
def failures() -> Iterator[None]:
    """What keeps a command from being done ends it with one line and code 1."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        typer.echo(f"masw-train: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("masw-train: interrupted; the same command resumes", err=True)
        raise typer.Exit(130) from None


def model_folder(model: str) -> Path:
    """The folder of a model; the embedded one is made on first use."""
    return embedded_model(say) if model == EMBEDDED else Path(model)
