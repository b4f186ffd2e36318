"""The gpu lane's repository in the real server, which has neither a GPU nor TensorRT-LLM here.

Its configurations are read and judged by the server itself; only the backend library and the GPU
are then found to be missing, in the server's own words.
"""

import re
import shutil
import subprocess

import pytest
from google.protobuf import text_format

from masw.build.deployment import lay_out
from masw.build.embedded_pair import prepare_embedded_pair
from masw.build.launch import launch_plan
from masw.build.processes import SHARED_MEMORY
from masw.build.repository import ENSEMBLE, LOAD_ORDER, read_model_config
from masw.build.triton_install import ServerError
from masw.build.triton_server import ServerConfig, TritonServer, find_installation, free_ports
from masw.engines.places import Places
from masw.engines.recipe import load_recipe
from tests.triton.serving import PATIENCE

pytestmark = pytest.mark.triton

NO_BACKEND = "unable to find backend library for backend 'tensorrtllm'"
CODE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


@pytest.fixture(scope="module")
def recipe():
    """A recipe of two ranks on ports of its own."""
    http, grpc, metrics = free_ports()
    stated = load_recipe("llama-3.1-70b-tp4-8b").model_dump(mode="json")
    stated["target"] |= {"tensor_parallel": 2, "gpus": [0, 1]}
    stated["draft"]["gpu"] = 2
    stated["serving"] |= {"http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    return type(load_recipe("embedded"))(**stated)


@pytest.fixture(scope="module")
def layout(recipe, tmp_path_factory):
    """The recipe laid out, with a tokenizer and a config for the models that only tokenize."""
    places = Places(tmp_path_factory.mktemp("root"))
    places.target_model.parent.mkdir(parents=True)
    places.target_model.symlink_to(prepare_embedded_pair() / "target")
    return lay_out(recipe, places)


@pytest.fixture(scope="module")
def server(recipe, layout, tmp_path_factory):
    """A server of a copy, so that further models can be put there; it has loaded nothing yet."""
    serving = recipe.serving
    copied = shutil.copytree(layout.repository, tmp_path_factory.mktemp("copy") / "repository")
    config = ServerConfig(
        copied,
        http_port=serving.http_port,
        grpc_port=serving.grpc_port,
        metrics_port=serving.metrics_port,
        log_file=tmp_path_factory.mktemp("log") / "triton.log",
    )
    with TritonServer(config) as started:
        yield started


def place(server, name, text, code=None):
    """A further model in the server's repository."""
    folder = server.config.model_repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text)
    if code is not None:
        (folder / "1" / "model.py").write_text(code)


def test_the_target_loads_as_far_as_its_backend(server):
    with pytest.raises(ServerError, match=NO_BACKEND):
        server.load("tensorrt_llm")


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("unfilled", "dims: -1", "dims: ${dims}"),
        ("unknown_type", "TYPE_UINT64", "TYPE_UINT65"),
        ("no_length", "dims: -1", "dims: 0"),
    ],
)
def test_a_broken_config_is_another_complaint(layout, server, name, right, wrong):
    """So the complaint about the backend means that the config was read and found right."""
    text = (layout.repository / "tensorrt_llm" / "config.pbtxt").read_text()
    assert right in text
    place(server, name, text.replace('"tensorrt_llm"', f'"{name}"').replace(right, wrong))
    with pytest.raises(ServerError, match="failed to poll from model repository"):
        server.load(name)


def test_the_server_understands_every_tensor_and_parameter(layout, server):
    """The same config, but for the backend: served back as it was written."""
    written = read_model_config(layout.repository / "tensorrt_llm" / "config.pbtxt")
    written.name, written.backend = "understood", "python"
    place(server, "understood", text_format.MessageToString(written), CODE)
    server.load("understood")
    served = server.model_config("understood")
    assert len(served["input"]) == len(written.input)
    for told, tensor in zip(served["input"], written.input, strict=True):
        assert (told["name"], told["dims"]) == (tensor.name, list(tensor.dims))
        assert told["optional"] == tensor.optional
        assert told["allow_ragged_batch"] == tensor.allow_ragged_batch
        assert ("reshape" in told) == tensor.HasField("reshape")
    assert [told["name"] for told in served["output"]] == [t.name for t in written.output]
    values = {key: value["string_value"] for key, value in served["parameters"].items()}
    assert values == {key: value.string_value for key, value in written.parameters.items()}
    server.unload("understood")


def rank_words(recipe, layout, rank: int) -> list[str]:
    """One rank's program of the launch line, where this machine's server has its files."""
    files = find_installation()
    plan = launch_plan(recipe, layout.repository, host="127.0.0.1", tritonserver=str(files.binary))
    words = " ".join(plan.command[2:]).split(" : ")[rank].split(" ")[2:]
    return [*words, f"--backend-directory={files.backends}", f"--cache-directory={files.caches}"]


def launched(recipe, layout, rank: int) -> tuple[int, str]:
    """Exit code and log of one rank's program, on free ports."""
    environment = TritonServer(ServerConfig(layout.repository)).environment()
    words = rank_words(recipe, layout, rank)
    for name, port in zip(("http", "grpc", "metrics"), free_ports(), strict=True):
        words = [re.sub(rf"^--{name}-port=.*", f"--{name}-port={port}", word) for word in words]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE
    )
    return done.returncode, done.stdout + done.stderr


def table(log: str) -> dict[str, str]:
    """What the server says of each model at the end of loading."""
    return dict(re.findall(r"^\| (\w+) +\| \d+ +\| (\S.*?) *\|$", log, re.MULTILINE))


def test_rank_0_of_the_launch_line_loads_all_models(recipe, layout):
    """The server takes every flag, and ends because backend and GPU are not there."""
    code, log = launched(recipe, layout, rank=0)
    told = table(log)
    assert code == 1 and set(told) >= set(LOAD_ORDER) - {ENSEMBLE}, log[-3000:]
    assert told["tensorrt_llm"].startswith("UNAVAILABLE: Invalid argument: unable to find backend")
    assert re.match("UNAVAILABLE: .*GPU", told["masw_draft"])
    assert told["preprocessing"] == told["postprocessing"] == "READY"
    assert not list(SHARED_MEMORY.glob("masw-rank0-*"))


def test_other_ranks_load_the_target_alone(recipe, layout):
    code, log = launched(recipe, layout, rank=1)
    assert code == 1 and set(table(log)) == {"tensorrt_llm"}, log[-3000:]
