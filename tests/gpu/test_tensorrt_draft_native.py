"""The compiled draft's streams, CUDA graphs and appends, over an engine of plain arithmetic."""

import pytest
import torch

from masw.engines.config import DecoderConfig
from masw.engines.draft_io import DraftIO
from masw.engines.engine_folder import Builder, DraftEngine
from masw.engines.messages import DraftCall, Sampling
from masw.engines.tensorrt_draft import TensorRTDraft
from masw.plugins.slot_attention.rule import MemoryRule
from tests.arithmetic_executor import ArithmeticExecutor
from tests.driver import live_entries
from tests.models import random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RULES = [MemoryRule(16, 16, 16, 4), MemoryRule(5, 9, 16, 1, "materialized")]
RULES += [MemoryRule.windowed(8, 24, 16), MemoryRule.full(400)]


@pytest.fixture
def new_draft(model_dir):
    """new_draft(rule, device) -> a draft of three sequences over the arithmetic."""

    def make(rule, device):
        config = DecoderConfig.load(model_dir("llama"))
        sizes = {"max_sequences": 3, "max_length": 400, "chunk": 70, "logits": True}
        io = DraftIO.of(config, rule, dtype="float32", **sizes)
        engine = DraftEngine(config, io, 16, Builder("tensorrt", "10.14", "plugin"), "b" * 64)
        return TensorRTDraft(engine, ArithmeticExecutor(io, device))

    return make


class Generation:
    """Three sequences of different lengths, and how many of their proposed ids are kept."""

    def __init__(self, draft, sampling):
        self.draft, self.sampling = draft, sampling
        self.committed = [0, 0, 0]
        self.new = [random_ids(length, length) for length in (5, 90, 200)]
        self.said = []

    def turn(self, number, which):
        """One iteration of some of the sequences."""
        calls = [
            DraftCall(i, self.committed[i], self.new[i], 4 + number % 2, self.sampling, number)
            for i in which
        ]
        for i, answer in zip(which, self.draft.propose(calls), strict=True):
            self.committed[i] += len(self.new[i])
            self.new[i] = [*answer.ids[: (number + i) % 6], 3 + number]
            self.said.append(answer.ids)

    def run(self):
        """Also a prefill that nobody waits for, others drafting beside it, then its own turn."""
        for number in range(4):
            self.turn(number, range(3))
        self.draft.propose([DraftCall(2, 0, random_ids(300, 1), 0)])
        self.committed[2], self.new[2] = 300, [7]
        self.turn(4, range(2))
        for number in range(5, 9):
            self.turn(number, range(3))
        self.draft.memory.check_integrity()
        return self.said


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_proposals_and_memory_equal_those_of_the_cpu(new_draft, rule, sampling):
    found, expected = new_draft(rule, "cuda"), new_draft(rule, "cpu")
    assert Generation(found, sampling).run() == Generation(expected, sampling).run()
    for row, length in enumerate(found.memory.fed):
        assert length == expected.memory.fed[row]
        entries = [entry for entry, _ in live_entries(rule, length)]
        for name in ("k", "v"):
            one, other = (getattr(draft.memory, name)[:, row] for draft in (found, expected))
            assert torch.equal(one[:, :, entries].cpu(), other[:, :, entries])
    graphs = [steps.graph is not None for steps in found._steps.values()]
    assert any(graphs) == sampling.greedy


def test_a_graph_is_captured_once_per_bucket(new_draft):
    draft = new_draft(RULES[0], "cuda")
    draft.propose([DraftCall(1, 0, [5, 6], 3)])
    (steps,) = draft._steps.values()
    graph = steps.graph
    assert graph is not None
    draft.propose([DraftCall(1, 2, [7], 3)])
    assert steps.graph is graph and len(draft._steps) == 1
