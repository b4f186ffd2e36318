"""`masw-build check`: a deployment that is right passes; each thing that is wrong is named with its
remedy; a machine that cannot tell says so."""

import json
import re
import shutil
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from masw.build.checks.finding import Finding, State
from masw.build.checks.machine import Machine
from masw.build.checks.subject import Subject
from masw.build.commands import app
from masw.build.deployment import lay_out
from masw.build.pair_folder import missing_parts, recipe_parts, write_pair_folder
from masw.build.preflight import preflight
from masw.engines import architectures
from masw.engines.adaptor import AdaptorConfig
from masw.engines.decoder import Decoder
from masw.engines.engine_folder import EngineFolderError
from masw.engines.pair import Pair
from masw.triton_repo.targets import loop_limits, target_engine
from tests.deployments import (
    DRAFT,
    GPUS,
    MACHINE,
    change_json,
    copy_deployment,
    failures,
    recipe,
    tiny_architectures,
    write_deployment,
)


@pytest.fixture(scope="module")
def stated():
    """The recipe, in a world that knows the tiny architectures too."""
    with pytest.MonkeyPatch.context() as patch:
        known = architectures._known() | tiny_architectures()
        patch.setattr(architectures, "_known", lambda: known)
        yield recipe()


@pytest.fixture(scope="module")
def written(stated, tmp_path_factory):
    return write_deployment(tmp_path_factory.mktemp("whole") / "root", stated)


@pytest.fixture
def places(written, stated, tmp_path):
    """A deployment of one's own to break."""
    return copy_deployment(written, tmp_path / "root", stated)


def checked(stated, places, machine=MACHINE, **options) -> dict[str, Finding]:
    """All findings by name."""
    findings = preflight(Subject(stated, places, machine, **options))
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


def test_a_whole_deployment_passes_every_check(stated, places):
    findings = checked(stated, places)
    assert {each.state for each in findings.values()} == {State.OK}, failures(findings)
    assert len(findings) >= 25
    assert "300 equal tokens; padded to 307 and 307" in findings["tokenizers"].found


# (what is done to the files, check that fails, what it says, remedy)
BROKEN_TARGET = [
    (
        {"build_config__speculative_decoding_mode": 1},
        "target engine: speculation",
        "speculative_decoding_mode is 1",
        "--speculative_decoding_mode draft_tokens_external",
    ),
    (
        {"build_config__max_draft_len": 0},
        "draft length",
        "max_draft_tokens is 8; the engine's max_draft_len is 0",
        "--max_draft_len 8 .*or lower it to 0 in the recipe",
    ),
    (
        {"build_config__kv_cache_type": "CONTINUOUS"},
        "target engine: prefix reuse",
        "kv_cache_type is CONTINUOUS",
        "--kv_cache_type paged",
    ),
    (
        {"build_config__plugin_config__use_paged_context_fmha": False},
        "target engine: prefix reuse",
        "use_paged_context_fmha is False",
        "--use_paged_context_fmha enable",
    ),
    (
        {"build_config__plugin_config__tokens_per_block": 64},
        "target engine: block",
        "tokens_per_block is 64; target.tokens_per_block is 32",
        "--tokens_per_block 32",
    ),
    (
        {"build_config__max_seq_len": 519},
        "target engine: max_seq_len",
        r"max_seq_len is 519; limits need max_length \+ the engine's max_draft_len = 520",
        "--max_seq_len 512 ",  # trtllm-build adds the draft length itself
    ),
    (
        {"build_config__max_draft_len": 9},  # kept back of 520 even where 8 are the most used
        "target engine: max_seq_len",
        "max_seq_len is 520; .* = 521",
        "--max_seq_len 512 ",
    ),
    (
        {"build_config__max_batch_size": 1},
        "target engine: max_batch_size",
        "max_batch_size is 1; limits need max_sequences = 2",
        "--max_batch_size 2",
    ),
    (
        {"build_config__max_num_tokens": 17},
        "target engine: max_num_tokens",
        "max_num_tokens is 17; .* = 18",
        "--max_num_tokens 18",
    ),
    (
        {"pretrained_config__dtype": "float16"},
        "target engine: dtype",
        "dtype is float16; target.dtype is bfloat16",
        "checkpoint of dtype bfloat16",
    ),
    (
        {"pretrained_config__quantization__quant_algo": "FP8"},
        "target engine: quantization",
        "quant_algo is FP8; target.quantization none is None",
        "checkpoint of quantization none",
    ),
    (
        {"pretrained_config__quantization__kv_cache_quant_algo": "INT8"},
        "target engine: KV dtype",
        "kv_cache_quant_algo is INT8; target.kv_cache is auto",
        "KV cache is auto",
    ),
    (
        {"pretrained_config__mapping__tp_size": 4, "pretrained_config__mapping__world_size": 4},
        "target engine: ranks",
        "built for TP 4 x PP 1, world size 4; the recipe has TP 2 x PP 1",
        "checkpoint for TP 2 x PP 1",
    ),
    (
        {"pretrained_config__logits_dtype": "float16"},
        "target engine: logits",
        "logits_dtype is float16; the draft's logits are float32",
        "--logits_dtype float32",
    ),
    (
        {"version": "1.1.0"},
        "target engine: version",
        r"built by 1\.1\.0, installed 1\.2\.1",
        r"rebuild with version 1\.2\.1",
    ),
]


@pytest.mark.parametrize(("change", "name", "found", "remedy"), BROKEN_TARGET)
def test_a_wrong_target_engine_is_named_with_the_flag(stated, places, change, name, found, remedy):
    change_json(places.target_engine / "config.json", **change)
    broken = failures(checked(stated, places))
    assert broken.keys() - {"target engine"} == {name}
    assert ("target engine" in broken) == server_refuses(stated, places)
    assert re.search(found, broken[name].found) and re.search(remedy, broken[name].remedy)
    assert f"masw-build target tiny --root {places.root}" in broken[name].remedy


def server_refuses(stated, places) -> bool:
    """Whether the loop's model would not start with this target engine."""
    config = SimpleNamespace(target={"engine": str(places.target_engine)})
    try:
        loop_limits(target_engine(config), Pair.of(stated))
    except EngineFolderError:
        return True
    return False


@pytest.mark.parametrize("name", ["use_paged_context_fmha", "_use_paged_context_fmha"])
@pytest.mark.parametrize("value", [True, "enable", False, "disable", None])
def test_paged_context_is_read_as_the_server_reads_it(stated, places, name, value):
    plugins = {"tokens_per_block": 32, name: value}
    change_json(places.target_engine / "config.json", build_config__plugin_config=plugins)
    wanted = set() if value in (True, "enable") else {"target engine: prefix reuse"}
    broken = failures(checked(stated, places)).keys()
    assert broken - {"target engine"} == wanted
    assert ("target engine" in broken) == server_refuses(stated, places) == bool(wanted)


def test_an_engine_that_lacks_what_the_server_reads_fails(stated, places):
    path = places.target_engine / "config.json"
    data = json.loads(path.read_text())
    del data["pretrained_config"]["vocab_size"]
    path.write_text(json.dumps(data))
    broken = failures(checked(stated, places))
    assert broken.keys() == {"target engine"} and server_refuses(stated, places)
    assert "lacks 'vocab_size'; build it again" in broken["target engine"].found


def remove_rank(places):
    (places.target_engine / "rank1.engine").unlink()


def remove_target_engine(places):
    shutil.rmtree(places.target_engine)


def spoil_target_engine(places):
    (places.target_engine / "config.json").write_text("[]")


def remove_draft_engine(places):
    shutil.rmtree(places.draft_engine)


def draft_engine(**changes):
    return lambda places: change_json(places.draft_engine / "config.json", **changes)


def remove_adaptor(places):
    places.adaptor.unlink()


def spoil_adaptor(places):
    places.adaptor.write_bytes(b"pickle")


def adaptor_of_another_memory(places):
    decoder = Decoder.load(places.draft_model)
    decoder.copy_adaptor(AdaptorConfig(decoder.fingerprint(), 16, 16, 4)).save(places.adaptor)


def adaptor_of_another_model(places):
    decoder = Decoder.load(places.target_model)
    decoder.copy_adaptor(AdaptorConfig(decoder.fingerprint(), 16, 16, 8)).save(places.adaptor)


def another_token(places):
    tokens = places.draft_model / "tokenizer.json"
    data = json.loads(tokens.read_text())
    vocab = data["model"]["vocab"]
    (name,) = [token for token, number in vocab.items() if number == 200]
    vocab["strange"] = vocab.pop(name)
    tokens.write_text(json.dumps(data))


def remove_target_model(places):
    shutil.rmtree(places.target_model)


def another_target_model(places):
    change_json(places.target_model / "config.json", num_hidden_layers=4)


def another_pair(places):
    change_json(places.pair / "pair.json", max_length=256)


def remove_pair(places):
    shutil.rmtree(places.pair)


def edit_repository(places):
    path = places.repository / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 2", "max_batch_size: 3"))


def unfill_repository(places):
    (places.repository / "masw_draft" / "config.pbtxt").write_text("name: ${name}")


@pytest.mark.parametrize(
    ("change", "name", "found", "remedy"),
    [
        (remove_rank, "target engine: ranks", r"missing rank1\.engine", "masw-build target tiny"),
        (remove_target_engine, "target engine", "has no config.json", "masw-build target tiny"),
        (
            spoil_target_engine,
            "target engine",
            "has no pretrained_config and",
            "remove .*/engines/target, then build it: masw-build target tiny",
        ),
        (remove_draft_engine, "draft engine", "holds none", "masw-build draft --recipe"),
        (
            draft_engine(format="masw-draft-engine-0"),
            "draft engine",
            "not of format",
            "masw-build draft",
        ),
        (
            draft_engine(builder__version="10.13.3"),
            "draft engine: device",
            r"tensorrt version 10\.13\.3, not 10\.14",
            "on this machine: remove .*/engines/draft, then build: masw-build draft",
        ),
        (
            draft_engine(builder__compute_capability="8.0"),
            "draft engine: device",
            r"compute capability 8\.0, not 9\.0",
            "on this machine: remove .*/engines/draft, then build: masw-build draft",
        ),
        (
            draft_engine(io__max_sequences=1),
            "draft engine",
            "max_sequences is 2; the engine allows up to 1",
            "masw-build draft --recipe",
        ),
        (
            draft_engine(draft_tokens=4),
            "draft engine",
            "max_draft_tokens is 8; the engine allows up to 4",
            "masw-build draft",
        ),
        (
            draft_engine(io__dtype="float16"),
            "draft engine",
            "float16, .*draft.dtype is bfloat16",
            "set draft.dtype to float16, or remove .*/engines/draft, then build: masw-build draft",
        ),
        (
            draft_engine(model__layers=7),
            "draft engine",
            "not llama-tied",
            "change draft.architecture",
        ),
        (
            draft_engine(tokenizer="f" * 64),
            "draft engine",
            "built for tokenizer ffff",
            "masw-build draft",
        ),
        (spoil_adaptor, "adaptor", "not a safetensors file", "masw-train pretrain"),
        (
            adaptor_of_another_memory,
            "adaptor",
            r"interval=4.*the recipe has .*interval=8",
            "change memory in the recipe",
        ),
        (adaptor_of_another_model, "adaptor", "layers.2.k_proj.weight", "masw-train pretrain"),
        (another_token, "tokenizers", "token 200 is '.*' in the target and 'strange'", "choose"),
        (remove_target_model, "target model", "has no config.json", "hf download x/llama "),
        (another_target_model, "target model", "layers is 4, but llama has 3", "hf download"),
        (another_pair, "pair", "max_length=256", "masw-build repository tiny"),
        (remove_pair, "pair", "has no pair.json", "masw-build repository tiny"),
        (edit_repository, "repository", "tensorrt_llm absent or not", "masw-build repository tiny"),
        (unfill_repository, "repository", "masw_draft absent or not", "masw-build repository"),
    ],
)
def test_broken_files_are_named_with_what_makes_them(stated, places, change, name, found, remedy):
    change(places)
    broken = failures(checked(stated, places))
    assert name in broken, broken
    assert re.search(found, broken[name].found), broken[name]
    assert re.search(remedy, broken[name].remedy), broken[name]
    assert str(places.root) in broken[name].remedy or name == "tokenizers"
    related = {"pair", "draft engine", "tokenizers", "target model", "target engine"}
    assert set(broken) <= {name} | related  # these share the broken part


def test_a_repository_of_either_switch_is_the_recipes(stated, places):
    lay_out(stated, places, decoupled=not stated.serving.decoupled)
    assert checked(stated, places)["repository"].state == State.OK


def test_without_its_model_the_draft_is_compared_by_fingerprint(stated, places):
    shutil.rmtree(places.draft_model)
    findings = checked(stated, places)
    assert not failures(findings) and "draft model" not in findings
    assert findings["tokenizers"].state == State.UNKNOWN
    assert findings["tokenizers"].found.endswith("does not exist; see draft engine")
    tokens = places.target_model / "tokenizer.json"
    change_json(tokens, added_tokens=[{"id": 300, "content": "more"}])
    broken = failures(checked(stated, places))
    assert broken.keys() == {"draft engine"}
    assert "built for tokenizer" in broken["draft engine"].found
    tokens.write_text("{}")
    assert "is no tokenizer.json" in failures(checked(stated, places))["draft engine"].found


@pytest.mark.parametrize(
    ("rows", "state", "found"),
    [
        (320, State.OK, "300 equal tokens; padded to 307 and 320"),
        (299, State.FAILED, "padded to 307 and 299, which is less than there are tokens"),
    ],
)
def test_padding_may_differ_but_not_cut_tokens_off(stated, places, monkeypatch, rows, state, found):
    known = architectures._known()
    padded = known | {DRAFT: known[DRAFT] | {"vocab_size": rows}}
    monkeypatch.setattr(architectures, "_known", lambda: padded)
    told = checked(stated, places)["tokenizers"]
    assert told.state == state and found in told.found


def test_tokenizers_of_other_bytes_and_the_same_tokens_are_equal(stated, places):
    """So a draft may come with another template or another order of its file."""
    change_json(places.target_model / "tokenizer.json", normalizer=None, truncation=None)
    files = [model / "tokenizer.json" for model in (places.target_model, places.draft_model)]
    assert files[0].read_bytes() != files[1].read_bytes()
    assert not failures(checked(stated, places))


@pytest.mark.parametrize(
    ("machine", "name", "found", "remedy"),
    [
        ({"gpus": GPUS[:2]}, "GPUs", "2 GPUs, none numbered 2", "change target.gpus"),
        (
            {"versions": {"tensorrt-llm": "1.3.0", "tensorrt": "10.14.1.48"}},
            "TensorRT-LLM",
            r"1\.3\.0; needed 1\.2\.x",
            "inside the container .*26.04-trtllm",
        ),
        (
            {"versions": {"tensorrt-llm": "1.2.1"}},
            "TensorRT",
            r"not installed; needed 10\.14\.x",
            "inside the container",
        ),
        ({"container": "25.10"}, "container", r"release 25\.10; needed 26\.04", "inside the"),
        ({"cuda": (12, 9)}, "CUDA driver", r"12\.9; needed 13\.0 or newer", "update the NVIDIA"),
        ({"mpirun": None}, "MPI", "leader, 2 ranks: no mpirun", "inside the container"),
        (
            {"shared_memory": 64 * 2**20},
            "shared memory",
            "has 64 MiB free; needed about 133",
            "--shm-size=1g",
        ),
    ],
)
def test_a_wrong_machine_is_named(stated, places, machine, name, found, remedy):
    broken = failures(checked(stated, places, replace(MACHINE, **machine)))
    assert name in broken
    assert re.search(found, broken[name].found) and re.search(remedy, broken[name].remedy)


@pytest.mark.parametrize(
    ("section", "capability", "needed"),
    [
        ({"target": {"quantization": "fp8"}}, "8.6", 89),
        ({"target": {"kv_cache": "fp8"}}, "8.0", 89),
        ({"target": {"quantization": "nvfp4"}}, "9.0", 100),
        ({"target": {"quantization": "int4_awq"}}, "7.5", 80),
        ({"draft": {"quantization": "fp8"}}, "8.6", 89),
        ({}, "7.5", 80),
    ],
)
def test_an_old_gpu_is_named_with_what_it_lacks(stated, places, section, capability, needed):
    old = tuple(replace(gpu, compute_capability=capability) for gpu in GPUS)
    role = next(iter(section), "target")
    findings = checked(recipe(**section), places, replace(MACHINE, gpus=old))
    found = findings[f"GPU architecture: {role}"]
    sm = int(capability.replace(".", ""))
    assert found.state == State.FAILED and f"is SM{sm}; " in found.found
    assert found.found.endswith(f"needs SM{needed}") and f"set {role}.quantization" in found.remedy
    newest = tuple(replace(gpu, compute_capability="10.0") for gpu in GPUS)
    findings = checked(recipe(**section), places, replace(MACHINE, gpus=newest))
    assert findings[f"GPU architecture: {role}"].state == State.OK


def test_taken_ports_are_named_with_their_holder(stated, places):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", stated.serving.grpc_port))
        holder.listen()
        found = failures(checked(stated, places))["ports"]
    assert f"grpc port {stated.serving.grpc_port}" in found.found
    assert "free it, or state serving.http_port, grpc_port" in found.remedy


def test_a_damaged_file_fails_its_own_part_and_leaves_the_others(stated, places):
    """Each is what a full disk or a careless edit leaves behind."""
    whole = {name for name, finding in checked(stated, places).items() if finding.state == "ok"}
    for damage in ("", "null", "[]", '{"memory": 1}'):
        (places.pair / "pair.json").write_text(damage)
        told = checked(stated, places)
        (broken,) = [finding for finding in told.values() if finding.state == "failed"]
        assert broken.name in ("pair", "layout") and broken.remedy
        assert len(whole - told.keys()) <= 2  # the repository stands beside the pair


def test_a_pair_laid_out_before_the_engine_was_built_must_be_laid_out_again(stated, places):
    """It would serve the draft in torch, slowly and without a word."""
    (places.pair / "draft").unlink()
    (places.pair / "draft").symlink_to(places.draft_model)
    broken = failures(checked(stated, places))
    assert broken.keys() == {"pair"} and "another draft" in broken["pair"].found
    assert "masw-build repository tiny" in broken["pair"].remedy


def test_a_draft_without_slots_needs_no_adaptor(stated, places):
    memory = {"sink": 8, "window": 8, "rollback": 16, "interval": 0}
    write_pair_folder(places.pair, Pair.of(recipe(memory=memory)), recipe_parts(places))
    places.adaptor.unlink()
    assert missing_parts(places.pair) == []


def test_memory_that_does_not_fit_says_what_to_change(stated, places):
    small = tuple(replace(gpu, free=1.0) for gpu in GPUS)
    broken = failures(checked(stated, places, replace(MACHINE, gpus=small)))
    assert broken.keys() == {"memory: target", "memory: draft"}
    assert "raise target.tensor_parallel" in broken["memory: target"].remedy
    assert "limits.max_sequences" in broken["memory: draft"].remedy


def test_lengths_beyond_the_model_are_refused(stated, places):
    long = recipe(limits={"max_length": 2048})
    found = failures(checked(long, places))["plan"]
    assert "limits.max_length is 2048; llama has 1024 positions" in found.found
    assert found.remedy == "change these numbers in the recipe"


def test_every_failure_has_a_remedy():
    with pytest.raises(ValueError, match="'ports' is a failure; give its remedy"):
        Finding("ports", State.FAILED, "taken")


def test_a_deployment_that_is_right_exits_with_0(stated, places, monkeypatch):
    monkeypatch.setattr(Machine, "probe", classmethod(lambda cls: MACHINE))
    file = places.root / "tiny.yaml"
    file.write_text(json.dumps(stated.model_dump(mode="json")))
    words = ["check", str(file), "--root", str(places.root), "--host", "127.0.0.1"]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert ", 0 failed, 0 unknown" in told.stdout
