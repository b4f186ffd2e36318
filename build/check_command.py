"""`masw-build check`: the table of checks before a deployment."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..engines.places import Places
from ..engines.recipe import Lane, Recipe, load_recipe
from .checks.finding import Finding, State
from .checks.machine import Machine
from .checks.subject import Subject
from .deployment import check_name
from .failures import cleaned_up, failures
from .predicted_speedup import Latencies
from .preflight import counted, preflight, table


def check(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    root: Annotated[
        Path, typer.Option(help="Folder of the recipe's models, engines and pair.")
    ] = Path(),
    gpu_memory: Annotated[
        float | None, typer.Option(help="GiB of each GPU; default: what this machine has free.")
    ] = None,
    draft_ms: Annotated[float | None, typer.Option(help="Measured: one draft step, in ms.")] = None,
    verify_ms: Annotated[
        float | None, typer.Option(help="Measured: one verification by the target, in ms.")
    ] = None,
    accepted: Annotated[
        float | None, typer.Option(help="Measured: draft tokens kept per iteration.")
    ] = None,
    decode_ms: Annotated[
        float | None, typer.Option(help="Measured: one plain target step; default --verify-ms.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address whose ports are tried; default as served.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for machines.")] = False,
) -> None:
    """Checks recipe, files and machine; says for each failure what to do.

    The exit code is 0 when nothing failed, 1 otherwise. Checks that this machine cannot make are
    "unknown" and do not count. With the three measured numbers the speedup is predicted.
    """
    with failures("masw-build"), cleaned_up():
        stated = load_recipe(recipe)
        check_name(stated)
        latencies = _latencies(stated, draft_ms, verify_ms, accepted, decode_ms)
        subject = Subject(stated, Places(root), Machine.probe(), gpu_memory, recipe)
        findings = preflight(subject, host or _host(stated))
        _report(stated, findings, latencies, as_json)
    if counted(findings)[State.FAILED]:
        raise typer.Exit(1)


def _report(
    recipe: Recipe, findings: list[Finding], latencies: Latencies | None, as_json: bool
) -> None:
    """Table, counts and prediction, or one JSON object; the warning goes to standard error."""
    counts = counted(findings)
    if as_json:
        checks = [finding.as_dict() for finding in findings]
        told = {"recipe": recipe.name, **counts, "checks": checks, "speedup": _told(latencies)}
        typer.echo(json.dumps(told))
    else:
        Console(highlight=False).print(table(findings))
        typer.echo(", ".join(f"{count} {state}" for state, count in counts.items()))
        if latencies is not None:
            typer.echo(f"predicted speedup: {latencies.speedup:.2f}x")
    if latencies is not None and latencies.warning:
        typer.echo(f"warning: {latencies.warning}", err=True)


def _host(recipe: Recipe) -> str:
    """Where the recipe's launch line listens."""
    return "127.0.0.1" if recipe.lane == Lane.CPU else "0.0.0.0"


def _latencies(
    recipe: Recipe,
    draft_ms: float | None,
    verify_ms: float | None,
    accepted: float | None,
    decode_ms: float | None,
) -> Latencies | None:
    """The measured numbers; raises ValueError where only some of them are given."""
    given = (draft_ms, verify_ms, accepted)
    if given == (None, None, None) and decode_ms is None:
        return None
    if None in given:
        raise ValueError("a prediction needs --draft-ms, --verify-ms and --accepted together")
    return Latencies(draft_ms, verify_ms, accepted, recipe.limits.draft_tokens, decode_ms)


def _told(latencies: Latencies | None) -> dict | None:
    if latencies is None:
        return None
    facts = {"predicted": round(latencies.speedup, 4), "warning": latencies.warning}
    return asdict(latencies) | facts
