"""The TensorRT plugins: kernels for six targets, and the wheel's own plugin sources driving them.

Triton's compiler, its interpreter and TensorRT's sources each run in processes of their own; here
is read what they wrote down. Nothing of TensorRT gets into this environment.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from masw.build.triton_install import masw_home
from tests.plugin_launches import DRAFTS, PROFILES

ROOT = Path(__file__).resolve().parents[2]
# TensorRT of the container for GPUs, and the newest: their plugin sources differ.
CONTAINER, NEWEST = "10.14.1.48.post1", "11.4.0.106"
TARGETS = {80: ("sm_80", "8.0"), 86: ("sm_86", "8.0"), 89: ("sm_89", "8.0")}
TARGETS |= {90: ("sm_90a", "8.0"), 100: ("sm_100a", "8.6"), 120: ("sm_120a", "8.7")}
PARTIAL = [".u64"] * 9 + [".u32"] * 3 + [".u64"] * 2
MERGE = [".u64"] * 2 + [".u32"] + [".u64"]
# Parts of the keys in each profile: programs that should run, by those without a split; and no
# more than 64, than given, than there are tiles of 64 keys.
PARTS = {
    "llama-3.2-3b": {"decode": 264 // 8, "wide": 264 // 64, "full": 1, "chunk": 1, "short": 2},
    "llama-3.2-1b": {"decode": 216 // 8, "chunk": 1},
    "small": {"decode": 24 // 6, "chunk": 24 // 8},
}
CASES = [(name, profile) for name, profiles in PROFILES.items() for profile in profiles]


def run(*arguments: str | Path, **environment: str) -> str:
    """Output of a Python program of its own, which must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plugin_sources(version: str, folder: Path) -> Path:
    """A folder to import `tensorrt` from: the wheel's plugin sources on the double."""
    wheels = masw_home() / "tensorrt-bindings" / version
    if not list(wheels.glob("*.whl")):
        wanted = f"tensorrt-cu13-bindings=={version}"
        run("-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, wanted)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if re.fullmatch(r"tensorrt_bindings/plugin/\w+\.py", name):
                path = folder / name.replace("tensorrt_bindings", "tensorrt", 1)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files.read(name))
    (folder / "tensorrt/__init__.py").write_text("from tests.tensorrt_double import *\n")
    return folder


def drive(version: str, folder: Path, *drafts: str, **environment: str) -> Path:
    """What the plugins launch under the sources of a version, in a folder."""
    found = folder / "found"
    found.mkdir()
    path = [str(plugin_sources(version, folder / "sources")), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    run("-m", "tests.plugin_launches", found, *drafts, **environment)
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Everything that the newest TensorRT's sources give, and kernels for the other targets."""
    return drive(NEWEST, tmp_path_factory.mktemp("plugin"), PYTHONHASHSEED="1")


@pytest.fixture(scope="session")
def launches(folder):
    """launches.json of it."""
    return json.loads((folder / "launches.json").read_text())


@pytest.fixture(scope="session")
def kernels(folder):
    """PTX by file name."""
    return {path.name: path.read_text() for path in folder.glob("*.ptx")}


def shape_of(name: str, profile: str) -> tuple[int, int, int]:
    """Batch, positions and entries that a profile is tuned for."""
    return PROFILES[name][profile][1]


@pytest.mark.parametrize(("name", "profile"), CASES)
def test_parts_follow_from_the_profile(launches, name, profile):
    """Both plugins agree on them, and on shapes and types."""
    draft, parts = DRAFTS[name], PARTS[name][profile]
    batch, positions, _ = shape_of(name, profile)
    first, second = (launches[name][plugin][profile] for plugin in ("partial", "merge"))
    rows = [batch, positions, draft.heads]
    assert first["shapes"] == [[*rows, parts, draft.head_dim], [*rows, parts]]
    assert first["types"] == ["FLOAT", "FLOAT"]
    assert second["shapes"] == [[*rows, draft.head_dim]]
    (merge,) = second["tactics"].values()
    assert merge["scalars"] == [parts]
    assert merge["grid"] == [batch * positions * draft.heads, 1, 1]


@pytest.mark.parametrize(("name", "profile"), CASES)
def test_tactics_launch_all_rows_and_parts(launches, name, profile):
    """Grid (tiles * parts, key heads, batch); scalars positions, entries, parts."""
    draft, parts = DRAFTS[name], PARTS[name][profile]
    batch, positions, entries = shape_of(name, profile)
    tactics = launches[name]["partial"][profile]["tactics"]
    assert len({launch["ptx"] for launch in tactics.values()}) == len(tactics) >= 3
    for tactic, launch in tactics.items():
        plan = launches[name]["plans"][int(tactic) - 1]
        tiles = -(-positions * draft.heads // draft.kv_heads // plan["block_m"])
        assert launch["grid"] == [tiles * parts, draft.kv_heads, batch]
        assert launch["block"] == [32 * plan["warps"], 1, 1]
        assert launch["scalars"] == [positions, entries, parts]
        assert 0 < launch["shared"] <= draft.shared_limit


def test_types_of_the_network(launches):
    """The double also checks that types of all inputs are what the plugin asks for."""
    types = {"fp16": "HALF", "bf16": "BF16", "fp32": "FLOAT"}
    assert {draft.dtype for draft in DRAFTS.values()} == set(types)
    for name, draft in DRAFTS.items():
        (out,) = launches[name]["merge"]["decode"]["types"]
        assert out == launches[name]["out_type"] == types[draft.dtype]


def test_attributes_carry_model_rule_and_device(launches):
    first, second = launches["llama-3.2-1b"]["attributes"]
    assert first == {
        **{"heads": 32, "kv_heads": 8, "head_dim": 64},
        **{"sink": 4, "window": 70, "rollback": 8, "interval": 4, "visibility": "materialized"},
        **{"sm": 80, "programs": 216, "most_parts": 64, "shared_limit": 163840},
    }
    assert second == {"head_dim": 64, "dtype": "fp16", "sm": 80, "most_parts": 64}


def test_refusals_name_the_field(launches):
    """And say what is allowed."""
    for field, message in launches["refusals"].items():
        assert message.startswith(f"{field} is "), message
    assert "120" in launches["refusals"]["sm"] and "multiple of" in launches["refusals"]["heads"]


def test_kernels_take_what_tensorrt_passes(kernels):
    """Input pointers, scalars, output pointers: Triton's scratch pointers are gone. No paths."""
    for name, ptx in kernels.items():
        entry = re.search(r"\.entry (\w+)\((.*?)\n\)", ptx, re.DOTALL)
        parameters = re.findall(r"\.param (\.\w+)", entry[2])
        assert parameters == (MERGE if name.startswith("merge") else PARTIAL), name
        numbers = map(int, re.findall(rf"\[{entry[1]}_param_(\d+)\]", ptx))
        assert set(numbers) == set(range(len(parameters))), name
        assert not re.search(r"\.(file|loc|section)\b", ptx) and str(ROOT) not in ptx


@pytest.mark.parametrize("sm", TARGETS)
def test_kernels_of_every_target_assemble(folder, kernels, sm):
    """By the ptxas that Triton brings along, and by the one on the path where there is one."""
    target, version = TARGETS[sm]
    mine = {name: ptx for name, ptx in kernels.items() if f".sm_{sm}." in name}
    assert {name.split(".")[0] for name in mine} == {"dense_partial_kernel", "merge_kernel"}
    for name, ptx in mine.items():
        assert f".target {target}\n" in ptx and f".version {version}\n" in ptx
        for assembler in assemblers():
            command = [assembler, f"--gpu-name={target}", folder / name, "-o", os.devnull]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"{assembler}: {done.stdout}{done.stderr}"


def assemblers() -> list[str]:
    """Programs that assemble PTX."""
    package = Path(importlib.util.find_spec("triton").origin).parent
    found = [str(package / "backends/nvidia/bin/ptxas"), shutil.which("ptxas")]
    return [path for path in found if path]


def test_bytes_are_the_same_in_every_process_and_version(folder, launches, tmp_path):
    """Another hash seed, an empty cache, and the plugin sources of the container's TensorRT."""
    again = drive(CONTAINER, tmp_path, "small", PYTHONHASHSEED="2")
    assert json.loads((again / "launches.json").read_text())["small"] == launches["small"]
    files = sorted(again.glob("*.ptx"))
    assert len(files) >= 4
    for path in files:
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_launches_give_what_the_oracle_gives(folder):
    """Grids, scalars and layouts as TensorRT gets them, run in Triton's interpreter."""
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    out = run("-m", "tests.plugin_interpreted", folder, **environment)
    assert out.count("tactics equal the oracle") == 2


def test_importing_the_plugins_needs_neither_triton_nor_tensorrt():
    """They are looked for only where a kernel is compiled or a network is built."""
    modules = "masw.plugins, masw.plugins.slot_attention, masw.plugins.slot_attention.op"
    run("-c", f"import sys, {modules}; assert not {{'triton', 'tensorrt'}} & set(sys.modules)")
