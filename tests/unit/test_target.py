"""The target: reuse of prefixes by content, verification, plain decoding, and bad calls."""

import numpy as np
import pytest
import torch

from masw.engines.messages import InvalidRequest, Proposal, Sampling, TargetCall, Verdict
from tests.models import VOCAB, random_ids
from tests.pairs import MAX_LENGTH, build_pair, new_target, reference

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = 100


@pytest.fixture
def target(pair):
    return new_target(pair.target)


def call(ids, output_tokens=1, drafts=(), **fields):
    fields = {"end_ids": ()} | fields
    return TargetCall(np.array(ids, np.int32), output_tokens, Proposal(tuple(drafts)), **fields)


def answer(target, *args, **fields):
    (verdict,) = target.verify([call(*args, **fields)])
    target.memory.check_integrity()
    return list(verdict.ids)


def fed(target, *args, **fields):
    """Tokens that one call makes the target feed."""
    before = target.fed_tokens
    answer(target, *args, **fields)
    return target.fed_tokens - before


# --- decoding and verification ------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 23, 24, 25, 49, 150])
def test_without_drafts_it_decodes_to_request_output_len(pair, target, length):
    ids = random_ids(length, seed=length)
    assert answer(target, ids, 12) == reference(pair.hf, ids, 12)


@pytest.mark.parametrize("place", [0, 1, 5, 11])
def test_plain_decoding_stops_at_the_end_id(pair, target, place):
    ids = random_ids(30)
    free = reference(pair.hf, ids, 12)
    assert answer(target, ids, 12, end_ids=(free[place], VOCAB - 1)) == until(free, free[place])


def until(ids, end_id):
    return ids[: ids.index(end_id) + 1]


def test_the_models_own_end_ids_are_the_default(pair, tmp_path):
    ids = random_ids(30)
    free = reference(pair.hf, ids, 12)
    other = build_pair(tmp_path, eos_token_id=[free[5], 3])  # the same weights
    assert other.target.config.eos_ids == (free[5], 3)
    assert answer(new_target(other.target), ids, 12, end_ids=None) == until(free, free[5])
    assert answer(new_target(other.target), ids, 12, end_ids=()) == free


@pytest.mark.parametrize("right", [0, 1, 4, 5])
def test_verification_gives_the_accepted_drafts_and_one_more(pair, target, right):
    ids = random_ids(40)
    free = reference(pair.hf, ids, 6)
    drafts = [*free[:right], *((x + 1) % VOCAB for x in free[right:5])]
    assert answer(target, ids, 6, drafts) == free[: right + 1]
    assert answer(target, [*ids, *free[: right + 1]], 3) == reference(
        pair.hf, [*ids, *free[: right + 1]], 3
    )


def test_verification_stops_at_an_accepted_end_id(pair, target):
    ids = random_ids(40)
    free = reference(pair.hf, ids, 6)
    end_id = next(x for x in free[1:] if x != free[0])
    assert answer(target, ids, 6, free[:5], end_ids=(end_id,)) == until(free, end_id)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("seed", range(4))
def test_min_tokens_equals_hugging_face_with_and_without_drafts(pair, target, min_tokens, seed):
    """Half of the vocabulary ends the text, so that its end is due as soon as it may come."""
    ids, end_ids = random_ids(30, seed=seed), tuple(range(0, VOCAB, 2))
    expected = reference(pair.hf, ids, 16, end_ids, min_tokens)
    fields = {"end_ids": end_ids, "min_tokens": min_tokens}
    assert answer(target, ids, 16, **fields) == expected
    assert answer(target, ids, 6, expected[:5], **fields) == expected[:6]
    if min_tokens:
        assert answer(target, ids, 6, [end_ids[0], 5], **fields) == expected[:1]


def test_a_batch_equals_its_calls_alone(pair):
    calls = [
        call(random_ids(length, seed=length), 9 if plain else 6, () if plain else random_ids(5))
        for length, plain in ((1, True), (30, False), (50, True), (51, False))
    ]
    together = new_target(pair.target).verify(calls)
    assert together == [new_target(pair.target).verify([one])[0] for one in calls]


# --- reuse of prefixes --------------------------------------------------------------------------


def test_a_second_turn_feeds_only_what_is_new(target):
    first = random_ids(LONG)
    assert fed(target, first) == LONG
    output = answer(target, first, 8)
    second = [*first, *output, *random_ids(20, seed=1)]
    # The last output token was never fed, all others are in the cache.
    assert fed(target, second) == 20 + 1
    assert fed(target, second) == 1, "the same prompt again needs its last logits only"


def test_verification_keeps_the_accepted_drafts_in_the_cache(pair, target):
    ids = random_ids(LONG)
    free = reference(pair.hf, ids, 6)
    drafts = [*free[:3], (free[3] + 1) % VOCAB, 7]
    assert fed(target, ids, 6, drafts) == LONG + 5
    assert fed(target, [*ids, *free[:4]], 6, free[4:6]) == 1 + 2


def test_sequences_with_one_prompt_do_not_destroy_each_others_cache(target):
    prompt, texts = random_ids(LONG), {1: [], 2: [], 3: []}
    for seed in texts:
        texts[seed] += answer(target, prompt, 3, seed=seed, sampling=Sampling(2.0))
    # The first fed it all, the others copied it and fed its last token; then 2 tokens each.
    assert target.fed_tokens == LONG + 1 + 1 + 3 * 2
    for _ in range(10):
        for seed, text in texts.items():
            before = target.fed_tokens
            text += answer(target, [*prompt, *text], 3, seed=seed, sampling=Sampling(2.0))
            assert target.fed_tokens - before == 3
    assert len(set(map(tuple, texts.values()))) == 3


def test_the_same_in_one_batch(target):
    prompt = random_ids(LONG)
    texts = [[], [], []]
    for step in range(10):
        before = target.fed_tokens
        calls = [
            call([*prompt, *text], 3, seed=i + 10 * step, sampling=Sampling(2.0))
            for i, text in enumerate(texts)
        ]
        for text, verdict in zip(texts, target.verify(calls), strict=True):
            text += verdict.ids
        assert step == 0 or target.fed_tokens - before == 9
    target.memory.check_integrity()


def test_the_least_recently_used_cache_is_replaced(target):
    prompts = [random_ids(40, seed=seed) for seed in range(5)]
    for prompt in prompts[:4]:
        assert fed(target, prompt) == 40
    assert fed(target, prompts[0]) == 1  # used again: prompt 1 is now the oldest
    assert fed(target, prompts[4]) == 40
    for kept in (0, 2, 3, 4):
        assert fed(target, prompts[kept]) == 1
    assert fed(target, prompts[1]) == 40


def test_a_replaced_cache_leaves_nothing_behind(pair, target):
    for seed in range(8):
        ids = random_ids(20 + 30 * (seed % 3), seed=seed)
        assert answer(target, ids, 5) == reference(pair.hf, ids, 5)


@pytest.mark.parametrize("count", [5, 13])
def test_more_calls_than_caches(pair, target, count):
    prompts = [random_ids(5 + 7 * i, seed=i) for i in range(count)]
    verdicts = target.verify([call(ids, 6) for ids in prompts])
    assert [list(v.ids) for v in verdicts] == [reference(pair.hf, ids, 6) for ids in prompts]
    target.memory.check_integrity()


def test_an_empty_batch(target):
    assert target.verify([]) == []


def test_every_committed_token_is_processed_once(pair, target):
    """Fed = committed, less the last token, plus rejected drafts."""
    ids, rejected = random_ids(LONG), 0
    for step in range(12):
        free = reference(pair.hf, ids, 6)
        right = step % 6
        drafts = [*free[:right], *((x + 1) % VOCAB for x in free[right:5])]
        rejected += 5 - right
        ids += answer(target, ids, 6, drafts)
    # After full acceptance the bonus token is fed next time; the very last is not fed at all.
    assert target.fed_tokens == len(ids) - 1 + rejected


# --- bad calls ----------------------------------------------------------------------------------

LOGITS = torch.zeros(2, VOCAB)
BAD = {
    "empty prompt": (call([]), "input_ids is empty; give 1"),
    "id too large": (call([1, VOCAB]), f"input_ids has an id outside 0 to {VOCAB - 1}"),
    "id negative": (call([-1, 1]), "input_ids has an id outside 0 to"),
    "draft id too large": (call([1], 3, [2, VOCAB]), "draft_input_ids has an id outside 0 to"),
    "no output": (call([1], 0), "request_output_len is 0; it must be 1"),
    "too many drafts": (call([1], 18, [2] * 17), "draft_input_ids has 17 ids; the limit is 16"),
    "too long": (call([1] * 280, 10), f"needs 289 positions; the limit is {MAX_LENGTH}"),
    "too long with drafts": (call([1] * 280, 1, [2] * 9), "needs 289 positions; the limit is"),
    "logits of wrong width": (
        TargetCall(np.array([1]), 3, Proposal((2, 3), LOGITS[:, :5]), Sampling(1.0)),
        r"draft_logits is \(2, 5\); it must be \(2, 307\)",
    ),
    "logits of wrong length": (
        TargetCall(np.array([1]), 3, Proposal((2, 3), LOGITS[:1]), Sampling(1.0)),
        r"draft_logits is \(1, 307\); it must be \(2, 307\)",
    ),
    "logits without a number": (
        TargetCall(np.array([1]), 3, Proposal((2, 3), LOGITS / 0), Sampling(1.0)),
        "draft_logits",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_by_name_and_harms_no_other(pair, name):
    bad, message = BAD[name]
    good = [call(random_ids(30), 5), call(random_ids(40, seed=1), 6, random_ids(5))]
    target = new_target(pair.target)
    first, refused, second = target.verify([good[0], bad, good[1]])
    assert isinstance(refused, InvalidRequest)
    with pytest.raises(InvalidRequest, match=message):
        raise refused
    alone = new_target(pair.target)
    assert [first, second] == [alone.verify([one])[0] for one in good]
    assert target.fed_tokens == alone.fed_tokens
    target.memory.check_integrity()


def test_lengths_up_to_the_limit_are_served(target):
    assert len(answer(target, [1] * (MAX_LENGTH - 9), 10)) == 10
    assert len(answer(target, random_ids(MAX_LENGTH - 5), 6, random_ids(5))) >= 1


@pytest.mark.parametrize("end_id", [-1, VOCAB, 2**31 - 1])
def test_an_end_id_outside_the_vocabulary_is_refused_or_means_none(target, end_id):
    """Clients send -1 for "no end id"; that is not the last word of the vocabulary."""

    def tokens(min_tokens):
        fields = {"sampling": Sampling(1000.0), "end_ids": (end_id,), "min_tokens": min_tokens}
        return target.verify([call([1, 2, 3], seed=seed, **fields) for seed in range(60)])

    limited = tokens(1)
    refused = all(isinstance(answer, InvalidRequest) for answer in limited)
    assert refused or limited == tokens(0)


@pytest.mark.parametrize("temperature", [1e-30, 1e-40])
def test_a_tiny_temperature_harms_no_other_call(target, temperature):
    cold, good = call([1, 2, 3], 2, sampling=Sampling(temperature)), call([4, 5], 2)
    verdicts = target.verify([cold, good])
    assert all(isinstance(verdict, Verdict) for verdict in verdicts)


def test_seeds_of_64_bits(target):
    for seed in (0, 2**63 - 1, 2**63, 2**64 - 1):
        assert answer(target, [1, 2, 3], 2, sampling=Sampling(1.0), seed=seed)
