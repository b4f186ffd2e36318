"""`masw-build launch`: prints how a recipe's repository is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..engines.places import Places
from ..engines.recipe import Launch, load_recipe
from .failures import cleaned_up, failures
from .launch import TRITONSERVER, launch_plan


def launch(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    root: Annotated[Path, typer.Option(help="Folder that holds the repository.")] = Path(),
    repository: Annotated[
        Path | None, typer.Option(help="The repository; ROOT/repository by default.")
    ] = None,
    mode: Annotated[
        Launch | None, typer.Option(help="Start of the target's ranks; default: the recipe's.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    tritonserver: Annotated[str, typer.Option(help="The server's program.")] = TRITONSERVER,
    as_json: Annotated[
        bool, typer.Option("--json", help="Command and environment as one JSON object.")
    ] = False,
) -> None:
    """Prints the command that starts a recipe's repository; it starts nothing."""
    with failures("masw-build"), cleaned_up():
        place = (repository or Places(root).repository).absolute()
        plan = launch_plan(load_recipe(recipe), place, mode, host, tritonserver)
        typer.echo(json.dumps(plan.as_dict()) if as_json else plan.shell())
