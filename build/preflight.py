"""Everything that can be said about a deployment before anything slow is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.table import Table

from ..engines.recipe import Lane
from .checks.draft import draft_findings
from .checks.finding import Finding, State
from .checks.gpus import gpu_findings
from .checks.layout import layout_findings
from .checks.memory import memory_findings
from .checks.models import model_findings
from .checks.subject import Subject
from .checks.system import system_findings
from .checks.target_engine import target_engine_findings
from .checks.versions import cpu_versions, gpu_versions

COLOURS = {State.OK: "green", State.FAILED: "red", State.UNKNOWN: "yellow"}


def preflight(subject: Subject, host: str = "127.0.0.1") -> list[Finding]:
    """All checks of a recipe's lane, in the order in which a deployment is made."""
    if subject.recipe.lane == Lane.CPU:
        return [
            *cpu_versions(subject.machine),
            *layout_findings(subject),
            *system_findings(subject, host),
        ]
    return [
        *gpu_versions(subject.machine),
        *gpu_findings(subject),
        *memory_findings(subject),
        *model_findings(subject),
        *draft_findings(subject),
        *target_engine_findings(subject),
        *layout_findings(subject),
        *system_findings(subject, host),
    ]


def counted(findings: Sequence[Finding]) -> dict[str, int]:
    """How many are ok, failed, unknown."""
    counts = Counter(finding.state for finding in findings)
    return {state.value: counts[state] for state in State}


def table(findings: Sequence[Finding]) -> Table:
    """The card: each check with what was found and, below it, what to do."""
    card = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("check", "state", "found"):
        card.add_column(name, no_wrap=name != "found", overflow="fold")
    for finding in findings:
        state = f"[{COLOURS[finding.state]}]{finding.state}[/]"
        remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
        card.add_row(finding.name, state, _plain(finding.found + remedy))
    return card


def _plain(text: str) -> str:
    """Text in which square brackets are no markup."""
    return text.replace("[", r"\[")
