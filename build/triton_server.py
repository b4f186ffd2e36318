"""A Triton Inference Server as a context manager: found, assembled, started, stopped, cleaned up.

The server is the one that the `nvidia-pytriton` wheel carries, or a system one under
/opt/tritonserver. It runs in a session of its own, so a Ctrl-C in the terminal does not reach it,
with explicit model control and a shared-memory prefix of its own.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from .processes import end_processes, remove_shared_memory, stubs, sweep_orphans
from .triton_install import (
    Installation,
    NoAnswer,
    ServerError,
    find_installation,
    masw_home,
)

KEEPALIVE = {  # options that let clients ping an idle stream every second
    "grpc-http2-min-recv-ping-interval-without-data": 500,
    "grpc-keepalive-permit-without-calls": 1,
    "grpc-keepalive-time": 10000,
}


@dataclass(frozen=True)
class ServerConfig:
    """Where one server listens and what it serves. Times in seconds."""

    model_repository: Path
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    log_file: Path | None = None
    start_timeout: float = 60.0
    stop_timeout: float = 5.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        for name, port in self.ports.items():
            if not 1 <= port <= 65535:
                raise ValueError(f"{name}_port = {port}: use a port from 1 to 65535")
        if len(set(self.ports.values())) < len(self.ports):
            raise ValueError(f"ports {self.ports}: give http, grpc and metrics a port each")
        if min(self.start_timeout, self.stop_timeout) <= 0:
            raise ValueError("start_timeout and stop_timeout: use seconds above 0")

    @property
    def ports(self) -> dict[str, int]:
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}


def check_ports(config: ServerConfig) -> None:
    """Raise ServerError naming the first port that is taken, by whom, and the way out."""
    for name, port in config.ports.items():
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, port))
            except OSError as error:
                raise ServerError(
                    f"{name} port {port} on {config.host} cannot be used ({error.strerror}"
                    f"{_listener(port)}); stop that process or choose another --{name}-port"
                ) from None


def free_ports(count: int = 3, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody uses at this moment."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]


def _listener(port: int) -> str:
    """', held by NAME (process N)' when this user may know."""
    try:
        connections = psutil.net_connections("tcp")
        pids = [c.pid for c in connections if c.laddr and c.laddr.port == port and c.pid]
        return f", held by {psutil.Process(min(pids)).name()} (process {min(pids)})" if pids else ""
    except psutil.Error:
        return ""


class TritonServer:
    """One running server. Use as a context manager, or call `start` and `stop`.

    After `stop` no process and no shared memory of it is left, however it ended.
    """

    def __init__(self, config: ServerConfig, installation: Installation | None = None):
        self.config = config
        self.installation = installation or find_installation()
        self.prefix = f"masw-{os.getpid()}-{uuid.uuid4().hex[:8]}-"
        self.log_file = config.log_file or self._default_log()
        self._process: subprocess.Popen | None = None
        self._log_mode = "wb"  # the log starts anew with this object and outlives restarts

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def is_alive(self) -> bool:
        """Whether the server process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait until the server answers; raises ServerError with its last log lines."""
        assert not self.is_alive(), "already started"
        sweep_orphans()
        check_ports(self.config)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open(self._log_mode) as log:
            self._log_mode = "ab"
            self._process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_live()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server with its models' processes and remove its shared memory."""
        if self.is_alive():
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.config.stop_timeout)
        self.kill()

    def kill(self) -> None:
        """The same at once, whatever is still running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        end_processes(self.stubs())
        remove_shared_memory(self.prefix)

    def stubs(self, model: str | None = None) -> list[psutil.Process]:
        """The live processes of Python models (of one model), known by this server's prefix."""
        return stubs(self.prefix, model)

    def command(self) -> list[str]:
        config, files = self.config, self.installation
        options = {
            "model-repository": config.model_repository,
            "model-control-mode": "explicit",
            "backend-directory": files.backends,
            "cache-directory": files.caches,
            "backend-config": f"python,shm-region-prefix-name={self.prefix}",
            "exit-timeout-secs": max(1, int(config.stop_timeout)),
            **KEEPALIVE,
        }
        for name, port in config.ports.items():
            options |= {f"{name}-address": config.host, f"{name}-port": port}
        flags = [f"--{name}={value}" for name, value in options.items()]
        return [str(files.binary), "--disable-auto-complete-config", *flags]

    def environment(self) -> dict[str, str]:
        """The server's and its models' environment: this Python's packages, idle threads asleep."""
        libraries = [str(path) for path in self.installation.libraries]
        inherited = os.environ.get("LD_LIBRARY_PATH")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {
            **os.environ,
            "PATH": path,
            "LD_LIBRARY_PATH": os.pathsep.join(libraries + ([inherited] if inherited else [])),
            "PYTHONUNBUFFERED": "1",
            "GOMP_SPINCOUNT": "30000",  # wait awake between two layers, asleep between two calls
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **self.config.environment,
        }

    def load(self, model: str, timeout: float = 600.0) -> None:
        """Load or reload one model; raises ServerError with the server's own reason."""
        self._control(model, "load", timeout)

    def unload(self, model: str, timeout: float = 60.0) -> None:
        """Refuse new requests to one model and end it once its running ones have finished."""
        self._control(model, "unload", timeout)

    def model_config(self, model: str) -> dict:
        """The configuration as the server understood it."""
        return json.loads(self.request(f"/v2/models/{model}/config"))

    def is_ready(self, model: str) -> bool:
        """Whether the server lists the model as ready (a dead stub stays ready: see `stubs`)."""
        try:
            self.request(f"/v2/models/{model}/ready", timeout=5)
        except ServerError:
            return False
        return True

    def metrics(self, timeout: float = 5.0) -> str:
        """The Prometheus page of the metrics port."""
        return self.request("/metrics", port=self.config.metrics_port, timeout=timeout)

    def request(
        self, path: str, body: object = None, timeout: float = 30.0, port: int | None = None
    ) -> str:
        """GET, or POST of a JSON body; raises ServerError with the server's own message."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        url = f"http://{host}:{port or self.config.http_port}{path}"
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with _OPENER.open(urllib.request.Request(url, data, headers), timeout=timeout) as page:
                return page.read().decode()
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path}: {error.code} {error.read().decode()[:2000]}") from None
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"{path}: {getattr(error, 'reason', error)}") from None

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that the server and its models have written."""
        if not self.log_file.is_file():
            return ""
        with self.log_file.open("rb") as log:
            log.seek(max(0, self.log_file.stat().st_size - 200 * lines))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def _control(self, model: str, verb: str, timeout: float) -> None:
        self.request(f"/v2/repository/models/{model}/{verb}", body={}, timeout=timeout)

    def _default_log(self) -> Path:
        return masw_home() / "logs" / f"triton-{self.config.http_port}.log"

    def _wait_until_live(self) -> None:
        deadline = time.monotonic() + self.config.start_timeout
        while time.monotonic() < deadline:
            if not self.is_alive():
                raise ServerError(self._failure(f"ended with code {self._process.returncode}"))
            try:
                self.request("/v2/health/live", timeout=2)
                return
            except ServerError:
                time.sleep(0.05)
        raise ServerError(self._failure(f"did not answer in {self.config.start_timeout:g} s"))

    def _failure(self, what: str) -> str:
        return f"the Triton server {what}; its log {self.log_file} ends:\n{self.log_tail()}"


# Straight to the server, whatever proxy the environment names.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
