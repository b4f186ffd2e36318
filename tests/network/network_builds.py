"""TensorRT-RTX builds the draft's network on the CPU; its report is compared with the table.

Run by tests/unit/test_network.py in a process of its own.
"""

import re

import pytest
import tensorrt_rtx as trt
import torch

from masw.build.network.attention import JoinedAttention
from masw.build.network.draft import draft_network
from masw.build.network.graph import EngineBuildError, Graph
from masw.engines.adaptor import AdaptorConfig
from masw.engines.config import DecoderConfig, RopeConfig
from masw.engines.decoder import Decoder
from masw.engines.draft_io import DraftIO
from masw.engines.rotary import RotaryTable
from masw.engines.tensorrt_module import load_tensorrt
from masw.plugins.slot_attention.rule import MemoryRule
from tests.driver import random_adaptor

DTYPES = {"Half": "float16", "Float": "float32", "BFloat16": "bfloat16", "Int32": "int32"}
IO_LINE = re.compile(
    r"Name: (\S+), IOMode: (\w+), DataType: (\w+), Dimensions: \[([-\d,]*)\].*ProfileInfo: (.*)"
)
SHAPE = r"\[([-\d,]*)\]"
RANGE = re.compile(f"MinShape: {SHAPE}, OptShape: {SHAPE}, MaxShape: {SHAPE}")
SMOLLM2_135M = DecoderConfig(
    family="llama", vocab_size=49152, hidden_size=576, layers=30, heads=9, kv_heads=3,
    head_dim=64, intermediate_size=1536, norm_eps=1e-5, max_positions=8192,
    rope=RopeConfig(theta=100000.0), tied_embeddings=True,
)  # fmt: skip


class Report(trt.ILogger):
    """A logger that keeps what the builder says."""

    def __init__(self):
        trt.ILogger.__init__(self)
        self.lines = []

    def log(self, severity, message):
        self.lines += message.splitlines()

    def tensors(self, mode):
        """Inputs or outputs of the engine: [(name, dtype, dims, ranges of each profile)]."""
        found = [match.groups() for match in map(IO_LINE.search, self.lines) if match]
        return [
            (name, DTYPES[dtype], sizes(dims), [tuple(map(sizes, x)) for x in RANGE.findall(rest)])
            for name, io_mode, dtype, dims, rest in found
            if io_mode == mode
        ]

    def count(self, text):
        return sum(text in line for line in self.lines)

    def number(self, pattern):
        return int(next(m[1] for m in map(re.compile(pattern).search, self.lines) if m))


def sizes(text):
    return tuple(int(size) for size in text.split(","))


def build(io, decoder, adaptor, attention=None, quantized=None):
    """(engine, what the builder said)."""
    report = Report()
    made = draft_network(trt, report, io, decoder, adaptor, attention, quantized)
    config = made.builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    return made.build(config), report


def check_table(io, report):
    """The engine's tensors are those of the table: names, dtypes, shapes, profiles, order."""
    assert report.tensors("Input") == [
        (x.name, x.dtype, x.dims, [expected_range(x, profile) for profile in io.profiles])
        for x in io.inputs
    ]
    assert report.tensors("Output") == [(x.name, x.dtype, x.dims, []) for x in io.outputs]


def expected_range(tensor, profile):
    pairs = zip(profile.batch, profile.positions, strict=True)
    return tuple(tensor.sized(*pair) for pair in pairs)


CASES = [
    ("qwen3", "float16", MemoryRule(16, 16, 16, 4), {}),
    ("qwen2", "bfloat16", MemoryRule(16, 16, 16, 8, "materialized"), {"top": 4}),
    ("llama", "float32", MemoryRule(16, 16, 16, 4), {"logits": True}),
    ("mistral", "float32", MemoryRule.windowed(16, 16), {"max_sequences": 2}),
]


@pytest.mark.parametrize(("name", "dtype", "rule", "settings"), CASES)
def test_tiny_models_build_with_the_tensors_of_the_table(decoder, name, dtype, rule, settings):
    model = decoder(name)
    adaptor = random_adaptor(model, rule, offset=True) if rule.interval else None
    settings = {"max_sequences": 3, "max_length": 160, "chunk": 64, "dtype": dtype} | settings
    io = DraftIO.of(model.config, rule, **settings)
    plan, report = build(io, model, adaptor)
    assert len(plan) > 100_000
    check_table(io, report)


def test_attention_by_plain_operations_builds(decoder):
    rule, model = MemoryRule(16, 16, 16, 4), decoder("llama")
    io = DraftIO.of(model.config, rule, max_sequences=2, max_length=160, chunk=64)
    _, report = build(io, model, random_adaptor(model, rule), JoinedAttention)
    check_table(io, report)


def test_smollm2_builds_with_fused_attention_and_every_weight_once():
    """The whole depth and width; seconds without a GPU, for nothing is measured."""
    decoder = random_decoder(SMOLLM2_135M)
    rule = MemoryRule()
    adaptor = decoder.copy_adaptor(AdaptorConfig("random")).requires_grad_(False)
    io = DraftIO.of(decoder.config, rule, max_sequences=8, max_length=8192)
    _, report = build(io, decoder, adaptor)
    check_table(io, report)
    assert report.count("Name: _gemm_mha") == len(io.profiles) * io.layers
    unique = {x.data_ptr(): x.nbytes for x in [*decoder.parameters(), *adaptor.parameters()]}
    stored = report.number(r"Total Weights Memory: (\d+) bytes")
    assert sum(unique.values()) <= stored <= 1.02 * sum(unique.values())


def random_decoder(config):
    """A float16 decoder of random weights and one embedding table, drawn once."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.half().to_empty(device="cpu").requires_grad_(False)
    for parameter in decoder.parameters():
        parameter.normal_(0, 0.02)
    decoder.lm_head.weight = decoder.embed_tokens.weight
    decoder.rotary = RotaryTable(config)
    return decoder


def test_a_failed_build_raises(decoder):
    """Sizes that vary need a profile."""
    rule, model = MemoryRule(16, 16, 16, 4), decoder("llama-tied")
    io = DraftIO.of(model.config, rule, max_sequences=1, max_length=60)
    made = draft_network(trt, Report(), io, model, random_adaptor(model, rule))
    with pytest.raises(EngineBuildError, match="could not build"):
        made.build(made.builder.create_builder_config())


def test_a_layer_that_does_not_fit_raises_where_it_is_added():
    builder = trt.Builder(Report())
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    graph = Graph(trt, builder.create_network(flags))
    x, y = graph.constant(torch.zeros(3, 4)), graph.constant(torch.zeros(3, 5))
    with pytest.raises(EngineBuildError, match="refused a layer"):
        graph.add(x, y)


def test_modules_are_imported_by_name_and_missing_ones_name_the_remedy():
    assert load_tensorrt("tensorrt_rtx") is trt
    with pytest.raises(ImportError, match=r"tensorrt is not installed: run in .* container"):
        load_tensorrt("tensorrt")
    with pytest.raises(ValueError, match="'onnx'; use one of tensorrt, tensorrt_rtx"):
        load_tensorrt("onnx")
