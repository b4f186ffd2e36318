"""What the draft's network computes equals the torch decoder over slot memory, call by call.

Run by tests/unit/test_network.py in a process of its own.
"""

from functools import cache

import pytest
import tensorrt_rtx as trt
import torch

from masw.build.network.attention import JoinedAttention, NativeAttention, native_attention
from masw.build.network.draft import draft_network
from masw.build.network.graph import Graph
from masw.build.network.visibility import BlockInputs, block_mask
from masw.engines.adaptor import AdaptorError
from masw.engines.decoder import Decoder
from masw.engines.draft_io import DraftIO
from masw.plugins.slot_attention.block import Block
from masw.plugins.slot_attention.rule import PADDING, RAW, MemoryRule
from tests.driver import random_adaptor
from tests.models import MODELS, random_ids, save_model
from tests.network_driver import NetworkDriver
from tests.network_interpreter import NetworkInterpreter

S = W = R = 16
BOTH = ["materialized", "evicted"]
DTYPES = [torch.float32, torch.float16]


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """pair(name, rule, dtype, ...) -> (decoder, adaptor of random projections).

    Models in float16 have smaller weights, and logits of the size of 1.
    """
    root = tmp_path_factory.mktemp("models")

    @cache
    def load(name, dtype):
        scale = {"initializer_range": 0.05} if dtype == torch.float16 else {}
        return Decoder.load(save_model(root / f"{name} {dtype}", name, **scale), dtype)

    def make(name, rule, dtype=torch.float32, **header):
        decoder = load(name, dtype)
        return decoder, random_adaptor(decoder, rule, **header) if rule.interval else None

    return make


class Feeder:
    """Draws new ids and feeds them in the calls a draft makes."""

    def __init__(self, driver):
        self.driver, self.ids = driver, iter(random_ids(2000))
        self.chunk = driver.io.positions(driver.io.chunk)
        self.step, _, self.catch_up = driver.io.profiles[0].positions

    def __call__(self, counts, positions):
        new = {row: [next(self.ids) for _ in range(count)] for row, count in counts.items()}
        return self.driver.feed(new, positions)

    def a_few_calls(self):
        """Ragged chunks past the ring, draft steps and catch-up at every offset, a rollback."""
        self({0: 47, 2: 9}, self.chunk)
        self({0: 22, 2: 64}, self.chunk)
        for _ in range(max(2, self.driver.io.rule.interval) + 1):
            self({2: 1, 1: 1, 0: 1}, self.step)
        for row in (0, 2):
            self.driver.memory.rollback(row, self.driver.memory.fed[row] - 2)
        for _ in range(3):
            self({0: 2, 1: 1, 2: 2}, self.catch_up)
        self({1: 25}, self.chunk)
        self({1: 1, 0: 0}, self.step)  # a place of the batch that holds nothing


def compare(pair, rule, **settings):
    Feeder(NetworkDriver(trt, pair, rule, **settings)).a_few_calls()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("visibility", BOTH)
@pytest.mark.parametrize("name", MODELS)
def test_every_family_equals_the_decoder(pair, name, visibility, dtype):
    rule = MemoryRule(S, W, R, 4, visibility)
    compare(pair(name, rule, dtype), rule)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_attention_by_plain_operations_equals_the_decoder(pair, name, dtype):
    """What a TensorRT without an attention layer gets."""
    rule = MemoryRule(S, W, R, 4)
    compare(pair(name, rule, dtype), rule, attention=JoinedAttention)


def test_rtx_has_the_attention_layer():
    assert native_attention(trt) is NativeAttention


@pytest.mark.parametrize(
    "header", [{"slot_embedding": 5}, {"offset": True}, {"slot_embedding": 7, "offset": True}]
)
def test_slot_embeddings_equal_the_decoder(pair, header):
    rule = MemoryRule(S, W, R, 4)
    compare(pair("llama", rule, **header), rule)


@pytest.mark.parametrize("shape", [(0, 5, 8, 3), (3, 1, 8, 2), (7, 9, 8, 11), (16, 16, 16, 1)])
@pytest.mark.parametrize("visibility", BOTH)
def test_uneven_rules_equal_the_decoder(pair, shape, visibility):
    rule = MemoryRule(*shape, visibility)
    compare(pair("llama-tied", rule), rule)


@pytest.mark.parametrize("rule", [MemoryRule.full(160), MemoryRule.windowed(S, W, R)], ids=str)
def test_rules_without_slots_equal_the_decoder(pair, rule):
    compare(pair("llama", rule), rule)


def test_the_last_position_has_a_rotary_entry(pair):
    """max_length tokens fed, r = 1: the last slot stands at position max_length."""
    rule = MemoryRule(S, W, R, 1)
    driver = NetworkDriver(trt, pair("llama", rule), rule, max_length=64)
    driver.feed({0: random_ids(64)}, 128)


@pytest.mark.parametrize("top", [1, 5])
def test_best_ids_come_in_order_with_and_without_all_logits(pair, top):
    rule = MemoryRule(S, W, R, 4)
    trio = pair("qwen2", rule)
    whole = NetworkDriver(trt, trio, rule, top=top)
    found = whole.feed({0: random_ids(30)}, 80)
    assert found["top_ids"].shape == (1, top)
    assert found["top_ids"].tolist() == found["logits"].topk(top).indices.tolist()
    few = NetworkDriver(trt, trio, rule, top=top, logits=False)
    block = few.memory.block([0], [random_ids(30)])
    assert few.interpreter.run(few.feeds(block, 80)).keys() == found.keys() - {"logits"}


def test_logits_of_every_raw_position_of_a_chunk(pair):
    """`last` may be any position; that of a slot is never asked for."""
    rule = MemoryRule(S, W, R, 4)
    driver = NetworkDriver(trt, pair("llama", rule), rule)
    driver.feed({0: random_ids(50)}, 80)
    block = driver.memory.block([0], [random_ids(40, seed=2)])
    hidden, _, _ = driver.decoder(block, driver.memory, driver.adaptor)
    logits = driver.decoder.logits(hidden[0])
    for place in (block.kind[0] == RAW).nonzero()[:, 0]:
        found = driver.interpreter.run(driver.feeds(block, 80, last=place[None]))
        torch.testing.assert_close(found["logits"][0], logits[place], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gamma_steps_feed_themselves(pair, dtype):
    """The ids of a step are the best ids of the step before; its keys and values are its own."""
    rule, gamma = MemoryRule(S, W, R, 4), 9
    trio = pair("mistral", rule, dtype)
    driver = NetworkDriver(trt, trio, rule)
    prompts = {0: random_ids(50), 1: random_ids(71, seed=1)}
    ids = driver.feed(prompts, 88)["top_ids"][:, 0]
    proposed = []
    for _ in range(gamma):
        proposed.append(ids)
        block = driver.memory.block([0, 1], ids[:, None].tolist())
        found = driver.interpreter.run(driver.feeds(block, 2))
        width = block.ids.shape[1]
        driver.memory.write(block, found["new_k"][:, :, :, :width], found["new_v"][:, :, :, :width])
        ids = found["top_ids"][:, 0]
    assert torch.stack(proposed, 1).tolist() == torch_proposals(trio, rule, prompts, gamma)


def torch_proposals(trio, rule, prompts, gamma):
    """The ids that the torch decoder proposes, row by row."""
    decoder, adaptor = trio
    memory = decoder.new_memory(rule, len(prompts), 160)
    proposals = []
    for row, new in prompts.items():
        ids = []
        for _ in range(gamma):
            hidden, block = decoder.feed(memory, [row], [new], adaptor)
            new = [decoder.logits(hidden[0, block.last_raw[0]]).argmax().item()]
            ids += new
        proposals.append(ids)
    return proposals


# --- the mask alone, against the plugin's reference


MASK_RULES = [
    *(MemoryRule(S, W, R, r, visibility) for r in (1, 4, 8) for visibility in BOTH),
    MemoryRule(0, 5, 8, 3),
    MemoryRule(3, 1, 8, 2, "materialized"),
    MemoryRule(7, 9, 8, 11),
    MemoryRule.windowed(S, W, R),
    MemoryRule.full(120),
]


@pytest.mark.parametrize("rule", MASK_RULES, ids=str)
@pytest.mark.parametrize("max_length", [40, 120])
def test_masks_equal_the_reference_at_every_length(rule, max_length):
    """All lengths at once as a batch: one, two and a few raw tokens more."""
    network = MaskNetwork(rule, max_length)
    for count in (1, 2, 19):
        fed = list(range(max_length - count + 1))
        block = Block.build(rule, list(fed), fed, [[0] * count] * len(fed))
        seen = network.run(block)
        for n, mask, expected, kind in zip(fed, seen, block.masks, block.kind, strict=True):
            extent, queries = rule.extent(n), kind != PADDING
            capacity = mask.shape[1] - len(kind)
            assert not mask[queries, extent:capacity].any()
            found = torch.cat([mask[:, :extent], mask[:, capacity:]], 1)
            assert torch.equal(found[queries], expected[queries]), f"fed {n}"
            assert mask.any(1).all()


class MaskNetwork:
    """A network that only makes the mask."""

    def __init__(self, rule, max_length):
        self.builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.graph = Graph(trt, self.builder.create_network(flags))  # owns the constants
        io = DraftIO(1, 1, 8, 9, rule, max_sequences=1, max_length=max_length)
        names = ("rows", "fed", "ids", "times", "kind")
        inputs = {x.name: self.graph.input(x) for x in io.inputs if x.name in names}
        mask = block_mask(self.graph, io, BlockInputs(**inputs))
        mask.name = "mask"
        self.graph.network.mark_output(mask)
        self.interpreter = NetworkInterpreter(trt, self.graph.network)

    def run(self, block):
        """(B, N, capacity + N) bool."""
        values = {name: getattr(block, name) for name in ("ids", "times", "kind")}
        values |= {"rows": torch.tensor(block.rows), "fed": torch.tensor(block.fed)}
        feeds = {name: value.int() for name, value in values.items()}
        return self.interpreter.run(feeds)["mask"][:, 0]


# --- what is refused


def refuse(pair, rule, adaptor, match, error=ValueError):
    decoder, _ = pair
    io = DraftIO.of(decoder.config, rule, max_sequences=1, max_length=60)
    with pytest.raises(error, match=match):
        draft_network(trt, trt.Logger(trt.Logger.ERROR), io, decoder, adaptor)


def test_low_rank_adaptors_are_refused_by_name(pair):
    rule = MemoryRule(S, W, R, 4)
    trio = pair("llama", rule, low_rank=3)
    refuse(trio, rule, trio[1], "low_rank is 3", AdaptorError)


def test_adaptors_of_another_rule_are_refused(pair):
    trio = pair("llama", MemoryRule(S, W, R, 4))
    refuse(trio, MemoryRule(S, W, R, 8), trio[1], "interval=4.*not.*interval=8", AdaptorError)
    refuse(trio, MemoryRule.windowed(S, W, R), trio[1], "needs an adaptor")
    refuse(trio, MemoryRule(S, W, R, 4), None, "needs an adaptor")


def test_tables_of_another_decoder_are_refused(pair):
    rule = MemoryRule(S, W, R, 4)
    decoder, adaptor = pair("llama", rule)
    io = DraftIO(9, 2, 8, 307, rule, max_sequences=1, max_length=60)
    with pytest.raises(ValueError, match=r"layers=9.*not the table of this decoder"):
        draft_network(trt, trt.Logger(trt.Logger.ERROR), io, decoder, adaptor)
