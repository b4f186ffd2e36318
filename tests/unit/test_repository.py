"""The generated repository: complete, typed, idempotent, and understood by the real server."""

import dataclasses
from pathlib import Path

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from masw.build import repository
from masw.build.repository import RepositoryConfig, model_configs, write_repository
from masw.build.tensors import TensorSpec
from masw.build.triton_server import ServerConfig, TritonServer, free_ports

ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
PYTHON_MODELS = [name for name in repository.LOAD_ORDER if name != repository.ENSEMBLE]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    for name in PYTHON_MODELS:
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.py").write_text(ECHO)
    return root


@pytest.fixture
def config():
    return RepositoryConfig(recipe='/pairs/a "quoted", name\n${x}', max_sequences=3)


def test_every_file_parses_and_says_what_the_object_says(config, sources, tmp_path):
    write_repository(config, tmp_path, sources)
    for name, message in model_configs(config).items():
        parsed = repository.read_model_config(tmp_path / name / "config.pbtxt")
        assert parsed == message and parsed.name == name
        assert (tmp_path / name / "1").is_dir()
        if name != repository.ENSEMBLE:
            assert (tmp_path / name / "1" / "model.py").read_text() == ECHO
            assert RepositoryConfig.from_parameters(_parameters(parsed)) == config


def test_nothing_is_left_unfilled(sources, tmp_path):
    write_repository(RepositoryConfig(recipe="/pairs/a"), tmp_path, sources)
    for path in tmp_path.rglob("*.pbtxt"):
        assert "${" not in path.read_text()


def test_tensors_follow_the_layout_of_nvidia(config):
    models = model_configs(config)
    draft, target = _inputs(models["masw_draft"]), _inputs(models["tensorrt_llm"])
    assert list(draft["new_ids"].dims) == [-1] and draft["new_ids"].allow_ragged_batch
    assert not any(tensor.optional for tensor in draft.values())
    for name in ("input_ids", "draft_input_ids", "draft_logits"):
        assert target[name].allow_ragged_batch
    assert target["draft_logits"].optional and list(target["draft_logits"].dims) == [-1, -1]
    loop = _inputs(models["tensorrt_llm_bls"])
    assert {name for name, tensor in loop.items() if not tensor.optional} == {"max_tokens"}
    assert {"text_input", "input_ids", "bad_words", "repetition_penalty", "lora_config"} <= set(
        loop
    )
    assert loop["seed"].data_type == pb.TYPE_UINT64


def test_scheduling(config):
    models = model_configs(config)
    for name in ("masw_draft", "tensorrt_llm"):
        assert models[name].HasField("dynamic_batching") and models[name].max_batch_size == 3
        assert models[name].dynamic_batching == pb.ModelDynamicBatching()
    for name in PYTHON_MODELS:
        assert [group.kind for group in models[name].instance_group] == [
            pb.ModelInstanceGroup.KIND_CPU
        ]
    assert models["tensorrt_llm_bls"].model_transaction_policy.decoupled
    unary = model_configs(dataclasses.replace(config, decoupled=False))
    assert not unary["tensorrt_llm_bls"].model_transaction_policy.decoupled


def test_ensemble_maps_tensors_that_exist(config):
    models = model_configs(config)
    ensemble = models["ensemble"]
    known = set(_inputs(ensemble))
    for step in ensemble.ensemble_scheduling.step:
        inputs = _inputs(models[step.model_name])
        outputs = {tensor.name for tensor in models[step.model_name].output}
        assert set(step.input_map) <= set(inputs) and set(step.output_map) <= outputs
        required = {name for name, tensor in inputs.items() if not tensor.optional}
        assert required <= set(step.input_map)
        assert set(step.input_map.values()) <= known
        known |= set(step.output_map.values())
    assert {tensor.name for tensor in ensemble.output} <= known


def test_writing_again_changes_only_what_differs(config, sources, tmp_path):
    assert len(write_repository(config, tmp_path, sources)) == 2 * len(PYTHON_MODELS) + 1
    assert write_repository(config, tmp_path, sources) == []
    (tmp_path / "masw_draft" / "1" / "model.py").write_text("broken")
    assert write_repository(config, tmp_path, sources) == [
        tmp_path / "masw_draft" / "1" / "model.py"
    ]
    assert not [path for path in tmp_path.rglob(".*")]


def test_a_failed_write_leaves_nothing_behind(config, sources, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_repository(config, tmp_path, sources)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_model_without_code_is_named(config, tmp_path):
    with pytest.raises(FileNotFoundError, match="tensorrt_llm"):
        write_repository(config, tmp_path / "repository", tmp_path)


@pytest.mark.parametrize(
    "field, value",
    [
        ("recipe", ""),
        ("draft_tokens", -1),
        ("draft_tokens", 2.5),
        ("draft_mode", "medusa"),
        ("target_mode", "friendly"),
        ("max_sequences", 0),
        ("max_sequences", True),
        ("max_waiting", -1),
        ("decoupled", "yes"),
        ("time_limit", 0.0),
        ("time_limit", float("nan")),
        ("engine_threads", -2),
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        RepositoryConfig(**{"recipe": "/pairs/a", field: value})


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="masw"):
        RepositoryConfig.from_parameters({})
    with pytest.raises(ValueError, match="gamma"):
        RepositoryConfig.from_parameters({"masw": '{"recipe": "/a", "gamma": 5}'})


@pytest.mark.parametrize("data_type, dims", [("INT31", (1,)), ("INT32", ()), ("INT32", (0,))])
def test_bad_tensors_are_refused_by_name(data_type, dims):
    with pytest.raises(ValueError, match="ids"):
        TensorSpec("ids", data_type, dims)


@pytest.mark.triton
def test_the_server_reads_what_was_written(config, sources, tmp_path, monkeypatch):
    monkeypatch.setenv("MASW_HOME", str(tmp_path / "home"))
    write_repository(config, tmp_path / "repository", sources)
    server = TritonServer(_server_config(tmp_path))
    with server:
        for name in ("tensorrt_llm", "masw_draft", "ensemble"):
            server.load(name)
        for name in repository.LOAD_ORDER:
            assert server.is_ready(name)
            _assert_equal(server.model_config(name), model_configs(config)[name])


def _assert_equal(served: dict, message: pb.ModelConfig):
    assert served["max_batch_size"] == message.max_batch_size
    for kind, written in (("input", message.input), ("output", message.output)):
        assert [_facts(tensor) for tensor in served[kind]] == [
            (tensor.name, pb.DataType.Name(tensor.data_type), list(tensor.dims))
            for tensor in written
        ]
    flags = [(tensor["optional"], tensor["allow_ragged_batch"]) for tensor in served["input"]]
    assert flags == [(tensor.optional, tensor.allow_ragged_batch) for tensor in message.input]
    assert ("dynamic_batching" in served) == message.HasField("dynamic_batching")
    for key, value in message.parameters.items():
        assert served["parameters"][key]["string_value"] == value.string_value


def _facts(tensor: dict) -> tuple:
    return tensor["name"], tensor["data_type"], tensor["dims"]


def _inputs(message: pb.ModelConfig) -> dict[str, pb.ModelInput]:
    return {tensor.name: tensor for tensor in message.input}


def _parameters(message: pb.ModelConfig) -> dict:
    """As Triton hands them to a Python model."""
    return {key: {"string_value": value.string_value} for key, value in message.parameters.items()}


def _server_config(folder) -> ServerConfig:
    http, grpc, metrics = free_ports()
    return ServerConfig(
        folder / "repository",
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
        log_file=folder / "triton.log",
    )
