"""The draft in TensorRT-LLM's PyTorch backend, over a double of its executor loop."""

import copy
import pickle
import sys

import pytest

from masw.engines.adaptor import AdaptorConfig
from masw.engines.memory import CapacityError
from masw.engines.messages import DraftCall, DraftStateError
from masw.engines.pair import DraftMode, Pair, PairError, load_draft
from masw.engines.request_drafts import DrafterSettings, RequestDrafts, Wanted
from masw.engines.trtllm_drafter import drafter_config
from masw.plugins.slot_attention.rule import MemoryRule
from tests.models import random_ids
from tests.pairs import CHUNK, MAX_LENGTH, R, S, W, build_pair, new_target, reference
from tests.pytorch_backend_double import DRAFTERS, Backend, LlmRequest, install

pytestmark = pytest.mark.usefixtures("one_thread")

NEW, DRAFTS = 20, 5
PROMPTS = [tuple(random_ids(n, seed=n)) for n in (1, 17, 48, 49, 130, 233)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A pair of tiny models and the folder their files are in."""
    root = tmp_path_factory.mktemp("models")
    return build_pair(root), root


@pytest.fixture(scope="module")
def expected(models):
    return [reference(models[0].hf, ids, NEW) for ids in PROMPTS]


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    """folders[draft] -> a prepared pair folder with that draft."""
    pair, root = models
    return {name: prepared(pair, root, name, tmp_path_factory.mktemp(name)) for name in pair.drafts}


def prepared(pair, root, name, folder, max_length=MAX_LENGTH):
    """Writes a pair folder over the models' files."""
    rule, decoder = MemoryRule(S, W, R, 4), pair.drafts[name]
    Pair(memory=rule, max_length=max_length, chunk=CHUNK).save(folder)
    (folder / "target").symlink_to(root / "target")
    (folder / "draft").symlink_to(root / ("target" if name == "same" else name))
    decoder.copy_adaptor(AdaptorConfig(decoder.fingerprint(), S, W, 4, "evicted")).save(
        folder / "adaptor.safetensors"
    )
    return folder


@pytest.fixture
def backend(models, folders, monkeypatch):
    """backend(draft, version, ...) -> a backend whose drafter is that of a pair."""

    def make(draft="near", version="1.2", batch_size=4, **fields):
        install(monkeypatch, version)
        config = drafter_config(folders[draft], DRAFTS, **{"max_sequences": 4} | fields)
        target = new_target(models[0].target, max_length=MAX_LENGTH + DRAFTS)
        return Backend(target, config, batch_size)

    return make


def requests_of(prompts=PROMPTS, first=0, **fields):
    return [LlmRequest(first + i, ids, NEW, **fields) for i, ids in enumerate(prompts)]


def drafted(backend):
    """Every step of every request, in order."""
    return [each for step in backend.steps for each in step]


def drafts_of(backend):
    return backend.config.drafter.drafts


# --- generations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "version"), [("near", v) for v in DRAFTERS] + [("same", "1.2"), ("other", "1.2")]
)
def test_generations_equal_hugging_face(backend, expected, draft, version):
    served = backend(draft, version)
    requests = requests_of()
    served.run(requests)
    assert [request.output for request in requests] == expected
    assert any(each.drafts for each in drafted(served))
    assert not drafts_of(served).held
    draft_engine = drafts_of(served).draft
    draft_engine.memory.check_integrity()
    assert len(draft_engine._free_rows) == 4


@pytest.mark.parametrize("mode", [DraftMode.SLOTS, DraftMode.FULL, DraftMode.WINDOW])
def test_drafts_are_those_of_the_draft_called_directly(backend, folders, mode):
    """Every step's drafts are what the pair's draft proposes after the whole text, fed anew."""
    served = backend("near", mode=mode)
    served.run(requests_of(PROMPTS[1:5]))
    oracle, compared = load_draft(folders["near"], mode), 0
    for each in drafted(served):
        room = NEW - (len(each.ids) - len(PROMPTS[1 + each.request_id])) - 1
        (proposal,) = oracle.propose([DraftCall(1, 0, each.ids, max(0, min(DRAFTS, room)))])
        assert each.drafts == proposal.ids
        compared += bool(each.drafts)
    assert compared > 10


def test_drafts_stop_at_the_end_id_and_before_the_last_token(backend, models, expected):
    free = expected[2]
    served = backend("same")
    (request,) = requests_of(PROMPTS[2:3], py_end_id=free[7])
    served.run([request])
    assert request.output == reference(models[0].hf, PROMPTS[2], NEW, (free[7],))
    steps = drafted(served)
    assert any(free[7] in each.drafts for each in steps)
    assert all(free[7] not in each.drafts[:-1] for each in steps)
    whole = backend("same")
    whole.run(requests_of(PROMPTS[2:3]))
    most = [len(each.ids) - len(PROMPTS[2]) + len(each.drafts) for each in drafted(whole)]
    assert max(most) == NEW - 1


@pytest.mark.parametrize(("version", "lengths"), [("1.0", {0, DRAFTS}), ("1.2", {DRAFTS})])
def test_draft_lengths_suit_cuda_graphs(backend, expected, version, lengths):
    """Where the executor does not pad, the drafter does; without drafts there is nothing to pad."""
    served, seen = backend("same", version), set()
    forward = served._forward

    def spy(request):
        if request.output:
            seen.add(len(request.py_draft_tokens))
        forward(request)

    served._forward = spy
    requests = requests_of()
    served.run(requests)
    assert seen == lengths
    assert [request.output for request in requests] == expected


def test_a_shorter_draft_length_set_by_the_executor_is_kept_to(backend, expected):
    served = backend("same", "1.3")
    served.config.drafter.update_max_total_draft_tokens(2)
    requests = requests_of()
    served.run(requests)
    assert [request.output for request in requests] == expected
    assert max(len(each.drafts) for each in drafted(served)) == 2


def test_requests_without_speculation_get_none(backend, expected):
    served = backend("same")
    requests = requests_of(PROMPTS[:2])
    requests[0].py_disable_speculative_decoding = True
    served.config.drafter.pad_draft_tokens_for_cuda_graph = lambda scheduled: None
    served.run(requests)
    assert [request.output for request in requests] == expected[:2]
    assert {each.request_id for each in drafted(served) if each.drafts} == {1}


# --- the batch and its sequences ----------------------------------------------------------------


def test_a_long_prompt_is_fed_in_chunks_while_others_draft(folders):
    """233 tokens in chunks of 24, two for a step: drafts in the fifth step."""
    settings = DrafterSettings(folders["near"], DRAFTS, prefill_chunks=2)
    drafts = RequestDrafts(settings)
    fed = []
    propose = drafts.draft.propose
    drafts.draft.propose = lambda calls: fed.append(calls) or propose(calls)
    long, short = Wanted(7, list(PROMPTS[5]), DRAFTS), Wanted(3, list(PROMPTS[0]), DRAFTS)
    answers = []
    for step in range(5):
        short.ids.append(step + 5)
        answers.append(drafts.propose([long, short]))
    assert [sorted(answer) for answer in answers] == [[3]] * 4 + [[3, 7]]
    assert max(len(call.new_ids) for calls in fed for call in calls) == CHUNK
    assert [len(c.new_ids) for calls in fed for c in calls if c.sequence_id == 7] == [24] * 9 + [17]
    (alone,) = load_draft(folders["near"]).propose([DraftCall(1, 0, PROMPTS[5], DRAFTS)])
    assert answers[-1][7] == list(alone.ids)


def test_more_requests_than_sequences_go_on_without_drafts(backend, expected):
    served = backend(batch_size=6, max_sequences=2)
    requests = requests_of()
    served.run(requests)
    assert [request.output for request in requests] == expected
    assert {each.request_id for each in served.steps[2] if each.drafts} == {0, 1}
    assert max(sum(bool(each.drafts) for each in step) for step in served.steps) == 2


def test_without_a_resource_manager_the_sequence_unused_longest_makes_room(backend, expected):
    served = backend(max_sequences=2, batch_size=2)
    served.config.resource_manager = None
    requests = requests_of()
    served.run(requests)
    assert [request.output for request in requests] == expected
    assert {each.request_id for each in drafted(served) if each.drafts} == set(range(6))
    assert len(drafts_of(served).held) == 2


def test_a_cancelled_request_frees_its_sequence_and_its_id_can_come_again(backend, expected):
    served = backend()
    first = requests_of(PROMPTS[3:5])
    served.run(first, steps=4)
    assert drafts_of(served).held == (0, 1)
    served.finish(first[0])
    assert drafts_of(served).held == (1,)
    again = requests_of(PROMPTS[2:3])  # request id 0 with another text
    served.run([first[1], *again])
    assert first[1].output == expected[4] and again[0].output == expected[2]


def test_another_text_under_an_id_that_was_not_freed_is_fed_anew(folders):
    drafts, oracle = RequestDrafts(DrafterSettings(folders["near"], 4)), load_draft(folders["near"])
    for number, ids in enumerate((PROMPTS[3], PROMPTS[4], PROMPTS[1])):
        found = drafts.propose([Wanted(5, list(ids), 4)])
        (alone,) = oracle.propose([DraftCall(number, 0, ids, 4)])
        assert found == {5: list(alone.ids)}
        assert drafts.propose([Wanted(5, list(ids), 3)]) == {5: list(alone.ids[:3])}


def test_many_requests_leave_nothing_behind(backend):
    served = backend("same")
    for number in range(150):
        served.run([LlmRequest(number, PROMPTS[0], 3)])
    drafts = drafts_of(served)
    assert not drafts.held and not drafts._failed
    assert not drafts.draft._sequences and len(drafts.draft._free_rows) == 4


# --- failures -----------------------------------------------------------------------------------


class Failing:
    """A draft that answers one request by an error, or loses its state for it."""

    def __init__(self, inner, number, error=None, lose_at=(), broken=False):
        self.inner, self.number, self.error, self.broken = inner, number, error, broken
        self.lose_at, self.calls = lose_at, 0

    def propose(self, calls):
        if self.broken and any(call.sequence_id == self.number for call in calls):
            self.broken = False
            raise RuntimeError("illegal memory access")
        mine = [call for call in calls if call.sequence_id == self.number and not call.end]
        self.calls += len(mine)
        if mine and self.calls in self.lose_at:
            self.inner.propose([DraftCall(self.number, 0, (), end=True)])
        answers = self.inner.propose(calls)
        if self.error is None:
            return answers
        return [
            self.error if call in mine else answer
            for call, answer in zip(calls, answers, strict=True)
        ]


def served_with(backend, failing):
    """(outputs, ids of the requests that had drafts) over a draft that fails."""
    served = backend()
    drafts = drafts_of(served)
    drafts._draft = failing(drafts.draft)
    requests = requests_of(PROMPTS[1:5])
    served.run(requests)
    assert not drafts.held
    return [r.output for r in requests], {e.request_id for e in drafted(served) if e.drafts}


@pytest.mark.parametrize("error", [CapacityError("too long"), DraftStateError("gone")])
def test_a_failing_request_goes_on_without_drafts_alone(backend, expected, error, caplog):
    outputs, with_drafts = served_with(backend, lambda draft: Failing(draft, 2, error))
    assert outputs == expected[1:5]
    assert with_drafts == {0, 1, 3}
    assert len([r for r in caplog.records if "request 2 goes on without drafts" in r.message]) == 1


def test_a_lost_sequence_is_fed_again(backend, expected):
    outputs, with_drafts = served_with(backend, lambda draft: Failing(draft, 2, lose_at=(3, 5)))
    assert outputs == expected[1:5]
    assert with_drafts == {0, 1, 2, 3}


def test_a_broken_call_costs_drafts_only(backend, expected):
    outputs, with_drafts = served_with(backend, lambda draft: Failing(draft, 2, broken=True))
    assert outputs == expected[1:5]
    assert 2 not in with_drafts


def test_a_text_beyond_the_drafts_length_goes_on_without_drafts(models, tmp_path, monkeypatch):
    pair, root = models
    install(monkeypatch, "1.2")
    folder = prepared(pair, root, "near", tmp_path, max_length=140)
    target = new_target(pair.target, max_length=MAX_LENGTH + DRAFTS)
    served = Backend(target, drafter_config(folder, DRAFTS), 2)
    requests = requests_of([PROMPTS[2], PROMPTS[4]])
    served.run(requests)
    assert [r.output for r in requests] == [
        reference(pair.hf, ids, NEW) for ids in (PROMPTS[2], PROMPTS[4])
    ]
    longest = max(len(each.ids) for each in drafted(served) if each.drafts)
    assert longest <= 140 < max(len(each.ids) for each in drafted(served))


# --- processes and versions ---------------------------------------------------------------------


def by_pickle(config):
    return pickle.loads(pickle.dumps(config))


@pytest.mark.parametrize(
    ("version", "copied"), [("1.0", by_pickle), ("1.3", by_pickle), ("1.3", copy.deepcopy)]
)
def test_a_copy_in_another_rank_gives_the_same_drafts(backend, version, copied):
    """A config is sent to every rank; drafter and resources of a copy share their sequences."""
    one = backend("near", version)
    other = backend("near", version)
    other.config = copied(one.config)
    assert drafts_of(other) is not drafts_of(one)
    for served in (one, other):
        served.run(requests_of(PROMPTS[:5]))
        assert not drafts_of(served).held
    assert one.steps == other.steps


def test_a_copy_does_not_carry_the_engine(backend):
    served = backend()
    served.run(requests_of(PROMPTS[:1]))
    assert len(pickle.dumps(served.config)) < 2000
    assert drafts_of(served)._draft is not None
    assert copy.deepcopy(served.config).drafter.drafts._draft is None


def test_after_shutdown_the_draft_opens_again(backend, expected):
    """The executor measures its memory with a first run that it shuts down."""
    served = backend()
    served.run(requests_of(PROMPTS[:2]), steps=2)
    served.config.resource_manager.shutdown()
    assert drafts_of(served)._draft is None and not drafts_of(served).held
    again = Backend(served.target, served.config, 4)
    requests = requests_of()
    again.run(requests)
    assert [request.output for request in requests] == expected


def test_sequences_do_not_limit_the_scheduler(backend):
    resources = backend(max_sequences=3).config.resource_manager
    assert resources.get_max_resource_count() == 3
    assert resources.get_needed_resource_to_completion(requests_of()[0]) == 0


def test_without_tensorrt_llm_the_container_is_named(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ImportError, match=r"run in the container tritonserver:26"):
        drafter_config(folders["near"], DRAFTS)


def test_a_pair_for_fewer_drafts_is_refused(folders, tmp_path):
    with pytest.raises(PairError, match=r"max_draft_len is 17; .* allows 16 \(max_draft_tokens\)"):
        drafter_config(folders["near"], 17)
    with pytest.raises(PairError, match="no prepared pair"):
        drafter_config(tmp_path, 5)


@pytest.mark.parametrize(
    "change", [{"max_draft_len": 0}, {"max_sequences": 0}, {"prefill_chunks": 0}, {"mode": "none"}]
)
def test_bad_settings_are_refused_by_name(folders, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        DrafterSettings(**{"pair": folders["near"], "max_draft_len": 5} | change)
