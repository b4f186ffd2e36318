"""`masw-build check` of the shipped recipes without a GPU; what is read of a machine with one."""

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from masw.build.checks.finding import Finding, State
from masw.build.checks.machine import Gpu, Machine, read_cuda, read_gpus
from masw.build.checks.subject import Subject
from masw.build.commands import app
from masw.build.preflight import counted, preflight, table
from masw.engines.places import Places
from masw.engines.recipe import Lane, load_recipe, recipe_names
from tests.deployments import GPU_RECIPES, failures

GIB = 2**30


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_are_checked_anywhere(name, tmp_path):
    bare = Machine(versions={}, shared_memory=64 * GIB)
    findings = preflight(Subject(load_recipe(name), Places(tmp_path), bare, recipe_name=name))
    told = {finding.name: finding for finding in findings}
    if load_recipe(name).lane == Lane.CPU:
        assert failures(told).keys() <= {"torch", "Triton server", "ports"}
        assert "pip install 'masw[cpu]'" in told["torch"].remedy
        return
    unknown = {n for n, each in told.items() if each.state == State.UNKNOWN}
    assert unknown >= {
        "container",
        "TensorRT-LLM",
        "TensorRT",
        "CUDA driver",
        "GPUs",
        "MPI",
        "tokenizers",
    }
    assert "memory: target" in unknown and "--gpu-memory" in told["memory: target"].remedy
    for part, command in (
        ("target model", "hf download meta-llama/Llama-3.1"),
        ("adaptor", f"masw-train pretrain --model {tmp_path}/models/draft --sink 128"),
        ("draft engine", f"masw-build draft --recipe {name} --root {tmp_path}"),
        ("target engine", f"masw-build target {name} --root {tmp_path}"),
        ("pair", f"masw-build repository {name} --root {tmp_path}"),
        ("repository", f"masw-build repository {name} --root {tmp_path}"),
    ):
        assert told[part].state == State.FAILED and command in told[part].remedy


def test_remedies_are_commands_that_a_shell_takes(tmp_path):
    """Folders and files may have blanks in their names."""
    root, file = tmp_path / "my models", str(tmp_path / "my recipe.yaml")
    subject = Subject(load_recipe(GPU_RECIPES[0]), Places(root), Machine(), recipe_name=file)
    told = {finding.name: finding.remedy for finding in preflight(subject)}
    for part, words in (
        ("draft engine", ["masw-build", "draft", "--recipe", file, "--root", str(root)]),
        ("target engine", ["masw-build", "target", file, "--root", str(root)]),
        ("repository", ["masw-build", "repository", file, "--root", str(root)]),
    ):
        assert shlex.split(told[part].partition(": ")[2]) == words


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_shipped_recipes_fit_gpus_of_80_gb(name, tmp_path):
    subject = Subject(load_recipe(name), Places(tmp_path), Machine(), gpu_memory=79.0)
    memory = [each for each in preflight(subject) if each.name.startswith("memory")]
    assert memory and all(each.state == State.OK for each in memory), memory


SMI = """0, NVIDIA H100 80GB HBM3, 9.0, 80900
1, NVIDIA H100 80GB HBM3, 9.0, 1024
"""
HEAD = "| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0 |"


def test_gpus_are_read_from_nvidia_smi():
    asked = []

    def run(command):
        asked.append(command)
        return SMI if len(command) > 1 else HEAD

    first, second = read_gpus(run)
    assert first == Gpu(0, "NVIDIA H100 80GB HBM3", "9.0", 80900 / 1024)
    assert (first.sm, second.free) == (90, 1.0) and asked[0][0] == "nvidia-smi"
    assert read_cuda(run) == (13, 0)
    assert read_gpus(lambda command: None) is None and read_cuda(lambda command: None) is None


def invoke(*words):
    return CliRunner().invoke(app, ["check", *map(str, words)])


@pytest.fixture
def bare_machine(monkeypatch):
    """No GPU and no driver, wherever the tests run."""
    monkeypatch.setattr(Machine, "probe", classmethod(lambda cls: cls(shared_memory=64 * GIB)))


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_the_command_prints_the_table_and_fails_for_absent_files(name, tmp_path, bare_machine):
    told = invoke(name, "--root", tmp_path, "--gpu-memory", 79)
    assert told.exit_code == 1, told.output
    words = " ".join(told.stdout.split())
    for part in ("draft engine failed", "GPUs unknown", "memory: target ok", "-> build it:"):
        assert part in words
    assert re.search(r"^\d+ ok, \d+ failed, \d+ unknown$", told.stdout, re.MULTILINE)


def test_the_command_is_one_json_object_for_machines(tmp_path, bare_machine):
    words = ["llama-3.1-8b-3b", "--root", tmp_path, "--json"]
    speed = ["--draft-ms", 12, "--verify-ms", 30, "--accepted", 2]
    result = invoke(*words, *speed)
    told = json.loads(result.stdout)
    assert result.exit_code == 1 and told["failed"] > 0
    assert told["ok"] + told["failed"] + told["unknown"] == len(told["checks"])
    assert all(check["remedy"] for check in told["checks"] if check["state"] == "failed")
    assert told["speedup"]["predicted"] == 1.0
    assert result.stderr.startswith("warning: predicted speedup 1.00x")
    assert json.loads(invoke(*words).stdout)["speedup"] is None


@pytest.mark.parametrize("option", ["--draft-ms", "--decode-ms"])
def test_the_command_wants_all_three_latencies(tmp_path, option):
    told = invoke("embedded", "--root", tmp_path, option, 1)
    assert told.exit_code == 1 and "--draft-ms, --verify-ms and --accepted" in told.stderr


def test_the_card_shows_brackets_as_they_are():
    card = table([Finding("GPUs", State.OK, "[0, 1]")])
    assert list(card.columns[2].cells) == [r"\[0, 1]"]
    assert counted([Finding("GPUs", State.OK, "")]) == {"ok": 1, "failed": 0, "unknown": 0}
