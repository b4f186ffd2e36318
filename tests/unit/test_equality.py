"""Greedy output in fp32 is Hugging Face's `generate`, token for token, whatever the draft does.

The pairs are tiny random models, every prompt list runs as one ragged batch through the whole
line: loop, draft with its memory, target with its caches. `tests.pairs.run` checks the memories.
"""

from itertools import product

import pytest

from masw.engines.local import generate_all
from tests.pairs import (
    MODES,
    Kind,
    build_pair,
    loop_settings,
    new_draft,
    new_target,
    prompts,
    reference,
    requests_of,
    run,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 20
GAMMAS = (1, 5, 16)
SLOTS = [Kind("slots", *rest) for rest in product((1, 4, 8), ("materialized", "evicted"))]
PLAIN = [Kind("full"), Kind("window")]
# Every slot rule, mode and γ with the draft that accepts in between; the others where they differ.
GRID = [
    *product(["near"], [*SLOTS, *PLAIN], GAMMAS),
    *product(["same"], [*SLOTS, *PLAIN], [5]),
    *product(["same", "other"], [Kind()], [1, 16]),
    ("near", Kind("none"), 5),
]


@pytest.fixture(scope="module")
def expected(pair):
    """What Hugging Face generates for each prompt, without an end id."""
    return [reference(pair.hf, ids, NEW) for ids in prompts()]


def outputs(answers):
    return [ids for ids, _ in answers]


def case_name(value):
    if isinstance(value, Kind):
        slots = f"-r{value.interval}-{value.visibility}" if value.mode == "slots" else ""
        return value.mode + slots
    return str(value)


@pytest.mark.parametrize(("draft", "kind", "gamma"), GRID, ids=case_name)
def test_the_whole_grid_equals_generate(pair, expected, draft, kind, gamma):
    answers, steps = run(pair, draft, kind, requests_of(prompts(), NEW, draft_tokens=gamma))
    assert outputs(answers) == expected
    assert any(step.drafts for step in steps) == (kind.mode != "none")
    assert all(stats.new_tokens == NEW and stats.draft_failures == 0 for _, stats in answers)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_every_accepted_length_occurs_in_the_grid(pair, expected, gamma):
    seen = set()
    for draft in ("near", "same"):
        requests = requests_of(prompts(), NEW, draft_tokens=gamma)
        answers, steps = run(pair, draft, Kind("full"), requests)
        assert outputs(answers) == expected
        seen |= {step.accepted for step in steps if step.drafts}
    assert seen == set(range(gamma + 1))


@pytest.mark.parametrize("draft", ["same", "near", "other"])
@pytest.mark.parametrize("kind", [Kind(), Kind("full")], ids=case_name)
def test_adaptive_draft_length_equals_generate(pair, expected, draft, kind):
    requests = requests_of(prompts(), NEW, draft_tokens=3, adaptive=True)
    answers, steps = run(pair, draft, kind, requests)
    assert outputs(answers) == expected
    assert len({len(step.drafts) for step in steps}) > 2, "the draft length did not adapt"


def early_end_ids(expected):
    """For each prompt, end ids of which one appears early or late in its free output."""
    places = [(7 * i) % (NEW - 2) + 1 for i in range(len(expected))]
    return [(output[place], 0) for output, place in zip(expected, places, strict=True)]


def requests_with_ends(all_end_ids, **changes):
    return [
        requests_of([ids], NEW, end_ids=end_ids, **changes)[0]
        for ids, end_ids in zip(prompts(), all_end_ids, strict=True)
    ]


@pytest.mark.parametrize("gamma", [5, 16])
def test_end_id_inside_and_outside_an_accepted_run(pair, expected, gamma):
    ends = early_end_ids(expected)
    wanted = [reference(pair.hf, ids, NEW, end) for ids, end in zip(prompts(), ends, strict=True)]
    inside = cut_run = own_token = 0
    for draft, kind in (("near", Kind("full")), ("near", Kind()), ("other", Kind("window"))):
        answers, steps = run(pair, draft, kind, requests_with_ends(ends, draft_tokens=gamma))
        assert outputs(answers) == wanted
        assert {stats.finish_reason for _, stats in answers} == {"end_id"}
        last = [step for step in steps if step.drafts and step.ids[-1] in step.call.end_ids]
        inside += sum(step.accepted == len(step.ids) for step in last)
        cut_run += sum(step.accepted == len(step.ids) < len(step.drafts) for step in last)
        own_token += sum(step.accepted < len(step.ids) for step in last)
    assert inside and cut_run and own_token


def test_end_id_in_plain_decoding(pair, expected):
    ends = early_end_ids(expected)
    wanted = [reference(pair.hf, ids, NEW, end) for ids, end in zip(prompts(), ends, strict=True)]
    answers, _ = run(pair, "near", Kind("none"), requests_with_ends(ends), plain_tokens=5)
    assert outputs(answers) == wanted


@pytest.mark.parametrize("kind", [Kind(mode) for mode in MODES], ids=case_name)
def test_min_tokens_equals_min_new_tokens(pair, expected, kind):
    ends, shortest = early_end_ids(expected), 10
    wanted = [
        reference(pair.hf, ids, NEW, end, shortest)
        for ids, end in zip(prompts(), ends, strict=True)
    ]
    answers, _ = run(pair, "near", kind, requests_with_ends(ends, min_tokens=shortest))
    assert outputs(answers) == wanted
    changed = [out != free[: len(out)] for out, free in zip(wanted, expected, strict=True)]
    assert any(changed)
    assert min(map(len, wanted)) > shortest


@pytest.mark.parametrize("kind", [Kind(), Kind("full"), Kind("window")], ids=case_name)
def test_a_row_of_a_batch_equals_its_solo_run(pair, kind):
    requests = requests_of(prompts(), NEW)
    together, _ = run(pair, "near", kind, requests)
    for place in range(0, len(requests), 4):
        (alone,), _ = run(pair, "near", kind, [requests[place]])
        ids, stats = together[place]
        assert alone[0] == ids
        assert alone[1].accepted_at == stats.accepted_at
        assert alone[1].drafted_at == stats.drafted_at


def test_more_sequences_than_caches_and_draft_rows(pair, expected):
    """Sequences without a draft row decode plainly, and caches are replaced all the time."""
    draft = new_draft(pair.drafts["near"], max_sequences=3)
    target = new_target(pair.target, max_sequences=3)
    settings = loop_settings(retry_pause=0.0)
    answers = generate_all(target, draft, settings, requests_of(prompts(), NEW))
    assert outputs(answers) == expected
    assert any(stats.drafted for _, stats in answers)
    assert any(stats.draft_failures for _, stats in answers)


@pytest.mark.parametrize("chunk", [1, 7, 400])
def test_chunk_sizes_do_not_matter(pair, expected, chunk):
    size = {"max_sequences": 8, "chunk": chunk}
    draft, target = new_draft(pair.drafts["near"], **size), new_target(pair.target, **size)
    settings = loop_settings(draft_chunk=chunk, target_chunk=chunk, concurrent_prefill=chunk == 7)
    chosen = slice(4, 24, 3)
    answers = generate_all(target, draft, settings, requests_of(prompts()[chosen], NEW))
    assert outputs(answers) == expected[chosen]


@pytest.mark.parametrize("name", ["llama-llama3", "mistral", "qwen2", "qwen3"])
def test_other_families_equal_generate(tmp_path, name):
    pair = build_pair(tmp_path, name)
    chosen = prompts()[::3]
    expected = [reference(pair.hf, ids, NEW) for ids in chosen]
    for draft, kind in (("near", Kind()), ("same", Kind("window")), ("near", Kind("full"))):
        answers, steps = run(pair, draft, kind, requests_of(chosen, NEW))
        assert outputs(answers) == expected
        assert any(step.accepted for step in steps)
