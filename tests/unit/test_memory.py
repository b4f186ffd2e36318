"""Slot memory fed step by step equals full recompute: logits, and every stored key and value.

Losslessness hides faults of the memory (they only cost acceptance), so nothing here looks at
output: `tests.driver.Driver` compares the logits and the live entries after every forward.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from masw.engines.decoder import Decoder
from masw.engines.memory import CapacityError, SlotMemory
from masw.plugins.slot_attention.rule import MemoryRule
from tests.driver import Driver, Requests, random_adaptor
from tests.models import random_ids, random_model, save_model
from tests.oracle import LONGEST

S = W = R = 16
BOTH = ["materialized", "evicted"]
INTERVALS = [1, 4, 8]
GRID = list(itertools.product(INTERVALS, BOTH))


@pytest.fixture(scope="session")
def pair(model_dir, hf_model, decoder):
    """pair(name, rule, ...) -> (decoder, Hugging Face model, adaptor of random projections)."""

    def make(name, rule, **header):
        return decoder(name), hf_model(name), random_adaptor(decoder(name), rule, **header)

    return make


# --- random sequences of prefill, propose, rollback and clear, three rows in one memory

ROWS = 3
rows = st.integers(0, ROWS - 1)
# Chunks of one, around R, around the window's edges, and larger than the ring.
chunks = st.dictionaries(rows, st.sampled_from([1, 2, 3, 15, 16, 17, 33, 49, 60]), min_size=1)
# Draft length, and a number that stands for the accepted length.
iterations = st.dictionaries(rows, st.tuples(st.integers(1, R), st.integers(0, R)), min_size=1)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("speculate"), iterations),
        st.tuples(st.just("speculate"), iterations),
        st.tuples(st.just("chunk"), chunks),
        st.tuples(st.just("clear"), rows),
    ),
    min_size=8,
    max_size=12,
)


@pytest.mark.parametrize(("interval", "visibility"), GRID)
def test_random_speculation_equals_recompute(pair, interval, visibility):
    memory_rule = MemoryRule(S, W, R, interval, visibility)

    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    @given(operations)
    def check(steps):
        requests = Requests(Driver(pair("llama", memory_rule), memory_rule, ROWS))
        for operation, plan in steps:
            getattr(requests, operation)(plan)

    check()


# --- every accepted length at every offset from a boundary


@pytest.mark.parametrize("base", [S, S + W + R + 24], ids=["first slots", "wrapped ring"])
@pytest.mark.parametrize("length", [1, 5, 16], ids=lambda n: f"draft{n}")
@pytest.mark.parametrize(("interval", "visibility"), GRID)
def test_every_accepted_length_at_every_offset(pair, interval, visibility, length, base):
    """One row per accepted length 0..draft length and offset 0..r - 1, all in one batch.

    A second iteration and a chunk longer than the ring follow, so that what the rollback left
    behind must have gone everywhere.
    """
    memory_rule = MemoryRule(S, W, R, interval, visibility)
    cases = list(itertools.product(range(length + 1), range(interval)))
    driver = Driver(pair("llama-tied", memory_rule), memory_rule, len(cases))
    ids = {row: random_ids(base + offset, row) for row, (_, offset) in enumerate(cases)}
    for again in (False, True):
        drafts = {row: random_ids(length, 1000 + again + row) for row in ids}
        accepted = {row: length - a if again else a for row, (a, _) in enumerate(cases)}
        driver.speculate(ids, drafts, accepted)
        for row, whole in ids.items():
            ids[row] = whole + drafts[row][: accepted[row]] + random_ids(1, 2000 + row)
            assert len(ids[row]) - driver.memory.fed[row] == 1 + (accepted[row] == length)
    driver.feed_up_to({row: whole + random_ids(W + R + 3, row) for row, whole in ids.items()})


# --- the same for every model family, slot embedding and shape of the rule


def a_few_iterations(driver):
    """Prefill past the ring, three iterations and a last chunk, two rows side by side."""
    requests = Requests(driver)
    requests.chunk({0: 70, 2: 9})
    for plans in ({0: (5, 2), 2: (8, 8)}, {2: (5, 0)}, {0: (5, 5), 2: (3, 1)}):
        requests.speculate(plans)
    requests.chunk({0: 2, 2: 40})


@pytest.mark.parametrize("name", ["llama-linear", "llama-llama3", "mistral", "qwen2", "qwen3"])
def test_families_equal_recompute(pair, name):
    """Biases of the mirrored projections and the norm of slot keys included."""
    memory_rule = MemoryRule(S, W, R, 4)
    a_few_iterations(Driver(pair(name, memory_rule), memory_rule, ROWS))


@pytest.mark.parametrize(
    "header", [{"slot_embedding": 5}, {"offset": True}, {"low_rank": 3}], ids=str
)
def test_slot_embeddings_equal_recompute(pair, header):
    memory_rule = MemoryRule(S, W, R, 4)
    a_few_iterations(Driver(pair("llama", memory_rule, **header), memory_rule, ROWS))


@pytest.mark.parametrize("shape", [(0, 5, 8, 3), (3, 1, 8, 2), (7, 9, 8, 11), (40, 16, 16, 8)])
@pytest.mark.parametrize("visibility", BOTH)
def test_uneven_rules_equal_recompute(pair, shape, visibility):
    memory_rule = MemoryRule(*shape, visibility)
    a_few_iterations(Driver(pair("llama-tied", memory_rule), memory_rule, ROWS))


@pytest.mark.parametrize("memory_rule", [MemoryRule.full(LONGEST), MemoryRule.windowed(S, W, R)])
def test_rules_without_slots_equal_recompute(decoder, hf_model, memory_rule):
    pair = decoder("llama"), hf_model("llama"), None
    a_few_iterations(Driver(pair, memory_rule, ROWS))


def test_the_slot_of_the_last_position_has_a_rotary_entry(tmp_path):
    """N tokens fed, r = 1: the last slot stands at position N."""
    memory_rule, shape = MemoryRule(S, W, R, 1), {"max_position_embeddings": 64}
    decoder = Decoder.load(save_model(tmp_path, "llama", **shape))
    trio = decoder, random_model("llama", **shape), random_adaptor(decoder, memory_rule)
    Driver(trio, memory_rule, 1, max_length=64).feed_up_to({0: random_ids(64)})


@pytest.mark.parametrize("length", [S, S + 4, S + W + R - 1, S + W + R, S + W + R + 1])
def test_memories_of_short_sequences_hold_their_slots(pair, length):
    memory_rule = MemoryRule(S, W, R, 4)
    trio = pair("llama-tied", memory_rule)
    Driver(trio, memory_rule, 1, max_length=length).feed_up_to({0: random_ids(length)})


# --- state, limits and integrity


@pytest.fixture
def filled(pair):
    """filled(length, max_length) -> a driver whose row 0 holds `length` tokens; row 1 is empty."""

    def make(length, max_length=LONGEST):
        memory_rule = MemoryRule(S, W, R, 4)
        driver = Driver(pair("llama-tied", memory_rule), memory_rule, 2, max_length)
        driver.feed_up_to({0: random_ids(length)})
        return driver

    return make


def snapshot(memory):
    return memory.k.clone(), memory.v.clone(), list(memory.fed)


def unchanged(memory, before):
    same = torch.equal(memory.k, before[0]) and torch.equal(memory.v, before[1])
    return same and memory.fed == before[2]


def test_overflow_is_refused_before_any_work(filled):
    driver = filled(58, max_length=60)
    before = snapshot(driver.memory)
    with pytest.raises(CapacityError, match="length 61 exceeds max_length 60"):
        driver.decoder.feed(driver.memory, [1, 0], [[3, 4], [3, 4, 5]], driver.adaptor)
    assert unchanged(driver.memory, before)
    driver.feed_up_to({0: random_ids(60)})


def test_one_row_twice_in_a_batch_is_refused_before_any_work(filled):
    driver = filled(30)
    before = snapshot(driver.memory)
    with pytest.raises(ValueError, match=r"rows are \[0, 0\]"):
        driver.decoder.feed(driver.memory, [0, 0], [[3], [4]], driver.adaptor)
    assert unchanged(driver.memory, before)


def test_a_block_of_an_older_state_is_refused(filled):
    driver = filled(30)
    block = driver.memory.block([0], [[3]])
    _, k, v = driver.decoder(block, driver.memory, driver.adaptor)
    driver.memory.write(block, k, v)
    before = snapshot(driver.memory)
    with pytest.raises(ValueError, match="row 0 holds 31 tokens, not 30"):
        driver.memory.write(block, k, v)
    assert unchanged(driver.memory, before)


def test_making_a_block_and_a_forward_modify_nothing(filled):
    driver = filled(50)
    before = snapshot(driver.memory)
    driver.decoder(driver.memory.block([0], [random_ids(40)]), driver.memory, driver.adaptor)
    assert unchanged(driver.memory, before)


def test_feeding_a_row_leaves_the_others_alone(filled):
    driver = filled(50)
    before = driver.memory.k[:, 0].clone(), driver.memory.v[:, 0].clone()
    driver.feed_up_to({1: random_ids(90)})
    assert torch.equal(driver.memory.k[:, 0], before[0])
    assert torch.equal(driver.memory.v[:, 0], before[1])


@pytest.mark.parametrize(("length", "kept"), [(100, 83), (50, 51), (50, -1), (49, 0)])
def test_rollback_beyond_the_window_is_refused(filled, length, kept):
    driver = filled(length)
    assert not driver.memory.can_rollback(0, kept)
    with pytest.raises(ValueError, match=f"from {length} to {kept} tokens.*window is 16"):
        driver.memory.rollback(0, kept)
    assert driver.memory.fed[0] == length


@pytest.mark.parametrize(("length", "kept"), [(100, 84), (100, 100), (48, 0), (17, 3)])
def test_rollback_within_the_window_keeps_every_live_entry(filled, length, kept):
    driver = filled(length)
    driver.memory.rollback(0, kept)
    driver.memory.check_integrity()
    driver.compare_entries(0, driver.recompute(random_ids(length)))
    driver.feed_up_to({0: random_ids(length)[:kept] + random_ids(50, seed=9)})


@pytest.mark.parametrize("steps", [(100, 90, 80, 70), (60, 45, 26)], ids=str)
def test_what_can_rollback_allows_after_a_rollback_keeps_the_window(filled, steps):
    """Tokens fed before an earlier rollback have overwritten entries for good."""
    driver = filled(steps[0])
    for kept in steps[1:]:
        if driver.memory.can_rollback(0, kept):
            driver.memory.rollback(0, kept)
        driver.memory.check_integrity()
    driver.compare_entries(0, driver.recompute(random_ids(steps[0])))


@pytest.mark.parametrize("moved", [101, 104, 99 - R - 2, 60, 20])
def test_integrity_check_sees_a_length_that_was_moved(filled, moved):
    driver = filled(100)
    driver.memory.fed[0] = moved
    with pytest.raises(AssertionError, match="row 0"):
        driver.memory.check_integrity()


def test_integrity_check_sees_a_rollback_that_went_too_far_after_more_was_fed(filled):
    driver = filled(100)
    driver.memory.fed[0] = 80
    driver.decoder.feed(driver.memory, [0], [[3]], driver.adaptor)
    with pytest.raises(AssertionError, match=r"row 0: entry .* instead of"):
        driver.memory.check_integrity()


def test_integrity_check_sees_a_length_beyond_the_limit(filled):
    driver = filled(50)
    driver.memory.fed[1] = LONGEST + 1
    with pytest.raises(AssertionError, match="row 1: length 161"):
        driver.memory.check_integrity()


def test_a_cleared_row_is_as_good_as_new(filled):
    """The same request gives the same bits whatever was in its row; buffers stay in place."""
    driver, ids = filled(1), random_ids(60, seed=5)
    buffers = driver.memory.k.data_ptr(), driver.memory.v.data_ptr()
    fresh, _ = driver.decoder.feed(driver.memory, [1], [ids], driver.adaptor)
    for length in range(1, 140, 9):
        driver.memory.clear(1)
        driver.decoder.feed(driver.memory, [1], [random_ids(length)], driver.adaptor)
    driver.memory.clear(1)
    again, _ = driver.decoder.feed(driver.memory, [1], [ids], driver.adaptor)
    driver.memory.check_integrity()
    assert torch.equal(again, fresh)
    assert (driver.memory.k.data_ptr(), driver.memory.v.data_ptr()) == buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_follow_the_formula(dtype):
    """4 bytes or 2, keys and values, 3 layers, 2 heads of 8, and S + W + R + slots entries."""
    memory = SlotMemory(
        MemoryRule(S, W, R, 8), layers=3, kv_heads=2, head_dim=8, rows=5, max_length=4096,
        dtype=dtype,
    )  # fmt: skip
    entries = S + W + R + (4096 - S) // 8
    assert memory.bytes_per_row == dtype.itemsize * 2 * 3 * 2 * 8 * entries
    assert 5 * memory.bytes_per_row == memory.k.nbytes + memory.v.nbytes


def test_a_memory_without_rows_is_refused():
    with pytest.raises(ValueError, match="rows is 0"):
        SlotMemory(MemoryRule(), layers=1, kv_heads=1, head_dim=2, rows=0, max_length=300)


def test_copied_prefix_continues_like_the_original(decoder, hf_model):
    pair, whole = (decoder("llama"), hf_model("llama"), None), random_ids(60)
    driver = Driver(pair, MemoryRule.full(LONGEST), 2)
    driver.feed_up_to({0: whole, 1: random_ids(20, seed=3)})
    driver.memory.copy_prefix(0, 1, 45)
    driver.memory.check_integrity()
    driver.feed_up_to({1: whole[:45] + random_ids(30, seed=4), 0: [*whole, 7]})


def test_a_prefix_that_is_not_there_is_not_copied(filled):
    driver = filled(50)
    before = snapshot(driver.memory)
    with pytest.raises(ValueError, match="50"):
        driver.memory.copy_prefix(0, 1, S + 1)  # the ring of a window cannot be copied
    assert unchanged(driver.memory, before)
