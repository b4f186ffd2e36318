"""`masw-build`: engines from models.

Exit codes: 0 built or planned, 1 could not be built, 2 a usage error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..engines import architectures
from ..engines.adaptor import read_adaptor
from ..engines.config import DecoderConfig
from ..engines.draft_io import DraftIO
from ..plugins.slot_attention.rule import MemoryRule, SlotVisibility
from .check_command import check
from .draft_plan import CONTAINER, DraftPlan, memory_card, shape_card, summary
from .failures import failures
from .launch_command import launch
from .repository_command import repository
from .target_command import target

PLANNING = ("dry_run", "as_json")  # options that a build does without

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.callback()
def commands() -> None:
    """Builds, lays out and checks what a recipe states."""


@app.command()
def draft(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help=f"Hugging Face folder; with --dry-run also {', '.join(architectures.names())}."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Engine folder to make.")] = None,
    adaptor: Annotated[
        Path | None, typer.Option(help="Memory adaptor; its header decides S, W, r, visibility.")
    ] = None,
    architecture: Annotated[
        str | None, typer.Option(help="Known architecture that the folder must be.")
    ] = None,
    sink: int = 128,
    window: int = 128,
    interval: int = 8,
    visibility: Annotated[str, typer.Option(help="evicted or materialized.")] = "evicted",
    rollback: Annotated[int, typer.Option(help="R: the most draft tokens.")] = 16,
    draft_tokens: Annotated[int | None, typer.Option(help="Largest draft length; R.")] = None,
    max_sequences: Annotated[int, typer.Option(help="Sequences with memory at once.")] = 8,
    max_length: Annotated[int, typer.Option(help="Prompt + output tokens.")] = 32_768,
    chunk: Annotated[int, typer.Option(help="Raw tokens per prefill call.")] = 512,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "bfloat16",
    module: Annotated[str, typer.Option(help="tensorrt or tensorrt_rtx.")] = "tensorrt",
    attention: Annotated[
        str | None, typer.Option(help="plugin or native; default plugin, native for tensorrt_rtx.")
    ] = None,
    logits: Annotated[bool, typer.Option(help="Return all logits (for sampling).")] = True,
    dry_run: Annotated[bool, typer.Option(help="Print shapes, memory and command only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as one JSON object.")] = False,
) -> None:
    """Builds the draft's TensorRT engine, or says what it will need (--dry-run)."""
    with failures():
        config = _model_config(model, architecture, dry_run)
        rule = MemoryRule(sink, window, rollback, interval, SlotVisibility(visibility))
        if adaptor is not None:
            rule = read_adaptor(adaptor)[0].rule(rollback)
        io = DraftIO.of(
            config,
            rule,
            max_sequences=max_sequences,
            max_length=max_length,
            dtype=dtype,
            chunk=chunk,
            logits=logits,
        )
        plan = DraftPlan(config, io, rule.rollback if draft_tokens is None else draft_tokens)
        _show(plan, as_json)
        if dry_run:
            _tell_command(context)
            return
        if out is None:
            raise ValueError("give --out, the engine folder to make, or --dry-run")
        if adaptor is None and rule.interval:
            raise ValueError(f"slots with r = {rule.interval} need --adaptor (or --interval 0)")
        from .draft_build import NATIVE, PLUGIN, DraftBuild, build_draft

        attention = attention or (PLUGIN if module == "tensorrt" else NATIVE)
        build = DraftBuild(plan, Path(model), out, adaptor, module, attention)
        typer.echo(str(build_draft(build, lambda text: typer.echo(text, err=True))))


app.command()(target)


def _model_config(model: str, architecture: str | None, dry_run: bool) -> DecoderConfig:
    """The architecture of a folder, or a known one by name where only a plan is wanted."""
    folder = Path(model)
    if folder.is_dir():
        if architecture is not None:
            return architectures.check_folder(architecture, folder)
        return DecoderConfig.load(folder)
    if dry_run:
        return architectures.architecture(model)
    raise ValueError(f"{model} is no folder; a build needs the model's weights")


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
    words = ["masw-build", "draft", context.params["model"]]
    for option in context.command.params:
        given = context.get_parameter_source(option.name).name == "COMMANDLINE"
        if option.param_type_name == "option" and given and option.name not in PLANNING:
            words += [option.opts[0], str(context.params[option.name])]
    for option, place in (("--out", "ENGINE_FOLDER"), ("--adaptor", "ADAPTOR.safetensors")):
        words += [] if option in words else [option, place]
    typer.echo(f"to build it, in the container {CONTAINER}: {' '.join(words)}", err=True)


app.command()(check)
app.command()(repository)
app.command()(launch)

if __name__ == "__main__":
    app()
