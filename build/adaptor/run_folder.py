"""The folder of a training run: settings, progress, adaptors, provenance, and what resuming needs.

settings.json         all that decides the outcome; a resumed run must state the same
state.safetensors     step, adaptor and optimiser
log.jsonl             one line per step
adaptor-r8.safetensors   the adaptor in bfloat16, one file per slot interval
provenance.json       where it came from
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...engines.adaptor import Adaptor
from ..bench.record import origin, without_folder
from ..output_folder import PROVENANCE, write_json
from .journal import differing
from .lock import lock
from .settings import TrainSettings
from .training import StepReport, Trainer

ADAPTORS = "adaptor-r*.safetensors"


class RunFolder:
    """One run; made anew, or taken up where it stopped.

    inputs: what else decides the outcome (stage, digests of model and data ...), JSON-ready.
    writes: False on ranks but the first. Raises ValueError naming what differs where the folder
    holds the steps of another run, and for a folder with an adaptor but no steps.
    """

    def __init__(
        self, path: Path, settings: TrainSettings, inputs: dict[str, Any], writes: bool = True
    ):
        self.path, self.settings, self.writes = path, settings, writes
        self._known, self._log = path / "settings.json", path / "log.jsonl"
        self._wanted = json.loads(json.dumps(inputs | asdict(settings)))
        self._check()

    def _check(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is no folder; give another --out")
        if not self.state.is_file():
            foreign = [*self.path.glob(PROVENANCE), *sorted(self.path.glob(ADAPTORS))]
            if foreign:
                raise ValueError(
                    f"{self.path} holds {foreign[0].name} of no run; give another --out"
                )
            return
        try:
            found = dict(json.loads(self._known.read_text()))
        except (ValueError, TypeError):
            raise ValueError(f"{self._known} holds no settings; give another --out") from None
        if differ := differing(found, self._wanted):
            raise ValueError(
                f"{self.path} holds a run with other settings or data ({', '.join(differ)}); "
                "give another --out or the same"
            )

    @property
    def state(self) -> Path:
        """File of the resumable state."""
        return self.path / "state.safetensors"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Makes the folder, in which no other process may train meanwhile.

        Raises DataError where one does.
        """
        if not self.writes:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as file:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB, self.path)
            self._check()  # another may have trained since
            yield

    def resume(self, trainer: Trainer) -> int:
        """Takes the trainer to the last saved step, which is returned, and cuts the log there.

        From here on the folder is this run's.
        """
        if self.state.is_file():
            trainer.load_state(self.state)
        if self.writes:
            write_json(self._known, self._wanted)
            lines = self._log.read_text().splitlines()
            self._log.write_text("".join(line + "\n" for line in lines[: trainer.step]))
        return trainer.step

    def note(self, report: StepReport) -> None:
        """Adds a step to the log."""
        with self._log.open("a") as file:
            file.write(json.dumps(asdict(report)) + "\n")

    def finish(self, adaptor: Adaptor, facts: dict[str, Any]) -> list[Path]:
        """Writes the adaptor, once for each slot interval of the run, and its provenance."""
        paths = []
        for interval in self.settings.intervals:
            paths.append(self.path / f"adaptor-r{interval}.safetensors")
            adaptor.save(paths[-1], torch.bfloat16, interval=interval, trained=True)
        record = {
            "command": " ".join(["masw-train", *map(without_folder, sys.argv[1:])]),
            **origin(),
            "settings": asdict(self.settings),
        }
        write_json(self.path / PROVENANCE, record | facts)
        return paths
