"""`masw-serve`: prepares what is missing, serves it, keeps it alive, drains on a signal."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..engines.recipes import EMBEDDED
from .processes import sweep_orphans
from .repository import RepositoryConfig, write_repository
from .supervisor import Supervisor, SupervisorConfig
from .triton_install import ServerError, masw_home
from .triton_server import ServerConfig, TritonServer, check_ports

app = typer.Typer(add_completion=False)


class Signals:
    """SIGINT and SIGTERM: the first sets `stop` where `may_drain` is set; any other raises
    KeyboardInterrupt in the main thread."""

    def __init__(self) -> None:
        self.stop = Event()
        self.may_drain = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if not self.may_drain or self.stop.is_set():
            raise KeyboardInterrupt
        self.stop.set()


class Reporter:
    """Tells a person (stderr) or, with json_lines, a machine (stdout, one object a line)."""

    def __init__(self, json_lines: bool):
        self.json_lines = json_lines
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._progress: Progress | None = None

    def __call__(self, kind: str, message: str, **details: object) -> None:
        if self.json_lines:
            print(json.dumps({"event": kind, "message": message, **details}), flush=True)
        elif kind == "loading" and self._progress:
            self._progress.update(self._progress.task_ids[0], description=f"loading {message}")
        else:
            self.console.print(f"{kind}: {message}", markup=False)

    @contextmanager
    def progress(self, first: str) -> Iterator[None]:
        """A spinner with the elapsed time, for the time of the block."""
        if self.json_lines or not self.console.is_terminal:
            yield
            return
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=self.console, transient=True) as self._progress:
            self._progress.add_task(first, total=None)
            yield
        self._progress = None


def prepare(recipe: str) -> str:
    """The pair's folder for a recipe: the embedded pair, made on first use, or a path as it is."""
    if recipe == EMBEDDED:
        from .embedded_pair import prepare_embedded_pair

        return str(prepare_embedded_pair())
    if not Path(recipe).is_dir():
        raise ServerError(
            f"--recipe {recipe}: no such folder; give that of a pair or '{EMBEDDED}'. A recipe's "
            "file is laid out by `masw-build repository`"
        )
    return str(Path(recipe).resolve())


def check_draft_tokens(recipe: str, draft_tokens: int) -> None:
    """Raises ValueError for a draft length beyond that of a recipe's pair, made or not."""
    from ..engines.pair import Pair
    from ..engines.recipe import load_recipe

    embedded = recipe == EMBEDDED
    pair = Pair.of(load_recipe(EMBEDDED)) if embedded else Pair.load(Path(prepare(recipe)))
    if draft_tokens > pair.max_draft_tokens:
        raise ValueError(
            f"draft_tokens = {draft_tokens}: the pair allows at most {pair.max_draft_tokens}"
        )


@app.command()
def serve(
    recipe: Annotated[str, typer.Option(help="'embedded' or the path of a pair.")] = EMBEDDED,
    model_repository: Annotated[
        Path | None, typer.Option(help="Serve this repository as it is, instead of a recipe.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="Port of the HTTP endpoint.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="Port of the gRPC endpoint.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Port of the metrics page.")] = 8002,
    draft_tokens: Annotated[int, typer.Option(help="Draft length; 0 = plain decoding.")] = 5,
    draft_mode: Annotated[str, typer.Option(help="slots, full, window or none.")] = "slots",
    max_sequences: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 8,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait beyond these.")] = 64,
    decoupled: Annotated[
        bool, typer.Option(help="Stream; --no-decoupled answers each request exactly once.")
    ] = True,
    log_file: Annotated[Path | None, typer.Option(help="Log of server and models.")] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="How long running requests may go on after SIGTERM or Ctrl-C.")
    ] = 60.0,
    json_lines: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, on stdout, for machines.")
    ] = False,
) -> None:
    """Serve a pair of target and draft through Triton until SIGTERM or Ctrl-C (twice: at once).

    Models that die are brought back. The exit code is 0 after a clean drain, 1 after a failure
    or when running requests had to be cut off.
    """
    report = Reporter(json_lines)
    signals = Signals()
    try:
        limits = SupervisorConfig(drain_limit=drain_seconds)
        repository = model_repository or _repository(http_port)
        config = ServerConfig(
            repository, host, http_port, grpc_port, metrics_port, log_file=log_file
        )
        if model_repository is None:
            models = RepositoryConfig(
                recipe=recipe,
                draft_tokens=draft_tokens,
                draft_mode=draft_mode,
                max_sequences=max_sequences,
                max_waiting=max_waiting,
                decoupled=decoupled,
            )
            check_draft_tokens(recipe, draft_tokens)
            sweep_orphans()
            check_ports(config)  # whoever has them may be reading that repository
            with report.progress("preparing"):
                write_repository(replace(models, recipe=prepare(recipe)), repository)
        finished = run(config, limits, report, signals)
    except (ServerError, ValueError, OSError) as error:
        report("error", str(error))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        report("stopped", "at once, as asked; running requests were cut off")
        raise typer.Exit(1) from None
    if not finished:
        raise typer.Exit(1)


def run(config: ServerConfig, limits: SupervisorConfig, report: Reporter, signals: Signals) -> bool:
    """Start, announce, watch, drain; whether every running request had finished."""
    started = time.monotonic()
    supervisor = Supervisor(TritonServer(config), limits, report)
    with report.progress("starting the server"):
        supervisor.start()
    try:
        seconds = time.monotonic() - started
        endpoints = {name: f"{config.host}:{port}" for name, port in config.ports.items()}
        shown = ", ".join(f"{name} {address}" for name, address in endpoints.items())
        report("ready", f"{shown}; {seconds:.1f} s", **endpoints, models=supervisor.models)
        signals.may_drain = True
        return supervisor.run(signals.stop)
    finally:
        supervisor.server.kill()


def _repository(http_port: int) -> Path:
    """The generated repository, one per port so that two servers never share one."""
    return masw_home() / "repositories" / str(http_port)


if __name__ == "__main__":
    sys.exit(app())
