"""The draft: what it proposes, the sequences it holds, and bad calls."""

import gc
from types import SimpleNamespace

import pytest
import torch

from masw.engines import draft as draft_module
from masw.engines.acceptance import adjust
from masw.engines.draft import TorchDraft
from masw.engines.local import generate_all
from masw.engines.messages import (
    DraftCall,
    DraftStateError,
    Proposal,
    Sampling,
)
from masw.plugins.slot_attention.rule import MemoryRule
from tests.models import VOCAB, random_ids
from tests.pairs import (
    MAX_LENGTH,
    Kind,
    R,
    RecordingTarget,
    loop_settings,
    new_draft,
    new_target,
    reference,
    requests_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = [Kind(), Kind("slots", 1, "materialized"), Kind("full"), Kind("window")]
SAMPLED = Sampling(0.9, top_k=20)


@pytest.fixture
def draft(pair):
    return new_draft(pair.target)


def propose(draft, *args, **fields) -> Proposal:
    """The answer to one call, raised if it is an error."""
    (answer,) = draft.propose([DraftCall(*args, **fields)])
    draft.memory.check_integrity()
    if isinstance(answer, Exception):
        raise answer
    return answer


def free_rows(draft) -> int:
    return len(draft._free_rows)


# --- proposals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 24, 25, 100])
def test_with_full_memory_it_proposes_its_own_greedy_text(pair, length):
    ids = random_ids(length, seed=length)
    draft = new_draft(pair.target, Kind("full"))
    assert list(propose(draft, 1, 0, ids, 16).ids) == reference(pair.hf, ids, 16)


def test_logits_are_those_the_ids_were_drawn_from(pair):
    """With full memory they are Hugging Face's logits after the adjustments."""
    ids = random_ids(30)
    draft = new_draft(pair.target, Kind("full"))
    answer = propose(draft, 1, 0, ids, 5, SAMPLED, seed=3, return_logits=True)
    with torch.no_grad():
        logits = pair.hf(torch.tensor([[*ids, *answer.ids]])).logits[0, 29:-1]
    torch.testing.assert_close(answer.logits, adjust(logits, SAMPLED), atol=1e-4, rtol=1e-4)
    assert torch.isfinite(answer.logits[range(5), answer.ids]).all()
    assert torch.isfinite(answer.logits).sum(-1).tolist() == [SAMPLED.top_k] * 5


def test_drawn_ids_follow_the_seed(draft):
    ids = random_ids(30)
    texts = {
        seed: [propose(draft, 1, 0, ids, 8, Sampling(1.5), seed).ids for _ in range(2)]
        for seed in range(6)
    }
    assert all(first == again for first, again in texts.values())
    assert len({first for first, _ in texts.values()}) == 6


@pytest.mark.parametrize(
    ("gamma", "sampling", "return_logits"),
    [(0, SAMPLED, True), (5, SAMPLED, False), (5, Sampling(), False)],
)
def test_logits_only_where_asked_for(draft, gamma, sampling, return_logits):
    answer = propose(draft, 1, 0, [3, 4], gamma, sampling, 1, return_logits)
    assert (len(answer.ids), answer.logits) == (gamma, None)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_proposals_of_a_batch_equal_solo_proposals(pair, kind):
    """Ragged prompts, γ of all sizes, both samplings, and a second turn after a rejection."""
    lengths, gammas = (1, 16, 33, 49, 100), (1, 0, 16, 5, 3)
    firsts, seconds = [], []
    for number, (length, gamma) in enumerate(zip(lengths, gammas, strict=True)):
        ids, sampling = random_ids(length, seed=length), SAMPLED if number % 2 else Sampling()
        firsts.append(DraftCall(number, 0, ids, gamma, sampling, number, True))
        new_ids = random_ids(2 + number, seed=number)
        seconds.append(DraftCall(number, length, new_ids, 4, sampling, number, True))
    batch = new_draft(pair.target, kind, max_sequences=5)
    together = [*batch.propose(firsts), *batch.propose(seconds)]
    batch.memory.check_integrity()
    solo = new_draft(pair.target, kind, max_sequences=1)
    for number in range(5):
        alone = [propose(solo, **vars(calls[number])) for calls in (firsts, seconds)]
        solo.propose([DraftCall(number, 0, [], end=True)])
        for one, other in zip(alone, together[number::5], strict=True):
            assert one.ids == other.ids
            if one.logits is not None:
                torch.testing.assert_close(one.logits, other.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_continuing_equals_starting_again(pair, kind):
    """Whatever was proposed and rejected before, the next proposal depends on the text only."""
    draft, fresh = (new_draft(pair.drafts["near"], kind) for _ in range(2))
    text = random_ids(20)
    propose(draft, 1, 0, text, 8)
    start, generator = len(text), torch.Generator().manual_seed(0)
    for step in range(30):
        proposed = propose(draft, 1, start, text[start:], 8).ids if step else ()
        if step:
            assert proposed == propose(fresh, step, 0, text, 8, end=True).ids
        kept = int(torch.randint(0, 9, (), generator=generator))
        start = len(text)
        text += [*proposed[:kept], *random_ids(1 + step % 3, seed=step)]
    assert free_rows(fresh) == 4


# --- sequences ----------------------------------------------------------------------------------


def test_an_unknown_sequence_and_a_wrong_position_are_state_errors(draft):
    with pytest.raises(DraftStateError, match="sequence 1 is unknown"):
        propose(draft, 1, 5, [3], 2)
    propose(draft, 1, 0, random_ids(10), 5)
    for position in (9, 11, 15):
        with pytest.raises(DraftStateError, match=f"10 committed tokens, not {position}"):
            propose(draft, 1, position, [3], 2)
    assert len(propose(draft, 1, 10, [3], 2).ids) == 2, "errors must leave the sequence alone"


def test_a_start_at_zero_begins_anew(draft):
    ids = random_ids(60)
    first = propose(draft, 1, 0, ids, 5)
    assert propose(draft, 1, 0, ids[:7], 5) != first
    assert propose(draft, 1, 0, ids, 5) == first
    assert free_rows(draft) == 3


def test_all_sequences_in_use(pair):
    draft = new_draft(pair.target, max_sequences=2)
    propose(draft, 1, 0, [3, 4], 2)
    propose(draft, 2, 0, [3, 4], 2)
    with pytest.raises(DraftStateError, match=r"all 2 sequences .* in use \(max_sequences\)"):
        propose(draft, 3, 0, [3, 4], 2)
    assert len(propose(draft, 1, 0, [5, 6, 7], 2).ids) == 2, "a known id keeps its place"
    propose(draft, 2, 2, [], end=True)
    assert len(propose(draft, 3, 0, [3, 4], 2).ids) == 2


def test_idle_sequences_expire_when_the_place_is_needed(pair, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(draft_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    draft = new_draft(pair.target, max_sequences=2, idle_seconds=10.0)
    propose(draft, 1, 0, [3, 4], 2)
    now[0] = 8.0
    propose(draft, 2, 0, [3, 4], 2)
    with pytest.raises(DraftStateError, match="all 2 sequences"):
        propose(draft, 3, 0, [3, 4], 2)
    now[0] = 11.0
    assert draft.holds(1), "it may stay as long as nobody needs its place"
    propose(draft, 3, 0, [3, 4], 2)
    assert not draft.holds(1) and draft.holds(2) and draft.holds(3)
    with pytest.raises(DraftStateError, match="sequence 1 is unknown"):
        propose(draft, 1, 2, [3], 2)


def test_the_end_frees_the_sequence_whatever_else_the_call_says(draft):
    propose(draft, 1, 0, [3, 4], 2)
    assert propose(draft, 1, 2, [], end=True) == Proposal()
    assert not draft.holds(1) and free_rows(draft) == 4
    propose(draft, 1, 0, [], end=True)
    assert len(propose(draft, 2, 0, [3, 4], 2, end=True).ids) == 2
    with pytest.raises(DraftStateError):
        propose(draft, 3, 7, [3], 2, end=True)
    assert free_rows(draft) == 4


def test_one_id_twice_in_a_batch_harms_no_other(pair, draft):
    good = DraftCall(2, 0, random_ids(9), 3)
    expected = new_draft(pair.target).propose([good])
    answers = draft.propose([DraftCall(1, 0, [3, 4], 2), DraftCall(1, 0, [5, 6, 7], 2), good])
    assert answers[2:] == expected
    draft.memory.check_integrity()
    draft.propose([DraftCall(number, 0, [], end=True) for number in (1, 2)])
    assert free_rows(draft) == 4 and len(set(draft._free_rows)) == 4


# --- bad calls ----------------------------------------------------------------------------------

BAD = {
    "id too large": (DraftCall(9, 0, [1, VOCAB], 2), f"new_ids has an id outside 0 to {VOCAB - 1}"),
    "id negative": (DraftCall(9, 0, [-1], 2), f"new_ids has an id outside 0 to {VOCAB - 1}"),
    "no ids": (DraftCall(9, 0, [], 2), "new_ids is empty; give 1"),
    "γ too large": (DraftCall(9, 0, [1], 17), "num_draft_tokens is 17; this draft allows 0 to 16"),
    "γ negative": (DraftCall(9, 0, [1], -1), "num_draft_tokens is -1; this draft allows 0 to 16"),
    "too long": (
        DraftCall(9, 0, [1] * (MAX_LENGTH + 1), 1),
        f"length {MAX_LENGTH + 1} exceeds max_length {MAX_LENGTH}",
    ),
    "unknown": (DraftCall(9, 4, [1], 1), "sequence 9 is unknown"),
    "negative position": (DraftCall(9, -4, [1] * 9, 1), "sequence 9 is unknown|start_position"),
    "tiny temperature": (DraftCall(9, 0, [1, 2], 2, Sampling(1e-40), 1, True), None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_by_name_and_harms_no_other(pair, name):
    bad, message = BAD[name]
    good = [DraftCall(1, 0, random_ids(30), 5), DraftCall(2, 0, random_ids(9), 3, SAMPLED, 1)]
    draft, alone = (new_draft(pair.target, max_sequences=3) for _ in range(2))
    first, refused, second = draft.propose([good[0], bad, good[1]])
    assert [first, second] == [alone.propose([one])[0] for one in good]
    if message is not None:
        with pytest.raises((ValueError, DraftStateError), match=message):
            raise refused
        assert draft.fed_tokens == alone.fed_tokens and free_rows(draft) == 1
    draft.memory.check_integrity()


def test_a_bad_continuation_leaves_its_sequence_as_it_was(pair, draft):
    ids = random_ids(30)
    propose(draft, 1, 0, ids, 5)
    for new_ids, gamma in (([VOCAB], 2), ([1], 99), ([], 2), ([1] * 300, 2)):
        with pytest.raises(ValueError):
            propose(draft, 1, 30, new_ids, gamma)
    expected = propose(new_draft(pair.target), 1, 0, [*ids, 7], 5)
    assert propose(draft, 1, 30, [7], 5) == expected


def test_draft_lengths_beyond_the_rollback_window_are_refused_at_construction(pair):
    message = f"max_draft_tokens is {R + 1}; the rollback window .* allows {R}"
    for kind in (Kind(), Kind("window")):
        with pytest.raises(ValueError, match=message):
            new_draft(pair.target, kind, max_draft_tokens=R + 1)
    assert new_draft(pair.target, Kind("full"), max_draft_tokens=R + 1).max_draft_tokens == R + 1
    with pytest.raises(ValueError, match="needs an adaptor"):
        TorchDraft(pair.target, MemoryRule())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_drafting_up_to_the_last_position(pair, kind):
    draft = new_draft(pair.target, kind, max_length=64)
    for length in range(60, 65):
        proposal = propose(draft, 1, 0, random_ids(length), 8)
        assert len(proposal.ids) == min(8, 64 - length + 1)
        assert draft.memory.fed[draft._sequences[1].row] == length + len(proposal.ids) - 1


# --- one after the other ------------------------------------------------------------------------


def living_objects() -> int:
    """Objects that the garbage collector knows, tensors among them."""
    gc.collect()
    return len(gc.get_objects())


def test_a_thousand_requests_leave_nothing_behind(pair):
    """Constant memory, and a fresh request is bit-equal to the first."""
    draft = new_draft(pair.target, max_sequences=2)
    probe = DraftCall(0, 0, random_ids(60), 6, SAMPLED, 5, True, end=True)
    (first,) = draft.propose([probe])

    def requests(numbers):
        for number in numbers:
            ids = random_ids(1 + 7 * number % 47, seed=number % 13)
            ends = bool(number % 3)
            draft.propose([DraftCall(number, 0, ids, number % 3, end=ends)])
            if not ends:
                more = random_ids(1 + number % 4)
                draft.propose([DraftCall(number, len(ids), more, 3, end=True)])

    requests(range(1, 200))
    before = living_objects()
    requests(range(200, 1001))
    assert living_objects() - before < 100
    assert free_rows(draft) == 2 and not draft._sequences
    (again,) = draft.propose([probe])
    assert again.ids == first.ids
    assert torch.equal(again.logits, first.logits)


# --- counters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", ["same", "near", "other"])
def test_draft_and_target_process_every_committed_token_once(pair, kind, name):
    """Exactly: committed tokens, less the last ones nobody needs, plus rejected proposals."""
    (request,) = requests_of([random_ids(90)], 40)
    draft, target = new_draft(pair.drafts[name], kind), RecordingTarget(new_target(pair.target))
    ((ids, stats),) = generate_all(target, draft, loop_settings(), [request])
    steps, committed = target.steps, 90 + len(ids)
    drafted = sum(len(step.drafts) for step in steps)
    assert (drafted, sum(step.accepted for step in steps)) == (stats.drafted, stats.accepted)
    # The target never feeds the last token of the output.
    assert target.inner.fed_tokens == committed - 1 + stats.drafted - stats.accepted
    # An iteration's last proposal is not fed, so one of a full acceptance comes with the next call.
    unfed = [step for step in steps if step.drafts]
    wasted = sum(len(s.drafts) - 1 - min(s.accepted, len(s.drafts) - 1) for s in unfed)
    last = unfed[-1]
    reached = len(last.call.ids) + min(last.accepted, len(last.drafts) - 1)
    assert draft.fed_tokens == reached + wasted
