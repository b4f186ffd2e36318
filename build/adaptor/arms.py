"""Arms of an ablation: proxy runs that differ from the base settings in one thing."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import yaml

from .settings import TrainSettings

PRETRAIN, SFT = "pretrain", "sft"
CURVE_POINTS = 200  # steps of a curve that are kept, up to twice as many


@dataclass(frozen=True)
class Arm:
    """One proxy run: settings, and its stages in order."""

    group: str
    name: str
    settings: TrainSettings
    stages: tuple[str, ...] = (SFT,)

    @property
    def key(self) -> str:
        """What an arm is known by; arms of several groups with the same settings share it."""
        return json.dumps([asdict(self.settings), self.stages], sort_keys=True)

    @property
    def share(self) -> TrainSettings:
        """Settings of one of its stages, which share the steps."""
        return replace(self.settings, steps=_share(self.settings.steps, len(self.stages)))


def _share(steps: int, stages: int) -> int:
    return max(1, steps // stages)


def curve_steps(steps: int, stages: int) -> range:
    """Which steps of an arm its curves keep, counted from 1 over its stages."""
    taken = stages * _share(steps, stages)
    return range(1, taken + 1, max(1, taken // CURVE_POINTS))


def read_arms(
    base: dict[str, Any], groups: Sequence[str] = (), names: Sequence[str] = ()
) -> list[Arm]:
    """The shipped arms on top of `base`, of these groups and names; () means all.

    Raises ValueError for a group or a name that there is not.
    """
    text = importlib.resources.files(__package__).joinpath("ablations.yaml").read_text()
    plan = yaml.safe_load(text)
    unknown = set(groups) - plan["groups"].keys()
    if unknown:
        raise ValueError(f"groups has {sorted(unknown)[0]!r}; known: {', '.join(plan['groups'])}")
    arms = [
        _arm(group, name, plan["base"] | base | differs)
        for group, named in plan["groups"].items()
        if not groups or group in groups
        for name, differs in named.items()
    ]
    known = list(dict.fromkeys(arm.name for arm in arms))
    for name in names:
        if name not in known:
            raise ValueError(f"arms has {name!r}; known: {', '.join(known)}")
    return [arm for arm in arms if not names or arm.name in names]


def _arm(group: str, name: str, values: dict[str, Any]) -> Arm:
    stages = tuple(values.pop("stages", (SFT,)))
    unknown = values.keys() - {field.name for field in fields(TrainSettings)}
    if unknown:
        raise ValueError(f"arm {name!r} has unknown settings {', '.join(sorted(unknown))}")
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Arm(group, name, TrainSettings(**lists), stages)
