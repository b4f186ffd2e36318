"""`masw-build repository`: the Triton repository of a recipe, of either lane."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..engines.places import Places
from ..engines.recipe import load_recipe
from .deployment import Layout, lay_out
from .failures import cleaned_up, failures
from .launch import launch_plan


def repository(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    root: Annotated[
        Path, typer.Option(help="Folder of the recipe's models, engines and pair.")
    ] = Path(),
    out: Annotated[
        Path | None, typer.Option(help="Repository to write; ROOT/repository by default.")
    ] = None,
    decoupled: Annotated[
        bool | None,
        typer.Option(
            "--decoupled/--no-decoupled",
            help="Stream, or answer each request exactly once; default: as the recipe says.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for machines.")] = False,
) -> None:
    """Writes the Triton repository and the pair folder of a recipe, and says how to start it.

    Files that are not there yet are named; the layout is complete without them.
    """
    with failures("masw-build"), cleaned_up():
        stated = load_recipe(recipe)
        layout = lay_out(stated, Places(root), out, decoupled)
        plan = launch_plan(stated, layout.repository.absolute())
        if as_json:
            typer.echo(json.dumps(_as_dict(layout) | {"launch": plan.as_dict()}))
            return
        typer.echo(f"repository: {layout.repository} ({len(layout.changed)} files written)")
        typer.echo(f"pair: {layout.pair}")
        for path in layout.missing:
            typer.echo(f"missing: {path}")
        if layout.missing:
            typer.echo(f"`masw-build check {recipe} --root {root}` says what makes them")
        typer.echo(f"start: {plan.shell()}")


def _as_dict(layout: Layout) -> dict:
    return {
        "repository": str(layout.repository),
        "pair": str(layout.pair),
        "changed": [str(path) for path in layout.changed],
        "missing": [str(path) for path in layout.missing],
    }
