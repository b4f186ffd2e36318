"""A running `masw-serve` for tests, its metrics, and requests of any shape to it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

from masw.build.processes import SHARED_MEMORY, end_processes, is_running
from masw.build.repository import LOOP
from masw.build.triton_server import free_ports

PATIENCE = 60.0  # seconds that a busy machine may need for what takes a few


def wait_until(holds: Callable[[], object], what: str, seconds: float = PATIENCE):
    """Waits until `holds()` is true and returns it; fails naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := holds():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s: {what}")


class Serving:
    """`masw-serve` in a process of its own; `events` are the lines it wrote."""

    def __init__(self, log_file: Path, *options: str):
        self.http_port, self.grpc_port, self.metrics_port = free_ports()
        self.log_file, self.events = log_file, []
        words = [sys.executable, "-m", "masw.build.serve", "--json"]
        words += [f"--http-port={self.http_port}", f"--grpc-port={self.grpc_port}"]
        words += [f"--metrics-port={self.metrics_port}", f"--log-file={log_file}", *options]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """host:port of gRPC."""
        return f"127.0.0.1:{self.grpc_port}"

    def _read(self) -> None:
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def wait_for(self, kind: str, since: int = 0) -> str:
        """The message of the first event of a kind at place `since` or later."""

        def found():
            failed = self.process.poll() not in (None, 0)
            assert not failed, f"masw-serve ended: {self.events} {self.log()}"
            return [e["message"] for e in self.events[since:] if e["event"] == kind]

        return wait_until(found, f"event {kind!r} in {self.events[since:]}")[0]

    def log(self) -> str:
        """The end of the server's log."""
        return self.log_file.read_text()[-3000:] if self.log_file.exists() else ""

    def stub(self, model: str) -> psutil.Process:
        """The process of one Python model."""
        family = filter(is_running, psutil.Process(self.process.pid).children(recursive=True))
        (process,) = [p for p in family if any(f"/{model}/1/" in word for word in p.cmdline())]
        return process

    def shared_memory(self) -> int:
        """Bytes in the server's regions of /dev/shm."""
        regions = SHARED_MEMORY.glob(f"masw-{self.process.pid}-*")
        return sum(region.stat().st_blocks * 512 for region in regions)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all lines of a metric with these labels; 0 where there is none."""
        page = self.get(self.metrics_port, "/metrics")
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name]
        lines = [line for line in lines if all(label in line for label in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def get(self, port: int, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as page:
            return page.read().decode()

    def post(self, path: str, body: Mapping) -> tuple[int, str]:
        """Status and body of an HTTP request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}{path}", json.dumps(body).encode()
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as page:
                return page.status, page.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def end(self) -> None:
        """Ends it at once, with all of its processes."""
        family = psutil.Process(self.process.pid).children(recursive=True) if self.alive else []
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        end_processes(family)
        self._reader.join()
        self.process.stdout.close()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


def tensors(inputs: Mapping[str, np.ndarray]) -> list[grpcclient.InferInput]:
    """Inputs by name, each a row of a batch of one."""
    made = []
    for name, array in inputs.items():
        batch = np.asarray(array)[None]
        made.append(grpcclient.InferInput(name, batch.shape, np_to_triton_dtype(batch.dtype)))
        made[-1].set_data_from_numpy(batch)
    return made


def stream(url: str, inputs: Mapping[str, np.ndarray], model: str = LOOP) -> list[dict]:
    """The responses to a streamed request as arrays by name, the bare final one left out.

    Raises InferenceServerException for an answer that is an error.
    """
    responses, done = [], threading.Event()

    def take(result, error):
        responses.append(error if error is not None else result)
        if error is not None or is_final(result):
            done.set()

    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(callback=take)
        client.async_stream_infer(model, tensors(inputs), enable_empty_final_response=True)
        assert done.wait(PATIENCE), "no final response"
        client.stop_stream()
    for error in responses:
        if isinstance(error, Exception):
            raise error
    return [arrays(response) for response in responses if response.get_response().outputs]


def is_final(result: grpcclient.InferResult) -> bool:
    """Whether no response follows."""
    return result.get_response().parameters["triton_final_response"].bool_param


def arrays(result: grpcclient.InferResult) -> dict[str, np.ndarray]:
    """Outputs of a response by name."""
    return {out.name: result.as_numpy(out.name) for out in result.get_response().outputs}


def int32(*numbers: int) -> np.ndarray:
    """(n,) array of int32."""
    return np.array(numbers, np.int32)


def flag(value: bool) -> np.ndarray:
    """(1,) array of bool."""
    return np.array([value])


def text(*words: str | bytes) -> np.ndarray:
    """(n,) array of strings."""
    return np.array([w if isinstance(w, bytes) else w.encode() for w in words], object)
