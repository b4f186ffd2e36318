"""A quantised draft's network equals ModelOpt's own fake-quantised model, and TensorRT builds it.

Run by tests/unit/test_network.py in a process of its own.
"""

import copy
from functools import cache

import pytest
import tensorrt_rtx as trt
import torch
from torch import nn

from masw.build.draft_quantizer import quantize_model, read_layers
from masw.build.draft_scheme import SCHEMES, linear_shapes
from masw.build.network.draft import draft_network
from masw.build.network.graph import EngineBuildError
from masw.engines.decoder import Decoder
from masw.engines.draft_io import DraftIO
from masw.plugins.slot_attention.rule import MemoryRule
from tests.driver import random_adaptor
from tests.models import random_ids, random_model
from tests.network_driver import NetworkDriver

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
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


def part(decoder, layers, **changes):
    """A table for that decoder in float32."""
    sizes = {"max_sequences": 3, "max_length": 160, "chunk": 64, "dtype": "float16"} | changes
    return DraftIO.of(decoder.config, layers, **sizes)


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
    print(name, scheme, (found - wanted).abs().mean() / moved, (found - wanted).abs().max(), moved)
    assert moved > 0.01
    assert (found - wanted).abs().mean() < 0.02 * moved
