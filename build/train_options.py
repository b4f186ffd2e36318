"""What the commands of `masw-train` share: options, the model's folder, how they end."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..engines.pair import DTYPES
from ..engines.recipes import EMBEDDED
from .embedded_pair import embedded_model
from .failures import failures as ending


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(DTYPES)}")
    return name


def _present_device(name: str) -> str:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{name!r} is no device; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(f"{name!r}: torch {torch.__version__} finds no CUDA device here")
    return name


Model = Annotated[str, typer.Option(help="'embedded' or a Hugging Face model folder.")]
Device = Annotated[str, typer.Option(help="'cpu' or 'cuda'.", callback=_present_device)]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.", callback=_known_dtype)]
Numbers = Annotated[str, typer.Option(help="Whole numbers separated by commas.")]


def say(text: str) -> None:
    """Tells a person what is happening."""
    typer.echo(text, err=True)


def failures() -> AbstractContextManager[None]:
    """How the commands of `masw-train` end when something is wrong."""
    return ending("masw-train", "interrupted; the same command resumes")


def model_folder(model: str) -> Path:
    """The folder of a model; the embedded one is made on first use.

    Raises ValueError for a place that is no model folder, such as a name on the hub.
    """
    folder = embedded_model(say) if model == EMBEDDED else Path(model)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model is {model!r}; it must be a folder with a config.json")
    return folder
