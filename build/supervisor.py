"""Keeps a served repository alive: loads, watches, reloads, restarts, drains.

The server itself does not notice that a model's process has died: it stays "ready" while calls
fail, and the streams of a dead decoupled model hang for ever. So the supervisor watches the
processes, sends canary requests, and acts:
- a dead model that answers each call once: unload + load. Its callers see an error after a
  second and go on once it is back; an ensemble around it leaves and returns by itself.
- a dead decoupled model (the loop), or a dead server: the server is started anew, which ends
  every hung stream with UNAVAILABLE.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import psutil

from .canary import Canary
from .processes import end_processes, is_running
from .repository import LOAD_ORDER, LOOP, read_model_config
from .triton_install import ServerError
from .triton_server import TritonServer

INFLIGHT = "masw_requests_inflight"
PENDING = f'nv_inference_pending_request_count{{model="{LOOP}"'


@dataclass(frozen=True)
class SupervisorConfig:
    """Patience, in seconds, and how many recoveries within `recovery_window` are too many."""

    watch_every: float = 0.5
    canary_every: float = 10.0
    canary_limit: float = 30.0
    load_limit: float = 600.0
    drain_limit: float = 60.0
    recoveries: int = 5
    recovery_window: float = 600.0

    def __post_init__(self):
        for name in (
            "watch_every",
            "canary_every",
            "canary_limit",
            "load_limit",
            "recovery_window",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: use seconds above 0")
        for name in ("drain_limit", "recoveries"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: use 0 or more")


@dataclass
class _Model:
    """A loaded Python model: its processes, its canary, and whether it streams."""

    processes: list[psutil.Process]
    canary: Canary
    decoupled: bool

    def is_dead(self) -> bool:
        return not all(is_running(process) for process in self.processes) or self.canary.is_hung()


def load_plan(repository: Path) -> list[str]:
    """The models to load, in order. An ensemble loads its parts, so those are left out (loading
    them before would start each twice). Raises ServerError when there is no model."""
    configs = [read_model_config(path) for path in repository.glob("*/config.pbtxt")]
    if not configs:
        raise ServerError(f"{repository} holds no <model>/config.pbtxt")
    parts = {step.model_name for config in configs for step in config.ensemble_scheduling.step}
    ensembles = [config.name for config in configs if config.platform == "ensemble"]
    return sorted(
        {config.name for config in configs} - parts, key=lambda n: (n in ensembles, *_rank(n))
    )


def _rank(name: str) -> tuple[int, str]:
    return (LOAD_ORDER.index(name) if name in LOAD_ORDER else len(LOAD_ORDER)), name


class Supervisor:
    """Serves one repository on one `TritonServer` until told to stop.

    report(kind, message) hears what happens: loading, ready, died, reloaded, restarted, draining,
    stopped. All methods belong to one thread.
    """

    def __init__(
        self,
        server: TritonServer,
        config: SupervisorConfig | None = None,
        report: Callable[[str, str], None] = lambda kind, message: None,
    ):
        self.server = server
        self.config = config or SupervisorConfig()
        self.report = report
        self.plan = load_plan(server.config.model_repository)
        self._models: dict[str, _Model] = {}
        self._recoveries: deque[float] = deque()

    @property
    def models(self) -> list[str]:
        """The Python models that are loaded and watched."""
        return list(self._models)

    def start(self) -> None:
        """Start the server and load every model; raises ServerError and leaves nothing behind."""
        try:
            self.server.start()
            self._load_all()
        except BaseException:
            self.server.kill()
            raise

    def run(self, stop: Event) -> bool:
        """Watch until `stop` is set, then drain; whether everything running had finished.

        Raises ServerError, with the server ended, when it takes too many recoveries.
        """
        try:
            while not stop.wait(self.config.watch_every):
                self.heal()
            return self.drain()
        finally:
            self.server.kill()

    def heal(self) -> None:
        """Look once at server and models, and bring back what has died."""
        if not self.server.is_alive():
            return self._restart("the server process has ended")
        dead = [name for name, model in self._models.items() if model.is_dead()]
        if streaming := [name for name in dead if self._models[name].decoupled]:
            return self._restart(f"{streaming[0]} has died, its streams would hang")
        for name in dead:
            self._reload(name)

    def drain(self) -> bool:
        """Refuse new requests, let running ones finish within `drain_limit`, stop the server."""
        self.report("draining", f"waiting up to {self.config.drain_limit:g} s for running requests")
        finished = self._await_running_requests()
        if finished:
            self.server.stop()
        else:
            self.server.kill()
        self.report("stopped", "all requests finished" if finished else "requests were cut off")
        return finished

    def _load_all(self) -> None:
        self._models.clear()
        for name in self.plan:
            self.report("loading", name)
            self._load(name)
        for name in self._served():
            self._watch(name)

    def _load(self, name: str) -> None:
        try:
            self.server.load(name, self.config.load_limit)
        except ServerError as error:
            raise ServerError(
                f"{name} did not load: {error}\nthe log {self.server.log_file} ends:\n"
                f"{self.server.log_tail()}"
            ) from None

    def _served(self) -> list[str]:
        """Names of the models that have a process."""
        names = {path.parent.name for path in self._repository.glob("*/config.pbtxt")}
        return sorted((name for name in names if self.server.stubs(name)), key=_rank)

    @property
    def _repository(self) -> Path:
        return self.server.config.model_repository

    def _watch(self, name: str) -> None:
        config = self.server.model_config(name)
        processes = self.server.stubs(name)
        every, limit = self.config.canary_every, self.config.canary_limit
        canary = Canary(self.server, config, processes, every, limit)
        decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._models[name] = _Model(processes, canary, decoupled)

    def _reload(self, name: str) -> None:
        self._spend(f"{name} has died")
        started = time.monotonic()
        end_processes(self._models[name].processes)  # a hung one: its callers get their error
        try:
            self.server.unload(name)
            self._load(name)
        except ServerError as error:
            self.report("failed", str(error))
            return  # still dead: the next look tries again
        self._watch(name)
        self.report("reloaded", f"{name} is back after {time.monotonic() - started:.1f} s")

    def _restart(self, why: str) -> None:
        self._spend(why)
        started = time.monotonic()
        self.server.kill()
        try:
            self.server.start()
            self._load_all()
        except ServerError as error:
            self.report("failed", str(error))
            self.server.kill()
            return  # the next look finds no server and tries again
        self.report("restarted", f"the server is back after {time.monotonic() - started:.1f} s")

    def _spend(self, why: str) -> None:
        """Count a recovery; raises ServerError when there were too many of late."""
        now = time.monotonic()
        while self._recoveries and now - self._recoveries[0] > self.config.recovery_window:
            self._recoveries.popleft()
        self.report("died", why)
        if len(self._recoveries) >= self.config.recoveries:
            raise ServerError(
                f"{why}, after {len(self._recoveries)} recoveries in "
                f"{self.config.recovery_window:g} s: giving up; the log {self.server.log_file} "
                f"ends:\n{self.server.log_tail()}"
            )
        self._recoveries.append(now)

    def _await_running_requests(self) -> bool:
        """Unload the loop, so that it takes nothing new, and wait for what it has."""
        if LOOP not in self._models or not self.server.is_alive():
            return True
        deadline = time.monotonic() + self.config.drain_limit
        try:
            self.server.unload(LOOP)
            idle_looks = 0
            while idle_looks < 2:  # a request on its way from queue to loop is in neither count
                if not any(map(is_running, self._models[LOOP].processes)):
                    return True
                idle_looks = idle_looks + 1 if _is_idle(self.server.metrics()) else 0
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.1)
        except ServerError as error:
            self.report("failed", f"draining: {error}")
            return False
        return True


def _is_idle(metrics: str) -> bool:
    """Whether the metrics page shows no request in the loop, nor one waiting for it."""
    running = _metric(metrics, INFLIGHT)
    waiting = _metric(metrics, PENDING)
    return bool(running) and sum(running) == 0 and sum(waiting) == 0


def _metric(page: str, name: str) -> list[float]:
    lines = (line for line in page.splitlines() if line.startswith(name))
    return [float(line.rsplit(" ", 1)[1]) for line in lines]
