"""TensorRT-LLM checkpoints of tiny models, tensor by tensor against a split written by hand."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from masw.build.calibration import Calibration
from masw.build.modelopt import modelopt
from masw.build.target_folder import CORRECTED, CheckpointError, check_checkpoint, complete
from tests.models import random_ids
from tests.targets import (
    by_hand,
    calibration_text,
    export,
    plan_of,
    quantizable,
    rank_files,
    reassembled,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # ModelOpt warns of much
LAYOUTS = [  # model, TP, PP; all have 4 heads and 2 key/value heads
    ("llama-llama3", 1, 1),
    ("llama-llama3", 2, 1),
    ("llama-llama3", 4, 1),
    ("llama-llama3", 2, 2),
    ("llama", 1, 3),
    ("llama-tied", 1, 1),
    ("llama-tied", 4, 2),
    ("mistral", 2, 1),
    ("qwen2", 2, 1),
    ("qwen2", 4, 2),
    ("qwen3", 2, 2),
    ("qwen3", 4, 1),
]


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def checkpoint(model_dir, tmp_path_factory):
    """checkpoint(name, tp, pp) -> (plan, folder), written once."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def write(name, tp, pp):
        if (name, tp, pp) not in made:
            plan = plan_of(model_dir(name), tp, pp)
            out = export(model_dir(name), root / f"{name}-{tp}-{pp}" / "out", plan)
            made[name, tp, pp] = plan, out
        return made[name, tp, pp]

    return write


@pytest.mark.parametrize(("name", "tp", "pp"), LAYOUTS)
def test_every_rank_holds_its_share_of_every_weight(checkpoint, model_dir, name, tp, pp):
    _, out = checkpoint(name, tp, pp)
    model = load(model_dir(name))
    ranks = rank_files(out)
    assert len(ranks) == tp * pp
    for rank, found in enumerate(ranks):
        wanted = by_hand(model.state_dict(), model.config, tp, pp, rank)
        assert found.keys() == wanted.keys()
        for tensor_name, tensor in wanted.items():
            assert torch.equal(found[tensor_name], tensor), (rank, tensor_name)


@pytest.mark.parametrize(("name", "tp", "pp"), LAYOUTS)
def test_the_plan_knows_every_tensor_beforehand(checkpoint, name, tp, pp):
    plan, out = checkpoint(name, tp, pp)
    for rank, found in enumerate(rank_files(out)):
        planned = {t.name: (t.dtype, t.shape, t.bytes) for t in plan.shards.tensors(rank)}
        assert planned == {n: (_dtype(t), tuple(t.shape), t.nbytes) for n, t in found.items()}


@pytest.mark.parametrize(("name", "tp", "pp"), LAYOUTS)
def test_ranks_put_together_give_hugging_faces_logits(checkpoint, model_dir, name, tp, pp):
    _, out = checkpoint(name, tp, pp)
    model = load(model_dir(name))
    again = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    again.load_state_dict(reassembled(rank_files(out), model.config, tp, pp), strict=True)
    ids = torch.tensor([random_ids(40)])
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)


def test_an_odd_vocabulary_is_padded_with_zeros_and_stated_unpadded(checkpoint):
    _, out = checkpoint("llama-llama3", 4, 1)
    last = rank_files(out)[-1]
    assert last["lm_head.weight"].shape[0] == last["transformer.vocab_embedding.weight"].shape[0]
    assert 4 * last["lm_head.weight"].shape[0] == 308  # of 307
    assert not last["lm_head.weight"][-1].any() and last["lm_head.weight"][-2].any()
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 307


@pytest.mark.parametrize(("name", "tp", "pp"), LAYOUTS)
def test_config_is_what_the_recipe_alone_implies(checkpoint, name, tp, pp):
    plan, out = checkpoint(name, tp, pp)
    written = json.loads((out / "config.json").read_text())
    assert {key: written[key] for key in plan.config} == plan.config
    assert written["producer"]["name"] == "modelopt"
    assert not (out / "quant_cfg.json").exists()
    assert json.loads((out / "provenance.json").read_text())["modelopt"]


@pytest.mark.parametrize(("name", "tp", "pp"), [("llama-llama3", 2, 2), ("qwen3", 2, 1)])
def test_the_plans_config_is_modelopts_but_for_known_differences(
    model_dir, tmp_path, name, tp, pp, capsys
):
    """Key by key against what ModelOpt writes when it is called without masw."""
    plan = plan_of(model_dir(name), tp, pp)
    kind = "qwen" if name.startswith("qwen") else "llama"
    write = modelopt("export").export_tensorrt_llm_checkpoint
    write(load(model_dir(name)), kind, torch.bfloat16, tmp_path, tp, pp)
    raw = json.loads((tmp_path / "config.json").read_text())
    different = {key for key in plan.config if key in raw and raw[key] != plan.config[key]}
    assert different == {"logits_dtype"} and raw["logits_dtype"] == "float16"
    same = plan.config.keys() & raw.keys() - CORRECTED
    assert {
        *("dtype", "vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_size", "intermediate_size"),
        *("hidden_act", "norm_epsilon", "position_embedding_type", "use_parallel_embedding"),
        *("embedding_sharding_dim", "mapping", "quantization"),
    } <= same


@pytest.mark.parametrize("name", ["llama", "llama-linear", "llama-llama3", "qwen3"])
def test_rope_of_the_config_is_the_models(model_dir, hf_model, name):
    """Frequencies of a Hugging Face model made of the config's RoPE keys alone."""
    config = plan_of(model_dir(name)).config
    rebuilt = transformers.LlamaConfig(
        hidden_size=config["hidden_size"],
        head_dim=config["head_size"],
        num_attention_heads=config["num_attention_heads"],
        max_position_embeddings=config["max_position_embeddings"],
        rope_theta=config["rotary_base"],
        rope_scaling=config["rotary_scaling"],
    )
    rotary = type(hf_model("llama").model.rotary_emb)(rebuilt)
    assert torch.equal(rotary.inv_freq, hf_model(name).model.rotary_emb.inv_freq)


def test_a_config_about_other_tensors_is_refused():
    planned = {"dtype": "bfloat16", "logits_dtype": "float32", "mapping": {"tp_size": 2}}
    written = {"dtype": "bfloat16", "logits_dtype": "float16", "mapping": {"tp_size": 2, "cp": 1}}
    assert complete(written, planned) == planned | {"mapping": {"tp_size": 2, "cp": 1}}
    with pytest.raises(CheckpointError, match=r"ModelOpt wrote mapping .*2"):
        complete(written | {"mapping": {"tp_size": 1}}, planned)
    with pytest.raises(CheckpointError, match="ModelOpt wrote dtype float16; the plan has bfloat"):
        complete(written | {"dtype": "float16"}, planned)


def test_an_existing_checkpoint_must_be_the_plans_and_of_the_model(checkpoint, model_dir, tmp_path):
    _, out = checkpoint("llama-llama3", 2, 1)
    folder = model_dir("llama-llama3")
    check_checkpoint(plan_of(folder, 2), out, folder)
    with pytest.raises(CheckpointError, match=r"has mapping .*remove it to write it anew"):
        check_checkpoint(plan_of(folder, 4), out, folder)
    with pytest.raises(CheckpointError, match="another model"):
        check_checkpoint(plan_of(folder, 2), out, model_dir("llama-tied"))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"no whole checkpoint .*config\.json"):
        check_checkpoint(plan_of(folder, 2), tmp_path, folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "no whole checkpoint"),
        ("config.json", "[]", "config.json is no object"),
        ("provenance.json", None, r"no whole checkpoint .*provenance\.json"),
        ("provenance.json", "{", "no whole checkpoint"),
        ("provenance.json", "{}", "another model"),
        ("rank1.safetensors", None, r"lacks rank1\.safetensors"),
        ("rank1.safetensors", "{", r"rank1\.safetensors is no whole safetensors file"),
    ],
)
def test_a_spoilt_checkpoint_is_refused(checkpoint, model_dir, tmp_path, file, content, message):
    _, out = checkpoint("llama-llama3", 2, 1)
    copy, folder = tmp_path / "copy", model_dir("llama-llama3")
    shutil.copytree(out, copy)
    (copy / file).unlink()
    if content is not None:
        (copy / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(plan_of(folder, 2), copy, folder)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """quantized(kind) -> (plan, checkpoint on two ranks, model folder), written once."""
    root = tmp_path_factory.mktemp("quantized")
    folder, made = quantizable(root / "model"), {}
    text = calibration_text(root)

    def write(kind):
        if kind not in made:
            cache = "auto" if kind == "int4_awq" else "fp8"
            plan = plan_of(folder, 2, quantization=kind, kv_cache=cache)
            made[kind] = plan, export(folder, root / kind / "out", plan, text), folder
        return made[kind]

    return write


@pytest.mark.parametrize("kind", ["fp8", "int4_awq", "nvfp4"])
def test_the_plan_knows_every_quantised_tensor(quantized, kind):
    plan, out, _ = quantized(kind)
    for rank, found in enumerate(rank_files(out)):
        planned = {t.name: (t.dtype, t.shape) for t in plan.shards.tensors(rank)}
        assert planned == {n: (_dtype(t), tuple(t.shape)) for n, t in found.items()}
    written = json.loads((out / "config.json").read_text())
    assert {key: written[key] for key in plan.config} == plan.config
    cache = written["quantization"]["kv_cache_quant_algo"]
    assert cache == ("FP8" if plan.target.kv_cache == "fp8" else None)


def test_a_checkpoint_is_not_used_again_with_another_calibration(quantized, tmp_path):
    plan, out, folder = quantized("fp8")
    text = Calibration(calibration_text(tmp_path), 4, 32)  # as `export` reads it
    check_checkpoint(plan, out, folder, text)
    (tmp_path / "other.txt").write_text("another text")
    more, other = replace(text, samples=5), replace(text, file=tmp_path / "other.txt")
    for wrong in (more, other):
        with pytest.raises(CheckpointError, match="calibrated on another text"):
            check_checkpoint(plan, out, folder, wrong)


def test_formats_are_those_tensorrt_llm_reads(quantized):
    """One projection of one of two ranks, 256 -> 512, as TensorRT-LLM's loader expects it."""
    name = "transformer.layers.0.mlp.fc"
    shapes = {
        "fp8": {
            "weight": ("float8_e4m3fn", (256, 256)),
            "weights_scaling_factor": ("float32", (1,)),
            "activation_scaling_factor": ("float32", (1,)),
        },
        "int4_awq": {
            "weight": ("int8", (128, 256)),
            "weights_scaling_factor": ("float32", (256, 2)),
            "prequant_scaling_factor": ("bfloat16", (256,)),
        },
        "nvfp4": {
            "weight": ("uint8", (256, 128)),
            "weights_scaling_factor": ("float8_e4m3fn", (256, 16)),
            "weights_scaling_factor_2": ("float32", ()),
            "activation_scaling_factor": ("float32", ()),
        },
    }
    for kind, wanted in shapes.items():
        found = rank_files(quantized(kind)[1])[1]
        parts = {k.removeprefix(f"{name}."): t for k, t in found.items() if k.startswith(name)}
        assert {k: (_dtype(t), tuple(t.shape)) for k, t in parts.items()} == wanted
        assert found["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(("kind", "most"), [("fp8", 0.03), ("int4_awq", 0.14), ("nvfp4", 0.12)])
def test_weights_read_back_are_the_models_within_the_formats_error(quantized, kind, most):
    """Elementwise within half a step of the format, and by root mean square."""
    _, out, folder = quantized(kind)
    model = load(folder)
    for rank, found in enumerate(rank_files(out)):
        exact = by_hand(model.state_dict(), model.config, 2, 1, rank)
        for name in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"):
            place = f"transformer.layers.1.{name}"
            wanted = exact[f"{place}.weight"].float()
            read, step = READERS[kind](found, place)
            assert ((read - wanted).abs() <= step + 0.01 * wanted.abs()).all(), name
            assert (read - wanted).norm() < most * wanted.norm(), name


def _fp8(found, place):
    scale = found[f"{place}.weights_scaling_factor"]
    read = found[f"{place}.weight"].float() * scale
    return read, read.abs() / 16 + scale * 2.0**-9


def _int4(found, place):
    packed = found[f"{place}.weight"].int()  # (out / 2, in): low nibble is the even output
    nibbles = torch.stack([packed & 15, packed >> 4 & 15], 1).flatten(0, 1)
    signed = torch.where(nibbles > 7, nibbles - 16, nibbles).float()
    scale = found[f"{place}.weights_scaling_factor"].repeat_interleave(128, 1)
    smooth = found[f"{place}.prequant_scaling_factor"].float()
    return signed * scale * smooth, 0.55 * scale * smooth


def _nvfp4(found, place):
    packed = found[f"{place}.weight"].int()  # (out, in / 2): low nibble is the even input
    nibbles = torch.stack([packed & 15, packed >> 4], 2).flatten(1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signed = values[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    scale = found[f"{place}.weights_scaling_factor"].float().repeat_interleave(16, 1)
    scale = scale * found[f"{place}.weights_scaling_factor_2"]
    return signed * scale, 1.1 * scale


READERS = {"fp8": _fp8, "int4_awq": _int4, "nvfp4": _nvfp4}


def test_activation_scales_are_measured_on_the_calibration_text(quantized, tmp_path):
    """FP8's largest number 448 stands for the largest input seen over the text's first ids."""
    _, out, folder = quantized("fp8")
    model, seen = load(folder), []
    model.model.layers[1].mlp.gate_proj.register_forward_pre_hook(
        lambda module, given: seen.append(given[0].abs().max())
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(calibration_text(tmp_path).read_text())["input_ids"][: 4 * 32]
    for start in range(0, 4 * 32, 32):
        model(torch.tensor([ids[start : start + 32]]))
    scale = rank_files(out)[0]["transformer.layers.1.mlp.fc.activation_scaling_factor"]
    assert scale.item() == pytest.approx(max(seen).item() / 448, rel=1e-3)


def test_an_export_that_fails_names_the_log_and_leaves_nothing(model_dir, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        print("what ModelOpt prints")
        raise AssertionError("Weights cannot be split")

    folder = model_dir("llama")
    monkeypatch.setattr(modelopt("export"), "export_tensorrt_llm_checkpoint", fail)
    message = "AssertionError: Weights cannot be split.*export.log"
    with pytest.raises(CheckpointError, match=message):
        export(folder, tmp_path / "out", plan_of(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["export.log"]
    assert "what ModelOpt prints" in (tmp_path / "export.log").read_text()


def test_a_model_that_lacks_weights_is_refused(model_dir, tmp_path):
    """transformers would make them up at random and only say so."""
    folder = shutil.copytree(model_dir("llama-llama3"), tmp_path / "model")
    (weights,) = folder.glob("*.safetensors")
    kept = {k: v for k, v in load_file(weights).items() if "layers.1." not in k}
    save_file(kept, weights, metadata={"format": "pt"})
    message = r"lacks 9 of the model's tensors, model\.layers\.1\."
    with pytest.raises(CheckpointError, match=message):
        export(folder, tmp_path / "out", plan_of(folder, 1, 1))
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_not_the_plans_is_not_kept(model_dir, tmp_path, monkeypatch):
    """ModelOpt told to write another layout than the recipe's."""
    folder, real = model_dir("llama"), modelopt("export").export_tensorrt_llm_checkpoint

    def other(model, kind, dtype, export_dir, **options):
        real(model, kind, dtype, export_dir, 1, 1)

    monkeypatch.setattr(modelopt("export"), "export_tensorrt_llm_checkpoint", other)
    with pytest.raises(CheckpointError, match="ModelOpt wrote mapping"):
        export(folder, tmp_path / "out", plan_of(folder, 2))
    assert not (tmp_path / "out").exists()


def _dtype(tensor):
    return str(tensor.dtype).removeprefix("torch.")
