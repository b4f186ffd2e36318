"""A training run from model folder and sources to adaptor files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...engines.adaptor import Adaptor
from ...engines.decoder import Decoder
from ...engines.engine_folder import file_sha256
from ...engines.pair import DTYPES
from ...engines.text import TextCodec
from ..bench.record import device_name
from ..progress import Say
from ..target_folder import model_fingerprint
from .rows import training_rows
from .run_folder import RunFolder
from .schedule import Schedule
from .settings import Loss, TrainSettings
from .sources import Source, digests
from .training import Ranks, StepReport, Trainer

LINE_EVERY = 10.0  # seconds between progress lines where no bar can be drawn


@dataclass(frozen=True)
class Run:
    """What a run reads and writes. tuning: questions and answers instead of packed documents.

    start: adaptor to go on from. target: model folder of another teacher (loss kl-target).
    Raises ValueError for options that would have no effect, or lack another.
    """

    model: Path
    sources: Sequence[Source]
    out: Path
    tuning: bool
    settings: TrainSettings = field(default_factory=TrainSettings)
    device: str = "cpu"
    start: Path | None = None
    target: Path | None = None
    save_every: int = 50
    tensorboard: bool = False

    def __post_init__(self):
        if (self.target is not None) != (self.settings.loss is Loss.TARGET):
            raise ValueError("loss kl-target needs --target, a model folder; no other loss has one")
        if not self.tuning and self.settings.prompt_weight != 1:
            raise ValueError("prompt_weight is for sft: a document has no prompt")
        if self.tensorboard and find_spec("tensorboard") is None:
            raise ValueError("tensorboard is not installed; pip install tensorboard")

    def inputs(self) -> dict[str, Any]:
        """What decides the outcome beside the settings: the stage, and digests of all that is read.

        Hub datasets are known by name only.
        """
        return {
            "stage": "sft" if self.tuning else "pretrain",
            "model": model_fingerprint(self.model),
            "data": digests(self.sources),
            "start": file_sha256(self.start),
            "target": self.target and model_fingerprint(self.target),
        }


def train(run: Run, say: Say) -> list[Path]:
    """Runs, or resumes, a training; returns the adaptor files (none on ranks but the first).

    Raises ValueError for settings or data that do not fit, before any step.
    """
    device = Ranks.device(run.device)
    with Ranks.joined(device) as ranks:
        return _train(run, ranks, device, say)


def _train(run: Run, ranks: Ranks, device: torch.device, say: Say) -> list[Path]:
    settings = run.settings
    inputs = run.inputs() | {"ranks": ranks.world}  # a batch is a multiple of their number
    folder = RunFolder(run.out, settings, inputs, writes=ranks.rank == 0)
    decoder = Decoder.load(run.model, DTYPES[settings.dtype], device)
    adaptor = _adaptor(run, decoder)
    teacher = run.target and Decoder.load(run.target, DTYPES[settings.dtype], device)
    codec = TextCodec(run.model)
    rows = training_rows(run.sources, codec, decoder.config, settings, run.tuning, say)
    schedule = Schedule(rows, settings, ranks.rank, ranks.world)
    trainer = Trainer(decoder, adaptor, schedule, teacher, ranks)
    with folder.held():
        _take_steps(run, folder, trainer, ranks, say)
        if ranks.rank:
            return []
        return folder.finish(
            adaptor,
            inputs
            | {
                "base": adaptor.config.base,
                "rows": {str(part.length): len(part) for part in rows},
                "tokens_seen": sum(_tokens(schedule, step) for step in range(settings.steps)),
                "device": device_name(run.device),
            },
        )


def _take_steps(run: Run, folder: RunFolder, trainer: Trainer, ranks: Ranks, say: Say) -> None:
    """The steps that are left; told and kept by the first rank."""
    steps, first = run.settings.steps, ranks.rank == 0
    done = folder.resume(trainer)
    say(f"{'resumed at' if done else 'starting at'} step {done} of {steps}")
    with _show(steps, done, quiet=not first) as show, _board(run, first) as board:
        for report in trainer.run():
            show(report)
            if not first:
                continue
            folder.note(report)
            board(report)
            if report.step % run.save_every == 0 or report.step == steps:
                trainer.save_state(folder.state)


def _adaptor(run: Run, decoder: Decoder) -> Adaptor:
    adaptor = run.settings.new_adaptor(decoder)
    shapes = {name: tensor.shape for name, tensor in adaptor.state_dict().items()}
    adaptor.check_fit("the run's settings", decoder.config, shapes)
    if run.start is not None:
        started = Adaptor.load(run.start, decoder.config, decoder.fingerprint()).state_dict()
        for name, tensor in started.items():
            if tensor.shape != shapes.get(name):
                raise ValueError(
                    f"{run.start.name} has {name} of shape {tuple(tensor.shape)}; these settings "
                    f"have {tuple(shapes[name]) if name in shapes else 'none'}"
                )
        adaptor.load_state_dict(started, strict=False)
    return adaptor


def _tokens(schedule: Schedule, step: int) -> int:
    part = schedule.choice[step]
    return schedule.batch_size(part) * schedule.rows[part].length


@contextmanager
def _show(total: int, done: int, quiet: bool) -> Iterator[Callable[[StepReport], None]]:
    """A bar with loss, gradient norm, tokens/s and time left; lines where there is no terminal."""
    console = Console(stderr=True, highlight=False)
    if quiet or not console.is_terminal:
        yield _line_printer(console, total, quiet)
        return
    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("starting", total=total, completed=done)
        yield lambda report: bar.update(task, completed=report.step, description=_told(report))


def _line_printer(console: Console, total: int, quiet: bool) -> Callable[[StepReport], None]:
    last, started, first = [0.0], time.monotonic(), []

    def show(report: StepReport) -> None:
        now = time.monotonic()
        first.append(report.step) if not first else None
        if quiet or (now - last[0] < LINE_EVERY and report.step < total):
            return
        last[0] = now
        each = (now - started) / (report.step - first[0] + 1)
        left = each * (total - report.step)
        console.print(f"{_told(report)}, {left:.0f} s left of {total} steps", markup=False)

    return show


def _told(report: StepReport) -> str:
    return (
        f"step {report.step}: loss {report.loss:.4f}, gradient {report.gradient_norm:.3f}, "
        f"{report.tokens_per_s:.0f} tokens/s"
    )


@contextmanager
def _board(run: Run, first: bool) -> Iterator[Callable[[StepReport], None]]:
    if not (run.tensorboard and first):
        yield lambda report: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(run.out / "tensorboard") as writer:

        def note(report: StepReport) -> None:
            for name in ("loss", "gradient_norm", "learning_rate", "tokens_per_s"):
                writer.add_scalar(name, getattr(report, name), report.step)

        yield note
