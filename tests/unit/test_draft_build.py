"""`masw-build draft`: plans against independent arithmetic, folders that fit, refusals by name."""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.main import get_command
from typer.testing import CliRunner

from masw.build.calibration import Calibration
from masw.build.commands import app
from masw.build.draft_plan import DraftPlan
from masw.build.draft_quantizer import calibration_ids
from masw.build.draft_scheme import SCHEMES, find_scheme
from masw.build.draft_settings import DraftSettings
from masw.engines.adaptor import AdaptorConfig
from masw.engines.architectures import architecture, names
from masw.engines.config import DecoderConfig
from masw.engines.decoder import Decoder
from masw.engines.draft_io import DraftIO
from masw.engines.engine_folder import ENGINE, Builder, DraftEngine, EngineFolderError
from masw.engines.recipe import load_recipe
from masw.engines.text import TextCodec
from masw.plugins.slot_attention.rule import MemoryRule
from tests.deployments import GPU_RECIPES
from tests.models import MODELS, save_model
from tests.tiny_tokenizers import TEXT, byte_level

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
        *(
            (["llama-3.1-8b", "--dry-run", f"--{name}", "16777217"], "is 16777217; .* or less")
            for name in ("sink", "window", "interval", "rollback", "max-sequences", "chunk")
        ),
        (["llama-3.1-8b", "--dry-run", "--quantization", "int8"], "'int8'; use one of none, fp8"),
        ([], "give MODEL, or --recipe"),
        (["llama-3.1-8b", "--dry-run", "--module", "x"], "TensorRT module is 'x'; use one of"),
        (
            ["llama-3.1-8b", "--dry-run", "--attention", "x"],
            "attention is 'x'; use plugin or native",
        ),
        (
            ["llama-3.1-8b", "--dry-run", "--module", "tensorrt_rtx", "--attention", "plugin"],
            "attention plugin needs module tensorrt; tensorrt_rtx has no such plugins",
        ),
        (["--recipe", "embedded", "--dry-run"], "recipe embedded has lane cpu; only lane gpu"),
        (["--recipe", "nothing", "--dry-run"], "recipe 'nothing' does not exist"),
        (["llama-3.1-8b", "--dry-run", "--root", "x"], "root is x; it is for --recipe only"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(options, message):
    result = call(*options, code=1)
    assert result.stderr.startswith("masw-build: ") and result.stderr.count("\n") == 1
    assert re.search(message, result.stderr)


def test_the_help_states_the_defaults_that_a_build_has():
    """typer's own defaults are never used, only shown."""
    shown = {each.name: each.default for each in get_command(app).commands["draft"].params}
    settings = asdict(DraftSettings())
    assert {name: shown[name] for name in settings if name != "memory"} == {
        name: value for name, value in settings.items() if name != "memory"
    }


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
    options[-1] = model / "config.json"  # a file
    assert "is not empty" in call(model, *options, code=1).stderr
    assert "is no model folder: it has no config.json" in call(tmp_path, *options, code=1).stderr
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


# --- quantised drafts


def test_a_plan_checks_the_adaptor_that_is_given(model_dir, tmp_path):
    """Its memory against the options, its tensors against the model."""
    own, file = Decoder.load(model_dir("llama")), tmp_path / "adaptor.safetensors"
    own.copy_adaptor(AdaptorConfig(own.fingerprint(), 8, 16, 4)).save(file)
    words = ["--adaptor", file, "--max-length", "512", "--dry-run", "--json"]
    assert json.loads(call(model_dir("llama"), *words, "--sink", "8").stdout)["capacity"]
    for option, value in (("sink", 9), ("window", 9), ("interval", 0), ("visibility", "never")):
        told = call(model_dir("llama"), *words, f"--{option}", value, code=1).stderr
        assert f"{option} is {value}, but adaptor {file} is for " in told
    told = call("llama-3.1-8b", *words, code=1).stderr
    assert "adaptor.safetensors: layers.0.k_proj.weight is" in told


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("name", names())
def test_quantised_weights_are_counted_layer_by_layer(name, scheme):
    plan, item = plan_of(name), 2
    with torch.device("meta"):
        decoder = Decoder(plan.model)
    saved = 0
    for path, layer in decoder.named_modules():
        if isinstance(layer, nn.Linear) and path != "lm_head":
            outputs, inputs = layer.weight.shape
            scales = inputs + outputs * inputs // 128 if scheme.name == "int4_awq" else 2
            saved += outputs * inputs * (item - scheme.bits / 8) - scales * item
    assert plan.weight_bytes - replace(plan, quantization=scheme.name).weight_bytes == saved


def test_blocks_that_do_not_divide_a_layer_are_refused():
    config = replace(architecture("llama-3.2-3b"), hidden_size=3008)
    io = DraftIO.of(config, RULE, max_sequences=1, max_length=1024)
    told = r"quantization is 'int4_awq'; hidden_size is 3008, .* blocks of 128: use .*none or fp8"
    with pytest.raises(ValueError, match=told):
        DraftPlan(config, io, quantization="int4_awq")
    DraftPlan(config, io, quantization="fp8")


@pytest.mark.parametrize(
    ("name", "capability", "instead"),
    [("fp8", "8.6", "int4_awq or none"), ("fp8", "7.5", "none"), ("int4_awq", "7.5", "none")],
)
def test_gpus_that_are_too_old_are_refused(name, capability, instead):
    with pytest.raises(
        ValueError, match=f"this GPU has {capability}: use .*quantization {instead}$"
    ):
        find_scheme(name).check_device(capability)
    for able in ("8.9", "9.0", "10.0", "12.0", None):
        find_scheme(name).check_device(able)


def test_versions_and_packages_that_are_missing_are_named(monkeypatch):
    old = SimpleNamespace(__name__="tensorrt", __version__="9.3", DataType=SimpleNamespace(FP8=1))
    with pytest.raises(ValueError, match=r"tensorrt 9\.3 has no data type INT4: use version 10"):
        SCHEMES["int4_awq"].check_module(old)
    monkeypatch.setitem(sys.modules, "modelopt.torch.export", None)
    with pytest.raises(ImportError, match=r"ModelOpt cannot be imported .* pip install"):
        SCHEMES["fp8"].check_module(old)


def test_what_a_calibration_needs_is_checked_first(tmp_path):
    model = save_model(tmp_path / "model", "llama")
    options = [model, "--interval", "0", "--max-length", "512", "--out", tmp_path / "e"]
    rtx = [*options, "--module", "tensorrt_rtx"]
    text = ["--calibration", tmp_path / "no.txt"]
    assert "only --quantization fp8 or int4_awq reads it" in call(*rtx, *text, code=1).stderr
    fp8 = [*rtx, "--quantization", "fp8"]
    assert "no.txt does not exist" in call(*fp8, *text, code=1).stderr
    assert "has no tokenizer.json" in call(*fp8, code=1).stderr


def test_calibration_reads_a_text_or_the_manual(tmp_path):
    codec, few = TextCodec(byte_level(tmp_path)), replace(SCHEMES["fp8"], samples=3, length=64)
    (tmp_path / "a.txt").write_text(TEXT * 8)
    ids = codec.tokenizer(TEXT * 8)["input_ids"]
    text = Calibration(tmp_path / "a.txt", few.samples, few.length)
    assert calibration_ids(codec, few, text) == [ids[:64], ids[64:128], ids[128:192]]
    manual = calibration_ids(codec, few, None)
    start = codec.tokenizer("\n\n".join(topics[name] for name in sorted(topics)[:3]))["input_ids"]
    assert manual == [start[:64], start[64:128], start[128:192]]


# --- recipes


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_every_gpu_recipe_is_planned_without_files(name, tmp_path):
    recipe = load_recipe(name)
    result = call("--recipe", name, "--dry-run", "--json")
    told = json.loads(result.stdout)
    plan = DraftPlan(
        recipe.draft_config(),
        DraftIO.of(
            recipe.draft_config(),
            recipe.memory,
            max_sequences=recipe.limits.max_sequences,
            max_length=recipe.limits.max_length,
            chunk=recipe.limits.chunk,
            dtype=recipe.draft.dtype,
            logits=True,
        ),
        recipe.limits.max_draft_tokens,
        recipe.draft.quantization,
    )
    assert told == json.loads(json.dumps(plan.as_dict()))
    assert DraftPlan.of(recipe) == plan  # what the preflight estimates
    assert result.stderr.endswith(f"masw-build draft --recipe {name}\n")
    # Files that are not there yet do not keep a root from being planned.
    with_root = call("--recipe", name, "--root", tmp_path, "--dry-run", "--json")
    assert json.loads(with_root.stdout) == told


def test_options_that_are_given_win_over_the_recipe():
    options = ["--max-sequences", "2", "--quantization", "fp8", "--interval", "4", "--no-logits"]
    result = call("--recipe", "llama-3.1-8b-3b", *options, "--dry-run", "--json")
    told = json.loads(result.stdout)
    assert told["quantization"] == "fp8"
    assert told["capacity"] == 128 + 128 + 16 + (32_768 - 128) // 4
    assert " --no-logits" in result.stderr and "--interval 4" in result.stderr


def test_a_recipe_names_its_files(tmp_path):
    settings = DraftSettings.of(load_recipe("llama-3.1-8b-3b"), tmp_path)
    assert settings.model == str(tmp_path / "models" / "draft")
    assert settings.adaptor == tmp_path / "models" / "adaptor.safetensors"
    assert settings.out == tmp_path / "engines" / "draft"
    settings.adaptor.parent.mkdir(parents=True)
    told = call("--recipe", "llama-3.1-8b-3b", "--root", tmp_path, code=1).stderr
    assert "adaptor.safetensors is not a safetensors file" in told


def test_a_folder_or_an_adaptor_of_another_recipe_is_refused(tmp_path, model_dir):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "draft").symlink_to(model_dir("llama"))
    options = ["--recipe", "llama-3.1-8b-3b", "--root", tmp_path]
    told = call(*options, "--dry-run", code=1).stderr
    assert "vocab_size is 307, but llama-3.2-3b has 128256" in told
    own = Decoder.load(model_dir("llama"))
    header = AdaptorConfig(own.fingerprint(), 128, 128, 4)
    own.copy_adaptor(header).save(tmp_path / "models" / "adaptor.safetensors")
    plan = call(*options[:2], "--root", tmp_path / "none", "--interval", "0", "--dry-run", "--json")
    assert json.loads(plan.stdout)["capacity"] == 128 + 128 + 16  # slots need no adaptor then
    told = call(*options, code=1).stderr
    assert re.search(r"is for MemoryRule.*interval=4.*recipe states .*interval=8", told)
