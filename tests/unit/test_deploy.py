"""Scripts, image and compose file of the gpu lane, without container or GPU."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from masw.engines.recipe import load_recipe, recipe_folder
from tests.deploy_stage import DEPLOY, Stage, wait_for_line

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(DEPLOY.glob("*.sh"))
TAGS = ("26.04", "26.05", "26.06", "26.07")  # TensorRT-LLM 1.2.1
STOP_SECONDS = 30  # default of launch.sh


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_bash(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def test_a_failed_preflight_ends_the_launch_with_its_code(stage):
    code, said = stage.finish(stage.launch(CHECK_CODE=3))
    assert code == 3 and "a table" in said and "preflight failed" in said
    assert stage.events == [f"check {stage.recipe} --root {stage.root}"]


def test_a_wrong_recipe_is_refused_before_anything(stage):
    stage.recipe.write_text("name: x\nlane: gpu\n")
    code, said = stage.finish(stage.launch())
    assert code == 2 and "recipe.yaml: target.architecture" in said and not stage.events
    stage.recipe.write_text((recipe_folder() / "embedded.yaml").read_text())
    code, said = stage.finish(stage.launch())
    assert code == 2 and "lane cpu; use masw-serve" in said and not stage.events


def test_times_that_are_no_whole_numbers_are_refused_by_name(stage):
    code, said = stage.finish(stage.launch(MASW_DRAIN_SECONDS="2.5"))
    assert code == 2 and "drain_seconds is '2.5'" in said and not stage.events
    refused = stage.ask("drain.sh", "60.0")
    assert refused.returncode == 2 and "SECONDS is '60.0'" in refused.stderr


def test_sigterm_drains_and_then_ends_the_server(stage):
    process = stage.launch('{"ranks": 4, "running": 0.7}')
    wait_for_line(process, "ready on HTTP port")
    process.send_signal(signal.SIGTERM)
    code, said = stage.finish(process)
    assert code == 0 and "drain: all requests finished" in said
    at = stage.events.index("unload")
    assert "generate 1" in stage.events[:at], "ready means that a token came"
    assert stage.events[at + 1] == "term with 0 running"
    assert stage.is_gone()


def test_requests_that_do_not_finish_are_cut_off_and_a_deaf_server_killed(stage):
    process = stage.launch(
        '{"running": 60, "deaf": true}', MASW_DRAIN_SECONDS=1, MASW_STOP_SECONDS=1
    )
    wait_for_line(process, "ready on HTTP port")
    process.send_signal(signal.SIGTERM)
    code, said = stage.finish(process)
    assert code == 1 and "requests still run after 1 s" in said and "cut off" in said
    assert stage.events[-1] == "term with 1 running" and stage.is_gone()


def test_a_second_signal_ends_it_at_once(stage):
    process = stage.launch('{"running": 60, "deaf": true}')
    wait_for_line(process, "ready on HTTP port")
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "draining, at most 120 s")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _ = stage.finish(process)
    assert code == 1 and time.monotonic() - began < 5 and stage.is_gone()


def test_a_rank_that_never_becomes_ready_is_named(stage):
    process = stage.launch('{"ranks": 4, "stuck_rank": 2}', MASW_READY_SECONDS=1)
    code, said = stage.finish(process)
    assert code == 70 and "not ready after 1 s" in said and stage.is_gone()
    named = re.findall(r"masw-launch: rank (\d+) .* its last line: (.*)", said)
    assert named == [("2", "[1,2]<stderr>:[TensorRT-LLM][INFO] Rank 2 is using GPU 2")]
    assert "masw-launch: model tensorrt_llm began to load and has not finished" in said


def test_a_server_that_gives_no_token_is_not_ready(stage):
    process = stage.launch('{"token": false}', MASW_READY_SECONDS=1)
    code, said = stage.finish(process)
    assert code == 70 and "not ready after 1 s: no token came" in said and "500" in said


def test_a_server_that_ends_while_loading_ends_the_launch_with_its_code(stage):
    code, said = stage.finish(stage.launch('{"exit": 9}'))
    assert code == 9 and "the server ended with code 9" in said


def test_a_draft_whose_process_dies_is_loaded_again(stage):
    process = stage.launch(MASW_WATCH_SECONDS=1)
    wait_for_line(process, "ready on HTTP port")
    (started,) = [event for event in stage.events if event.startswith("draft process")]
    os.kill(int(started.split()[-1]), signal.SIGKILL)
    wait_for_line(process, "masw_draft is back")
    process.send_signal(signal.SIGTERM)
    assert stage.finish(process)[0] == 0
    about = [event for event in stage.events if event.startswith("draft")]
    assert about[1:3] == ["draft unload", "draft load"] and len(about) == 4, "once"


def test_an_unloaded_loop_is_no_hang_and_a_draft_never_found_not_dead(stage):
    plan = '{"running": 2.5, "draft": false}'
    process = stage.launch(plan, MASW_WATCH_SECONDS=1, MASW_HANG_SECONDS=1)
    wait_for_line(process, "ready on HTTP port")
    assert stage.ask("drain.sh", "9").returncode == 0, "as a pod's preStop does"
    process.send_signal(signal.SIGTERM)
    assert stage.finish(process)[0] == 0 and stage.events[-1] == "term with 0 running"
    assert "draft load" not in stage.events


def test_a_server_that_gives_no_token_any_more_is_ended(stage):
    process = stage.launch('{"token": 1}', MASW_WATCH_SECONDS=1, MASW_HANG_SECONDS=2)
    code, said = stage.finish(process)
    assert code == 71 and re.search(r"not ready for \d s: no token came", said) and stage.is_gone()


def test_a_server_that_says_it_is_not_ready_any_more_is_ended_too(stage):
    process = stage.launch('{"sick": 1}', MASW_WATCH_SECONDS=1, MASW_HANG_SECONDS=2)
    code, said = stage.finish(process)
    assert code == 71 and re.search(r"not ready for \d s: /v2/health/ready", said)
    assert stage.is_gone()


def test_models_are_named_by_real_log_lines(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        'I1130 00:40:38.414778 11853 model_lifecycle.cc:472] "loading: tensorrt_llm:1"\n'
        "I1130 00:40:40.572947 11853 model_lifecycle.cc:839] "
        "\"successfully loaded 'tensorrt_llm'\"\n"
        'I1130 00:40:40.574660 11853 model_lifecycle.cc:472] "loading: masw_draft:1"\n'
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 62.99 GiB for max tokens in paged KV cache"
        " (294848).\n"
    )
    named = subprocess.run([DEPLOY / "unready.sh", log, "1"], capture_output=True, text=True)
    assert named.stdout == "model masw_draft began to load and has not finished\n"


def test_ranks_that_a_server_spawned_are_told_from_the_server(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        '[1,0]<stdout>:I1130 00:40:38.4 7 model_lifecycle.cc:472] "loading: tensorrt_llm:1"\n'
        "[2,0]<stdout>:[TensorRT-LLM][INFO] Rank 0 is using GPU 0\n"
        "[2,1]<stdout>:[TensorRT-LLM][INFO] Allocated 9 GiB for max tokens in paged KV cache\n"
        "[1,0]<stdout>:still waiting\n"
    )
    named = subprocess.run([DEPLOY / "unready.sh", log, "2"], capture_output=True, text=True)
    assert named.stdout.splitlines() == [
        "model tensorrt_llm began to load and has not finished",
        "rank 0 of the target has not allocated its KV cache; its last line: "
        "[2,0]<stdout>:[TensorRT-LLM][INFO] Rank 0 is using GPU 0",
    ]


def test_the_canary_asks_an_idle_server_and_lets_a_busy_one_work(stage):
    seen = stage.folder / f"masw-emitted-{stage.ports[0]}"
    process = stage.launch()
    try:
        wait_for_line(process, "ready on HTTP port")
        asked = stage.events.count("generate 1")
        assert stage.ask("ready.sh").returncode == 0
        assert stage.events.count("generate 1") == asked + 1, "nothing was emitted since"
        seen.write_text("0\n")  # as if it had looked before the tokens that were emitted
        assert stage.ask("ready.sh").returncode == 0
        assert stage.events.count("generate 1") == asked + 1
        assert stage.ask("drain.sh", "5").returncode == 0
        refused = stage.ask("ready.sh")
        assert refused.returncode == 3 and "/v2/models/tensorrt_llm_bls/ready" in refused.stderr
    finally:
        process.send_signal(signal.SIGTERM)
        stage.finish(process)
    gone = stage.ask("ready.sh")
    assert gone.returncode == 1 and "/v2/health/ready" in gone.stderr
    assert stage.ask("drain.sh").returncode == 0, "nothing is left to drain"


@pytest.fixture
def group(stage):
    """Settings of the leader of three pods, its keys, and an `ssh` that finds the hosts in $UP."""
    keys = stage.folder / "keys"
    keys.mkdir()
    for name in ("id_ed25519", "id_ed25519.pub"):
        (keys / name).write_text(f"{name}\n")
    stage.command("ssh", '[[ " $UP " == *" ${@: -2:1} "* ]]')
    return {
        "MASW_SSH": keys,
        "MASW_GPUS": 8,
        "MASW_WORKER_SECONDS": 1,
        "LWS_LEADER_ADDRESS": "demo-0.demo.apps",
        "LWS_GROUP_SIZE": 3,
        "CHECK_CODE": 3,
    }


def test_the_leader_of_several_nodes_launches_once_its_workers_answer(stage, group):
    up = "demo-0-1.demo.apps demo-0-2.demo.apps"
    code, said = stage.finish(stage.launch(script="node.sh", UP=up, **group))
    assert code == 3 and "preflight failed" in said, said
    hosts = (stage.folder / ".ssh" / "hostfile").read_text().splitlines()
    assert hosts == [f"demo-0{worker}.demo.apps slots=8" for worker in ("", "-1", "-2")]
    assert (stage.folder / ".ssh" / "id_ed25519").stat().st_mode & 0o77 == 0


def test_a_worker_that_does_not_answer_is_named(stage, group):
    code, said = stage.finish(stage.launch(script="node.sh", UP="demo-0-1.demo.apps", **group))
    assert code == 69 and "worker demo-0-2.demo.apps does not answer" in said
    assert not stage.events


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the Dockerfile, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    lines = text.replace("\\\n", "").splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def test_the_image_is_built_on_a_container_with_engines():
    first, base = instructions()[:2]
    assert first[0] == "ARG" and first[1].removeprefix("TRITON=") in TAGS
    assert base == ("FROM", "nvcr.io/nvidia/tritonserver:${TRITON}-trtllm-python-py3")
    rest = dict(instructions()[2:])  # the last of each kind
    assert int(rest["USER"]) > 0, "not root"
    assert "/opt/masw/deploy/ready.sh" in rest["HEALTHCHECK"]
    check = next(text for name, text in instructions() if name == "RUN").split("&&")[0]
    for tag, allowed in (("26.03", False), *((tag, True) for tag in TAGS), ("26.08", False)):
        done = subprocess.run(["bash", "-c", check], env={**os.environ, "TRITON": tag})
        assert (done.returncode == 0) == allowed, tag


def test_what_the_container_brings_is_not_installed_again():
    script = DEPLOY / "dependencies.py"
    here = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert here.stdout.strip() == "", "this environment lacks nothing"
    bare = subprocess.run(
        [sys.executable, "-S", "-I", script], capture_output=True, text=True, check=True
    )
    wanted = {re.split(r"[>=\[]", line)[0] for line in bare.stdout.split()}
    project = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2]
    declared = set(re.findall(r'"([\w-]+)', project.partition("\n]")[0]))
    held = {"numpy", "torch", "transformers"}
    assert declared - held <= wanted and not held & wanted
    for name, text in instructions():
        if name == "RUN" and "pip install" in text:
            assert text.count("--no-deps") == 1 and "--constraint /tmp/before.txt" in text


def test_compose_starts_the_image_with_gpus_and_time_to_drain():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = compose["services"]["server"]
    tag = server["build"]["args"]["TRITON"]
    assert tag in TAGS and server["image"].endswith(f"-{tag}")
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).is_file()
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    assert server["shm_size"] == "8gb" and server["ulimits"]["memlock"] == -1
    serving = load_recipe("llama-3.1-70b-tp4-8b").serving
    ports = [serving.http_port, serving.grpc_port, serving.metrics_port]
    assert server["ports"] == [f"{port}:{port}" for port in ports]
    assert server["volumes"][0].endswith(":/masw") and server["command"][-1] == "/masw"
    drain, stop = (int(server["environment"][f"MASW_{n}_SECONDS"]) for n in ("DRAIN", "STOP"))
    assert server["stop_grace_period"] == "3m" and drain + stop < 180 and stop == STOP_SECONDS


def test_every_path_and_host_in_deploy_is_meant():
    for path in (each for each in DEPLOY.rglob("*") if each.is_file()):
        text = path.read_text()
        for name in re.findall(r"/opt/masw/deploy/([\w.]+)", text):
            assert (DEPLOY / name).is_file(), f"{path.name} names {name}"
        assert not re.search(r":latest\b|\btag: latest", text), path.name
        hosts = set(re.findall(r"\b(?:[a-z0-9-]+\.)+(?:io|com|org|ai|dev|net)/", text))
        groups = {"kubernetes.io/", "x-k8s.io/", "coreos.com/", "nvidia.com/", "json-schema.org/"}
        ours = {host for host in hosts if not any(host.endswith(group) for group in groups)}
        assert ours <= {"nvcr.io/"}, f"{path.name} names {ours}"
