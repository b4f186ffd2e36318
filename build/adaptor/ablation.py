"""Proxy runs trained briefly, then compared on the same samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...engines.adaptor import Adaptor
from ...engines.config import DecoderConfig
from ...engines.decoder import Decoder
from ...engines.pair import DTYPES
from ...engines.text import TextCodec
from ..bench.record import device_name, origin, rounded
from ..output_folder import write_json
from ..progress import Say
from ..target_folder import model_fingerprint
from .arms import PRETRAIN, SFT, Arm, curve_steps
from .comparison import check_samples, overall
from .evaluation import DraftMemory, Evaluator
from .journal import differing
from .rows import Rows, check_lengths, training_rows
from .samples import Sample
from .schedule import Schedule
from .settings import TrainSettings
from .sources import Source, digests
from .summary import Summary, summaries
from .training import StepReport, Trainer


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

    def run(self, arms: Sequence[Arm], out: Path, say: Say) -> Iterator[dict[str, Any]]:
        """Results of the arms in order, each kept in a file of `out`; those there are read.

        Raises ValueError, before any training, for samples that cannot be evaluated, for data that
        cannot be trained on, and for a result in `out` that other settings, data, model or samples
        gave.
        """
        model = DecoderConfig.load(self.model)
        check_samples(self.samples, self.max_tokens, model)
        for arm in arms:
            check_lengths(arm.settings, model)
        kept = {arm: self._kept(arm, path) for arm in arms if (path := _file(out, arm)).is_file()}
        done = {arm.key: result for arm, result in kept.items()}
        rows = StageRows(self.model, self._sources, say)
        for arm in arms:
            if arm.key not in done:
                rows.prepare(arm)
        out.mkdir(parents=True, exist_ok=True)
        for arm in arms:
            if arm not in kept:
                say(f"{arm.group}: {arm.name}")
                result = done.get(arm.key) or self._inputs(arm) | self._run(arm, rows)
                done[arm.key] = kept[arm] = result | {"group": arm.group, "name": arm.name}
                write_json(_file(out, arm), kept[arm], indent=None)
            yield kept[arm]

    def _kept(self, arm: Arm, path: Path) -> dict[str, Any]:
        """The result in a file, which must be what this arm would give."""
        inputs = self._inputs(arm)
        try:
            result = json.loads(path.read_text())
            found = result["settings"] | {key: result.get(key) for key in inputs}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is no result of an arm; give another --out") from None
        wanted = json.loads(json.dumps(asdict(arm.settings) | inputs))
        if differ := differing(found, wanted):
            raise ValueError(f"{path} has other {', '.join(differ)}; give another --out")
        return result

    def _inputs(self, arm: Arm) -> dict[str, Any]:
        """What decides an arm's result beside its settings: digests of all that is read, limits."""
        return self._shared | {
            "stages": arm.stages,
            "data": {stage: self._digests[stage] for stage in arm.stages},
        }

    @cached_property
    def _shared(self) -> dict[str, Any]:
        samples = "".join(sample.digest for sample in self.samples)
        return {
            "model": model_fingerprint(self.model),
            "samples": hashlib.sha256(samples.encode()).hexdigest(),
            "draft_tokens": self.draft_tokens,
            "max_tokens": self.max_tokens,
        }

    @cached_property
    def _digests(self) -> dict[str, list[list[str | None]]]:
        return {stage: digests(sources) for stage, sources in self._sources.items()}

    def _run(self, arm: Arm, rows: StageRows) -> dict[str, Any]:
        settings = arm.settings
        trained = Decoder.load(self.model, DTYPES[settings.dtype], self.device)
        adaptor, reports = settings.new_adaptor(trained), []
        for stage in arm.stages:
            schedule = Schedule(rows.of(stage, settings), arm.share)
            reports += list(Trainer(trained, adaptor, schedule).run())
        return self._result(arm, reports, self._evaluate(settings, adaptor))

    @property
    def _sources(self) -> dict[str, Sequence[Source]]:
        return {PRETRAIN: self.pretraining, SFT: self.tuning}

    def _evaluate(self, settings: TrainSettings, adaptor: Adaptor) -> list[Summary]:
        decoder = Decoder.load(self.model, DTYPES["float32"], self.device)
        adaptor.requires_grad_(False)
        memories = [
            DraftMemory(f"r = {interval}", settings.rule(interval), adaptor)
            for interval in settings.intervals
        ]
        limits = self.draft_tokens, self.max_tokens
        return summaries(Evaluator(decoder, False), self.samples, lambda prefix: memories, *limits)

    def _result(self, arm: Arm, reports: list[StepReport], rows: list[Summary]) -> dict[str, Any]:
        steps = curve_steps(arm.settings.steps, len(arm.stages))
        curve = [reports[step - 1] for step in steps]
        return {
            "settings": asdict(arm.settings),
            "tokens": sum(report.tokens for report in reports),
            "loss": [rounded(report.loss) for report in curve],
            "gradient_norm": [rounded(report.gradient_norm) for report in curve],
            "tok_iter": overall(rows),
            "rows": [asdict(summary) for summary in rows],
            "device": device_name(self.device),
            **origin(),
        }


class StageRows:
    """Training rows of stages from their sources, made once for all arms that share them."""

    def __init__(self, model: Path, sources: dict[str, Sequence[Source]], say: Say):
        self.model, self.sources, self.say = model, sources, say
        self._made: dict[tuple, list[Rows]] = {}

    @cached_property
    def _reader(self) -> tuple[TextCodec, DecoderConfig]:
        return TextCodec(self.model), DecoderConfig.load(self.model)

    def prepare(self, arm: Arm) -> None:
        """Makes an arm's rows. Raises DataError for data that give none."""
        for stage in arm.stages:
            Schedule(self.of(stage, arm.settings), arm.share)

    def of(self, stage: str, settings: TrainSettings) -> list[Rows]:
        """The rows of a stage under these settings."""
        tuning = stage == SFT
        key = stage, settings.lengths, settings.prompt_weight if tuning else None
        if key not in self._made:
            what = self.sources[stage], *self._reader, settings
            self._made[key] = training_rows(*what, tuning, self.say)
        return self._made[key]


def _file(out: Path, arm: Arm) -> Path:
    return out / f"{arm.group}--{arm.name}.json".replace(" ", "_").replace("/", "_")
