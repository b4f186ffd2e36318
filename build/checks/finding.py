"""The outcome of one check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class State(StrEnum):
    """ok, failed, or unknown: this machine or these files cannot tell."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """One line of the table. remedy: what exactly to do; every failure has one."""

    name: str
    state: State
    found: str
    remedy: str = ""

    def __post_init__(self):
        if self.state == State.FAILED and not self.remedy:
            raise ValueError(f"the finding {self.name!r} is a failure; give its remedy")

    def as_dict(self) -> dict[str, str]:
        """JSON-ready."""
        return asdict(self)


def ok(name: str, found: str) -> Finding:
    """A check that holds."""
    return Finding(name, State.OK, found)


def failed(name: str, found: str, remedy: str) -> Finding:
    """A check that does not."""
    return Finding(name, State.FAILED, found, remedy)


def unknown(name: str, why: str, remedy: str = "") -> Finding:
    """A check that could not be made, and why."""
    return Finding(name, State.UNKNOWN, why, remedy)


def judged(name: str, holds: bool, found: str, remedy: str) -> Finding:
    """ok or failed; the remedy is dropped where it is not needed."""
    return ok(name, found) if holds else failed(name, found, remedy)
