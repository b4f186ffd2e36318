"""`masw-build target` to the end, with a trtllm-build that notes its arguments, fails or dies."""

import json
import os
import re
import shutil
import signal
import time

import pytest
import typer
import yaml
from typer.testing import CliRunner

from masw.build import target_build
from masw.build.commands import app
from masw.build.failures import cleaned_up, failures
from tests.targets import calibration_text, known, quantizable, recipe_data

pytestmark = pytest.mark.filterwarnings("ignore")  # ModelOpt warns of much

HEAD = """#!/bin/bash
printf '%s\\n' "$@" > "$RECORD"
while [ $# -gt 0 ]; do
  case $1 in --output_dir) out=$2;; --max_draft_len) len=$2;; esac
  shift
done
engine() { echo "[TRT-LLM] [I] Serializing $out/rank$1.engine"; echo > "$out/rank$1.engine"; }
config() {
  plugins="{\\"use_paged_context_fmha\\": ${2:-true}}"
  build="{\\"max_draft_len\\": $1, \\"plugin_config\\": $plugins}"
  echo "{\\"pretrained_config\\": {}, \\"build_config\\": $build}" > "$out/config.json"
}
"""
WORKS = "engine 0; engine 1; config $len; sleep 0.3"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A root with the FP8 checkpoint of a tiny model on two ranks, and its recipe."""
    root = tmp_path_factory.mktemp("root")
    folder = quantizable(root / "models" / "target")
    recipe = root / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(recipe_data(2, quantization="fp8", max_draft_len=7)))
    text = ["--calibration", calibration_text(root), "--calibration-samples", 4]
    with known(folder):
        arguments = [recipe, "--root", root, *text, "--calibration-length", 16]
        told = call(*arguments, "--checkpoint-only", "--json")
    return root, recipe, told


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["target", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture
def root(written, tmp_path):
    """A fresh copy of the root."""
    return shutil.copytree(written[0], tmp_path / "root")


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """builder(script) puts such a trtllm-build on PATH; returns the file of its arguments."""

    def install(body):
        (tmp_path / "bin").mkdir()
        script = tmp_path / "bin" / "trtllm-build"
        script.write_text(HEAD + body + "\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("RECORD", str(tmp_path / "arguments"))
        return tmp_path / "arguments"

    return install


def build(root, *options, code=0):
    with known(root / "models" / "target"):
        return call(root / "tiny.yaml", "--root", root, *options, code=code)


def left(root):
    """What stands where engines are made, unfinished folders included."""
    folder = root / "engines"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_checkpoint_alone_needs_no_tensorrt_llm(written):
    root, _, told = written
    named = json.loads(told.stdout)
    assert named["checkpoint"] == str(root / "checkpoints" / "target")
    assert named["command"][0] == "trtllm-build" and "engine" not in named
    steps = ["reading weights", "calibrating 4/4", "writing 2 rank files", "checking the tensors"]
    assert re.search(".*".join(steps), told.stderr, re.DOTALL)
    assert "quantizers" not in told.output  # ModelOpt's own words
    assert "Inserted" in (root / "logs" / "target-checkpoint.log").read_text()
    record = json.loads((root / "checkpoints" / "target" / "provenance.json").read_text())
    assert record["calibration"]["samples"] == 4 and len(record["calibration"]["sha256"]) == 64
    assert str(root) not in json.dumps(record)


def test_without_tensorrt_llm_the_container_and_the_command_are_named(root, monkeypatch):
    monkeypatch.setenv("PATH", str(root / "empty"))
    told = build(root, code=1).stderr
    assert "trtllm-build is not installed" in told
    assert "tritonserver:26.04-trtllm-python-py3" in told
    command = told.strip().splitlines()[-1]
    assert command.startswith(f"trtllm-build --checkpoint_dir {root}/checkpoints/target")
    assert f"--output_dir {root}/engines/target " in command and "--max_draft_len 7 " in command
    assert left(root) == []


def test_engines_of_all_ranks_are_built_from_the_checkpoint_that_is_there(root, builder):
    arguments = builder(WORKS)
    told = build(root, "--workers", 1)
    out = root / "engines" / "target"
    assert told.stdout.strip() == str(out)
    assert "using the checkpoint" in told.stderr and "2/2 engines" in told.stderr
    given = arguments.read_text().split()
    options = dict(zip(given[::2], given[1::2], strict=True))
    assert options.pop("--checkpoint_dir") == str(root / "checkpoints" / "target")
    assert options.pop("--output_dir") != str(out)  # it is built aside, then moved
    assert options == {
        "--workers": "1",
        "--speculative_decoding_mode": "draft_tokens_external",
        "--max_draft_len": "7",
        "--max_batch_size": "2",
        "--max_input_len": "256",
        "--max_seq_len": "256",
        "--max_num_tokens": "64",
        "--max_beam_width": "1",
        "--kv_cache_type": "paged",
        "--tokens_per_block": "32",
        "--remove_input_padding": "enable",
        "--context_fmha": "enable",
        "--use_paged_context_fmha": "enable",
        "--gpt_attention_plugin": "auto",
        "--gemm_plugin": "disable",
    }
    files = {path.name for path in out.iterdir()}
    assert files == {"config.json", "provenance.json", "rank0.engine", "rank1.engine"}
    assert left(root) == ["target"]
    assert "rank1.engine" in (root / "logs" / "target-engine.log").read_text()
    assert "engines/target is not empty" in build(root, code=1).stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "engine 0; echo '[TRT-LLM] [E] no memory on rank 1' >&2; exit 3",
            r"failed with exit code 3; rank 1 has no engine.*\n.*\[E\] no memory on rank 1",
        ),
        ("exit 2", r"failed with exit code 2; rank 0, 1 has no engine.*\n\(nothing\)"),
        ("echo one; kill -9 $$", r"was killed by SIGKILL \(out of memory\?\); rank 0, 1"),
        ("engine 1; config $len", "ended without all engines; rank 0 has no engine"),
        ("engine 0; engine 1", "wrote no config.json"),
        ("engine 0; engine 1; config 0", "max_draft_len 0; the recipe wants 7"),
        ("engine 0; engine 1; config $len false", "turned use_paged_context_fmha off"),
    ],
)
def test_a_failed_build_names_rank_or_log_and_leaves_nothing(root, builder, body, message):
    builder(body)
    told = build(root, code=1).stderr
    assert re.search(message, told, re.DOTALL), told
    assert left(root) == []
    assert (root / "checkpoints" / "target" / "config.json").is_file()


@pytest.mark.parametrize("end", ["kill -9 $$", "wait"])
def test_workers_end_with_the_build(root, builder, tmp_path, monkeypatch, end):
    """Killed (first case) or interrupted by the user (second), nothing keeps running."""
    real_sleep = time.sleep
    builder(f"sleep 60 & echo $! > {tmp_path}/worker; {end}")
    if end == "wait":

        def interrupt(seconds):
            if (tmp_path / "worker").exists() and (tmp_path / "worker").read_text().strip():
                raise KeyboardInterrupt

        monkeypatch.setattr(target_build.time, "sleep", interrupt)
    build(root, code=1 if end != "wait" else 130)
    worker = (tmp_path / "worker").read_text().strip()
    deadline = time.monotonic() + 10  # a killed process may take a moment to end
    while _runs(worker) and time.monotonic() < deadline:
        real_sleep(0.05)
    assert not _runs(worker) and left(root) == []


def _runs(pid):
    """Whether a process exists and is no zombie that waits to be collected."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_sigterm_ends_a_command_like_ctrl_c():
    """What `docker stop` sends: the build's own clean-up runs, and the old handler is back."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as end, failures("masw-build"), cleaned_up():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert end.value.exit_code == 130
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_checkpoint_of_another_recipe_or_model_is_not_used(root, builder):
    builder(WORKS)
    recipe = root / "tiny.yaml"
    kept = recipe.read_text()
    recipe.write_text(yaml.safe_dump(recipe_data(2)))
    assert "has quantization" in build(root, code=1).stderr
    recipe.write_text(kept)
    quantizable(root / "models" / "target", seed=2)
    assert "written from another model" in build(root, code=1).stderr
    assert left(root) == []


def test_the_build_machine_needs_no_weights(written, root, builder):
    """A checkpoint may be written on one machine and compiled on another."""
    builder(WORKS)
    shutil.rmtree(root / "models" / "target")
    with known(written[0] / "models" / "target"):
        call(root / "tiny.yaml", "--root", root)
    assert left(root) == ["target"]
