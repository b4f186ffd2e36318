"""What is emitted follows the target: the acceptance rule alone, and the whole loop.

Seeds are fixed, so each chi-square passes or fails for good; LIKELY is far below what a right
rule gives, and each test shows that it would see the draft's distribution instead.
"""

import asyncio
from collections import Counter

import pytest
import torch
from scipy.stats import chi2_contingency

from masw.engines import speculative
from masw.engines.acceptance import accept, adjust, draw, forbid_end, generator, next_token
from masw.engines.local import generate, generate_all
from masw.engines.messages import (
    InvalidRequest,
    Proposal,
    Sampling,
    Verdict,
    derive_seed,
)
from masw.engines.sequence import GenerationRequest
from masw.engines.speculative import LoopSettings, SpeculativeLoop
from tests.chance import LIKELY, SMALL, UNLIKELY, exact_joint, likelihood, warp
from tests.pairs import Kind, build_pair, loop_settings, new_draft, new_target

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, TRIALS = 12, 5000
SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.6),
    Sampling(1.4, top_k=5),
    Sampling(0.9, top_p=0.7),
    Sampling(1.2, top_k=8, top_p=0.85),
]


def logits_of(seed, *shape, spread=1.5):
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distribution(logits) -> dict[int, float]:
    return dict(enumerate(logits.double().softmax(-1).tolist()))


# --- the rule alone -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 2, 7, VOCAB, 50])
@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999, 1.0])
def test_adjust_equals_the_warpers_of_transformers(temperature, top_k, top_p):
    sampling = Sampling(temperature, top_k, top_p)
    for seed in range(10):
        logits = logits_of(seed, 3, VOCAB)
        torch.testing.assert_close(adjust(logits, sampling), warp(logits, sampling))


def emitted_rows(sampling, with_logits, trials=TRIALS):
    """Tokens of many verification steps over fixed distributions, two drafts each.

    Returns the lists emitted, the target's adjusted logits (3, V) and the draft's (2, V).
    """
    target = logits_of(1, 3, VOCAB)
    draft = adjust(target[:2] + logits_of(2, 2, VOCAB, spread=1.0), sampling)
    rows = []
    for trial in range(trials):
        random = generator(derive_seed(7, trial, "draft"))
        ids = [draw(row, random) for row in draft]
        random = generator(derive_seed(7, trial, "target"))
        rows.append(accept(target, ids, draft if with_logits else None, sampling, random))
    return rows, adjust(target, sampling), draft


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("with_logits", [True, False], ids=["draft logits", "exact match"])
def test_every_emitted_position_follows_the_target(sampling, with_logits):
    rows, target, draft = emitted_rows(sampling, with_logits)
    assert {len(row) for row in rows} == {1, 2, 3}
    for place in range(3):
        counts = Counter(row[place] for row in rows if len(row) > place)
        assert likelihood(counts, distribution(target[place])) > LIKELY
    counts = Counter(row[0] for row in rows)
    assert set(counts) <= set(torch.isfinite(target[0]).nonzero()[:, 0].tolist())
    smoothed = {x: 0.99 * p + 0.01 / VOCAB for x, p in distribution(draft[0]).items()}
    assert likelihood(counts, smoothed) < UNLIKELY


def test_draft_logits_accept_more_than_exact_match():
    sampling = Sampling(1.0)
    kept = [
        sum(len(row) - 1 for row in emitted_rows(sampling, mode, 2000)[0]) for mode in (True, False)
    ]
    _, target, draft = emitted_rows(sampling, True, 1)
    p, q = target[:2].softmax(-1), draft.softmax(-1)
    for count, (one, two) in zip(kept, (torch.minimum(p, q).sum(-1), (p * q).sum(-1)), strict=True):
        assert count / 2000 == pytest.approx(float(one * (1 + two)), abs=0.05)
    assert kept[0] > kept[1]


def test_the_same_distribution_is_always_accepted():
    logits, sampling = logits_of(3, 4, VOCAB), Sampling(0.8, top_k=6)
    adjusted = adjust(logits[:3], sampling)
    for trial in range(500):
        ids = [draw(row, generator(10_000 + 3 * trial + i)) for i, row in enumerate(adjusted)]
        assert len(accept(logits, ids, adjusted, sampling, generator(trial))) == 4


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.0, 5, 0.5), Sampling(1.0, top_k=1)])
def test_greedy_keeps_only_the_argmax_even_where_sampling_would_keep_more(sampling):
    target = torch.tensor([[0.50, 0.49, 0.01], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]).log()
    draft = torch.tensor([[0.01, 0.49, 0.50], [0.1, 0.8, 0.1]]).log()
    # p(1) = q(1): the sampling rule keeps token 1 always, greedy never.
    assert accept(target, [1, 1], draft, Sampling(1.0), generator(0))[0] == 1
    assert accept(target, [1, 1], draft, sampling, None) == [0]
    assert accept(target, [0, 1], draft, sampling, None) == [0, 1, 2]
    assert accept(target, [0, 2], draft, sampling, None) == [0, 1]
    assert accept(target, [0, 2], None, sampling, None) == [0, 1]
    assert accept(target[:1], [], None, sampling, None) == [0]


def test_without_drafts_one_token_of_the_target():
    logits, sampling = logits_of(4, 1, VOCAB), Sampling(0.9, top_k=7)
    tokens = [accept(logits, [], None, sampling, generator(seed)) for seed in range(3000)]
    assert {len(token) for token in tokens} == {1}
    counts = Counter(token[0] for token in tokens)
    assert likelihood(counts, distribution(adjust(logits[0], sampling))) > LIKELY
    plain = Counter(next_token(logits[0], sampling, generator(seed)) for seed in range(3000))
    assert likelihood(plain, distribution(adjust(logits[0], sampling))) > LIKELY


def test_forbidden_end_ids_cannot_be_drawn():
    logits = logits_of(5, 3, VOCAB)
    forbidden = forbid_end(logits, (2, 7), 2)
    assert torch.isinf(forbidden[:2, [2, 7]]).all() and torch.equal(forbidden[2], logits[2])
    assert torch.isfinite(logits).all(), "the caller's logits were changed"
    for seed in range(200):
        assert accept(forbidden, [2, 7], logits[:2], Sampling(1.0), generator(seed))[0] != 2


def test_a_temperature_near_zero_is_argmax_and_no_error():
    """1 / temperature overflows float32 long before temperature is 0."""
    logits = logits_of(6, 2, VOCAB)
    for temperature in (1e-6, 1e-30, 1e-40, 1e-300):
        best, sampling = logits.argmax(-1).tolist(), Sampling(temperature)
        assert accept(logits, best[:1], None, sampling, generator(0)) == best


# --- seeds and requests -------------------------------------------------------------------------


def test_derived_seeds_are_never_the_users_and_differ_by_length_and_role():
    users = [0, 1, 2, 41, 42, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    for seed in users:
        derived = [derive_seed(seed, n, r) for n in range(300) for r in ("draft", "target")]
        assert seed not in derived
        assert len(set(derived)) == len(derived)
        assert all(0 <= value < 2**63 for value in derived)
    assert len({derive_seed(seed, 5, "draft") for seed in users}) == len(users)
    assert derive_seed(1, 23, "draft") != derive_seed(12, 3, "draft")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1; it must be 0"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_bad_sampling_fields_are_refused_by_name(fields, message):
    with pytest.raises(InvalidRequest, match=message):
        Sampling(**fields)


def test_greedy_and_neutral_values_of_a_request():
    assert Sampling.from_request(None, None, None).greedy
    assert Sampling.from_request(0.0, 40, 0.9).greedy
    assert Sampling.from_request(0.7, 1, None).greedy
    assert Sampling.from_request(None, None, 0.9) == Sampling(1.0, 0, 0.9)
    assert Sampling.from_request(None, 4, None) == Sampling(1.0, 4, 1.0)
    assert Sampling.from_request(0.7, None, None) == Sampling(0.7)


# --- the loop over tables: thousands of sequences, no model -------------------------------------

STATES = 4


class Tables:
    """Ports whose target and draft are tables: next-token logits by the last token."""

    def __init__(self):
        self.p, self.q = logits_of(11, STATES, STATES), logits_of(12, STATES, STATES)

    async def draft(self, call):
        if call.end:
            return Proposal()
        random, last, ids, rows = generator(call.seed), call.new_ids[-1], [], []
        for _ in range(call.draft_tokens):
            rows.append(adjust(self.q[last], call.sampling))
            last = draw(rows[-1], random)
            ids.append(last)
        logits = torch.stack(rows) if ids and call.return_logits else None
        return Proposal(tuple(ids), logits)

    async def target(self, call):
        random, drafts = generator(call.seed), call.proposal.ids
        if drafts:
            rows = self.p[[int(call.ids[-1]), *drafts]]
            tokens = accept(rows, drafts, call.proposal.logits, call.sampling, random)
            return Verdict(tuple(tokens))
        ids = [int(call.ids[-1])]
        for _ in range(call.output_tokens):
            ids.append(next_token(self.p[ids[-1]], call.sampling, random))
        return Verdict(tuple(ids[1:]))


async def table_texts(requests):
    tables = Tables()
    loop = SpeculativeLoop(tables.target, tables.draft, LoopSettings(8192))
    return [(await generate(loop, request))[0] for request in requests]


def chain_probabilities(logits, first, length) -> dict[tuple[int, ...], float]:
    """The exact joint distribution of a Markov chain's next tokens."""
    rows = logits.double().softmax(-1).tolist()
    joint = {(): 1.0}
    for _ in range(length):
        joint = {
            (*ids, x): p * rows[ids[-1] if ids else first][x]
            for ids, p in joint.items()
            for x in range(STATES)
        }
    return joint


@pytest.mark.parametrize("gamma", [0, 1, 2, 5])
@pytest.mark.parametrize("use_logits", [True, False], ids=["draft logits", "exact match"])
def test_joint_distribution_over_several_iterations(gamma, use_logits):
    sampling = Sampling(0.8)
    texts = asyncio.run(
        table_texts(
            GenerationRequest(
                (2,), 4, sampling, seed, draft_tokens=gamma, use_draft_logits=use_logits
            )
            for seed in range(2500)
        )
    )
    counts = Counter(map(tuple, texts))
    tables = Tables()
    assert likelihood(counts, chain_probabilities(tables.p / 0.8, 2, 4)) > LIKELY
    assert likelihood(counts, chain_probabilities(tables.q / 0.8, 2, 4)) < UNLIKELY


def same_token_draws(length, use_logits, gamma=2):
    """One long text over a memoryless target: tables whose rows are all the same."""
    tables = Tables()
    tables.p, tables.q = tables.p[:1].repeat(STATES, 1), tables.q[:1].repeat(STATES, 1)
    loop = SpeculativeLoop(tables.target, tables.draft, LoopSettings(8192))
    request = GenerationRequest(
        (0,), length, Sampling(1.0), 5, draft_tokens=gamma, use_draft_logits=use_logits
    )

    async def firsts():
        return [ids[0] async for ids in loop.run(loop.sequence(request))]

    return asyncio.run(firsts()), tables.p[0]


def dependence(tokens) -> float:
    """p-value of independence of neighbours."""
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=False))
    table = [[pairs[a, b] for b in range(STATES)] for a in range(STATES)]
    return chi2_contingency(table).pvalue


@pytest.mark.parametrize("use_logits", [True, False], ids=["draft logits", "exact match"])
def test_draws_of_successive_iterations_are_independent(use_logits):
    tokens, logits = same_token_draws(6000, use_logits)
    assert dependence(tokens) > LIKELY
    assert likelihood(Counter(tokens), distribution(logits)) > LIKELY


def test_a_replayed_seed_would_be_noticed(monkeypatch):
    monkeypatch.setattr(speculative, "derive_seed", lambda seed, length, role: seed)
    tokens, logits = same_token_draws(2000, True)
    assert likelihood(Counter(tokens), distribution(logits)) < UNLIKELY


# --- the whole line over tiny models ------------------------------------------------------------

PROMPT = (1, 2, 3)


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory):
    """A pair with a vocabulary of 4."""
    return build_pair(tmp_path_factory.mktemp("small"), noise=0.3, **SMALL)


def texts_of(pair, draft, requests, batch=32):
    """Output ids of all requests, `batch` at a time over fresh engines."""
    limits, texts = {"max_sequences": batch, "max_length": 64}, []
    engines = new_target(pair.target, **limits), new_draft(pair.drafts[draft], Kind(), **limits)
    settings = loop_settings(max_length=64)
    for start in range(0, len(requests), batch):
        part = requests[start : start + batch]
        texts += [ids for ids, _ in generate_all(*engines, settings, part)]
    return texts


@pytest.mark.parametrize(
    ("draft", "sampling", "use_logits"),
    [
        ("other", Sampling(1.0), True),
        ("near", Sampling(0.8, top_k=3), True),
        ("other", Sampling(1.3, top_p=0.9), False),
    ],
    ids=["rejection sampling", "near draft, top-k", "exact match, top-p"],
)
def test_texts_of_the_engines_follow_the_targets_joint_distribution(
    small_pair, draft, sampling, use_logits
):
    requests = [
        GenerationRequest(PROMPT, 3, sampling, s, draft_tokens=2, use_draft_logits=use_logits)
        for s in range(1600)
    ]
    counts = Counter(map(tuple, texts_of(small_pair, draft, requests)))
    assert likelihood(counts, exact_joint(small_pair.hf, PROMPT, 3, sampling)) > LIKELY


@pytest.mark.parametrize("use_logits", [True, False], ids=["draft logits", "exact match"])
def test_same_seed_same_text_whatever_the_batch(small_pair, use_logits):
    prompts = [tuple((seed * 7 + i * i) % 4 for i in range(3 + 2 * seed)) for seed in range(12)]
    requests = [
        GenerationRequest(
            ids, 20, Sampling(1.1), seed, draft_tokens=1 + seed % 5, use_draft_logits=use_logits
        )
        for seed, ids in enumerate(prompts)
    ]
    together = texts_of(small_pair, "near", requests)
    assert texts_of(small_pair, "near", requests) == together
    assert texts_of(small_pair, "near", requests[::-1]) == together[::-1]
    assert texts_of(small_pair, "near", requests, batch=5) == together
    assert texts_of(small_pair, "near", requests, batch=1) == together


def test_different_seeds_give_different_texts(small_pair):
    requests = [GenerationRequest(PROMPT, 24, Sampling(1.5), seed) for seed in range(12)]
    assert len(set(map(tuple, texts_of(small_pair, "near", requests)))) == len(requests)
