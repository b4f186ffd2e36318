"""The table of a draft engine's tensors: sizes, profiles, and what it refuses."""

import pytest

from masw.engines.config import DecoderConfig
from masw.engines.draft_io import DraftIO, IoTensor
from masw.plugins.slot_attention.block import Block
from masw.plugins.slot_attention.rule import MemoryRule
from tests.models import MAX_POSITIONS, hf_config


def table(rule=None, **changes):
    sizes = {"max_sequences": 4, "max_length": 1000, "chunk": 512} | changes
    return DraftIO(2, 3, 64, 307, rule or MemoryRule(), **sizes)


def test_shapes_of_a_call():
    tensor = IoTensor("x", "int32", (3, "batch", "positions", 8))
    assert tensor.dims == (3, -1, -1, 8)
    assert tensor.sized(5, 4) == (3, 5, 4, 8)


def test_names_of_inputs_and_outputs():
    names = [x.name for x in table().inputs]
    assert names[:6] == ["rows", "fed", "last", "ids", "times", "kind"]
    assert names[6:] == ["memory_k.0", "memory_v.0", "memory_k.1", "memory_v.1"]
    outputs = ["new_k", "new_v", "top_ids", "top_logits"]
    assert [x.name for x in table().outputs] == outputs
    assert [x.name for x in table(logits=True).outputs] == [*outputs, "logits"]


@pytest.mark.parametrize("max_length", [100, 272, 273, 1000])
def test_memory_holds_the_rule_and_begins_aligned(max_length):
    io = table(max_length=max_length)
    k, v = io.memory(1)
    assert k.shape == v.shape == (4, 3, io.capacity, 64)
    assert io.capacity % 8 == 0
    assert 0 <= io.capacity - io.rule.capacity(max_length) < 8


@pytest.mark.parametrize("interval", [0, 1, 3, 4, 8])
@pytest.mark.parametrize("raw_tokens", [1, 2, 17, 64])
def test_positions_hold_every_block_of_so_many_raw_tokens(interval, raw_tokens):
    rule = MemoryRule(16, 16, 16, interval)
    blocks = [Block.build(rule, [0], [n], [[0] * raw_tokens]) for n in range(60)]
    assert max(b.ids.shape[1] for b in blocks) == table(rule).positions(raw_tokens)


def test_profiles():
    decode, prefill = table().profiles
    assert (decode.name, decode.batch, decode.positions) == ("decode", (1, 4, 4), (2, 2, 4))
    assert (prefill.name, prefill.batch, prefill.positions) == (
        "prefill", (1, 1, 1), (1, 576, 576),
    )  # fmt: skip
    decode, prefill = table(MemoryRule.windowed(128, 128)).profiles
    assert decode.positions == (1, 1, 2)
    assert prefill.positions == (1, 512, 512)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; use one of float32"),
        ({"max_sequences": 0}, "max_sequences is 0"),
        ({"chunk": 0}, "chunk is 0"),
        ({"top": 0}, "top is 0"),
        ({"top": 308}, "top is 308; the model has 307"),
        ({"rule": MemoryRule.full(999)}, "max_length is 1000; this rule keeps at most 999"),
    ],
    ids=str,
)
def test_wrong_sizes_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        table(**changes)


def test_a_decoder_gives_its_architecture_and_its_limit():
    config = DecoderConfig.from_hf(hf_config("mistral").to_dict())
    io = DraftIO.of(config, MemoryRule(), max_sequences=1, max_length=MAX_POSITIONS)
    assert (io.layers, io.kv_heads, io.head_dim, io.vocab_size) == (2, 2, 12, 307)
    with pytest.raises(ValueError, match="max_length is 1025; the model has 1024 positions"):
        DraftIO.of(config, MemoryRule(), max_sequences=1, max_length=MAX_POSITIONS + 1)
