"""Everything that can be said about a deployment before anything slow is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from ..engines.recipe import Lane
from .checks.draft import draft_findings
from .checks.finding import Finding, State, failed
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
    checks: dict[str, Callable[[], list[Finding]]] = {
        "versions": lambda: gpu_versions(subject.machine),
        "GPUs": lambda: gpu_findings(subject),
        "memory": lambda: memory_findings(subject),
        "models": lambda: model_findings(subject),
        "draft": lambda: draft_findings(subject),
        "target engine": lambda: target_engine_findings(subject),
        "layout": lambda: layout_findings(subject),
        "system": lambda: system_findings(subject, host),
    }
    if subject.recipe.lane == Lane.CPU:
        checks = {name: checks[name] for name in ("versions", "layout", "system")}
        checks["versions"] = lambda: cpu_versions(subject.machine)
    return [finding for name, check in checks.items() for finding in _made(name, check)]


def _made(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of a group of checks; one that breaks at a damaged file leaves the others."""
    try:
        return check()
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        found = f"{type(error).__name__}: {error}"
        return [failed(name, found, "a file of this part is damaged: make it again")]


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
