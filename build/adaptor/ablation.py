"""Proxy runs that differ in one thing: trained briefly, then compared on the same samples."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ...engines.adaptor import Adaptor
from ...engines.decoder import Decoder
from ...engines.pair import DTYPES
from ..bench.record import device_name, machine, rounded, versions
from .comparison import overall
from .evaluation import DraftMemory, Evaluator
from .rows import Rows, pretraining_rows, tuning_rows
from .samples import Sample
from .schedule import Schedule
from .settings import TrainSettings
from .sources import Source
from .summary import Summary, summaries
from .training import StepReport, Trainer

PRETRAIN, SFT = "pretrain", "sft"
CURVE_POINTS = 200  # most steps of a curve that are kept


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


@dataclass(frozen=True)
class Laboratory:
    """What all arms share: the model, the data of either stage, and the samples."""

    model: Path
    pretraining: Sequence[Source]
    tuning: Sequence[Source]
    samples: Sequence[Sample]
    device: str = "cpu"
    draft_tokens: int = 5
    max_tokens: int = 128

    def run(
        self, arms: Sequence[Arm], out: Path, say: Callable[[str], None]
    ) -> Iterator[dict[str, Any]]:
        """Results of the arms in order, each kept in a file of `out`; those that exist are read."""
        out.mkdir(parents=True, exist_ok=True)
        done: dict[str, dict] = {}
        for arm in arms:
            path = out / f"{arm.group}--{arm.name}.json".replace(" ", "_").replace("/", "_")
            if path.is_file():
                result = json.loads(path.read_text())
            else:
                say(f"{arm.group}: {arm.name}")
                result = done.get(arm.key) or self._run(arm)
                result = result | {"group": arm.group, "name": arm.name}
                path.write_text(json.dumps(result) + "\n")
            done[arm.key] = result
            yield result

    def _run(self, arm: Arm) -> dict[str, Any]:
        settings = arm.settings
        trained = Decoder.load(self.model, DTYPES[settings.dtype], self.device)
        adaptor, reports = settings.new_adaptor(trained), []
        for stage in arm.stages:
            share = replace(settings, steps=max(1, settings.steps // len(arm.stages)))
            trainer = Trainer(trained, adaptor, Schedule(self._rows(stage, share, trained), share))
            reports += list(trainer.run())
        return self._result(arm, reports, self._evaluate(settings, adaptor))

    def _rows(self, stage: str, settings: TrainSettings, decoder: Decoder) -> list[Rows]:
        from ...engines.text import TextCodec

        end_id = decoder.config.eos_ids[0] if decoder.config.eos_ids else 0
        codec, quiet = TextCodec(self.model), lambda text: None
        if stage == PRETRAIN:
            length = max(settings.lengths)
            return pretraining_rows(self.pretraining, codec, length, end_id, quiet)
        weight = settings.prompt_weight
        return tuning_rows(self.tuning, codec, settings.lengths, end_id, weight, quiet)

    def _evaluate(self, settings: TrainSettings, adaptor: Adaptor) -> list[Summary]:
        decoder = Decoder.load(self.model, DTYPES["float32"], self.device)
        adaptor.requires_grad_(False)
        memories = [
            DraftMemory(f"r = {interval}", settings.rule(interval), adaptor)
            for interval in settings.intervals
        ]
        limits = self.draft_tokens, self.max_tokens
        return summaries(Evaluator(decoder, False), self.samples, lambda prefix: memories, *limits)

    def _result(self, arm: Arm, reports: list[StepReport], rows: list[Summary]) -> dict:
        stride = max(1, len(reports) // CURVE_POINTS)
        return {
            "settings": asdict(arm.settings),
            "stages": arm.stages,
            "tokens": sum(report.tokens for report in reports),
            "loss": [rounded(report.loss) for report in reports[::stride]],
            "gradient_norm": [rounded(report.gradient_norm) for report in reports[::stride]],
            "tok_iter": overall(rows),
            "rows": [asdict(summary) for summary in rows],
            "device": device_name(self.device),
            "machine": machine(),
            "versions": versions(),
        }
