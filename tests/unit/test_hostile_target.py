"""The whole line over targets with the C++ backend's manners: the output is that of plain decoding.

Two of them, both behind the target's tensors: the cpu lane's hostile target, and a double of the
C++ backend that is strict about its inputs. Prompts and limits are random by seed; the oracle of
greedy texts is one free run of Hugging Face's `generate`, cut where a text must end.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from masw.engines.hostile_target import HOSTILE_PATIENCE, Habits, HostileTarget
from masw.engines.local import Batcher, generate
from masw.engines.messages import Proposal, Sampling, TargetCall, TargetError
from masw.engines.patience import PatientTarget
from masw.engines.sequence import GenerationRequest
from masw.engines.speculative import SpeculativeLoop
from masw.engines.target import until_end
from masw.engines.trtllm_calls import AdaptedTarget, TrtllmCalls
from masw.engines.trtllm_folder import padded_vocab
from masw.triton_repo.ports import TargetModel
from tests.chance import LIKELY, SMALL, UNLIKELY, exact_joint, likelihood
from tests.models import VOCAB, random_ids
from tests.pairs import Kind, build_pair, loop_settings, new_draft, new_target, reference
from tests.triton_double import TritonDouble, TrtllmBackend, hostile_model

pytestmark = pytest.mark.usefixtures("one_thread")

NEW, ROWS = 24, 12
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 30, 45, 60, 71)
MAX_SEQ_LEN = LENGTHS[-1] + NEW
PATIENT = replace(HOSTILE_PATIENCE, pause=0.0)
CALM = Habits(fail=0.0, answer_nothing=0.0, stall=0.0)


def hostile(engine, width, seed, habits=None, **limits):
    target = HostileTarget(
        engine,
        engine.decoder.config.vocab_size,
        habits=habits,
        seed=seed,
        sleep=lambda seconds: None,
        **limits,
    )
    assert width == padded_vocab(engine.decoder.config.vocab_size, 64)
    return target, hostile_model(target)


def strict(layout):
    """A maker of the double with that layout."""

    def make(engine, width, seed, **limits):
        limits["max_draft_len"] = limits.pop("max_draft_tokens")
        backend = TrtllmBackend(engine, width, layout=layout, seed=seed, **limits)
        return backend, backend

    return make


TARGETS = {
    "hostile": hostile,
    "double": strict("asked"),
    "both": strict("both"),
}


@dataclass
class Line:
    """A loop over one of TARGETS, and what it did."""

    loop: SpeculativeLoop
    target: HostileTarget | TrtllmBackend
    triton: TritonDouble

    def run(self, requests):
        """[(ids, statistics)] of requests that run at once."""

        async def run_all():
            return await asyncio.gather(*(generate(self.loop, each) for each in requests))

        return asyncio.run(run_all())


def line(pair, make, draft="near", seed=0, adapt=True, rows=ROWS, limit=MAX_SEQ_LEN, **fields):
    """Draft and target over tiny models; without `adapt` calls reach the target as they are."""
    sizes = {"max_sequences": rows, "max_length": limit}
    decoder, limits = pair.target, {"max_seq_len": limit + 16, "max_draft_tokens": 16}
    vocab = decoder.config.vocab_size
    width = padded_vocab(vocab, 64)
    target, model = make(new_target(decoder, **sizes), width, seed, **limits, **fields)
    triton = TritonDouble(tensorrt_llm=model)
    port = TargetModel(triton, None, vocab)
    port = AdaptedTarget(port, TrtllmCalls(vocab, 64)) if adapt else port
    engine = new_draft(pair.drafts[draft], Kind("full"), **sizes) if draft else None
    settings = loop_settings(max_length=limit, rule=engine and engine.memory.rule)
    loop = SpeculativeLoop(
        PatientTarget(port, PATIENT), Batcher(engine.propose) if engine else None, settings
    )
    return Line(loop, target, triton)


@pytest.fixture(scope="module")
def texts(pair):
    """{prompt: what Hugging Face generates freely}; the longest fills max_seq_len."""
    prompts = [tuple(random_ids(length, seed=length)) for length in LENGTHS]
    return {ids: reference(pair.hf, ids, NEW) for ids in prompts}


def random_requests(texts, rng):
    """For each prompt a request with random limits, and the ids that must come of it."""
    pairs = []
    for ids, text in texts.items():
        tokens = rng.choice([1, 2, 3, rng.randrange(1, NEW + 1), NEW, NEW])
        ends = rng.choice([(), (), (text[rng.randrange(NEW)], 5, 6), (text[rng.randrange(NEW)],)])
        gamma, adaptive = rng.choice([0, 1, 2, 3, 5, 8, 16]), rng.random() < 0.3
        fields = {"draft_tokens": gamma, "adaptive": adaptive, "end_ids": ends}
        request = GenerationRequest(ids, tokens, seed=rng.getrandbits(60), **fields)
        pairs.append((request, until_end(text[:tokens], ends)))
    return pairs


@pytest.mark.parametrize("draft", ["near", "same", "other"])
@pytest.mark.parametrize("kind", TARGETS)
def test_random_greedy_generations_equal_plain_decoding(pair, texts, kind, draft):
    """324 generations in all."""
    done, drafted = Counter(), 0
    for seed in range(3):
        served = line(pair, TARGETS[kind], draft, seed)
        requests, wanted = zip(*random_requests(texts, random.Random(seed)), strict=True)
        answers = served.run(requests)
        assert [ids for ids, _ in answers] == list(wanted)
        done += served.target.done
        drafted += sum(stats.drafted for _, stats in answers)
        for request, (ids, stats) in zip(requests, answers, strict=True):
            assert stats.new_tokens == len(ids) and stats.draft_failures == 0
            ended = bool(ids) and ids[-1] in request.end_ids
            assert stats.finish_reason == ("end_id" if ended else "length")
    assert drafted
    if kind == "hostile":
        names = "drop_all drop_some end_early fail answer_nothing stall echo pad"
        assert all(done[name] for name in names.split()), done
    else:
        assert done["dropped"] and not done["ended"], done


@pytest.mark.parametrize("kind", ["hostile", "both"])
@pytest.mark.parametrize("gamma", range(0, 17, 2))
def test_drafts_never_pass_max_tokens_or_max_seq_len(pair, texts, kind, gamma):
    """The longest prompt and its output fill max_seq_len to the last token, which the target
    asserts of input + output + draft; the text comes to its end all the same."""
    ids = list(texts)[-1]
    served = line(pair, TARGETS[kind], "same", gamma)
    ((answer, stats),) = served.run([GenerationRequest(ids, NEW, draft_tokens=gamma)])
    assert answer == texts[ids] and stats.finish_reason == "length"
    for values in served.triton.calls:
        drafts = len(values.get("draft_input_ids", ()))
        length, asked = len(values["input_ids"]), int(values["request_output_len"][0])
        assert length + asked <= len(ids) + NEW
        assert length + asked + drafts <= MAX_SEQ_LEN
        assert not drafts or asked == drafts + 1
        assert drafts <= gamma


def test_a_target_of_longer_sequences_gets_all_drafts_to_the_end(pair, texts):
    ids = list(texts)[-1]

    def drafts_of(max_seq_len):
        served = line(pair, TARGETS["double"], "same", drop=0.0, limit=MAX_SEQ_LEN + 32)
        settings = {"max_length": MAX_SEQ_LEN, "max_seq_len": max_seq_len}
        served.loop.settings = replace(served.loop.settings, **settings)
        ((answer, stats),) = served.run([GenerationRequest(ids, NEW, draft_tokens=8)])
        assert answer == texts[ids]
        return stats.iterations

    assert drafts_of(MAX_SEQ_LEN + 32) < drafts_of(None)


@pytest.mark.parametrize("place", [0, 1, 2, 5, 11, NEW - 1])
@pytest.mark.parametrize("kind", ["hostile", "both"])
def test_any_of_several_end_ids_ends_the_text_and_is_its_last(pair, texts, kind, place):
    requests, wanted = [], []
    for number, (ids, text) in enumerate(texts.items()):
        ends = [(text[place], 5, 6), (5, text[place], 6), (5, 6, text[place])][number % 3]
        requests.append(GenerationRequest(ids, NEW, end_ids=ends, draft_tokens=number % 7))
        wanted.append(until_end(text, ends))
    answers = line(pair, TARGETS[kind], seed=place).run(requests)
    assert [ids for ids, _ in answers] == wanted
    assert {stats.finish_reason for _, stats in answers} == {"end_id"}


@pytest.mark.parametrize("kind", ["hostile", "both"])
@pytest.mark.parametrize("least", [1, 4, 9])
def test_min_tokens_equals_min_new_tokens(pair, texts, kind, least):
    """The end id is due at once or soon; what comes when it is forbidden is another text."""
    requests, wanted, changed = [], [], 0
    for number, (ids, text) in enumerate(texts.items()):
        end_id = text[number % 4]
        expected = reference(pair.hf, ids, NEW, (end_id,), least)
        fields = {"min_tokens": least, "end_ids": (end_id,), "draft_tokens": number % 6}
        requests.append(GenerationRequest(ids, NEW, **fields))
        wanted.append(expected)
        changed += expected[: len(text)] != text[: len(expected)]
    answers = line(pair, TARGETS[kind], seed=least).run(requests)
    assert [ids for ids, _ in answers] == wanted and changed


def test_without_adapted_calls_the_double_would_lose_tokens(pair, texts):
    """The double bites: an end id of the target's own is not in its output, so none is given."""
    served = line(pair, TARGETS["double"], adapt=False, drop=0.0)
    requests = [GenerationRequest(ids, NEW, end_ids=(text[7],)) for ids, text in texts.items()]
    served.loop.settings = replace(served.loop.settings, max_length=MAX_SEQ_LEN)
    with pytest.raises(TargetError, match="gave no token"):
        served.run(requests)
    assert served.target.done["ended"]


def test_failures_beyond_the_bound_reach_their_own_request_only(pair, texts):
    doomed = list(texts)[3]
    served = line(pair, hostile, habits=Habits(doomed_id=doomed[0]))
    requests = [GenerationRequest(ids, NEW) for ids in texts]

    async def run_all():
        running = (generate(served.loop, request) for request in requests)
        return await asyncio.gather(*running, return_exceptions=True)

    for (ids, text), answer in zip(texts.items(), asyncio.run(run_all()), strict=True):
        if ids[0] == doomed[0]:
            assert isinstance(answer, TargetError)
            assert "in 5 attempts" in str(answer) and "for good" in str(answer)
        else:
            assert answer[0] == text
    calls = [values for values in served.triton.calls if tuple(values["input_ids"]) == doomed]
    assert len(calls) == PATIENT.attempts


# --- sampling -----------------------------------------------------------------------------------

PROMPT, COUNT = (1, 2, 3, 0, 1, 2), 640


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory):
    """A pair with a vocabulary of 4; the engine's logits are 64 wide."""
    return build_pair(tmp_path_factory.mktemp("small"), noise=0.3, **SMALL)


def sampled(pair, kind, draft, sampling, use_logits, **fields):
    """Counts of texts of 3 tokens, and their exact probabilities."""
    served = line(pair, TARGETS[kind], draft, rows=32, limit=64, **fields)
    counts = Counter()
    for start in range(0, COUNT, 32):
        requests = [
            GenerationRequest(PROMPT, 3, sampling, s, draft_tokens=2, use_draft_logits=use_logits)
            for s in range(start, start + 32)
        ]
        counts.update(tuple(ids) for ids, _ in served.run(requests))
    return counts, exact_joint(pair.hf, PROMPT, 3, sampling)


@pytest.mark.parametrize(
    ("kind", "draft", "sampling", "use_logits"),
    [
        ("hostile", "other", Sampling(1.0), True),
        ("hostile", "near", Sampling(0.8, top_k=3), True),
        ("hostile", "near", Sampling(1.3, top_p=0.9), False),
        ("both", "other", Sampling(1.2, top_k=3, top_p=0.9), True),
        ("both", "other", Sampling(0.5), False),
    ],
)
def test_sampled_texts_follow_the_targets_joint_distribution(
    small_pair, kind, draft, sampling, use_logits
):
    counts, exact = sampled(small_pair, kind, draft, sampling, use_logits)
    assert likelihood(counts, exact) > LIKELY


def test_exact_match_of_the_double_is_biased_if_it_were_used(small_pair):
    """Why a sampled call without draft logits goes out without its drafts."""
    counts, exact = sampled(
        small_pair, "double", "other", Sampling(0.5), False, adapt=False, drop=0.0
    )
    assert likelihood(counts, exact) < UNLIKELY


# --- the hostile target itself ------------------------------------------------------------------


def refusal(pair, drafts=0, tokens=None, length=20, **fields):
    target, _ = hostile(
        new_target(pair.target),
        padded_vocab(VOCAB, 64),
        0,
        CALM,
        max_seq_len=60,
        max_draft_tokens=8,
    )
    proposal = Proposal(tuple(random_ids(drafts)))
    ids = np.array(random_ids(length), np.int32)
    call = TargetCall(ids, tokens or drafts + 1, proposal, **{"end_ids": ()} | fields)
    return target.verify([call])[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"drafts": 3, "tokens": 9}, "request_output_len"),
        ({"drafts": 9}, "max_draft_len"),
        ({"drafts": 8, "length": 44}, "61 tokens; max_seq_len is 60"),
        ({"tokens": 1, "length": 52}, "61 tokens; max_seq_len is 60"),
        ({"end_ids": (1, 2)}, "more than one end_id"),
        ({"min_tokens": 1}, "min_tokens without end_id"),
    ],
)
def test_it_refuses_what_the_c_backend_would_not_serve(pair, fields, words):
    with pytest.raises(ValueError, match=words):
        raise refusal(pair, **fields)
    assert refusal(pair, drafts=8, length=43).ids


@pytest.mark.parametrize("fields", [{"echo": 1.1}, {"fail": -0.1}, {"stalls": -1}])
def test_bad_habits_are_refused_by_name(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Habits(**fields)
