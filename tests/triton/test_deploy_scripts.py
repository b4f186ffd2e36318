"""The deployment's scripts against a real server without a supervisor, as in the gpu lane."""

import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from masw.build.processes import end_processes
from masw.build.repository import DRAFT, LOOP, TARGET
from masw.build.triton_install import ServerError
from masw.build.triton_server import ServerConfig, TritonServer, free_ports
from tests.triton.serving import PATIENCE, wait_until
from tests.triton.test_serving import LONG

pytestmark = pytest.mark.triton
DEPLOY = Path(__file__).parents[2] / "deploy"
SECONDS = "60"
GENERATE = f"/v2/models/{LOOP}/generate"


@pytest.fixture
def server(write_models, tmp_path):
    """A server with no model loaded yet."""
    assert shutil.which("curl"), "the scripts need curl: install it"
    log = tmp_path / "triton.log"
    config = ServerConfig(write_models(), "127.0.0.1", *free_ports(), log, stop_timeout=1)
    with TritonServer(config) as running:
        yield running


@pytest.fixture
def run(server, tmp_path):
    """run(script, *words) -> its exit code."""
    ports = {
        "MASW_HTTP_PORT": str(server.config.http_port),
        "MASW_METRICS_PORT": str(server.config.metrics_port),
    }

    def call(script: str, *words: str) -> int:
        environment = {**os.environ, **ports, "TMPDIR": str(tmp_path)}
        words = [DEPLOY / script, *words]
        return subprocess.run(words, env=environment, timeout=PATIENCE).returncode

    return call


def total(server: TritonServer, name: str) -> float:
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", server.metrics(), re.M)
    return sum(map(float, found))


def test_ready_with_the_first_token_revived_and_drained_with_the_last(server, run):
    assert run("ready.sh", "2") == 3, "Triton says ready although nothing is loaded"
    for model in (TARGET, DRAFT, LOOP):
        server.load(model)
    assert run("ready.sh", SECONDS) == 0
    assert total(server, "masw_emitted_tokens_total") == 1
    assert total(server, "masw_queue_seconds_count") == 1, "what the autoscaler reads"
    draft = (DRAFT, str(server.config.model_repository))
    assert run("revive.sh", "look", *draft) == 0
    end_processes(server.stubs(DRAFT))
    assert run("revive.sh", "look", *draft) == 1, "Triton does not bring it back"
    assert run("revive.sh", "load", *draft) == 0 == run("revive.sh", "look", *draft)
    body = {"text_input": LONG, "max_tokens": 400, "stream": False, "return_perf_metrics": True}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.request, GENERATE, body, PATIENCE)
        wait_until(lambda: total(server, "masw_emitted_tokens_total") > 1, "it decodes")
        assert run("ready.sh") == 0 and total(server, "masw_queue_seconds_count") == 2, "not asked"
        drained = pool.submit(run, "drain.sh", SECONDS)
        wait_until(lambda: not server.is_ready(LOOP), "nothing new is taken")
        with pytest.raises(ServerError):
            server.request(GENERATE, body)
        assert not running.done(), "the request ran while new ones were refused"
        assert drained.result() == 0
        answer = running.result(timeout=1)
    assert json.loads(json.loads(answer)["statistics"])["new_tokens"] == 400, "to the end"
    assert json.loads(json.loads(answer)["statistics"])["drafted"] > 0, "with the new draft"
    assert run("ready.sh", "2") == 1
    assert run("drain.sh", "1") == 0, "again, as after a pod's preStop"
