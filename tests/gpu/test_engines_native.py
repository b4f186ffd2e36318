"""The torch engines on a GPU propose what they propose on the CPU, with the kernels underneath."""

import numpy as np
import pytest
import torch

from masw.engines.acceptance import accept, generator
from masw.engines.decoder import Decoder
from masw.engines.draft import TorchDraft
from masw.engines.messages import DraftCall, Proposal, Sampling, TargetCall
from masw.engines.target import TorchTarget
from masw.plugins.slot_attention import op
from masw.plugins.slot_attention.rule import MemoryRule
from tests.driver import random_adaptor
from tests.kernel_cases import BOTH, Case
from tests.models import VOCAB, random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RULES = [MemoryRule(16, 16, 16, 4, visibility) for visibility in BOTH]
RULES += [MemoryRule.windowed(8, 24, 16), MemoryRule.full(400)]


def draft(folder, rule, device):
    """A draft with random mirrored projections on a device."""
    decoder = Decoder.load(folder, device=device)
    adaptor = random_adaptor(Decoder.load(folder), rule).to(device) if rule.interval else None
    return TorchDraft(decoder, rule, adaptor, max_sequences=3, max_length=400, chunk=70)


def generation(engine, seed, sampling):
    """Proposals of three sequences over several iterations, some rejected in part."""
    lengths, committed = [5, 90, 200], [0, 0, 0]
    new = [random_ids(n, seed + n) for n in lengths]
    said = []
    for turn in range(5):
        calls = [
            DraftCall(i, committed[i], new[i], 4 + turn % 2, sampling, seed + turn, True)
            for i in range(3)
        ]
        answers = engine.propose(calls)
        said.append([(answer.ids, answer.logits) for answer in answers])
        for i, answer in enumerate(answers):
            committed[i] += len(new[i])
            new[i] = [*answer.ids[: (turn + i) % 4], 3 + (turn * 7 + i) % (VOCAB - 3)]
    engine.memory.check_integrity()
    return said


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_draft_proposes_the_same_tokens(model_dir, rule, name):
    found, expected = (
        generation(draft(model_dir(name), rule, device), 7, Sampling())
        for device in ("cuda", "cpu")
    )
    assert [[ids for ids, _ in turn] for turn in found] == [
        [ids for ids, _ in turn] for turn in expected
    ]


def test_draft_samples_on_the_device(model_dir):
    said = generation(draft(model_dir("llama"), RULES[0], "cuda"), 3, Sampling(0.8, 20, 0.9))
    for ids, logits in (answer for turn in said for answer in turn):
        assert logits.shape == (len(ids), VOCAB)
        assert all(torch.isfinite(row[token]) for row, token in zip(logits, ids, strict=True))


def test_target_verifies_and_decodes_the_same(model_dir):
    ids = np.array(random_ids(120), np.int32)
    answers = []
    for device in ("cuda", "cpu"):
        target = TorchTarget(Decoder.load(model_dir("llama"), device=device), max_length=400)
        plain = target.verify([TargetCall(ids, 6, end_ids=())])[0].ids
        proposal = Proposal((*plain[:2], 5, 6))
        answers.append((plain, target.verify([TargetCall(ids, 1, proposal, end_ids=())])[0].ids))
    assert answers[0] == answers[1]


def test_acceptance_by_sampling_runs_on_the_device():
    logits = torch.randn(4, 50, device="cuda")
    draft_logits = torch.randn(3, 50, device="cuda")
    random = generator(1, logits.device)
    assert 1 <= len(accept(logits, (1, 2, 3), draft_logits, Sampling(1.0), random)) <= 4


@pytest.mark.parametrize("size", [3, 129])
def test_gradients_take_the_reference_and_agree(size):
    inputs = Case(RULES[0], torch.float32, 64, 4, 2, (60, 0), (size, 1)).on("cuda")
    memory = [x.nan_to_num() for x in (inputs.memory_k, inputs.memory_v)]
    q = inputs.q.clone().requires_grad_()
    out = op.slot_attention(q, inputs.k_new, inputs.v_new, *memory, inputs.block)
    out.sum().backward()
    inputs.check(out.detach())
    assert q.grad.isfinite().all()
    inputs.check(op.slot_attention(*inputs.arguments))


def test_memories_beyond_four_gib_are_addressed():
    """The last row of a memory of more than 2**31 values."""
    case = Case(RULES[0], torch.bfloat16, 128, 8, 8, (130,), (2,))
    inputs = case.on("cuda")
    rows, (kv_heads, entries, dim) = 70, inputs.memory_k.shape[1:]
    big = [torch.empty(rows, kv_heads, 2**15, dim, dtype=case.dtype, device="cuda") for _ in "kv"]
    assert big[0].numel() > 2**31
    for whole, part in zip(big, (inputs.memory_k, inputs.memory_v), strict=True):
        whole[-1, :, :entries] = part[1]
    block = type(inputs.block).build(case.rule, [rows - 1], case.fed, [range(2)], "cuda")
    inputs.check(op.slot_attention(inputs.q, inputs.k_new, inputs.v_new, *big, block))
