"""One running server with a tiny random pair, shared by the tests that do it no harm."""

import shutil
from pathlib import Path

import pytest

from masw.build.embedded_pair import prepare_embedded_pair
from masw.build.repository import (
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    RepositoryConfig,
    write_repository,
)
from masw.clients.client import MaswClient
from tests.triton.pair import write_pair
from tests.triton.serving import PATIENCE, Serving


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny random pair with the embedded model's tokenizer."""
    return write_pair(tmp_path_factory.mktemp("tiny") / "pair", prepare_embedded_pair() / "target")


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """serve(*options) -> a ready `masw-serve`; all of them end with the session."""
    started = []

    def start(*options: str) -> Serving:
        started.append(Serving(tmp_path_factory.mktemp("log") / "triton.log", *options))
        started[-1].wait_for("ready")
        return started[-1]

    yield start
    for serving in started:
        serving.end()


@pytest.fixture(scope="session")
def write_models(tiny, tmp_path_factory):
    """write_models(**config) -> a repository for the tiny pair, one thread for each engine."""

    def write(**config) -> Path:
        folder = tmp_path_factory.mktemp("models")
        config = {"recipe": str(tiny.folder), "engine_threads": 1} | config
        write_repository(RepositoryConfig(**config), folder)
        return folder

    return write


@pytest.fixture(scope="session")
def server(serve, write_models):
    """The shared server, with all models and up to 8 sequences at once."""
    return serve(f"--model-repository={write_models()}", "--drain-seconds=0")


@pytest.fixture(scope="session")
def serve_core(serve, write_models):
    """serve_core(*options, **config) -> a server of loop, draft and target only: it starts soon."""

    def start(*options: str, **config) -> Serving:
        repository = write_models(**config)
        for name in (ENSEMBLE, PREPROCESSING, POSTPROCESSING):
            shutil.rmtree(repository / name)
        return serve(f"--model-repository={repository}", *options)

    return start


@pytest.fixture
def client(server):
    """A gRPC client of the shared server's endpoint for people."""
    with MaswClient(server.url, timeout_s=PATIENCE) as connected:
        yield connected
