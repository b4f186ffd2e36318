"""The compiled draft: proposals against the torch draft, host arithmetic, folders, refusals."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from masw.engines.adaptor import AdaptorConfig
from masw.engines.config import DecoderConfig
from masw.engines.draft import TorchDraft
from masw.engines.draft_io import DraftIO
from masw.engines.draft_numbers import (
    ALIGNED,
    Bucket,
    DraftingPlan,
    Layout,
    lay_out,
    pack_chunk,
    rounded_up,
)
from masw.engines.engine_folder import (
    ENGINE,
    Builder,
    DraftEngine,
    EngineFolderError,
    file_sha256,
    is_engine_folder,
)
from masw.engines.executor import TensorRTExecutor
from masw.engines.memory import SlotMemory
from masw.engines.messages import DraftCall, DraftStateError, Sampling
from masw.engines.pair import DraftMode, Pair, PairError, load_draft
from masw.engines.tensorrt_draft import TensorRTDraft
from masw.engines.tokens import tokens_sha256
from masw.plugins.slot_attention.block import Block
from masw.plugins.slot_attention.rule import MemoryRule
from tests.arithmetic_executor import ArithmeticExecutor
from tests.models import random_ids

ROOT = Path(__file__).resolve().parents[2]
RULES = [
    MemoryRule(16, 16, 16, 4),
    MemoryRule(3, 5, 16, 1, "materialized"),
    MemoryRule(0, 7, 16, 5),
    MemoryRule.windowed(8, 8),
    MemoryRule.full(200),
]


def test_it_proposes_what_the_torch_draft_proposes():
    """Runs tests/network/draft_proposals.py in a process of its own; no test may be skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(
        [*command, "tests/network/draft_proposals.py"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout, done.stdout


# --- buckets and numbers of calls


@pytest.mark.parametrize(
    ("sequences", "most", "batch"),
    [(1, 8, 1), (2, 8, 2), (3, 8, 4), (5, 8, 8), (8, 8, 8), (5, 6, 6), (1, 1, 1), (3, 3, 3)],
)
def test_batches_are_rounded_up_and_draft_lengths_are_not(sequences, most, batch):
    for gamma in (1, 5, 16):
        assert Bucket.of(sequences, gamma, most) == Bucket(batch, gamma)


def test_few_buckets_serve_all_batches():
    for most in (1, 6, 8, 64):
        buckets = {Bucket.of(sequences, 5, most) for sequences in range(1, most + 1)}
        assert len(buckets) <= most.bit_length() + 1
        assert all(rounded_up(count, most) >= count for count in range(1, most + 1))


def test_tensors_of_a_call_stand_apart_and_aligned():
    for batch, positions in ((1, 1), (3, 4), (65, 2), (1, 640)):
        layout = Layout(batch, positions)
        end = 0
        for name, start in layout.starts.items():
            assert start >= end and start % ALIGNED == 0
            end = start + int(np.prod(layout.shape(name)))
        assert end <= layout.size


def as_block(rule, rows, fed, new_ids, positions):
    """ids, times, kind (B, positions) of the torch engine's own block, and the last raw places."""
    block = Block.build(rule, rows, fed, new_ids)
    spare = positions - block.ids.shape[1]
    found = {name: F.pad(getattr(block, name), (0, spare)) for name in ("ids", "times", "kind")}
    return {name: value.tolist() for name, value in found.items()}, block.last_raw.clamp(min=0)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("most", [1, 2, 19])
def test_calls_are_laid_out_like_blocks(rule, most):
    """At every fed length, ragged, sequences without a token among them."""
    fed = list(range(100))
    counts = [(n * 7) % (most + 1) for n in fed]
    counts[0] = most
    ids = [random_ids(most, n) for n in fed]
    one = (np.array([numbers]) for numbers in (fed, fed, counts))
    found = lay_out(rule, *one, np.array([ids]), 2 * most)
    pieces = [part[:count] for part, count in zip(ids, counts, strict=True)]
    expected, last = as_block(rule, fed, fed, pieces, 2 * most)
    assert {name: found[name][0].tolist() for name in expected} == expected
    assert found["last"][0].tolist() == last.tolist()
    lengths = [n + count for n, count in zip(fed, counts, strict=True)]
    assert found["lengths"][0].tolist() == lengths and found["fed"][0].tolist() == fed


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_steps_of_a_proposal_are_blocks_one_after_the_other(rule):
    io = DraftIO(1, 1, 8, 99, rule, max_sequences=5, max_length=200)
    plan = DraftingPlan((4, 0, 2), (14, 51, 30), ((5, 6), (7,), (8, 9)), (6, 1, 3))
    assert plan.fed_counts == (7, 1, 4)
    first, later = plan.pack(io, 4)
    step, _, catch_up = io.profiles[0].positions
    fed = list(plan.fed)
    for number in range(plan.steps):
        fresh = [[0] if number < gamma else [] for gamma in plan.draft_tokens]
        new = fresh if number else [list(ids) for ids in plan.backlogs]
        layout = Layout(4, step if number else catch_up)
        packed = later[number - 1] if number else first[0]
        expected, last = as_block(rule, plan.rows, fed, new, layout.positions)
        expected |= {"rows": list(plan.rows), "fed": fed, "last": last.tolist()}
        fed = [n + len(ids) for n, ids in zip(fed, new, strict=True)]
        for name, value in (expected | {"lengths": fed}).items():
            start, shape = layout.starts[name], layout.shape(name)
            found = packed[start : start + int(np.prod(shape))].reshape(shape)
            assert found[:3].tolist() == value, (number, name)
            assert not found[3:].any(), "a sequence that is not there must be padding"
    assert fed == [n + count for n, count in zip(plan.fed, plan.fed_counts, strict=True)]


def test_short_chunks_are_padded_to_few_widths():
    io = DraftIO(1, 1, 8, 99, RULES[0], max_sequences=2, max_length=200, chunk=24)
    most = io.profiles[1].positions[2]
    widths = {pack_chunk(io, 1, 20, [5] * n, most)[1].positions for n in range(1, 25)}
    assert widths == {1, 2, 4, 8, 16, 30}
    with pytest.raises(ValueError, match="backlogs have 1 to 2 ids"):
        DraftingPlan((0,), (0,), ((1, 2, 3),), (1,))


# --- memory in parts


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_storing_step_by_step_and_advancing_at_once_equals_writing(rule):
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 4, "rows": 2, "max_length": 200}
    written = SlotMemory(rule, **sizes)
    stored = SlotMemory(rule, **sizes, capacity=written.capacity + 5)
    assert stored.capacity == written.capacity + 5
    for start in range(0, 90, 9):
        for step in range(9):
            block = Block.build(rule, [1, 0], [start + step] * 2, [[0], [0]])
            k, v = torch.rand(2, 2, 2, 2, block.ids.shape[1], 4)
            written.write(block, k, v)
            wider = (F.pad(x, (0, 0, 0, 3)) for x in (k, v))  # positions beyond the block
            stored.store(block, *wider)
        assert stored.fed == [start] * 2
        stored.advance(Block.build(rule, [1, 0], [start] * 2, [[0] * 9] * 2))
    assert stored.fed == written.fed
    stored.check_integrity()
    for one, other in ((stored.k, written.k), (stored.v, written.v)):
        assert torch.equal(one[..., : written.capacity, :], other)
    with pytest.raises(ValueError, match="row 1 holds 90 tokens, not 5"):
        stored.advance(Block.build(rule, [1], [5], [[0]]))


# --- the draft over arithmetic


@pytest.fixture
def engine(model_dir):
    config = DecoderConfig.load(model_dir("llama"))
    sizes = {"max_sequences": 3, "max_length": 160, "chunk": 24, "logits": True}
    io = DraftIO.of(config, RULES[0], dtype="float32", **sizes)
    return DraftEngine(config, io, 8, Builder("tensorrt", "10.14", "plugin", "9.0"), "b" * 64)


def test_sampling_leaves_the_other_sequences_greedy(engine):
    """The arithmetic puts all weight on one id, so both ways give the same ids."""
    greedy, mixed = (TensorRTDraft(engine, ArithmeticExecutor(engine.io)) for _ in range(2))
    calls = [DraftCall(n, 0, random_ids(20 + n, n), 3 + n) for n in range(3)]
    expected = [answer.ids for answer in greedy.propose(calls)]
    calls[1] = replace(calls[1], sampling=Sampling(0.5), return_logits=True)
    found = mixed.propose(calls)
    assert [answer.ids for answer in found] == expected
    assert [answer.logits is None for answer in found] == [True, False, True]
    assert found[1].logits.shape == (4, engine.io.vocab_size)
    assert found[1].logits.argmax(-1).tolist() == list(expected[1])


def test_limits_beyond_the_engine_are_refused_by_name(engine):
    executor = ArithmeticExecutor(engine.io)
    for name, limit in (("max_length", 160), ("max_draft_tokens", 8)):
        with pytest.raises(ValueError, match=f"{name} is {limit + 1}; the engine allows 1 to"):
            TensorRTDraft(engine, executor, **{name: limit + 1})
    draft = TensorRTDraft(engine, executor, max_length=100, max_draft_tokens=2)
    answers = draft.propose([DraftCall(1, 0, [3] * 101, 1), DraftCall(2, 0, [3], 3)])
    assert [type(answer).__name__ for answer in answers] == ["CapacityError", "InvalidRequest"]


def test_an_engine_that_fails_costs_the_sequence_and_no_more(engine):
    """After an error in the middle the prefix has to be sent again."""
    draft = TensorRTDraft(engine, ArithmeticExecutor(engine.io))
    draft.propose([DraftCall(1, 0, random_ids(30), 5), DraftCall(2, 0, random_ids(9), 5)])
    call = next(iter(draft._steps.values())).later
    run, call.run = call.run, None
    with pytest.raises(TypeError):
        draft.propose([DraftCall(1, 30, [4], 5), DraftCall(2, 9, [4], 5)])
    call.run = run
    (refused,) = draft.propose([DraftCall(1, 31, [4], 5)])
    assert isinstance(refused, DraftStateError)
    (again,) = draft.propose([DraftCall(1, 0, random_ids(32), 5)])
    assert len(again.ids) == 5 and draft.memory.fed[draft._sequences[1].row] == 36
    draft.memory.check_integrity()


# --- folders


@pytest.fixture
def folder(model_dir, tmp_path, decoder):
    """A pair whose draft is a compiled one, with an engine file that TensorRT will not read."""
    rule, target = MemoryRule(16, 16, 16, 4), model_dir("llama")
    Pair(memory=rule, max_length=160, max_draft_tokens=8, chunk=24).save(tmp_path)
    (tmp_path / "target").mkdir()
    for path in target.iterdir():
        (tmp_path / "target" / path.name).symlink_to(path)
    vocab = {"model": {"vocab": {"a": 0, "b": 1}}}
    (tmp_path / "target" / "tokenizer.json").write_text(json.dumps(vocab))
    own = decoder("llama")
    header = AdaptorConfig(own.fingerprint(), 16, 16, 4)
    own.copy_adaptor(header).save(tmp_path / "adaptor.safetensors")
    sizes = {"max_sequences": 4, "max_length": 160, "chunk": 24, "dtype": "float32"}
    engine = DraftEngine(
        own.config,
        DraftIO.of(own.config, rule, **sizes),
        8,
        Builder("tensorrt_rtx", "1.7", "native"),
        own.fingerprint(),
        file_sha256(tmp_path / "adaptor.safetensors"),
        tokens_sha256(tmp_path / "target" / "tokenizer.json"),
    )
    (tmp_path / "draft").mkdir()
    engine.write(tmp_path / "draft")
    (tmp_path / "draft" / ENGINE).write_bytes(b"engine")
    return tmp_path


def change(folder, **fields):
    """Rewrites fields of the engine's config.json."""
    engine = DraftEngine.load(folder / "draft")
    io = replace(engine.io, **fields.pop("io", {}))
    replace(engine, io=io, **fields).write(folder / "draft")


def test_the_kind_of_draft_follows_from_its_folder(folder, model_dir):
    assert is_engine_folder(folder / "draft")
    assert not is_engine_folder(model_dir("llama")) and not is_engine_folder(folder / "none")
    (folder / "draft" / "config.json").write_text('["no object"]')
    assert not is_engine_folder(folder / "draft")
    for path in (folder / "draft").iterdir():
        path.unlink()
    (folder / "draft").rmdir()
    (folder / "draft").symlink_to(model_dir("llama"))
    assert isinstance(load_draft(folder), TorchDraft)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_fitting_engine_needs_a_gpu_and_says_so(folder):
    with pytest.raises(EngineFolderError, match="for a GPU and there is none; serve the pair with"):
        load_draft(folder, max_sequences=4)


def test_a_missing_tensorrt_is_named_with_its_remedy(folder):
    change(folder, builder=Builder("tensorrt", "10.14", "plugin", "9.0"))
    with pytest.raises(ImportError, match="tensorrt is not installed: run in NVIDIA's"):
        load_draft(folder, max_sequences=4)
    with pytest.raises(ImportError):
        TensorRTExecutor(folder / "draft", DraftEngine.load(folder / "draft"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base": "c" * 64}, "built for base model c{16}, not [0-9a-f]{16}"),
        ({"tokenizer": "d" * 64}, "built for tokenizer d{16}, not [0-9a-f]{16}"),
        ({"adaptor": "e" * 64}, "built with another adaptor than"),
        ({"io": {"rule": MemoryRule(16, 16, 16, 8)}}, "interval=8.*need .*interval=4"),
        ({"io": {"max_length": 100}}, "max_length is 160; the engine allows up to 100"),
        ({"draft_tokens": 5}, "max_draft_tokens is 8; the engine allows up to 5"),
        ({"quantization": "fp8"}, "draft_quantization is 'none'; the engine was built with 'fp8'"),
        ({"io": {"max_sequences": 2}}, "max_sequences is 4; the engine allows up to 2"),
    ],
)
def test_an_engine_that_does_not_fit_its_pair_is_refused_by_name(folder, fields, message):
    change(folder, **fields)
    with pytest.raises((PairError, EngineFolderError), match=message):
        load_draft(folder, max_sequences=4)


def test_another_draft_mode_than_the_engine_has_is_refused(folder):
    for mode in (DraftMode.FULL, DraftMode.WINDOW):
        with pytest.raises(PairError, match=r"interval=4.*draft mode need .*interval=0"):
            load_draft(folder, mode, 4)


def test_engines_of_another_version_are_no_hugging_face_folders(folder):
    path = folder / "draft" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "masw-draft-engine-9"}))
    with pytest.raises(EngineFolderError, match="not of format masw-draft-engine-1"):
        load_draft(folder)


def test_another_kind_of_gpu_is_refused(engine):
    engine.check_use(version="10.14", compute_capability="9.0")
    with pytest.raises(EngineFolderError, match=r"compute capability 9\.0, not 8\.6"):
        engine.check_use(compute_capability="8.6")
    builder = replace(engine.builder, compute_capability=None)
    replace(engine, builder=builder).check_use(compute_capability="8.6")
