"""Whole sequences at once: the masks against the dense oracle, the results against slot memory."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from masw.build.adaptor.stream import (
    BLOCK,
    ChunkedAttention,
    FlexAttention,
    causal_attention,
    sparse_mask,
    stream_attention,
    stream_block,
    visibility_function,
)
from masw.plugins.slot_attention.reference import dense_oracle
from masw.plugins.slot_attention.rule import RAW, SLOT, MemoryRule
from tests.driver import random_adaptor
from tests.models import random_ids

RULES = [
    MemoryRule(sink, window, interval=interval, visibility=visibility)
    for visibility in ("materialized", "evicted")
    for sink, window, interval in ((8, 8, 4), (0, 5, 3), (16, 1, 1), (3, 16, 8))
]


def oracle_mask(rule, length):
    """The dense oracle's mask with the slots moved behind the raw tokens."""
    stream, mask = dense_oracle(rule, length)
    order = sorted(range(len(stream)), key=lambda i: (stream[i][0] == "slot", stream[i][1]))
    return torch.tensor(mask)[order][:, order]


def plain(q, k, v, mask):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(2, 3)) / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


@pytest.fixture(scope="module", params=RULES, ids=str)
def case(request):
    rule, length = request.param, 77
    block = stream_block(rule, torch.tensor([random_ids(length), random_ids(length, 1)]))
    total = block.times.shape[1]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, total, 16, generator=generator) for h in (4, 2, 2))
    return block, oracle_mask(rule, length), q, k, v


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_chunked_attention_equals_the_dense_oracle(case, chunk):
    block, mask, q, k, v = case
    found = ChunkedAttention(block, chunk=chunk)(0, q, k, v)
    torch.testing.assert_close(found, plain(q, k, v, mask))


def test_flex_mask_is_the_dense_oracle_mask(case):
    block, mask, q, k, v = case
    total = block.times.shape[1]
    found = create_mask(visibility_function(block), 1, 1, total, total, device="cpu")
    assert torch.equal(found[0, 0], mask)
    attention = FlexAttention(block)
    out = flex_attention(q, k, v, block_mask=attention.mask, enable_gqa=True)
    torch.testing.assert_close(out, plain(q, k, v, mask))


@pytest.mark.parametrize("length", [100, 128, 700])  # less than a block, one, several
def test_the_sparse_mask_is_that_of_torch_without_a_square_mask(length):
    ids = torch.zeros((1, length), dtype=torch.int64)
    block = stream_block(MemoryRule(130, 20, interval=8), ids)
    total, sees, asked = block.times.shape[1], visibility_function(block), []

    def watched(batch, head, query, key):
        found = sees(batch, head, query, key)
        asked.append(found.numel())
        return found

    found = sparse_mask(watched, block.times[0])
    assert max(asked) <= BLOCK * total
    expected = create_block_mask(sees, None, None, total, total, device="cpu")
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert found.shape == expected.shape
    for name in (
        *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
        *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
    ):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert bool(found.full_kv_num_blocks.any()) == (length == 700)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", [MemoryRule(), MemoryRule(interval=4, visibility="materialized")])
def test_flex_attention_on_cuda_equals_chunked_with_gradients(rule):
    block = stream_block(rule, torch.zeros((2, 1111), dtype=torch.int64, device="cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2, 9, block.times.shape[1], 64), *[(2, 3, block.times.shape[1], 64)] * 2
    results = []
    for make in (stream_attention, ChunkedAttention):
        generator.manual_seed(0)
        q, k, v = (
            torch.randn(s, generator=generator, device="cuda").bfloat16().requires_grad_()
            for s in shape
        )
        out = make(block)(0, q, k, v)
        out.float().square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for found, expected in zip(*results, strict=True):
        error = (found - expected).float().norm() / expected.float().norm()
        assert error < 1e-2


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("visibility", ["materialized", "evicted"])
def test_training_and_serving_compute_the_same_slots_and_logits(decoder, name, visibility):
    """The stream's keys and values are those that slot memory holds after serving in chunks."""
    model, rule, length = decoder(name), MemoryRule(16, 16, 16, 4, visibility), 150
    adaptor = random_adaptor(model, rule, offset=True, low_rank=3)
    ids = random_ids(length)
    block = stream_block(rule, torch.tensor([ids]))
    hidden, pairs = model.run(block, stream_attention(block), adaptor)
    memory, served = model.new_memory(rule, 1, length), []
    for start in range(0, length, 37):
        out, part = model.feed(memory, [0], [ids[start : start + 37]], adaptor)
        served.append(out[0, part.kind[0] == RAW])
    torch.testing.assert_close(
        model.logits(torch.cat(served)), model.logits(hidden[0, :length]), atol=1e-4, rtol=0
    )
    slots, first = rule.slots(length), rule.entry_of_slot(0)
    assert slots == int((block.kind == SLOT).sum()) > 20
    for layer, (k, v) in enumerate(pairs):
        for stored, trained in ((memory.k, k), (memory.v, v)):
            found = stored[layer, 0, :, first : first + slots]
            torch.testing.assert_close(found, trained[0, :, length:], atol=1e-4, rtol=0)


def test_without_slots_the_stream_gives_the_logits_of_hugging_face(decoder, hf_model):
    ids = torch.tensor([random_ids(90)])
    block = stream_block(MemoryRule.full(90), ids)
    hidden, _ = decoder("llama").run(block, causal_attention)
    expected = hf_model("llama")(ids).logits
    torch.testing.assert_close(decoder("llama").logits(hidden), expected, atol=1e-4, rtol=0)
