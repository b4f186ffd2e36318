"""The slot-attention kernels against the dense oracle: natively on a GPU, or interpreted.

`tests/unit/test_kernels.py` runs this file in Triton's interpreter, in a process of its own.
"""

import os
from dataclasses import replace

import pytest
import torch

from masw.engines.draft_calls import DraftingSteps, EngineCall
from masw.engines.draft_io import DraftIO
from masw.engines.draft_numbers import Bucket, DraftingPlan, Layout, pack_chunk
from masw.engines.memory import SlotMemory
from masw.plugins.slot_attention.block import Block
from masw.plugins.slot_attention.rule import PADDING, RAW, SLOT, MemoryRule
from tests.arithmetic_executor import ArithmeticExecutor
from tests.kernel_cases import BOTH, RULES, SHAPES, SIZES, TOLERANCE, Case

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SAMPLES = 2 if INTERPRETED else 2 * len(SHAPES)
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    """Where the kernels run."""
    if INTERPRETED:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; tests/unit/test_kernels.py interprets these tests")
    return "cuda"


@pytest.fixture(scope="module")
def launch(device):
    """The module that launches the kernels; importing it needs Triton, and decides its mode."""
    from masw.plugins.slot_attention import launch

    return launch


def plans(launch, case, inputs):
    """The plan of a device of 132 multiprocessors, without splitting, and in 3 parts.

    The interpreter's time goes by programs, so there they are few and large.
    """
    planned = launch.plan_launch(inputs.q, inputs.block, case.kv_heads, 132)
    if INTERPRETED:
        planned = replace(planned, block_m=64, block_n=64, parts=2)
    return {planned, replace(planned, parts=1), replace(planned, parts=3)}


@pytest.mark.parametrize("sample", range(SAMPLES))
@pytest.mark.parametrize("size", SIZES)
def test_attention_equals_the_dense_oracle(launch, device, size, sample):
    """Ragged batches of every size over poisoned memories; shapes and rules in turn."""
    seed = (sample * len(SIZES) + SIZES.index(size)) if INTERPRETED else sample
    case = Case.sample(size, seed)
    inputs = case.on(device)
    for plan in sorted(plans(launch, case, inputs), key=str)[: 2 if INTERPRETED else 3]:
        inputs.check(launch.attend(*inputs.arguments, plan=plan))


@pytest.mark.parametrize("new", [(1, 1, 2), (2, 2, 0), (9, 4, 1)], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 20])
def test_every_number_of_parts_gives_the_same(launch, device, parts, new):
    """Also more parts than there are key tiles."""
    rule = MemoryRule(16, 33, 16, 3)
    case = Case(rule, torch.float32, 64, 6, 2, (353, 47, 0), new)
    inputs = case.on(device)
    inputs.check(launch.attend(*inputs.arguments, plan=launch.Plan(64, 32, 4, 2, parts=parts)))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_decode_steps_around_every_boundary(launch, device, rule):
    """One new token at each fed length of a unit, where the ring is empty, filling and full."""
    ring = rule.sink + rule.ring
    fed = sorted({0, *range(rule.sink, rule.sink + 5), *range(ring - 2, ring + 4), 301})
    fed = tuple(n for n in fed if n < 600)
    case = Case(rule, torch.float16, 64, 2, 1, fed, (1,) * len(fed))
    inputs = case.on(device)
    for parts in (1, 3):
        inputs.check(launch.attend(*inputs.arguments, plan=launch.Plan(16, 64, 4, 2, parts=parts)))


@pytest.mark.parametrize("visibility", BOTH)
def test_keys_without_a_mask_end_at_every_offset_of_a_tile(launch, device, visibility):
    """Fed lengths at which the slots that all rows see end before, at and after a tile's end."""
    fed = tuple(range(78, 88) if INTERPRETED else range(70, 102))
    case = Case(MemoryRule(3, 5, 3, 1, visibility), torch.float16, 64, 2, 1, fed, (2,) * len(fed))
    inputs = case.on(device)
    plan = launch.Plan(16, 16, 4, 2, unmasked=True)
    inputs.check(launch.attend(*inputs.arguments, plan=plan))


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_that_see_nothing_but_themselves(launch, device, parts):
    """Window 1 without sinks or slots that are born yet: the output is the row's own value."""
    case = Case(MemoryRule(0, 1, 1, 0), torch.float32, 64, 2, 1, (0, 9, 300), (3, 1, 2))
    inputs = case.on(device)
    out = launch.attend(*inputs.arguments, plan=launch.Plan(16, 32, 4, 2, parts=parts))
    inputs.check(out)
    for i, count in enumerate(case.new):
        torch.testing.assert_close(out[i, 0, :count], inputs.v_new[i, 0, :count])


@pytest.mark.parametrize("parts", [1, 4])
def test_a_batch_of_padding_gives_zeros(launch, device, parts):
    case = Case(RULES[2], torch.float16, 64, 4, 1, (130, 47), (3, 0))
    inputs = case.on(device)
    out = launch.attend(*inputs.arguments, plan=launch.Plan(16, 64, 4, 2, parts=parts))
    assert (inputs.block.kind[1] == PADDING).all() and not out[1].any()
    inputs.check(out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_planned_launches_of_every_shape(launch, device, shape):
    """A draft step of 2 positions, catch-up of 4, over some hundred entries."""
    for new in ((1, 1), (2, 1)):
        case = Case(MemoryRule(16, 33, 16, 4), *shape, (303, 48), new)
        inputs = case.on(device)
        plan = launch.plan_launch(inputs.q, inputs.block, case.kv_heads, 132)
        assert plan.parts > 1
        inputs.check(launch.attend(*inputs.arguments, plan=plan))


# --- the append


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_append_writes_what_the_memory_writes(launch, device, rule):
    """Bit for bit and nothing else, with chunks longer than the ring and idle rows."""
    dtype = list(TOLERANCE)[RULES.index(rule) % len(TOLERANCE)]
    shape = {"layers": 2, "kv_heads": 2, "head_dim": 80, "rows": 4, "max_length": 400}
    memory, generator = SlotMemory(rule, **shape, dtype=dtype), torch.Generator().manual_seed(0)
    found = [x.clone().fill_(7).to(device) for x in (memory.k, memory.v)]
    memory.k.fill_(7)
    memory.v.fill_(7)
    for new in ({3: 17, 0: 1}, {0: 3, 1: 150}, {3: 1, 2: 2, 0: 0}, {3: 129}, {0: 1, 1: 2, 2: 1}):
        ids = [range(count) for count in new.values()]
        block = memory.block(list(new), ids)
        size = (2, 2, *block.kind.shape[:1], 2, block.kind.shape[1], 80)
        k, v = torch.randn(size, generator=generator).to(dtype)
        there = Block.build(rule, block.rows, block.fed, ids, device)
        launch.append(*found, there, k.to(device), v.to(device))
        memory.write(block, k, v)
        assert torch.equal(found[0].cpu(), memory.k) and torch.equal(found[1].cpu(), memory.v)
    memory.check_integrity()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.ring], ids=str)
def test_append_leaves_overwritten_tokens_out(launch, device, rule):
    """Without the tokens that overwrite them they would show: the ring stays as it was."""
    count = rule.ring + 40
    block = Block.build(rule, [0], [rule.sink], [range(count)], device)
    kept = (block.kind == RAW) & (block.times < rule.sink + 40)
    without = replace(block, kind=torch.where(kept, RAW, PADDING).to(torch.uint8))
    memory = torch.full((2, 1, 1, 1, rule.capacity(600), 64), 7.0, device=device)
    new = torch.zeros(2, 1, 1, 1, block.kind.shape[1], 64, device=device)
    launch.append(*memory, without, *new)
    assert (memory == 7).all()


class EngineCalls:
    """Calls of a compiled draft that append by their own numbers, beside a memory on the CPU."""

    def __init__(self, rule, device):
        sizes = {"max_sequences": 4, "max_length": 400, "dtype": "float32", "logits": True}
        self.io = DraftIO(2, 2, 16, 99, rule, **sizes)
        sizes = {"layers": 2, "kv_heads": 2, "head_dim": 16, "rows": 4, "max_length": 400}
        sizes["capacity"] = self.io.capacity
        self.memory, self.expected = (SlotMemory(rule, **sizes, device=x) for x in (device, "cpu"))
        self.executor = ArithmeticExecutor(self.io, device)

    def make(self, profile, layout):
        return EngineCall(self.io, self.executor, profile, layout, self.memory)

    def append(self, launch, call, rows, fed, counts):
        """By the kernel and by the memory, which must then be equal bit for bit."""
        new = call.tensors["new_k"], call.tensors["new_v"]
        launch.append_to(self.memory.k, self.memory.v, self.io.rule, call.placed, *new)
        block = Block.build(self.io.rule, rows, fed, [[0] * count for count in counts])
        self.expected.store(block, *(x.cpu() for x in new))
        for name in ("k", "v"):
            found, expected = getattr(self.memory, name), getattr(self.expected, name)
            assert torch.equal(found.cpu(), expected) and expected.any()


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_append_of_drafting_steps_is_that_of_the_memory(launch, device, rule):
    """A batch with a sequence too many, γ of three sizes."""
    calls = EngineCalls(rule, device)
    step, _, catch_up = calls.io.profiles[0].positions
    first, later = (calls.make("decode", Layout(4, n)) for n in (catch_up, step))
    plan = DraftingPlan((3, 0, 2), (6, 51, 30), ((5, 6), (7,), (8, 9)), (9, 1, 4))
    steps = DraftingSteps.make(Bucket(4, plan.steps), first, later)
    steps.load(*plan.pack(calls.io, 4))
    for number, (fed, counts) in enumerate(zip(plan.fed_before(), plan.counts(), strict=True)):
        calls.append(launch, steps.run(number), plan.rows, fed.tolist(), counts)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_append_of_a_prefill_call_is_that_of_the_memory(launch, device, rule):
    """Chunks longer than the ring, and padded."""
    calls = EngineCalls(rule, device)
    for fed, count in ((0, 150), (150, 40), (190, 201)):
        most = calls.io.profiles[1].positions[2]
        packed, layout = pack_chunk(calls.io, 1, fed, [7] * count, most)
        call = calls.make("prefill", layout)
        call.load(packed[0])
        call.run()
        calls.append(launch, call, [1], [fed], [count])


# --- choices


@pytest.mark.parametrize("visibility", BOTH)
def test_cases_have_slots_and_padding(visibility):
    """The sampled cases really cover what they are for."""
    blocks = [Case.sample(size, seed).on("cpu").block for size in (3, 17) for seed in range(12)]
    assert any((block.kind == SLOT).any() for block in blocks)
    assert any((block.kind == PADDING).any() for block in blocks)


@pytest.mark.parametrize(("programs", "tiles"), [(1, 1), (8, 65), (256, 512), (9000, 2), (20, 3)])
def test_parts_fill_the_device_and_never_exceed_the_tiles(launch, programs, tiles):
    parts = launch.count_parts(programs, tiles, 16, 264)
    assert 1 <= parts <= min(tiles, launch.MOST_PARTS)
    if (programs, tiles) == (8, 65):
        assert 132 < parts * programs <= 264
    if programs == 9000:
        assert parts == 1


def test_memories_that_cannot_be_addressed_are_refused(launch):
    memory = torch.zeros(2, 2, 8, 16).transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        launch.attend(*[torch.zeros(1, 2, 1, 16)] * 3, memory, memory, None)
