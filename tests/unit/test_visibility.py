"""The visibility rule against the words of the paper, and the operator against plain softmax."""

import itertools
import math

import pytest
import torch

from masw.plugins.slot_attention import op, reference
from masw.plugins.slot_attention.block import Block
from masw.plugins.slot_attention.rule import PADDING, RAW, SLOT, MemoryRule

BOTH = ["materialized", "evicted"]
# Small and uneven numbers reach every edge: no sink, window 1, r above W, r = 0 (no slots).
RULES = [
    MemoryRule(s, w, r, i, visibility)
    for (s, w, r), i, visibility in itertools.product(
        [(0, 1, 1), (0, 4, 2), (1, 2, 3), (3, 5, 1), (4, 3, 4), (5, 8, 5)], [0, 1, 2, 3, 5], BOTH
    )
]
NO_OR_TWO = [rule for rule in RULES if rule.interval in (0, 2) and rule.visibility == "evicted"]
LENGTH = 40


def name_of(rule):
    return f"{rule.sink}-{rule.window}-{rule.rollback}-{rule.interval}-{rule.visibility}"


def content_of_entries(rule, length):
    """{entry: ("raw", t) or ("slot", b)}: writes the tokens one after the other, later ones win."""
    held, unit, slots = {}, 0, 0
    for t in range(length):
        place = t if t < rule.sink else rule.sink + (t - rule.sink) % (rule.window + rule.rollback)
        held[place] = ("raw", t)
        unit = (unit + 1) % rule.interval if rule.interval and t >= rule.sink else unit
        if rule.interval and t >= rule.sink and unit == 0:
            held[rule.sink + rule.window + rule.rollback + slots] = ("slot", t)
            slots += 1
    return held


def drawn(rule, length):
    """The dense oracle as text: one line per position, '#' where it sees the column's position."""
    stream, mask = reference.dense_oracle(rule, length)
    names = [f"s{t}" if kind == "slot" else str(t) for kind, t in stream]
    return [
        f"{name:>2} {''.join('#' if seen else '.' for seen in row)}"
        for name, row in zip(names, mask, strict=True)
    ]


# S = 2, W = 3, r = 2: boundaries at 3, 5, 7, ... and columns 0 1 2 3 s3 4 5 s5 6 7 s7 8.
MATERIALIZED = """
 0 #...........
 1 ##..........
 2 ###.........
 3 ####........
s3 #####.......
 4 ######......
 5 ##.####.....
s5 ##.#####....
 6 ##..#####...
 7 ##..#.####..
s7 ##..#.#####.
 8 ##..#..#####
"""
# A slot appears W = 3 tokens after its boundary: s3 from 6 on, s5 from 8 on. Token 2 has left the
# window at 5 while its slot is not seen before 6: the intended short gap of r - 1 = 1 token.
EVICTED = """
 0 #...........
 1 ##..........
 2 ###.........
 3 ####........
s3 #####.......
 4 ####.#......
 5 ##.#.##.....
s5 ##.#.###....
 6 ##..###.#...
 7 ##..#.#.##..
s7 ##..#.#.###.
 8 ##..#..###.#
"""


@pytest.mark.parametrize(("visibility", "picture"), [(BOTH[0], MATERIALIZED), (BOTH[1], EVICTED)])
def test_dense_oracle_draws_the_words_of_the_design(visibility, picture):
    assert drawn(MemoryRule(2, 3, 1, 2, visibility), 9) == picture.strip("\n").splitlines()


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_block_masks_equal_the_dense_oracle(rule):
    """Blocks of every size at every offset see what the oracle lets them see, nothing is lost."""
    stream, dense = reference.dense_oracle(rule, LENGTH)
    dense, place = torch.tensor(dense), {item: i for i, item in enumerate(stream)}
    for length in range(LENGTH // 2):
        held = content_of_entries(rule, length)
        for size in (1, 2, 3, 5, 8, 13, 20):
            new = [i for i, (_, t) in enumerate(stream) if length <= t < length + size]
            block = Block.build(rule, [0], [length], [range(size)])
            extent = rule.extent(length)
            columns = [place.get(held.get(entry), -1) for entry in range(extent)] + new
            known = torch.tensor(columns) >= 0
            expected = dense[new][:, columns] & known
            assert torch.equal(block.masks[0], expected), f"{length=} {size=}"
            assert torch.equal(expected.sum(1), dense[new].sum(1)), f"{length=} {size=}"


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_counts_and_places_equal_a_token_by_token_count(rule):
    for length in range(LENGTH):
        held = content_of_entries(rule, length)
        slots = sorted(t for kind, t in held.values() if kind == "slot")
        assert rule.slots(length) == len(slots)
        assert [rule.boundary(m) for m in range(len(slots))] == slots
        assert [t for t in range(length) if rule.is_boundary(t)] == slots
        assert max(held, default=-1) == rule.extent(length) - 1
        for entry, (kind, t) in held.items():
            number = slots.index(t) if kind == "slot" else t
            found = rule.entry_of_slot(number) if kind == "slot" else rule.entry_of_raw(number)
            assert found == entry
        times = reference.stored_times(rule, length).tolist()
        assert times == [held.get(e, ("", -1))[1] for e in range(rule.extent(length))]


def test_capacity_holds_every_entry_of_sequences_of_any_length():
    for rule, length in itertools.product(RULES, range(LENGTH)):
        last = max(content_of_entries(rule, length), default=-1)
        assert rule.capacity(length) > last, f"{rule} {length=}"


@pytest.mark.parametrize("interval", [0, 1, 4, 8])
@pytest.mark.parametrize("length", [48, 49, 100, 4096])
def test_capacity_formula(interval, length):
    slots = (length - 16) // interval if interval else 0
    assert MemoryRule(16, 16, 16, interval).capacity(length) == 16 + 16 + 16 + slots


def test_capacity_of_a_plain_cache():
    assert MemoryRule.full(100).capacity(100) == 100
    assert MemoryRule.windowed(4, 8, 2).capacity(10_000) == 14
    with pytest.raises(ValueError, match=r"101.*100"):
        MemoryRule.full(100).capacity(101)


@pytest.mark.parametrize("rule", NO_OR_TWO, ids=name_of)
def test_rollback_up_to_r_is_allowed_and_never_breaks_the_window(rule):
    for length, kept in itertools.product(range(LENGTH), range(LENGTH)):
        held = content_of_entries(rule, length).values()
        needed = [j for j in range(kept) if j < rule.sink or j > kept - rule.window]
        intact = kept <= length and all(("raw", j) in held for j in needed)
        if rule.can_rollback(length, kept):
            assert intact, f"{length=} {kept=}"
        else:
            assert kept > length or length - kept > rule.rollback
    assert not rule.can_rollback(5, -1)


@pytest.mark.parametrize("field", ["sink", "window", "rollback", "interval"])
def test_negative_numbers_are_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{field} is -1"):
        MemoryRule(**{field: -1})


def test_rules_that_cannot_work_are_refused_by_name():
    with pytest.raises(ValueError, match="window is 0"):
        MemoryRule(4, 0, 1, 0)
    with pytest.raises(ValueError, match="window is 0"):
        MemoryRule(4, 0, 0, 2)
    with pytest.raises(ValueError, match="rollback is 0"):
        MemoryRule(4, 4, 0, 2)
    with pytest.raises(ValueError, match="sometimes"):
        MemoryRule(4, 4, 1, 2, "sometimes")


def test_block_lays_out_ragged_sequences_with_padding():
    rule = MemoryRule(2, 3, 1, 2)
    block = Block.build(rule, [4, 0, 2], [0, 3, 7], [[10, 11, 12, 13], [20], []])
    assert block.ids.tolist() == [[10, 11, 12, 13, 13], [20, 20, 0, 0, 0], [0] * 5]
    assert block.times.tolist() == [[0, 1, 2, 3, 3], [3, 3, 0, 0, 0], [0] * 5]
    assert block.kind.tolist() == [[RAW] * 4 + [SLOT], [RAW, SLOT] + [PADDING] * 3, [PADDING] * 5]
    assert block.positions[0].tolist() == [0, 1, 2, 3, 4]
    assert block.positions[1, :2].tolist() == [3, 4]
    assert block.last_raw.tolist()[:2] == [3, 0]
    assert block.raw_counts == (4, 1, 0)


def plain_attention(q, k, v, mask):
    """Softmax attention in float64, head by head and query by query."""
    group, out = len(q) // len(k), torch.zeros_like(q)
    for head, query in itertools.product(range(len(q)), range(q.shape[1])):
        keys, values = k[head // group][mask[query]], v[head // group][mask[query]]
        scores = keys.double() @ q[head, query].double() / math.sqrt(q.shape[-1])
        out[head, query] = (scores.softmax(0) @ values.double()).float()
    return out


def test_reference_attention_equals_attention_head_by_head():
    q, k, v = torch.randn(6, 5, 7), torch.randn(2, 9, 7), torch.randn(2, 9, 7)
    mask = torch.rand(5, 9) < 0.5
    mask[:, 0] = True
    found = reference.slot_attention(q, k, v, mask)
    assert torch.allclose(found, plain_attention(q, k, v, mask), atol=2e-6)


# (new raw tokens, fed length) of each row: single tokens, catch-up, chunks, and a row that idles
RAGGED = [
    [(1, 0)],
    [(1, 37), (2, 4), (1, 9)],
    [(5, 60), (0, 11), (17, 0)],
    [(64, 3), (1, 90)],
    [(65, 0), (33, 50), (90, 20)],
]


@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 4), (9, 3)], ids=str)
@pytest.mark.parametrize("sizes", RAGGED, ids=str)
def test_operator_equals_the_reference(sizes, heads, gradient):
    rule, dim = MemoryRule(5, 7, 3, 4), 10
    (new, fed), batch = zip(*sizes, strict=True), len(sizes)
    rows = list(range(batch))[::-1]
    block = Block.build(rule, rows, fed, [range(count) for count in new])
    width, generator = block.kind.shape[1], torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads[0], width, dim, generator=generator).requires_grad_(gradient)
    k, v = torch.randn(2, batch, heads[1], width, dim, generator=generator)
    memory = torch.randn(2, batch, heads[1], rule.capacity(200), dim, generator=generator)
    before = memory.clone()
    out = op.slot_attention(q, k, v, *memory, block)
    for i, row in enumerate(rows):
        held = memory[:, row, :, : rule.extent(fed[i])]
        expected = reference.slot_attention(
            q[i],
            torch.cat([held[0], k[i]], 1),
            torch.cat([held[1], v[i]], 1),
            block.masks[i],
            block.kind[i] == PADDING,
        )
        assert torch.allclose(out[i], expected, atol=2e-6)
        assert not out[i][:, block.kind[i] == PADDING].any()
    assert torch.equal(memory, before)


def test_operator_paths_agree_and_pass_gradients(monkeypatch):
    rule = MemoryRule(5, 7, 3, 4)
    block = Block.build(rule, [0], [30], [range(9)])
    width = block.kind.shape[1]
    q, k, v = torch.randn(4, width, 8), torch.randn(2, width, 8), torch.randn(2, width, 8)
    memory = torch.randn(2, 1, 2, rule.capacity(60), 8)
    inputs = (q[None], k[None], v[None], *memory, block)
    in_place = op.slot_attention(*inputs)
    monkeypatch.setattr(op, "IN_PLACE_POSITIONS", 0)
    assert torch.allclose(op.slot_attention(*inputs), in_place, atol=2e-6)
    k.requires_grad_()
    op.slot_attention(q[None].requires_grad_(), k[None], v[None], *memory, block).sum().backward()
    assert k.grad.abs().sum() > 0


def test_unseen_memory_does_not_matter():
    """Stale entries, also those a rollback left behind, have no influence whatever they hold."""
    rule = MemoryRule(5, 7, 3, 4)
    block = Block.build(rule, [0], [30], [range(2)])
    q, k, v = (torch.randn(1, 2, block.kind.shape[1], 8) for _ in range(3))
    memory = torch.randn(2, 1, 2, rule.capacity(60), 8)
    out = op.slot_attention(q, k, v, *memory, block)
    seen = torch.zeros(rule.capacity(60), dtype=torch.bool)
    seen[: block.extents[0]] = block.masks[0][:, : block.extents[0]].any(0)
    memory[:, :, :, ~seen] = 1e4
    assert torch.equal(op.slot_attention(q, k, v, *memory, block), out)
