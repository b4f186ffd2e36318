"""`masw-train evaluate`, `ablate` and `plot`: what draft memories and arms are worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..engines.decoder import Decoder
from ..engines.pair import DTYPES
from ..engines.recipes import EMBEDDED
from .adaptor import comparison as comparing
from .adaptor.ablation import Laboratory
from .adaptor.arms import read_arms
from .adaptor.samples import read_samples
from .adaptor.sources import Source
from .bench.record import emit, progress
from .options import new_file, numbers, words
from .train_options import Device, Dtype, Model, Numbers, failures, model_folder, say

PerKind = Annotated[int, typer.Option(min=0, help="Samples per kind and prefix; 0 = all.")]


def evaluate(
    samples: Annotated[Path, typer.Argument(help="What `masw-train answers` wrote.")],
    adaptor: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE of a trained adaptor, repeatable.")
    ] = None,
    transferred: Annotated[
        str, typer.Option(help="S:W:r of memories to try every adaptor in as it is.")
    ] = "",
    untrained: Annotated[str, typer.Option(help="W:r of untrained copies.")] = "128:8",
    equal: Annotated[
        str, typer.Option(help="Windows with as many entries as slots of these intervals.")
    ] = "8,4",
    window: Annotated[int, typer.Option(min=1, help="W beside the slots of --equal.")] = 128,
    windows: Annotated[str, typer.Option(help="Further windows, by entries.")] = "",
    swa: Annotated[str, typer.Option(help="Sliding windows without a sink.")] = "1024",
    snapkv: Annotated[bool, typer.Option(help="SnapKV, one eighth of the prefix.")] = True,
    sink: Annotated[int, typer.Option(help="Sink of windows and untrained copies.")] = 128,
    draft_tokens: Annotated[int, typer.Option(min=1)] = 5,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    per_kind: PerKind = 0,
    prefixes: Annotated[str, typer.Option(help="Only these prefixes; none = all.")] = "",
    distances: Annotated[bool, typer.Option(help="NLL and KL by distance as well.")] = True,
    outcomes: Annotated[
        Path | None, typer.Option(help="File of outcomes; those in it are not made again.")
    ] = None,
    model: Model = EMBEDDED,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Result to write.", callback=new_file)
    ] = None,
) -> None:
    """Tok./Iter of draft memories, exact for greedy decoding, from one forward each."""
    check_distinct(samples=samples, outcomes=outcomes, json=json_file)
    with failures():
        comparison = comparing.Comparison(
            adaptors=files_of(adaptor or []),
            transferred=tuples_of(transferred, "S:W:r"),
            untrained=tuples_of(untrained, "W:r"),
            equal=numbers(equal, least=0),
            windows=numbers(windows, least=0),
            swa=numbers(swa, least=0),
            snapkv=snapkv,
            sink=sink,
            window=window,
            draft_tokens=draft_tokens,
            max_tokens=max_tokens,
        )
        chosen = comparing.first_of_each(
            read_samples(samples), per_kind, numbers(prefixes, least=0)
        )
        decoder = Decoder.load(model_folder(model), DTYPES[dtype], device)
        with progress(len(chosen)) as tick:
            summaries = comparing.compare(comparison, decoder, chosen, tick, distances, outcomes)
        record = comparing.record(comparison, dtype, device, summaries)
        emit(record, comparing.card(summaries), json_file)


def ablate(
    samples: Annotated[Path, typer.Argument(help="What `masw-train answers` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder of results; those in it are not made again.")],
    sft_data: Annotated[list[str], typer.Option(help="Data of stage sft, NAME=PATH.")],
    pretrain_data: Annotated[list[str], typer.Option(help="Data of stage pretrain.")],
    groups: Annotated[str, typer.Option(help="Groups of arms by comma; none = all.")] = "",
    arms: Annotated[str, typer.Option(help="Names of arms by comma; none = all.")] = "",
    lengths: Numbers = "2304",
    batch_tokens: int = 9216,
    micro_tokens: int = 2304,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps per arm.")] = 60,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    per_kind: PerKind = 8,
    prefixes: Annotated[str, typer.Option(help="Only these prefixes; none = all.")] = "",
    model: Model = EMBEDDED,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
) -> None:
    """Trains and evaluates the arms of build/adaptor/ablations.yaml, briefly each."""
    with failures():
        base = {
            "lengths": numbers(lengths),
            "batch_tokens": batch_tokens,
            "micro_tokens": micro_tokens,
            "steps": steps,
            "dtype": dtype,
        }
        chosen = read_arms(base, words(groups), words(arms))
        laboratory = Laboratory(
            model_folder(model),
            [Source.parse(text) for text in pretrain_data],
            [Source.parse(text) for text in sft_data],
            comparing.first_of_each(read_samples(samples), per_kind, numbers(prefixes, least=0)),
            device,
            max_tokens=max_tokens,
        )
        for result in laboratory.run(chosen, out, say):
            typer.echo(f"{result['group']}: {result['name']}: {result['tok_iter']}")


def plot(
    results: Annotated[Path, typer.Argument(help="Folder with evaluate*.json and ablations/.")],
    out: Annotated[Path, typer.Argument(help="Folder of the PNG files.")],
) -> None:
    """Draws the pictures of committed results."""
    with failures():
        from .adaptor.plots import draw_all, read_results

        arms = read_results(results / "ablations", "*.json", ("group", "name", "tok_iter"))
        evaluations = read_results(results, "evaluate*.json", ("rows",))
        if not arms and not evaluations:
            raise ValueError(f"{results} has neither evaluate*.json nor ablations/*.json")
        for path in draw_all(arms, evaluations, out):
            typer.echo(str(path))


def files_of(texts: Sequence[str]) -> dict[str, Path]:
    """Files by name, each one written NAME=FILE."""
    found: dict[str, Path] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise typer.BadParameter(f"{text!r}: give NAME=FILE")
        if name in found:
            raise typer.BadParameter(f"{text!r}: there is another {name!r}; give each its own name")
        found[name] = Path(path)
    return found


def tuples_of(text: str, form: str) -> tuple[tuple[int, ...], ...]:
    """Numbers in a form such as W:r, several of these separated by commas."""
    parts = [part.split(":") for part in text.replace("_", "").split(",") if part.strip()]
    found = [[number.strip() for number in part] for part in parts]
    numeric = all(number.isdecimal() for entry in found for number in entry)
    if not numeric or any(len(entry) != len(form.split(":")) for entry in found):
        raise typer.BadParameter(f"{text!r}: give {form}, several separated by commas")
    return tuple(tuple(map(int, entry)) for entry in found)


def check_distinct(**files: Path | None) -> None:
    """Raises BadParameter where two options name one file, of which one would be lost."""
    seen: dict[Path, str] = {}
    for name, path in files.items():
        if path is not None and (other := seen.setdefault(path.resolve(), name)) != name:
            raise typer.BadParameter(f"{other} and {name} are both {str(path)!r}; give two files")
