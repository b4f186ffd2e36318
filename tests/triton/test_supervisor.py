"""The supervisor against the real server, with small models in place of the engines."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient

from masw.build import repository
from masw.build.processes import SHARED_MEMORY, end_processes, is_running
from masw.build.repository import DRAFT, LOOP, TARGET, RepositoryConfig, write_repository
from masw.build.supervisor import Supervisor, SupervisorConfig, load_plan
from masw.build.triton_install import ServerError
from masw.build.triton_server import ServerConfig, TritonServer, free_ports

pytestmark = pytest.mark.triton

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("weights of the test are missing")
"""
# Computes for as many milliseconds as `input_lengths` says.
SPINNING = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            length = pb_utils.get_input_tensor_by_name(request, "input_lengths").as_numpy()
            end = time.monotonic() + float(length[0, 0]) / 1000
            while time.monotonic() < end:
                pass
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
# Streams max_tokens times "x", 50 ms apart, one call to masw_draft each, retried until it works.
STREAMING = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
COLUMNS = {
    "sequence_id": np.uint64, "start_position": np.int32, "new_ids": np.int32,
    "num_draft_tokens": np.int32, "temperature": np.float32, "top_p": np.float32,
    "top_k": np.int32, "seed": np.uint64, "return_draft_logits": bool, "end": bool,
}

class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="masw_requests_inflight", description="running", kind=pb_utils.MetricFamily.GAUGE
        )
        self.inflight = self.family.Metric(labels={})
        self.inflight.set(0)

    async def execute(self, requests):
        await asyncio.gather(*(self.stream(request) for request in requests))

    async def stream(self, request):
        sender = request.get_response_sender()
        if "masw_canary" in request.parameters():
            return sender.send(pb_utils.InferenceResponse([]), flags=FINAL)
        self.inflight.increment(1)
        tokens = pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy()
        for _ in range(int(tokens[0, 0])):
            while await self.draft_fails():
                await asyncio.sleep(0.05)
            text = pb_utils.Tensor("text_output", np.array([b"x"], object))
            sender.send(pb_utils.InferenceResponse([text]))
            await asyncio.sleep(0.05)
        sender.send(pb_utils.InferenceResponse([]), flags=FINAL)
        self.inflight.increment(-1)

    async def draft_fails(self):
        inputs = [pb_utils.Tensor(n, np.zeros((1, 1), t)) for n, t in COLUMNS.items()]
        call = pb_utils.InferenceRequest(
            model_name="masw_draft", requested_output_names=["draft_input_ids"], inputs=inputs
        )
        return (await call.async_exec()).has_error()
"""
QUICK = SupervisorConfig(watch_every=0.1, drain_limit=10)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One masw home for the module, so that the backend is assembled once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def make_config(tmp_path, home, monkeypatch):
    """Write a repository of small models, some replaced, and configure a server for it."""
    monkeypatch.setenv("MASW_HOME", str(home))

    def make(**code: str) -> ServerConfig:
        models = {name: ECHO for name in repository.LOAD_ORDER if name != repository.ENSEMBLE}
        for name, text in (models | {LOOP: STREAMING} | code).items():
            (tmp_path / "source" / name / "1").mkdir(parents=True)
            (tmp_path / "source" / name / "1" / "model.py").write_text(text)
        write_repository(RepositoryConfig("unused"), tmp_path / "models", tmp_path / "source")
        http, grpc, metrics = free_ports()
        return ServerConfig(
            tmp_path / "models",
            "127.0.0.1",
            http,
            grpc,
            metrics,
            log_file=tmp_path / "log",
            stop_timeout=1.0,
        )

    return make


@pytest.fixture
def supervised(make_config):
    """Factory of started supervisors that a thread keeps watching; all ended afterwards."""
    started = []

    def start(limits=QUICK, **code) -> "Watched":
        watched = Watched(make_config(**code), limits)
        started.append(watched)
        return watched

    yield start
    for watched in started:
        watched.end()


class Watched:
    """A supervisor at work in a thread, with what it reported."""

    def __init__(self, config: ServerConfig, limits: SupervisorConfig):
        self.events: list[tuple[str, str]] = []
        self.error: Exception | None = None
        self.finished: bool | None = None
        self.server = TritonServer(config)
        self.supervisor = Supervisor(self.server, limits, lambda *event: self.events.append(event))
        self.supervisor.start()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            self.finished = self.supervisor.run(self.stop)
        except ServerError as error:
            self.error = error

    def wait_for(self, kind: str, seconds: float = 15.0) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for event, message in self.events:
                if event == kind:
                    return message
            time.sleep(0.02)
        raise AssertionError(f"no {kind!r} in {self.events}\n{self.server.log_tail()}")

    def stub(self, model: str) -> psutil.Process:
        (process,) = self.server.stubs(model)
        return process

    def end(self):
        self.supervisor.config = QUICK
        self.stop.set()
        self.thread.join(30)
        self.server.kill()


class Stream:
    """One streaming request; `result` waits for its end: (responses with text, error or None)."""

    def __init__(self, port: int, tokens: int):
        self._answers: queue.Queue = queue.Queue()
        self._client = grpcclient.InferenceServerClient(f"127.0.0.1:{port}")
        self._client.start_stream(callback=lambda result, error: self._answers.put((result, error)))
        text = grpcclient.InferInput("text_input", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([[b"hi"]], object))
        length = grpcclient.InferInput("max_tokens", [1, 1], "INT32")
        length.set_data_from_numpy(np.array([[tokens]], np.int32))
        self._client.async_stream_infer(LOOP, [text, length], enable_empty_final_response=True)
        self.texts = 0

    def next(self, seconds: float = 15.0) -> bool:
        """Take one response; False at the end; raises the stream's error."""
        result, error = self._answers.get(timeout=seconds)
        if error is not None:
            raise error
        self.texts += result.as_numpy("text_output") is not None
        return not result.get_response().parameters["triton_final_response"].bool_param

    def result(self) -> tuple[int, Exception | None]:
        try:
            while self.next():
                pass
        except grpcclient.InferenceServerException as error:
            return self.texts, error
        finally:
            self._client.stop_stream(cancel_requests=True)
            self._client.close()
        return self.texts, None


def left_behind(server: TritonServer) -> list:
    return [*server.stubs(), *SHARED_MEMORY.glob(f"{server.prefix}*")]


def assert_serves(watched: Watched):
    assert Stream(watched.server.config.grpc_port, 2).result() == (2, None)


def test_start_and_stop_leave_nothing_behind(make_config):
    supervisor = Supervisor(TritonServer(make_config()), QUICK)
    supervisor.start()
    server, pid = supervisor.server, supervisor.server.pid
    assert supervisor.models == list(repository.LOAD_ORDER[:-1])
    assert server.is_ready(repository.ENSEMBLE)
    assert all(len(server.stubs(name)) == 1 for name in supervisor.models)
    assert list(SHARED_MEMORY.glob(f"{server.prefix}*"))
    server.stop()
    assert not psutil.pid_exists(pid) and not left_behind(server)


def test_a_killed_draft_costs_a_running_stream_only_time(supervised):
    watched = supervised()
    loop = watched.stub(LOOP)
    stream = Stream(watched.server.config.grpc_port, 20)
    stream.next()
    watched.stub(DRAFT).kill()
    assert DRAFT in watched.wait_for("reloaded")
    assert stream.result() == (20, None)
    assert watched.stub(LOOP) == loop, "the loop was touched"


def test_a_killed_target_is_back_without_a_person(supervised):
    watched = supervised()
    old = watched.stub(TARGET)
    old.kill()
    assert TARGET in watched.wait_for("reloaded")
    assert watched.stub(TARGET) != old
    assert_serves(watched)


def test_a_killed_loop_gives_its_streams_an_error_and_is_back(supervised):
    watched = supervised()
    stream = Stream(watched.server.config.grpc_port, 1000)
    stream.next()
    watched.stub(LOOP).kill()
    _, error = stream.result()
    assert "UNAVAILABLE" in str(error.status())
    watched.wait_for("restarted")
    assert_serves(watched)


def test_a_killed_server_is_started_anew(supervised):
    watched = supervised()
    psutil.Process(watched.server.pid).kill()
    watched.wait_for("restarted")
    assert_serves(watched)
    assert len(watched.server.stubs()) == 5, "stubs of the dead server are left"


def test_a_model_that_cannot_be_kept_alive_ends_the_service(supervised):
    watched = supervised(SupervisorConfig(watch_every=0.1, recoveries=1))
    watched.stub(DRAFT).kill()
    watched.wait_for("reloaded")
    watched.stub(DRAFT).kill()
    watched.thread.join(15)
    assert DRAFT in str(watched.error) and "giving up" in str(watched.error)
    assert not watched.server.is_alive() and not left_behind(watched.server)


def test_a_hung_model_is_reloaded_and_a_busy_one_is_not(supervised):
    limits = SupervisorConfig(watch_every=0.1, canary_every=0.2, canary_limit=1.0)
    watched = supervised(limits, **{TARGET: SPINNING})
    tensors = {"input_ids": ([0], [1, 1]), "input_lengths": ([3000], [1, 1])}
    tensors["request_output_len"] = ([1], [1, 1])
    inputs = [
        {"name": name, "datatype": "INT32", "shape": shape, "data": data}
        for name, (data, shape) in tensors.items()
    ]
    watched.server.request(f"/v2/models/{TARGET}/infer", {"inputs": inputs})
    assert not [event for event in watched.events if event[0] == "died"], "busy is not dead"
    watched.stub(TARGET).suspend()
    assert TARGET in watched.wait_for("reloaded")
    assert_serves(watched)


def test_drain_lets_a_running_stream_finish_and_refuses_new_ones(supervised):
    watched = supervised()
    port = watched.server.config.grpc_port
    stream = Stream(port, 30)
    stream.next()
    watched.stop.set()
    watched.wait_for("draining")
    time.sleep(0.3)
    texts, error = Stream(port, 1).result()
    assert texts == 0 and error is not None
    assert stream.result() == (30, None)
    watched.thread.join(15)
    assert watched.finished and not left_behind(watched.server)


def test_drain_cuts_off_what_outlasts_its_limit(supervised):
    watched = supervised(SupervisorConfig(watch_every=0.1, drain_limit=0.5))
    stream = Stream(watched.server.config.grpc_port, 1000)
    stream.next()
    watched.stop.set()
    watched.thread.join(15)
    assert watched.finished is False and not left_behind(watched.server)
    assert stream.result()[1] is not None


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_port_in_use_is_named(make_config, name):
    config = make_config()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", config.ports[name]))
        taken.listen()
        with pytest.raises(ServerError, match=f"{name} port {config.ports[name]}.*--{name}-port"):
            TritonServer(config).start()


def test_a_model_that_does_not_load_is_named_with_its_reason(make_config):
    supervisor = Supervisor(TritonServer(make_config(**{DRAFT: BROKEN})), QUICK)
    with pytest.raises(ServerError, match=f"{DRAFT} did not load.*weights of the test"):
        supervisor.start()
    assert not supervisor.server.is_alive() and not left_behind(supervisor.server)


def test_an_empty_repository_is_refused(tmp_path):
    with pytest.raises(ServerError, match=r"holds no <model>/config\.pbtxt"):
        load_plan(tmp_path)


def test_bad_ports_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="grpc_port = 70000"):
        ServerConfig(tmp_path, grpc_port=70000)
    with pytest.raises(ValueError, match="a port each"):
        ServerConfig(tmp_path, http_port=9000, grpc_port=9000)


class Command:
    """`masw-serve --json` in a process of its own."""

    def __init__(self, config: ServerConfig):
        words = [sys.executable, "-m", "masw.build.serve", "--json", "--drain-seconds=10"]
        words += [f"--{name}-port={port}" for name, port in config.ports.items()]
        words += [f"--model-repository={config.model_repository}", f"--log-file={config.log_file}"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.events: list[dict] = []

    def wait_for(self, kind: str) -> dict:
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == kind:
                return self.events[-1]
        raise AssertionError(f"no {kind!r} in {self.events}")

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def command(make_config):
    config = make_config()
    command = Command(config)
    command.config = config
    family = []
    try:
        command.wait_for("ready")
        family = command.family()
        yield command
    finally:
        command.process.kill()
        command.process.wait()
        command.process.stdout.close()
        end_processes(family)


def test_masw_serve_drains_on_sigterm(command):
    family, regions = command.family(), _regions(command)
    assert len(family) >= 6 and regions
    stream = Stream(command.config.grpc_port, 20)
    stream.next()
    command.process.send_signal(signal.SIGTERM)
    assert stream.result() == (20, None)
    assert command.process.wait(15) == 0
    assert not any(map(is_running, family)) and not _regions(command)


def test_a_second_signal_ends_masw_serve_at_once(command):
    family = command.family()
    stream = Stream(command.config.grpc_port, 1000)
    stream.next()
    command.process.send_signal(signal.SIGINT)
    command.wait_for("draining")
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(5) == 1
    assert stream.result()[1] is not None
    assert not any(map(is_running, family)) and not _regions(command)


def test_the_next_start_ends_what_a_killed_masw_serve_left(command):
    family = command.family()
    command.process.kill()
    command.process.wait()
    assert any(map(is_running, family))
    with TritonServer(command.config) as server:  # on the very same ports
        assert not any(map(is_running, family)) and not _regions(command)
        assert server.is_alive()
        server.kill()


def test_masw_serve_refuses_a_missing_recipe(tmp_path):
    words = [sys.executable, "-m", "masw.build.serve", "--json", f"--recipe={tmp_path / 'none'}"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=30)
    event = json.loads(result.stdout)
    assert result.returncode == 1 and event["event"] == "error"
    assert "--recipe" in event["message"] and "embedded" in event["message"]


def _regions(command: Command) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"masw-{command.process.pid}-*"))


def test_servers_of_live_owners_are_left_alone(make_config):
    config = make_config()
    with TritonServer(config) as first:
        assert first.prefix.startswith(f"masw-{os.getpid()}-")
        first.load(TARGET)
        http, grpc, metrics = free_ports()
        other = ServerConfig(config.model_repository, "127.0.0.1", http, grpc, metrics)
        second = TritonServer(other)
        second.start()
        second.kill()
        assert first.is_ready(TARGET) and len(first.stubs()) == 1
        assert list(SHARED_MEMORY.glob(f"{first.prefix}*"))
        first.kill()
