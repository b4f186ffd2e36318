"""A quantised draft's network equals ModelOpt's own fake-quantised model, and TensorRT builds it.

Run by tests/unit/test_network.py in a process of its own.
"""

import copy
import hashlib
import json
from functools import cache
from itertools import islice

import pytest
import tensorrt_rtx as trt
import torch
from typer.testing import CliRunner

from masw.build.commands import app
from masw.build.draft_plan import DraftPlan
from masw.build.draft_quantizer import quantize_model, read_layers
from masw.build.draft_scheme import SCHEMES
from masw.build.network.draft import draft_network
from masw.build.network.graph import EngineBuildError, Graph
from masw.engines.decoder import Decoder
from masw.engines.draft_io import DraftIO
from masw.engines.engine_folder import DraftEngine
from masw.plugins.slot_attention.rule import MemoryRule
from tests.driver import random_adaptor
from tests.models import random_ids, random_model, save_model
from tests.network.network_builds import Report, build, check_table
from tests.network_driver import NetworkDriver
from tests.tiny_tokenizers import TEXT, byte_level

WIDE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32,
    "vocab_size": 320,  # TensorRT pads odd sizes
}  # fmt: skip
RULE = MemoryRule(16, 16, 16, 4)
FULL = MemoryRule.full(160)
NAMES = ["llama", "qwen2", "qwen3"]  # plain, biases, QK norms


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """models(name, scheme) -> (decoder, plain HF model, HF model quantised by ModelOpt)."""
    root = tmp_path_factory.mktemp("wide")

    @cache
    def make(name, scheme):
        plain = random_model(name, **WIDE, initializer_range=0.08)
        folder = root / f"{name} {scheme}"
        plain.save_pretrained(folder)
        samples = [random_ids(64, seed) for seed in range(6)]
        quantized = quantize_model(copy.deepcopy(plain), SCHEMES[scheme], samples)
        return Decoder.load(folder), plain, quantized

    return make


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_modelopts_fake_quantised_model(models, name, scheme):
    """At every position, with full attention; far nearer than quantisation moves them."""
    decoder, plain, quantized = models(name, scheme)
    driver = NetworkDriver(trt, (decoder, None), FULL, quantized=read_layers(quantized))
    ids = random_ids(60, seed=9)
    block = driver.memory.block([0], [ids])
    with torch.no_grad():
        wanted, exact = (model(torch.tensor([ids])).logits[0] for model in (quantized, plain))
    found = torch.stack(
        [
            driver.interpreter.run(driver.feeds(block, 64, torch.tensor([place])))["logits"][0]
            for place in range(60)
        ]
    )
    moved = (wanted - exact).abs().mean()
    assert moved > 0.05
    assert (found - wanted).abs().mean() < 1e-3 * moved


@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_precision_is_as_near_the_float_model_as_modelopt_is(models, scheme, tmp_path):
    """Scales and activations are rounded too: other roundings, no larger errors."""
    _, plain, quantized = models("llama", scheme)
    plain.save_pretrained(tmp_path)
    half = Decoder.load(tmp_path, torch.float16)
    driver = NetworkDriver(trt, (half, None), FULL, quantized=read_layers(quantized))
    ids = random_ids(60, seed=9)
    with torch.no_grad():
        wanted, exact = (model(torch.tensor([ids])).logits[0, 30:] for model in (quantized, plain))
    found = torch.stack(
        [
            driver.interpreter.run(driver.feeds(block, 64))["logits"][0]
            for block in (driver.memory.block([0], [ids[: n + 1]]) for n in range(30, 60))
        ]
    )
    assert (found - exact).abs().mean() < 1.2 * (wanted - exact).abs().mean()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_slot_memory_equals_the_decoder_with_modelopts_layers(models, scheme):
    """Slots from plain mirrored projections: chunks, steps, a rollback, catch-up, ragged."""
    decoder, quantized = models("qwen2", scheme)[0], models("qwen2", scheme)[2]
    layers, mixed = read_layers(quantized), copy.deepcopy(decoder)
    adaptor = random_adaptor(decoder, RULE)
    for name in layers:
        parent, _, own = name.rpartition(".")
        setattr(mixed.get_submodule(parent), own, quantized.model.get_submodule(name))
    driver = NetworkDriver(trt, (mixed, adaptor), RULE, quantized=layers)
    ids = iter(random_ids(500))
    for counts, positions in (
        ({0: 47, 2: 9}, 80),
        ({0: 22, 2: 60}, 80),
        *[({0: 1, 1: 1, 2: 1}, 2)] * 5,
    ):
        driver.feed({row: list(islice(ids, n)) for row, n in counts.items()}, positions)
    driver.memory.rollback(0, driver.memory.fed[0] - 2)
    for _ in range(3):
        driver.feed({row: list(islice(ids, n)) for row, n in ((0, 2), (1, 1), (2, 2))}, 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tensorrt_builds_them_and_stores_what_the_plan_says(models, scheme, dtype):
    decoder, _, quantized = models("llama", scheme)
    sizes = {"max_sequences": 2, "max_length": 160, "chunk": 64, "dtype": dtype}
    io = DraftIO.of(decoder.config, RULE, **sizes)
    adaptor = random_adaptor(decoder, RULE)
    plan, report = build(io, decoder, adaptor, quantized=read_layers(quantized))
    assert len(plan) > 100_000
    check_table(io, report)
    planned = DraftPlan(decoder.config, io, 5, scheme).weight_bytes
    rotary = 2 * 161 * (decoder.config.head_dim // 2) * 2  # tables of cos and sin
    stored = report.number(r"Total Weights Memory: (\d+) bytes")
    assert abs(stored - planned - rotary) < 0.03 * planned


def test_tensorrt_reads_int4_constants_as_they_are_packed():
    """It turns this one, so that the engine holds the turned values in its own packing."""
    random = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (64, 128), generator=random, dtype=torch.int8)
    builder = trt.Builder(Report())
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    graph = Graph(trt, builder.create_network(flags))
    weight = graph.dequantize(graph.constant_int4(values), graph.constant(torch.ones(64, 1).half()))
    x = graph.network.add_input("x", trt.DataType.HALF, (8, 128))
    graph.network.mark_output(graph.multiply_matrices(x, weight, transpose=True))
    engine = bytes(builder.build_serialized_network(graph.network, builder.create_builder_config()))
    turned = values.t().flatten().tolist()
    pairs = zip(turned[0::2], turned[1::2], strict=True)
    assert bytes((low & 15) | (high & 15) << 4 for low, high in pairs) in engine


def test_a_gpu_without_fp8_is_refused_by_tensorrt_too(models):
    """What `Scheme.check_device` says first."""
    decoder, _, quantized = models("llama", "fp8")
    io = DraftIO.of(decoder.config, FULL, max_sequences=1, max_length=160)
    report = Report()
    made = draft_network(trt, report, io, decoder, quantized=read_layers(quantized))
    config = made.builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM80, 0)
    with pytest.raises(EngineBuildError):
        made.build(config)
    assert report.count("Cannot compile for target(s) sm80")
    with pytest.raises(ValueError, match=r"'fp8', which needs compute capability 8\.9 or higher"):
        SCHEMES["fp8"].check_device("8.0")


def test_only_linear_layers_of_the_backbone_are_read(models):
    decoder, _, quantized = models("llama", "fp8")
    names = [name for name, _ in decoder.named_modules() if name.endswith("_proj")]
    assert list(read_layers(quantized)) == names
    more = copy.deepcopy(quantized)
    for quantizer in (more.lm_head.weight_quantizer, more.lm_head.input_quantizer):
        quantizer.enable()
        quantizer.amax = torch.tensor(1.0)
    with pytest.raises(ValueError, match="ModelOpt quantised lm_head"):
        read_layers(more)


def test_the_command_builds_a_folder_that_says_so(tmp_path):
    sizes = {"hidden_size": 64, "head_dim": 16, "vocab_size": 320, "num_hidden_layers": 1}
    model = byte_level(save_model(tmp_path / "model", "llama", **sizes))
    out, text = tmp_path / "engine", tmp_path / "text.txt"
    text.write_text(TEXT * 4)
    options = ["--max-length", "512", "--chunk", "64", "--interval", "0", "--dtype", "float16"]
    options += ["--module", "tensorrt_rtx", "--quantization", "fp8", "--out", out]
    command = ["draft", model, *options, "--calibration", text]
    done = CliRunner().invoke(app, [str(word) for word in command])
    assert done.exit_code == 0, done.output
    assert DraftEngine.load(out).quantization == "fp8"
    assert "calibrating fp8 on text.txt" in done.stderr and "calibrating: 1 passes" in done.stderr
    used = json.loads((out / "provenance.json").read_text())["calibration"]
    assert used["sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
