"""`masw-build draft`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..engines import architectures
from ..engines.recipe import load_recipe, recipe_names
from ..engines.trtllm_module import CONTAINER
from .draft_plan import DraftPlan, memory_card, shape_card, summary
from .draft_settings import DraftSettings
from .failures import cleaned_up, failures

HOW = ("recipe", "root", "dry_run", "as_json")  # say how to build, not what
PLANNING = ("dry_run", "as_json")  # options that a build does without


def draft(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"Hugging Face folder; with --dry-run also {', '.join(architectures.names())}.",
            show_default="the recipe's",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A YAML file or a shipped recipe, whose draft is built: "
            f"{', '.join(recipe_names())}. Options that are given win."
        ),
    ] = None,
    root: Annotated[Path, typer.Option(help="Folder with the recipe's files.")] = Path("."),
    out: Annotated[Path | None, typer.Option(help="Engine folder to make.")] = DraftSettings.out,
    adaptor: Annotated[
        Path | None, typer.Option(help="Memory adaptor; its header decides S, W, r, visibility.")
    ] = DraftSettings.adaptor,
    architecture: Annotated[
        str | None, typer.Option(help="Known architecture that the folder must be.")
    ] = DraftSettings.architecture,
    sink: int = DraftSettings.sink,
    window: int = DraftSettings.window,
    interval: int = DraftSettings.interval,
    visibility: Annotated[
        str, typer.Option(help="evicted or materialized.")
    ] = DraftSettings.visibility,
    rollback: Annotated[
        int, typer.Option(help="R: the most draft tokens.")
    ] = DraftSettings.rollback,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Largest draft length; R.")
    ] = DraftSettings.draft_tokens,
    max_sequences: Annotated[
        int, typer.Option(help="Sequences with memory at once.")
    ] = DraftSettings.max_sequences,
    max_length: Annotated[
        int, typer.Option(help="Prompt + output tokens.")
    ] = DraftSettings.max_length,
    chunk: Annotated[int, typer.Option(help="Raw tokens per prefill call.")] = DraftSettings.chunk,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = DraftSettings.dtype,
    quantization: Annotated[
        str, typer.Option(help="Of the backbone's linear layers: none, fp8 or int4_awq.")
    ] = DraftSettings.quantization,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Text to measure scales on: .txt, or .jsonl with text.",
            show_default="Python's own manual",
        ),
    ] = DraftSettings.calibration,
    module: Annotated[str, typer.Option(help="tensorrt or tensorrt_rtx.")] = DraftSettings.module,
    attention: Annotated[
        str | None, typer.Option(help="plugin or native; default plugin, native for tensorrt_rtx.")
    ] = DraftSettings.attention,
    logits: Annotated[
        bool, typer.Option(help="Return all logits (for sampling).")
    ] = DraftSettings.logits,
    dry_run: Annotated[bool, typer.Option(help="Print shapes, memory and command only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as one JSON object.")] = False,
) -> None:
    """Builds the draft's TensorRT engine, or says what it will need (--dry-run)."""
    with failures("masw-build"), cleaned_up():
        settings = _settings(context, recipe, root)
        plan = settings.plan(dry_run)
        _show(plan, as_json)
        if dry_run:
            _tell_command(context)
            return
        made = settings.build(plan, lambda text: typer.echo(text, err=True))
        typer.echo(str(made), err=as_json)


def _settings(context: typer.Context, recipe: str | None, root: Path) -> DraftSettings:
    """The recipe's settings, or the defaults, with the options that are given on top."""
    given = {name: context.params[name] for name in _given(context) if name not in HOW}
    if recipe is None and "root" in _given(context):
        raise ValueError(f"root is {root}; it is for --recipe only")
    base = DraftSettings() if recipe is None else DraftSettings.of(load_recipe(recipe), root)
    return base.change(given)


def _given(context: typer.Context) -> list[str]:
    """Names of all parameters that stand on the command line."""
    return [
        parameter.name
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name).name == "COMMANDLINE"
    ]


def _show(plan: DraftPlan, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(plan.as_dict()))
        return
    console = Console(highlight=False)
    console.print(shape_card(plan))
    console.print(memory_card(plan))
    console.print(summary(plan), markup=False)


def _tell_command(context: typer.Context) -> None:
    """The command to run where TensorRT and a GPU are: this one, with all that was given."""
    words, given = ["masw-build", "draft"], _given(context)
    for parameter in context.command.params:
        if parameter.name in given and parameter.name not in PLANNING:
            value = context.params[parameter.name]
            words += _word(parameter, value)
    for option, place in (("--out", "ENGINE_FOLDER"), ("--adaptor", "ADAPTOR.safetensors")):
        words += [] if option in words or "recipe" in given else [option, place]
    typer.echo(f"to build it, in the container {CONTAINER}: {shlex.join(words)}", err=True)


def _word(parameter, value: object) -> list[str]:
    """A parameter as it is written: a switch that is off is its second name."""
    if parameter.param_type_name == "argument":
        return [str(value)]
    if isinstance(value, bool):
        return [parameter.opts[0] if value else parameter.secondary_opts[0]]
    return [parameter.opts[0], str(value)]
