"""What dies, overflows or is told to stop, and what its users see of it."""

import json
import signal
import time

import pytest
import tritonclient.grpc as grpcclient

from masw.build.repository import DRAFT, LOOP, TARGET
from masw.clients.client import MaswClient
from masw.clients.messages import GenerationRequest, MaswError
from tests.triton.serving import PATIENCE, arrays, flag, int32, tensors, text, wait_until

pytestmark = pytest.mark.triton

PROMPT = "once upon a time 🙂 " * 10
RUNNING, WAITING = 2, 1


@pytest.fixture(scope="module")
def frail(serve_core):
    """A server for the tests of this module alone: few places, and processes that get killed."""
    return serve_core("--drain-seconds=60", max_sequences=RUNNING, max_waiting=WAITING)


@pytest.fixture
def client(frail):
    """A gRPC client of that server."""
    with MaswClient(frail.url, timeout_s=2 * PATIENCE) as connected:
        yield connected


def ask(tokens=24, **options):
    return GenerationRequest(text=PROMPT, max_tokens=tokens, **options)


def start(client, tokens=1500):
    """A long stream that has begun, and its first piece of text."""
    running = client.stream(ask(tokens))
    return running, next(running).text


def kill(server, model):
    """kill -9 on a model's process; returns how many events there were before."""
    before = len(server.events)
    server.stub(model).kill()
    return before


def wait_until_inflight(server, count, seconds=PATIENCE):
    def holds():
        return server.metric("masw_requests_inflight") == count

    wait_until(holds, f"{count} requests in flight", seconds)


def wait_until_served(client, tiny):
    """Waits until the service answers rightly again, asking as a patient client would."""

    def works():
        try:
            return client.generate(ask()).text
        except MaswError:
            return None

    assert wait_until(works, "served again") == tiny.answer(PROMPT, 24)


def test_too_many_requests_are_refused_at_once(client, frail, tiny):
    running = [start(client)[0] for _ in range(RUNNING)]
    waiting = client.stream(ask())
    wait_until_inflight(frail, RUNNING + WAITING)
    began = time.monotonic()
    with pytest.raises(MaswError, match=r"max_sequences 2 \+ max_waiting 1.*later"):
        client.generate(ask())
    assert time.monotonic() - began < 5
    running[0].close()
    assert "".join(chunk.text for chunk in waiting) == tiny.answer(PROMPT, 24)
    running[1].close()
    wait_until_inflight(frail, 0)


def test_a_waiting_request_that_is_cancelled_leaves_its_place(client, frail):
    running = [start(client)[0] for _ in range(RUNNING)]
    waiting = client.stream(ask())
    try:
        wait_until_inflight(frail, RUNNING + WAITING)
        waiting.close()
        wait_until_inflight(frail, RUNNING, 2)
    finally:
        for each in running:
            each.close()
        wait_until_inflight(frail, 0)


def test_a_killed_draft_costs_a_stream_only_time(client, frail, tiny):
    tokens = 300
    running, piece = start(client, tokens)
    before = kill(frail, DRAFT)
    whole = piece + "".join(chunk.text for chunk in running)
    assert whole == tiny.answer(PROMPT, tokens)
    assert running.result.statistics.draft_failures > 0
    assert DRAFT in frail.wait_for("reloaded", before)
    again = client.generate(ask(40))
    assert again.text == tiny.answer(PROMPT, 40)
    assert again.statistics.accepted > 0 and again.statistics.draft_failures == 0


def test_a_killed_target_fails_its_requests_and_is_back(client, frail, tiny):
    running, _ = start(client)
    before, began = kill(frail, TARGET), time.monotonic()
    with pytest.raises(MaswError, match="target"):
        list(running)
    assert time.monotonic() - began < 20
    assert TARGET in frail.wait_for("reloaded", before)
    wait_until_served(client, tiny)


def test_a_killed_loop_fails_its_requests_and_is_back(client, frail, tiny):
    running, _ = start(client)
    before, began = kill(frail, LOOP), time.monotonic()
    with pytest.raises(MaswError) as caught:
        list(running)
    assert caught.value.status == "UNAVAILABLE" and time.monotonic() - began < 20
    frail.wait_for("restarted", before)
    wait_until_served(client, tiny)


def test_sigterm_drains_a_running_stream_to_its_end(client, frail, tiny):
    running, piece = start(client, 300)
    frail.process.send_signal(signal.SIGTERM)
    assert piece + "".join(chunk.text for chunk in running) == tiny.answer(PROMPT, 300)
    assert frail.process.wait(PATIENCE) == 0
    assert frail.events[-1]["message"] == "all requests finished"


def test_a_repository_that_is_not_decoupled_answers_once(serve_core, tiny):
    server, wanted = serve_core("--drain-seconds=0", decoupled=False), tiny.answer(PROMPT, 24)
    inputs = {"text_input": text(PROMPT), "max_tokens": int32(24)}
    with grpcclient.InferenceServerClient(server.url) as unary:
        assert arrays(unary.infer(LOOP, tensors(inputs)))["text_output"].item().decode() == wanted
        with pytest.raises(grpcclient.InferenceServerException, match="stream"):
            unary.infer(LOOP, tensors(inputs | {"stream": flag(True)}))
        with pytest.raises(grpcclient.InferenceServerException, match="max_tokens"):
            unary.infer(LOOP, tensors(inputs | {"max_tokens": int32(0)}))
    status, answer = server.post(f"/v2/models/{LOOP}/infer", {"inputs": JSON_INPUTS})
    outputs = {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
    assert status == 200 and outputs["text_output"] == [wanted]


JSON_INPUTS = [
    {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [PROMPT]},
    {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [24]},
]
