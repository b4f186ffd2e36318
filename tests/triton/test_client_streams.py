"""The clients against a real Triton server with a stand-in for the loop model."""

import asyncio
import json
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.protobuf import text_format
from typer.testing import CliRunner

from masw.build.repository import LOOP, RepositoryConfig, model_configs
from masw.build.triton_server import ServerConfig, ServerError, TritonServer
from masw.clients.client import AsyncMaswClient, MaswClient
from masw.clients.generate import app
from masw.clients.messages import GenerationRequest, MaswError

pytestmark = pytest.mark.triton

WORDS = "eins zwei 三 🙂"
EIGHT = f"{WORDS} {WORDS} "
MANY = 1000  # 10 s: a request that is meant to be left


def free_ports(count):
    with_sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in with_sockets]
    for each in with_sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("echo")
    code = folder / "models" / LOOP / "1" / "model.py"
    code.parent.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("echo_loop.py"), code)
    config = text_format.MessageToString(model_configs(RepositoryConfig(recipe="echo"))[LOOP])
    (code.parent.parent / "config.pbtxt").write_text(config)
    http, grpc, metrics = free_ports(3)
    settings = ServerConfig(
        model_repository=folder / "models",
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
        log_file=folder / "triton.log",
    )
    with TritonServer(settings) as running:
        running.load(LOOP)
        yield running


@pytest.fixture
def url(server):
    return f"127.0.0.1:{server.config.grpc_port}"


@pytest.fixture
def client(url):
    with MaswClient(url, timeout_s=20) as connected:
        yield connected


def ask(prompt=WORDS, tokens=8, **options):
    return GenerationRequest(text=prompt, max_tokens=tokens, **options)


def state(client):
    return json.loads(client.generate(ask("#state")).text)


def wait_until_idle(client):
    """The cancellations counted once nothing runs any more; at most 2 s."""
    for _ in range(40):
        now = state(client)
        if now["running"] == 0:
            return now["cancelled"]
        time.sleep(0.05)
    raise AssertionError(f"still running after 2 s: {now}")


def test_streaming_text(client):
    assert client.is_ready()
    with client.stream(ask()) as stream:
        with pytest.raises(RuntimeError, match="not complete"):
            _ = stream.result
        chunks = list(stream)
    assert [chunk.text for chunk in chunks] == [f"{word} " for word in EIGHT.split()]
    assert sorted(chunk.time_s for chunk in chunks) == [chunk.time_s for chunk in chunks]
    result = stream.result
    assert (result.text, result.statistics.new_tokens) == (EIGHT, 8)
    assert 0 < result.ttft_s < result.elapsed_s
    assert 20 < result.tok_s < 110  # a word per 10 ms


def test_answer_in_one_piece(client):
    chunks = list(client.stream(ask(stream=False)))
    assert [chunk.text for chunk in chunks] == [EIGHT]


@pytest.mark.parametrize("stream", [True, False])
def test_ids_for_ids(client, stream):
    result = client.generate(GenerationRequest(ids=(1, 2, 3), max_tokens=5, stream=stream))
    assert result.ids == (2, 3, 4, 2, 3)
    assert result.text == ""
    assert result.new_tokens == 5


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(tokens=0), "max_tokens is 0, at least 1"),
        (ask("#late"), "this came late"),
    ],
)
def test_the_servers_refusals_have_their_status(client, request_, message):
    with pytest.raises(MaswError, match=message) as caught:
        client.generate(request_)
    assert caught.value.status == "INVALID_ARGUMENT"
    assert client.generate(ask()).text == EIGHT


def test_unknown_model(url):
    with (
        MaswClient(url, model="nothing") as client,
        pytest.raises(MaswError, match="unknown model: 'nothing'"),
    ):
        assert not client.is_ready()
        client.generate(ask())


@pytest.mark.parametrize("prompt", ["#silent", WORDS])
def test_timeout_before_and_in_the_answer(url, client, prompt):
    before = wait_until_idle(client)
    with (
        MaswClient(url, timeout_s=0.3) as hurried,
        pytest.raises(MaswError, match=r"within the timeout of 0\.3 s") as caught,
    ):
        hurried.generate(ask(prompt, MANY))
    assert caught.value.status == "DEADLINE_EXCEEDED"
    assert wait_until_idle(client) == before + 1


def test_leaving_early_cancels(client):
    before = wait_until_idle(client)
    with client.stream(ask(tokens=MANY)) as stream:
        next(stream)
    for _ in client.stream(ask(tokens=MANY)):
        break
    dropped = client.stream(ask(tokens=MANY))
    next(dropped)
    dropped.close()
    with pytest.raises(MaswError) as caught:
        list(dropped)
    assert caught.value.status == "CANCELLED"
    assert wait_until_idle(client) == before + 3


def test_four_at_once_from_one_client(client):
    prompts = [f"{name} {WORDS}" for name in "abcd"]
    started = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda prompt: client.generate(ask(prompt, 50)), prompts))
    assert time.perf_counter() - started < 1.8  # one after the other: 2 s and more
    assert [result.text[0] for result in results] == list("abcd")
    assert all(result.statistics.new_tokens == 50 for result in results)


def test_asyncio(url, client):
    before = wait_until_idle(client)

    async def use():
        async with AsyncMaswClient(url, timeout_s=20) as connected:
            assert await connected.is_ready()
            results = await asyncio.gather(*(connected.generate(ask(f"{n} a")) for n in range(4)))
            assert [result.text[0] for result in results] == list("0123")
            with pytest.raises(MaswError, match="max_tokens is 0"):
                await connected.generate(ask(tokens=0))
            async with connected.stream(ask(tokens=MANY)) as stream:
                assert (await anext(stream)).text == "eins "
            async for _ in connected.stream(ask(tokens=MANY)):
                break
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(connected.generate(ask(tokens=MANY)), 0.2)

    asyncio.run(use())
    assert wait_until_idle(client) == before + 3


def test_generate_command(url):
    command = ["-q", "drei", "--url", url, "--max-tokens", "6", "--compare", "--json"]
    done = CliRunner().invoke(app, command, input="eins\nzwei\n")
    assert done.exit_code == 0, done.output
    answer, numbers = done.stdout.rstrip("\n").split("\n")
    assert answer == "eins zwei drei eins zwei drei "
    assert json.loads(numbers)["equal"] is True
    assert json.loads(numbers)["new_tokens"] == 6
    assert "Tok./Iter 1.00" in done.stderr


def test_server_that_goes_away(server, client):
    """Last of all, since it ends the server."""
    stream = client.stream(ask(tokens=MANY))
    next(stream)
    server.kill()
    with pytest.raises(MaswError, match="connection was lost") as caught:
        list(stream)
    assert caught.value.status == "UNAVAILABLE"
    with pytest.raises(MaswError, match="no server can be reached"):
        client.generate(ask())
    with pytest.raises(ServerError):
        server.load(LOOP)
