"""`masw-build draft`: plans against independent arithmetic, folders that fit, refusals by name."""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from masw.build.commands import app
from masw.build.draft_plan import DraftPlan
from masw.engines.adaptor import AdaptorConfig
from masw.engines.architectures import architecture, names
from masw.engines.config import DecoderConfig
from masw.engines.decoder import Decoder
from masw.engines.draft_io import DraftIO
from masw.engines.engine_folder import ENGINE, Builder, DraftEngine, EngineFolderError
from masw.plugins.slot_attention.rule import MemoryRule
from tests.models import MODELS, save_model

RULE = MemoryRule(128, 128, 16, 8)


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["draft", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def plan_of(name, **sizes):
    config, defaults = architecture(name), {"max_sequences": 4, "max_length": 32_768}
    sizes = defaults | {"dtype": "bfloat16"} | sizes
    return DraftPlan(config, DraftIO.of(config, RULE, **sizes))


@pytest.mark.parametrize("name", names())
def test_weights_are_those_of_decoder_and_adaptor(name):
    plan = plan_of(name)
    with torch.device("meta"):
        decoder = Decoder(plan.model)
        mirror = 2 * plan.model.layers * plan.model.kv_heads * plan.model.head_dim
    counted = sum(parameter.numel() for parameter in decoder.parameters())
    assert plan.weight_count == counted + mirror * plan.model.hidden_size


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_every_family_are_counted(model_dir, name):
    """Biases and QK norms included, against the tensors of decoder and adaptor."""
    decoder = Decoder.load(model_dir(name))
    rule = MemoryRule(8, 8, 8, 4)
    sizes = {"max_sequences": 1, "max_length": 64, "dtype": "float32"}
    plan = DraftPlan(decoder.config, DraftIO.of(decoder.config, rule, **sizes))
    adaptor = decoder.copy_adaptor(AdaptorConfig("", 8, 8, 4))
    weights = [p for module in (decoder, adaptor) for p in module.parameters()]
    counted = {weight.data_ptr(): weight.numel() for weight in weights}  # a tied head is one weight
    assert plan.weight_count == sum(counted.values())


def test_memory_is_what_slot_memory_allocates(model_dir):
    decoder = Decoder.load(model_dir("llama"))
    io = DraftIO.of(decoder.config, RULE, max_sequences=3, max_length=1024, dtype="float32")
    plan = DraftPlan(decoder.config, io)
    for row in plan.memory_rows((300, 1024)):
        memory = decoder.new_memory(RULE, 1, row.length)
        full = decoder.new_memory(MemoryRule.full(row.length), 1, row.length)
        assert (row.bytes, row.full_bytes) == (memory.bytes_per_row, full.bytes_per_row)
    assert plan.memory_bytes >= 3 * memory.bytes_per_row  # entries are rounded up to eight


def test_a_plan_prints_shapes_memory_and_the_command_for_the_container():
    options = ["--dry-run", "--max-sequences", "2", "--dtype", "float16"]
    result = call("llama-3.1-8b", *options)
    shown = " ".join(result.stdout.split())
    assert "memory_k.0 float16 2 × 8 × 4352 × 128" in shown
    for row in ("8,192 1,280 160 1,024 84%", "32,768 4,352 544 4,096 87%", "131,072 16,640"):
        assert row in shown
    assert "weights 15.46" in shown
    command = "masw-build draft llama-3.1-8b --max-sequences 2 --dtype float16"
    assert command in result.stderr and "tritonserver:26.04-trtllm-python-py3" in result.stderr


def test_the_plan_is_one_json_object_for_machines():
    told = json.loads(call("llama-3.2-3b", "--dry-run", "--json").stdout)
    assert told["weights"] == plan_of("llama-3.2-3b").weight_count
    assert [profile["positions"] for profile in told["profiles"]] == [[2, 2, 4], [1, 576, 576]]
    assert told["memory"][1] == {
        "length": 32_768,
        "entries": 128 + 128 + 16 + (32_768 - 128) // 8,
        "bytes": 4352 * 2 * 28 * 8 * 128 * 2,
        "full_bytes": 32_768 * 2 * 28 * 8 * 128 * 2,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["llama-3.1-8b"], "is no folder; a build needs the model's weights"),
        (["gpt", "--dry-run"], "architecture is 'gpt'; known: llama-3.2-3b"),
        (["llama-3.1-8b", "--dry-run", "--draft-tokens", "17"], "draft_tokens is 17.*R = 16"),
        (["llama-3.1-8b", "--dry-run", "--max-length", "140000"], "max_length is 140000.*131072"),
        (["llama-3.1-8b", "--dry-run", "--dtype", "int3"], "dtype is 'int3'"),
        (["llama-3.1-8b", "--dry-run", "--window", "0"], "window is 0"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(options, message):
    result = call(*options, code=1)
    assert result.stderr.startswith("masw-build: ") and result.stderr.count("\n") == 1
    assert re.search(message, result.stderr)


def test_a_build_checks_what_is_cheap_first(tmp_path):
    model = save_model(tmp_path / "model", "llama")
    lengths = ["--max-length", "512"]
    assert "need --adaptor" in call(model, *lengths, "--out", tmp_path / "e", code=1).stderr
    assert "give --out" in call(model, *lengths, code=1).stderr
    told = call(model, *lengths, "--architecture", "llama-3.1-8b", "--dry-run", code=1).stderr
    assert "vocab_size is 307, but llama-3.1-8b has 128256" in told
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    options = [*lengths, "--interval", "0", "--out", tmp_path / "full"]
    assert "is not empty" in call(model, *options, code=1).stderr
    options[-1] = tmp_path / "new"
    told = call(model, *options, "--module", "tensorrt", code=1).stderr
    assert "tensorrt is not installed: run in NVIDIA's TensorRT-LLM container" in told
    options += ["--module", "tensorrt_rtx", "--attention", "plugin"]
    told = call(model, *options, code=1).stderr
    assert "attention plugin needs module tensorrt" in told
    assert not (tmp_path / "new").exists()


def test_a_device_that_is_too_small_is_refused():
    plan = plan_of("llama-3.1-8b")
    with pytest.raises(ValueError, match=r"needs about 17\.. GiB, card has 8\.0 GiB free; lower"):
        plan.check_device(8 * 2**30, "card")
    plan.check_device(80 * 2**30, "card")


@pytest.fixture
def engine(tmp_path, model_dir):
    config = DecoderConfig.load(model_dir("llama-llama3"))
    io = DraftIO.of(config, RULE, max_sequences=2, max_length=512)
    made = DraftEngine(config, io, 5, Builder("tensorrt", "10.14", "plugin", "9.0"), "b" * 64)
    made.write(tmp_path)
    (tmp_path / ENGINE).write_bytes(b"engine")
    return made


def test_an_engine_folder_states_everything_and_comes_back(engine, tmp_path):
    assert DraftEngine.load(tmp_path) == engine
    engine.check_use("b" * 64, version="10.14")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ({"base": "c" * 64}, "built for base model b+, not c+"),
        ({"base": "b" * 64, "tokenizer": "d" * 64}, "built for tokenizer None, not d+"),
        ({"base": "b" * 64, "version": "10.9"}, r"tensorrt version 10\.14, not 10\.9"),
    ],
)
def test_an_engine_is_refused_for_another_use(engine, use, message):
    with pytest.raises(EngineFolderError, match=message):
        engine.check_use(**use)


def test_a_damaged_engine_folder_is_refused_by_name(engine, tmp_path):
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    for change, message in (
        ({"format": "other"}, "not of format masw-draft-engine-1"),
        ({"draft_tokens": 17}, "draft_tokens is 17; the rollback window R = 16"),
        ({"surplus": 1}, "does not fit this version: .*surplus"),
        ({"io": {k: v for k, v in good["io"].items() if k != "chunk"}}, "DraftIO lacks chunk"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(EngineFolderError, match=message):
            DraftEngine.load(tmp_path)
    path.write_text("{")
    with pytest.raises(EngineFolderError, match="is no JSON"):
        DraftEngine.load(tmp_path)
    (tmp_path / ENGINE).unlink()
    with pytest.raises(EngineFolderError, match="is no draft engine"):
        DraftEngine.load(tmp_path)


def test_draft_tokens_beyond_the_rollback_window_are_refused():
    with pytest.raises(ValueError, match="draft_tokens is 9; the rollback window R = 4"):
        replace(
            plan_of("llama-3.2-3b"),
            io=DraftIO.of(
                architecture("llama-3.2-3b"),
                replace(RULE, rollback=4),
                max_sequences=1,
                max_length=1024,
            ),
            draft_tokens=9,
        )


def test_an_engine_is_really_built_without_a_gpu(model_dir, tmp_path):
    """TensorRT-RTX builds on a CPU; in a process of its own, as the command runs."""
    model = model_dir("qwen3")
    decoder = Decoder.load(model)
    adaptor = tmp_path / "a.safetensors"
    decoder.copy_adaptor(AdaptorConfig(decoder.fingerprint(), 16, 16, 4)).save(adaptor)
    out = tmp_path / "engines" / "tiny"
    sizes = ["--max-length", "512", "--chunk", "64", "--max-sequences", "2", "--dtype", "float16"]
    command = [sys.executable, "-m", "masw.build.commands", "draft", str(model), *sizes]
    command += ["--adaptor", str(adaptor), "--module", "tensorrt_rtx", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    engine = DraftEngine.load(out)
    assert engine.model == decoder.config and engine.base == decoder.fingerprint()
    assert engine.io.rule == MemoryRule(16, 16, 16, 4)
    assert (engine.builder.module, engine.builder.attention) == ("tensorrt_rtx", "native")
    assert engine.adaptor == hashlib.sha256(adaptor.read_bytes()).hexdigest()
    weights = sum(2 * p.numel() for p in decoder.parameters())
    assert (out / ENGINE).stat().st_size > weights
    assert {path.name for path in out.parent.iterdir()} == {"tiny"}  # no scratch is left
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 1 and "is not empty" in again.stderr


def test_an_adaptor_of_another_base_is_refused(model_dir, tmp_path):
    adaptor = tmp_path / "a.safetensors"
    other = Decoder.load(model_dir("llama-tied"))
    other.copy_adaptor(AdaptorConfig("f" * 64, 16, 16, 4)).save(adaptor)
    sizes = ["--max-length", "512", "--module", "tensorrt_rtx", "--out", tmp_path / "e"]
    told = call(model_dir("llama-tied"), *sizes, "--adaptor", adaptor, code=1).stderr
    assert "was made for base model ffffffffffff" in told
    assert not (tmp_path / "e").exists()
