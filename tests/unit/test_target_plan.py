"""Plans of TensorRT-LLM targets: every shipped recipe, arithmetic by hand, refusals by name."""

import json
import math
import re
import shlex
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from typer.testing import CliRunner

from masw.build import output_folder, target_checkpoint
from masw.build.calibration import Calibration
from masw.build.commands import app
from masw.build.modelopt import settings
from masw.build.target_plan import TargetPlan
from masw.engines.architectures import names
from masw.engines.recipe import Recipe, load_recipe
from tests.deployments import GPU_RECIPES
from tests.models import hf_config, save_model
from tests.targets import NAME, SIZES, known, plan_of, recipe_data
from tests.tiny_tokenizers import byte_level


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["target", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_every_shipped_recipe_has_a_config_a_table_and_a_command(name):
    recipe = load_recipe(name)
    shown = call(name, "--config-only").stdout
    config, end = json.JSONDecoder().raw_decode(shown)
    model, target = recipe.target_config(), recipe.target
    assert config["architecture"] == "LlamaForCausalLM"
    assert config["rotary_scaling"]["rope_type"] == "llama3" and config["rotary_base"] == 500_000
    assert config["mapping"]["tp_size"] == target.tensor_parallel
    rows = -(-model.vocab_size // target.tensor_parallel)
    assert f"{rows} × {model.hidden_size}" in shown[end:]
    words = shlex.split(shown.splitlines()[-1])
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert words[0] == "trtllm-build"
    assert (
        options.items()
        >= {
            "--speculative_decoding_mode": "draft_tokens_external",
            "--max_draft_len": str(target.max_draft_len),
            "--max_batch_size": str(recipe.limits.max_sequences),
            "--max_seq_len": str(recipe.limits.max_length),
            "--max_input_len": str(recipe.limits.max_length),
            "--max_num_tokens": str(target.max_num_tokens),
            "--kv_cache_type": "paged",
            "--use_paged_context_fmha": "enable",
            "--tokens_per_block": str(target.tokens_per_block),
            "--gemm_plugin": "auto",
            "--workers": str(target.ranks),
        }.items()
    )
    assert "tritonserver:26.04-trtllm-python-py3" in shown


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_bytes_of_all_ranks_are_the_models(name):
    """Against a Hugging Face model of the architecture, made without memory."""
    told = json.loads(call(name, "--config-only", "--json").stdout)
    recipe = load_recipe(name)
    m, tp = recipe.target_config(), recipe.target.tensor_parallel
    config = transformers.LlamaConfig(
        vocab_size=m.vocab_size,
        hidden_size=m.hidden_size,
        intermediate_size=m.intermediate_size,
        num_hidden_layers=m.layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads,
        head_dim=m.head_dim,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)  # on every rank
    count = sum(p.numel() for p in model.parameters()) + (tp - 1) * norms
    assert m.kv_heads % tp == 0  # else copies of heads would count
    assert told["checkpoint_bytes"] == 2 * count == sum(rank["bytes"] for rank in told["ranks"])
    for rank in told["ranks"]:
        sizes = (2 * math.prod(shape) for _, shape in rank["tensors"].values())
        assert rank["bytes"] == sum(sizes)
    each = 2 * 2 * m.layers * m.kv_heads * m.head_dim // tp
    assert told["cache_bytes_per_token"] == each
    assert [rank["gpu"] for rank in told["ranks"]] == list(recipe.target.gpus)


def test_config_only_compares_a_model_folder_with_the_recipe(tmp_path):
    architecture = {  # of Llama-3.1-8B, as its publisher's config.json states it
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(architecture))
    call("llama-3.1-8b-3b", "--config-only", "--model", tmp_path)
    path.write_text(json.dumps(architecture | {"rope_scaling": None}))
    told = call("llama-3.1-8b-3b", "--config-only", "--model", tmp_path, code=1).stderr
    assert "rope is RopeConfig" in told and "llama-3.1-8b has RopeConfig" in told


def test_a_quantised_target_gets_the_flags_of_its_format(tmp_path):
    folder = save_model(tmp_path, "llama-llama3", **SIZES)
    plugins = {"fp8": "disable", "int4_awq": "auto", "nvfp4": "nvfp4"}
    for kind, plugin in plugins.items():
        for cache in ("auto", "fp8")[: 1 if kind == "int4_awq" else 2]:
            plan = plan_of(folder, 2, quantization=kind, kv_cache=cache)
            words = plan.command("c", "e", 1)
            options = dict(zip(words[1::2], words[2::2], strict=True))
            assert options["--gemm_plugin"] == plugin and options["--workers"] == "1"
            fp8 = options.get("--use_fp8_context_fmha")
            assert fp8 == ("enable" if cache == "fp8" else None)
    assert "--use_fp8_context_fmha" not in plan_of(folder).command("c", "e")


@pytest.mark.parametrize(
    ("sizes", "tp", "pp", "target", "message"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 36},
            *(4, 1, {}, "heads is 6; .*4"),
        ),
        ({"intermediate_size": 54}, 4, 1, {}, "intermediate_size is 54; .*4"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48},
            *(4, 1, {}, "kv_heads is 6; target.tensor_parallel 4 must divide it or be a multiple"),
        ),
        ({"num_hidden_layers": 3}, 1, 2, {}, "layers is 3; target.pipeline_parallel 2"),
        ({}, 1, 1, {"quantization": "int4_awq"}, "hidden_size is 32, 32 on each of 1 ranks; int4"),
        ({}, 4, 1, {"quantization": "nvfp4"}, "hidden_size is 32, 8 on each of 4.*16"),
        (
            SIZES | {"vocab_size": 307},
            *(1, 1, {"quantization": "int4_awq"}, "vocab_size is 307; ModelOpt pads it.*64"),
        ),
        (
            {},
            1,
            1,
            {"kv_cache": "fp8"},
            "kv_cache is 'fp8' with .*'none'; .*only with fp8 or nvfp4",
        ),
        (SIZES, 2, 1, {"quantization": "int4_awq", "kv_cache": "fp8"}, "'fp8' with .*'int4_awq'"),
        ({"max_position_embeddings": 128}, 1, 1, {}, "max_length is 256; tiny has 128 positions"),
        ({}, 1, 1, {"max_num_tokens": 33}, r"max_num_tokens is 33; .*2 x .*16 \+ 1\) takes 34"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(tmp_path, sizes, tp, pp, target, message):
    hf_config("llama-llama3", **sizes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        plan_of(tmp_path, tp, pp, **target)


def test_recipes_of_the_cpu_lane_and_unknown_ones_are_refused():
    assert "lane gpu" in call("embedded", "--config-only", code=1).stderr
    told = call("llama-9", "--config-only", code=1).stderr
    assert told.startswith("masw-build: recipe 'llama-9' does not exist") and told.count("\n") == 1


def write_recipe(folder, **target):
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe_data(**target)))
    return path


def test_a_build_checks_what_is_cheap_first(model_dir, tmp_path):
    folder, root = model_dir("llama-llama3"), tmp_path / "root"
    base = ["--root", root, "--model", folder]
    with known(folder):
        plain = write_recipe(tmp_path)
        told = call(plain, "--root", root, code=1).stderr
        assert re.search(r"models/target is no model folder: it has no config\.json", told)
        other = ["--root", root, "--model", model_dir("qwen2")]
        assert "family is qwen2, but tiny has llama" in call(plain, *other, code=1).stderr
        (tmp_path / "bare").mkdir()
        (tmp_path / "bare" / "config.json").write_text((folder / "config.json").read_text())
        bare = ["--root", root, "--model", tmp_path / "bare"]
        assert "has no weights" in call(plain, *bare, code=1).stderr
        (root / "engines" / "target").mkdir(parents=True)
        (root / "engines" / "target" / "rank0.engine").touch()
        assert "engines/target is not empty" in call(plain, *base, code=1).stderr
        (root / "engines" / "target" / "rank0.engine").unlink()
        quantised = write_recipe(tmp_path, quantization="fp8")
        assert "give --calibration FILE" in call(quantised, *base, code=1).stderr
        text = ["--calibration", tmp_path / "none.txt"]
        assert "none.txt does not exist" in call(quantised, *base, *text, code=1).stderr
    assert not (root / "checkpoints").exists() and not (root / "logs").exists()


def test_disk_and_memory_are_checked(model_dir, tmp_path, monkeypatch):
    folder = model_dir("llama-llama3")
    base = ["--root", tmp_path / "root", "--model", folder]
    needed = plan_of(folder).checkpoint_bytes
    with known(folder):
        recipe = write_recipe(tmp_path)
        small = SimpleNamespace(free=needed - 1)
        with monkeypatch.context() as patch:
            patch.setattr(output_folder.shutil, "disk_usage", lambda path: small)
            assert "the checkpoint needs about" in call(recipe, *base, code=1).stderr
            small.free = 2 * needed - 1
            patch.setattr(shutil, "which", lambda name: name)
            told = call(recipe, *base, code=1).stderr
            assert "the engine with its checkpoint needs about" in told
        small = SimpleNamespace(available=needed - 1)
        monkeypatch.setattr(target_checkpoint.psutil, "virtual_memory", lambda: small)
        assert "GiB of memory" in call(recipe, *base, code=1).stderr


def test_without_modelopt_the_remedy_is_named(model_dir, tmp_path, monkeypatch):
    folder = model_dir("llama-llama3")
    monkeypatch.setitem(sys.modules, "modelopt.torch.export", None)
    with known(folder):
        base = ["--root", tmp_path, "--model", folder]
        told = call(write_recipe(tmp_path), *base, code=1).stderr
    assert "pip install 'masw[gpu]'" in told


def test_calibration_reads_the_start_of_every_document_first(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(byte_level(tmp_path))
    path = tmp_path / "texts.jsonl"
    documents = ["the cat sat. " * 20, "", "文本 the dog " * 3, "the end"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    ids = [tokenizer(text)["input_ids"] for text in documents]
    found = Calibration(path, 5, 8).sequences(tokenizer)
    starts = [ids[0][:8], ids[2][:8], ids[3][:8]]
    assert found == [*starts, ids[0][8:16], ids[2][8:16]]
    assert Calibration(path, 2, 8).sequences(tokenizer) == starts[:2]
    plain = tmp_path / "text.txt"
    plain.write_text(documents[0])
    assert Calibration(plain, 100, 8).sequences(tokenizer) == [
        ids[0][start : start + 8] for start in range(0, len(ids[0]), 8)
    ]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", " \n", {}, "a.txt holds no text"),
        ("a.jsonl", '{"words": 1}\n', {}, "a line holds"),
        ("a.pdf", "x", {}, "is a.pdf; use a text file"),
        ("a.txt", "x", {"samples": 0}, "samples is 0; use 1 or more"),
        ("a.txt", "x", {"length": 0}, "length is 0; use 1 or more"),
    ],
)
def test_bad_calibration_files_are_refused(tmp_path, name, content, options, message):
    (tmp_path / name).write_text(content)
    tokenizer = transformers.AutoTokenizer.from_pretrained(byte_level(tmp_path))
    with pytest.raises(ValueError, match=message):
        Calibration(tmp_path / name, **options).sequences(tokenizer)


def test_settings_of_modelopts_older_and_newer_form_mean_the_same():
    """0.37 has mappings of patterns, 0.47 lists in which the last match counts."""
    weights, cache = {"num_bits": (4, 3), "axis": None}, {"num_bits": (4, 3), "enable": True}

    off = {"default": {"enable": False}}
    older = SimpleNamespace(
        FP8_DEFAULT_CFG={"quant_cfg": {"*weight_quantizer": weights} | off, "algorithm": "max"},
        FP8_KV_CFG={"quant_cfg": {"*[kv]_bmm_quantizer": cache} | off, "algorithm": "max"},
    )
    all_off = {"quantizer_name": "*", "enable": False}
    on = [{"quantizer_name": "*weight_quantizer", "cfg": weights}]
    kv = [{"quantizer_name": "*[kv]_bmm_quantizer", "cfg": cache}]
    newer = SimpleNamespace(
        FP8_DEFAULT_CFG={"quant_cfg": [all_off, *on], "algorithm": "max"},
        FP8_KV_CFG={"quant_cfg": kv},
    )
    entries = {"*weight_quantizer": weights, "*[kv]_bmm_quantizer": cache} | off
    assert settings(older, "fp8", "fp8") == {"quant_cfg": entries, "algorithm": "max"}
    assert settings(newer, "fp8", "fp8")["quant_cfg"] == [all_off, *on, *kv]
    assert settings(older, "fp8", "auto") == older.FP8_DEFAULT_CFG
    assert older.FP8_DEFAULT_CFG["quant_cfg"].keys() == {"*weight_quantizer", "default"}


def test_a_plan_of_the_architecture_alone_is_that_of_the_folder(model_dir):
    folder = model_dir("qwen3")
    assert NAME not in names()
    with known(folder):
        plan = TargetPlan(Recipe(**recipe_data(2)))
    assert plan.config["qwen_type"] == "qwen3" and plan.config["qk_layernorm"]
    assert plan.config["attn_bias"] is False
    assert plan_of(model_dir("qwen2")).config["attn_bias"] is True
