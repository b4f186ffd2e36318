"""`trtllm-build` on a checkpoint: a TensorRT-LLM engine folder, one engine per rank."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..engines.trtllm_folder import EngineConfig
from ..engines.trtllm_module import CONTAINER
from .output_folder import check_space, check_unused, staged, write_provenance
from .progress import Say
from .target_plan import BUILDER, TargetPlan

Show = Callable[[int, str], object]
LAST_LINES = 8  # of the log, shown with an error
POLL_SECONDS = 0.2
_RANK = re.compile(r"\brank[ :=_-]*(\d+)", re.IGNORECASE)


class TargetBuildError(RuntimeError):
    """trtllm-build failed; the message names the ranks or the last lines of its log."""


class NoBuilder(RuntimeError):
    """TensorRT-LLM is not installed here; the message says where it is and what to run."""


@dataclass(frozen=True)
class EngineJob:
    """An engine folder to be built of a checkpoint. workers: ranks built at once, None: all."""

    plan: TargetPlan
    checkpoint: Path
    out: Path
    log: Path
    workers: int | None = None

    def __post_init__(self):
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers is {self.workers}; use 1 or more")

    def check(self, reserved: int = 0) -> None:
        """Raises ValueError where the folder is used or the disk too small.

        reserved: bytes that will be written beside the engines before they are built.
        """
        check_unused(self.out)
        if shutil.which(BUILDER) is not None:
            needed = self.plan.checkpoint_bytes + reserved
            check_space(self.out, needed, "the engine" + " with its checkpoint" * bool(reserved))

    @property
    def command(self) -> list[str]:
        """The call that builds straight into the engine folder."""
        return self.plan.command(self.checkpoint, self.out, self.workers)


def without_builder(job: EngineJob) -> NoBuilder:
    """The error that says which container has trtllm-build and what to run there."""
    return NoBuilder(
        f"{BUILDER} is not installed; the engine is built for the GPUs of the machine it will run "
        f"on, in the container {CONTAINER}: run this command again there, or\n"
        f"{shlex.join(job.command)}"
    )


def build_engine(job: EngineJob, say: Say) -> Path:
    """Builds the engine folder of a checked job; it appears whole or not at all.

    Raises NoBuilder without TensorRT-LLM, TargetBuildError where trtllm-build fails.
    """
    if shutil.which(BUILDER) is None:
        raise without_builder(job)
    started = datetime.now(UTC)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with staged(job.out) as stage:
        say(f"building {job.plan.target.ranks} engines; output in {job.log}")
        code = _run(job, stage, say)
        missing = _missing(stage, job.plan.target.ranks)
        if code or missing:
            raise TargetBuildError(_explain(code, missing, job.log))
        _check_config(job.plan, stage)
        write_provenance(stage, started, trtllm_build=shlex.join(job.command))
    return job.out


def _run(job: EngineJob, stage: Path, say: Say) -> int:
    """The exit code, negative for a signal. Its process group ends with this call."""
    command = job.plan.command(job.checkpoint, stage, job.workers)
    ranks, done = job.plan.target.ranks, 0
    with job.log.open("wb") as output, _bar(ranks, say) as show:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                before, done = done, ranks - len(_missing(stage, ranks))
                show(done - before, _last_lines(job.log, 1))
        finally:
            _end(process)
    return process.returncode


def _end(process: subprocess.Popen) -> None:
    """Ends what is left of the builder: its workers where it was killed, all on an interrupt."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _bar(ranks: int, say: Say) -> Iterator[Show]:
    """Yields show(engines more, last line of the log): a bar, or a line for each engine."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        told = count(1)
        yield lambda done, text: [say(f"{next(told)}/{ranks} engines") for _ in range(done)]
        return
    columns = BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn()
    line = TextColumn("{task.description}", markup=False)
    with Progress(*columns, line, console=console, transient=True) as bars:
        task = bars.add_task("", total=ranks)
        yield lambda done, text: bars.update(task, advance=done, description=text[-60:])


def _missing(stage: Path, ranks: int) -> list[int]:
    """Ranks whose engine is not written yet."""
    return [rank for rank in range(ranks) if not (stage / f"rank{rank}.engine").is_file()]


def _explain(code: int, missing: list[int], log: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        what = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    else:
        what = f"failed with exit code {code}" if code else "ended without all engines"
    tail = _last_lines(log, LAST_LINES)
    blamed = sorted({int(rank) for rank in _RANK.findall(tail)} & set(missing))
    where = f"; rank {', '.join(map(str, blamed or missing))} has no engine" if missing else ""
    return f"{BUILDER} {what}{where}; the end of {log}:\n{tail or '(nothing)'}"


def _last_lines(log: Path, most: int) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * most))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join([line.rstrip() for line in lines if line.strip()][-most:])


def _check_config(plan: TargetPlan, stage: Path) -> None:
    """What trtllm-build may change with a warning only, and the loop cannot do without."""
    if not (stage / "config.json").is_file():
        raise TargetBuildError(f"{BUILDER} wrote no config.json beside the engines")
    built = EngineConfig.load(stage)
    if built.number("max_draft_len") != plan.target.max_draft_len:
        raise TargetBuildError(
            f"{BUILDER} built engines of max_draft_len {built.number('max_draft_len')}; the recipe "
            f"wants {plan.target.max_draft_len}"
        )
    if not built.paged_context:
        raise TargetBuildError(
            f"{BUILDER} turned use_paged_context_fmha off, so prefixes could not be reused; its "
            "log says why"
        )
