"""The compiled draft proposes what the torch draft proposes, token for token, in float32.

Its engine is the network, evaluated by the interpreter. Run by tests/unit/test_tensorrt_draft.py
in a process of its own.
"""

from itertools import product

import pytest
import tensorrt_rtx as trt
import torch

from masw.engines.draft import TorchDraft
from masw.engines.local import generate_all
from masw.engines.messages import Draft, DraftCall, InvalidRequest, Proposal, Sampling
from masw.engines.tensorrt_draft import TensorRTDraft
from masw.plugins.slot_attention.rule import MemoryRule
from tests.driver import live_entries, random_adaptor
from tests.models import MODELS, VOCAB, random_ids
from tests.network_executor import NetworkExecutor, new_engine
from tests.pairs import (
    CHUNK,
    MAX_LENGTH,
    Kind,
    R,
    RecordingTarget,
    build_pair,
    loop_settings,
    new_target,
    requests_of,
)

NEW = 12
BOTH = ("materialized", "evicted")
SLOTS = [Kind("slots", *rest) for rest in product((1, 4, 7), BOTH)]
PLAIN = [Kind("full"), Kind("window")]
SAMPLED = Sampling(0.9, top_k=40, top_p=0.95)
LENGTHS = (1, 16, 33, 49, 72, 200)  # edges of the memory and of chunks


class Twins(Draft):
    """A torch draft and a compiled draft that must answer every call alike."""

    def __init__(self, decoder, rule, *, logits=True, draft_tokens=R, **sizes):
        sizes = {"max_sequences": 4, "max_length": MAX_LENGTH, "chunk": CHUNK} | sizes
        adaptor = random_adaptor(decoder, rule) if rule.interval else None
        self.torch = TorchDraft(decoder, rule, adaptor, max_draft_tokens=draft_tokens, **sizes)
        engine = new_engine(decoder, rule, draft_tokens=draft_tokens, logits=logits, **sizes)
        self.executor = NetworkExecutor(trt, engine.io, decoder, adaptor)
        self.compiled = TensorRTDraft(engine, self.executor)

    def propose(self, calls):
        expected, found = self.torch.propose(calls), self.compiled.propose(calls)
        for one, other in zip(found, expected, strict=True):
            self.compare(one, other)
        self.compare_state()
        return found

    def compare(self, one, other):
        if isinstance(other, Exception):
            assert (type(one), str(one)) == (type(other), str(other))
            return
        assert one.ids == other.ids
        assert (one.logits is None) == (other.logits is None)
        if one.logits is not None:
            torch.testing.assert_close(one.logits, other.logits, atol=2e-4, rtol=1e-4)

    def compare_state(self):
        """The same sequences, in the same rows, with the same tokens fed and counted."""
        one, other = self.compiled, self.torch
        assert one._sequences.keys() == other._sequences.keys()
        for number, held in one._sequences.items():
            twin = other._sequences[number]
            assert (held.row, held.fed, held.committed) == (twin.row, twin.fed, twin.committed)
            assert one.memory.fed[held.row] == len(held.fed)
        assert one.memory.fed == other.memory.fed and one.fed_tokens == other.fed_tokens
        one.memory.check_integrity()

    def compare_memory(self):
        """Every entry that a next token sees holds the same keys and values."""
        one, other = self.compiled.memory, self.torch.memory
        for row, length in enumerate(one.fed):
            entries = [entry for entry, _ in live_entries(one.rule, length)]
            for mine, theirs in ((one.k, other.k), (one.v, other.v)):
                pair = mine[:, row, :, entries], theirs[:, row, :, entries]
                torch.testing.assert_close(*pair, atol=1e-4, rtol=0)

    def say(self, *args, **fields) -> Proposal:
        """The answer to one call, raised if it is an error."""
        (answer,) = self.propose([DraftCall(*args, **fields)])
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """pairs(name) -> target and drafts of that family, made once."""
    made, root = {}, tmp_path_factory.mktemp("pairs")

    def pair(name="llama"):
        if name not in made:
            made[name] = build_pair(root / name, name)
        return made[name]

    return pair


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny models run faster on one thread."""
    torch.set_num_threads(1)


def generate(pair, name, kind, gamma, lengths=LENGTHS, **changes):
    """Whole generations of a ragged batch; returns the twins and the target's steps."""
    sizes = {"max_sequences": len(lengths)}
    twins = Twins(pair.drafts[name], kind.rule(), **sizes)
    target = RecordingTarget(new_target(pair.target, **sizes))
    prompts = [tuple(random_ids(length, seed=length)) for length in lengths]
    requests = requests_of(prompts, NEW, draft_tokens=gamma, **changes)
    settings = loop_settings(rule=twins.torch.memory.rule)
    answers = generate_all(target, twins, settings, requests)
    assert all(stats.draft_failures == 0 and stats.drafted for _, stats in answers)
    assert not twins.compiled._sequences
    return twins, target.steps


# --- whole generations


@pytest.mark.parametrize("visibility", BOTH)
@pytest.mark.parametrize("name", MODELS)
def test_every_family_proposes_the_same_tokens(pairs, name, visibility):
    _, steps = generate(pairs(name), "near", Kind("slots", 4, visibility), 5)
    assert len({step.accepted for step in steps if step.drafts}) > 2


@pytest.mark.parametrize("kind", [*SLOTS, *PLAIN], ids=str)
def test_every_rule_proposes_the_same_tokens(pairs, kind):
    generate(pairs(), "near", kind, 6, lengths=(33, 49, 131))


@pytest.mark.parametrize("gamma", range(1, R + 1))
def test_every_draft_length_proposes_the_same_tokens(pairs, gamma):
    kind = SLOTS[gamma % len(SLOTS)]
    generate(pairs(), "same" if gamma % 3 else "near", kind, gamma, lengths=(5, 131))


def test_every_accepted_length_occurs(pairs):
    seen = set()
    for name in ("same", "near"):
        _, steps = generate(pairs(), name, Kind("full"), 4)
        seen |= {step.accepted for step in steps if step.drafts}
    assert seen == set(range(5))


@pytest.mark.parametrize("name", ["same", "near", "other"])
def test_drafts_of_every_quality_propose_the_same_tokens(pairs, name):
    """Adaptive γ: sequences of one batch propose different numbers of tokens."""
    generate(pairs(), name, Kind(), 3, adaptive=True)


@pytest.mark.parametrize("kind", [Kind(), Kind("full")], ids=str)
def test_sampling_draws_the_same_tokens(pairs, kind):
    generate(pairs(), "near", kind, 5, sampling=SAMPLED, seed=11)


# --- calls one by one


@pytest.mark.parametrize("kind", [*SLOTS, *PLAIN], ids=str)
def test_any_calls_are_answered_alike(pairs, kind):
    """Ragged batches, γ 0 to R, accepted 0 to γ, catch-up of any length, chunks, ends, restarts."""
    twins = Twins(pairs().drafts["near"], kind.rule())
    random = torch.Generator().manual_seed(3)

    def pick(most):
        return int(torch.randint(0, most + 1, (), generator=random))

    text, start, proposed = {}, {}, {}
    catch_up = set()
    for turn in range(16):
        calls = []
        for number in range(4):
            if pick(3) == 0:
                continue
            if number not in text or len(text[number]) > MAX_LENGTH - 60 or pick(11) == 0:
                text[number], start[number], proposed[number] = [], 0, ()
                new = random_ids(1 + pick(70), seed=turn * 4 + number)
            else:
                start[number] = len(text[number])
                kept = proposed[number][: pick(len(proposed[number]))]
                new = [*kept, *random_ids(1 + pick(2) * (pick(3) == 0), seed=turn)]
            gamma = (0, 1, 2, 5, 9, R)[pick(5)]
            sampling = SAMPLED if pick(3) == 0 else Sampling()
            text[number] += new
            call = DraftCall(number, start[number], new, gamma, sampling, turn, True)
            calls.append(call)
        answers = twins.propose(calls)
        for call, answer in zip(calls, answers, strict=True):
            proposed[call.sequence_id] = answer.ids
            assert len(answer.ids) == call.draft_tokens
            catch_up.add(len(call.new_ids))
        twins.compare_memory()
    assert {1, 2, 3} < catch_up
    twins.propose([DraftCall(number, 0, [], end=True) for number in range(4)])
    assert sorted(twins.compiled._free_rows) == [0, 1, 2, 3]


@pytest.mark.parametrize("visibility", BOTH)
def test_rollback_and_catch_up_at_every_offset_of_a_boundary(pairs, visibility):
    """One sequence through several units: accepted a, then one token of the target's own."""
    twins = Twins(pairs().drafts["same"], MemoryRule(6, 9, 8, 5, visibility), draft_tokens=8)
    for accepted in (0, 1, 3, 6, 7, 8):
        text, proposed = random_ids(20 + accepted, seed=accepted), ()
        start = 0
        for step in range(5):
            new = text[start:] if not step else [*proposed[:accepted], 3 + step]
            proposed = twins.say(1, start, new, 8).ids
            text = text[:start] + new
            start = len(text)
        twins.compare_memory()
        twins.say(1, start, [], end=True)


@pytest.mark.parametrize("backlog", [1, 2, 3, 4, 17, 18, 23, 24, 25, 26, 48, 49, 50, 100])
def test_backlogs_of_every_size(pairs, backlog):
    """Alone and beside a sequence that only drafts, with and without draft tokens."""
    twins = Twins(pairs().drafts["near"], Kind().rule())
    twins.propose([DraftCall(1, 0, random_ids(31), 4), DraftCall(2, 0, random_ids(40, 1), 4)])
    new = random_ids(backlog, seed=5)
    calls = [DraftCall(1, 31, new, 6), DraftCall(2, 40, [9], 3), DraftCall(3, 0, new, 0)]
    ids = [answer.ids for answer in twins.propose(calls)]
    assert [len(one) for one in ids] == [6, 3, 0]
    twins.compare_memory()
    twins.say(3, backlog, [7], 5)


@pytest.mark.parametrize("kind", [Kind("slots", 1), Kind("slots", 7), *PLAIN], ids=str)
def test_drafting_up_to_the_last_position(pairs, kind):
    twins = Twins(pairs().drafts["near"], kind.rule(64), max_length=64)
    for length in range(60, 65):
        proposal = twins.say(1, 0, random_ids(length), 8)
        assert len(proposal.ids) == min(8, 64 - length + 1)
        row = twins.compiled._sequences[1].row
        assert twins.compiled.memory.fed[row] == length + len(proposal.ids) - 1
    assert isinstance(twins.propose([DraftCall(2, 0, [3] * 65, 1)])[0], ValueError)


def test_bad_calls_are_answered_alike_and_harm_no_other(pairs):
    twins = Twins(pairs().drafts["near"], Kind().rule(), max_sequences=2)
    good = DraftCall(1, 0, random_ids(30), 5)
    for bad in (
        DraftCall(9, 0, [1, VOCAB], 2),
        DraftCall(9, 0, [], 2),
        DraftCall(9, 0, [1], 17),
        DraftCall(9, 4, [1], 1),
        DraftCall(1, 0, [1], 1),
        DraftCall(9, 0, [1] * (MAX_LENGTH + 1), 1),
    ):
        first, second = twins.propose([good, bad])
        assert len(first.ids) == 5 and isinstance(second, Exception)
    twins.say(2, 0, [3, 4], 2)
    assert "max_sequences" in str(twins.propose([DraftCall(3, 0, [3], 1)])[0])


def test_an_engine_without_logits_drafts_greedily_and_refuses_to_sample(pairs):
    twins = Twins(pairs().drafts["near"], Kind().rule(), logits=False)
    twins.say(1, 0, random_ids(30), 5)
    sampled = DraftCall(2, 0, random_ids(9), 3, SAMPLED, 1)
    greedy, refused = twins.compiled.propose([DraftCall(1, 30, [5], 4), sampled])
    assert len(greedy.ids) == 4
    with pytest.raises(InvalidRequest, match=r"temperature is 0\.9.*returns no logits"):
        raise refused
    assert twins.compiled.propose([DraftCall(2, 0, [3, 4], 0, SAMPLED)]) == [Proposal()]


# --- buffers


def test_the_same_buffers_are_used_again(pairs):
    twins = Twins(pairs().drafts["near"], Kind().rule())

    def rounds(seed):
        for number in range(3):
            new = random_ids(60 + number, seed + number)
            twins.propose([DraftCall(number, 0, new, 5), DraftCall(7, 0, new[:9], 2)])
        calls = [DraftCall(n, 60 + n, [5, 6], gamma) for n, gamma in ((0, 3), (1, 5), (2, 1))]
        twins.propose(calls)

    rounds(0)
    bound = len(twins.executor.calls)
    runs = sum(call.runs for call in twins.executor.calls)
    rounds(50)
    assert len(twins.executor.calls) == bound
    assert sum(call.runs for call in twins.executor.calls) == 2 * runs
    memory = twins.compiled.memory
    assert memory.capacity == twins.compiled.io.capacity
    for call in twins.executor.calls:
        for layer in range(memory.k.shape[0]):
            assert call.addresses[f"memory_k.{layer}"] == memory.k[layer].data_ptr()
            assert call.addresses[f"memory_v.{layer}"] == memory.v[layer].data_ptr()
        base = min(call.addresses[name] for name in ("rows", "fed", "last", "ids"))
        names = ("rows", "fed", "last", "ids", "times", "kind")
        assert all((call.addresses[name] - base) % 256 == 0 for name in names)


def test_one_drafting_call_has_one_call_of_the_engine_per_token(pairs):
    """Three sequences with 5, 2 and 1 tokens: five calls of four sequences."""
    twins = Twins(pairs().drafts["near"], Kind().rule())
    prompts = [random_ids(2, number) for number in range(3)]
    gammas = (5, 2, 1)
    twins.propose([DraftCall(n, 0, prompts[n], gammas[n]) for n in range(3)])
    shapes = [(tuple(c.tensors["ids"].shape), c.runs) for c in twins.executor.calls]
    assert shapes == [((4, 4), 1), ((4, 2), 4)]
