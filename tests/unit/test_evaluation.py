"""Tok./Iter from one masked forward equals what the running loop counts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from masw.build.adaptor.arms import curve_steps
from masw.build.adaptor.comparison import Comparison, compare, first_of_each, overall
from masw.build.adaptor.evaluation import DraftMemory, Evaluator, Outcome
from masw.build.adaptor.family import Family, families
from masw.build.adaptor.plots import draw_bars, draw_initialisation, in_order
from masw.build.adaptor.samples import DataError, Sample
from masw.build.adaptor.snapkv import SnapKV
from masw.build.adaptor.spread import beside_windows
from masw.build.adaptor.summary import Summary, count_iterations, summarise
from masw.engines.draft import TorchDraft
from masw.engines.local import generate_all
from masw.engines.sequence import GenerationRequest
from masw.engines.speculative import LoopSettings
from masw.engines.target import TorchTarget
from masw.plugins.slot_attention.rule import MemoryRule
from tests.driver import random_adaptor
from tests.models import MAX_POSITIONS, random_ids

GAMMA = 5
RULES = {
    "slots r4": MemoryRule(8, 16, 16, 4, "evicted"),
    "slots r3, materialized": MemoryRule(4, 12, 16, 3, "materialized"),
    "window": MemoryRule.windowed(8, 24),
    "full": MemoryRule.full(MAX_POSITIONS),
}


def run_loop(decoder, rule, adaptor, prompt, max_tokens, end_ids=()):
    """Ids and statistics of the real loop: torch target and draft, the same tiny model."""
    limits = {"max_sequences": 1, "max_length": 400, "max_draft_tokens": 8}
    target = TorchTarget(decoder, **limits)
    draft = TorchDraft(decoder, rule, adaptor, **limits)
    settings = LoopSettings(max_length=400, max_draft_tokens=8, draft_tokens=GAMMA)
    request = GenerationRequest(tuple(prompt), max_tokens, end_ids=end_ids)
    [(ids, statistics)] = generate_all(target, draft, settings, [request])
    return ids, statistics


def hits_of(model, sample, memory):
    [outcome] = Evaluator(model).run(Family.alone(sample), [memory])
    return outcome[memory.name].hits


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 60])
def test_counts_equal_the_running_loop(decoder, name, max_tokens):
    model, rule = decoder("llama"), RULES[name]
    adaptor = random_adaptor(model, rule) if rule.interval else None
    for seed in range(4):
        prompt = random_ids(100 + seed, seed)
        ids, expected = run_loop(model, rule, adaptor, prompt, max_tokens)
        sample = Sample(tuple(prompt), tuple(ids))
        hits = hits_of(model, sample, DraftMemory(name, rule, adaptor))
        found = count_iterations(hits, GAMMA, max_tokens)
        for field in ("iterations", "new_tokens", "drafted", "accepted", "accepted_at"):
            assert getattr(found, field) == getattr(expected, field), field
    assert name == "full" or max_tokens < 60 or 0 < found.accepted < found.drafted


def test_counts_equal_the_running_loop_where_an_end_id_stops_it(decoder):
    model, rule = decoder("llama"), RULES["slots r4"]
    adaptor = random_adaptor(model, rule)
    for seed in range(4):
        prompt = random_ids(90, seed)
        free, _ = run_loop(model, rule, adaptor, prompt, 60)
        ids, expected = run_loop(model, rule, adaptor, prompt, 60, end_ids=(free[20],))
        assert len(ids) < 60
        sample = Sample(tuple(prompt), tuple(ids))
        hits = hits_of(model, sample, DraftMemory("slots", rule, adaptor))
        found = count_iterations(hits, GAMMA, 60)
        assert (found.iterations, found.new_tokens) == (expected.iterations, expected.new_tokens)


def plain_snapkv(model, sample, snapkv):
    """The selection and the answer's attention again, head by head and token by token."""
    prompt, total = len(sample.prompt), len(sample.ids)

    def attend(layer, q, k, v):
        out = torch.zeros_like(q)
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[-1]
        for head in range(kv_heads):
            group = range(head * heads // kv_heads, (head + 1) * heads // kv_heads)
            votes = torch.zeros(prompt - snapkv.observed)
            for h in group:
                for i in range(prompt - snapkv.observed, prompt):
                    scores = torch.tensor([float(q[0, h, i] @ k[0, head, j]) for j in range(i + 1)])
                    votes += (scores / dim**0.5).softmax(0)[: len(votes)]
            half = snapkv.kernel // 2
            padded = torch.cat([torch.zeros(half), votes, torch.zeros(half)])
            smooth = torch.stack([padded[j : j + snapkv.kernel].sum() for j in range(len(votes))])
            best = smooth.argsort(descending=True)[: snapkv.capacity - snapkv.observed]
            kept = sorted([*best.tolist(), *range(prompt - snapkv.observed, prompt)])
            for h in group:
                for i in range(total):
                    keys = list(range(i + 1))
                    if i >= prompt:
                        keys = kept + list(range(prompt, i + 1))
                    weights = (k[0, head, keys] @ q[0, h, i] / dim**0.5).softmax(0)
                    out[0, h, i] = weights @ v[0, head, keys]
        return out

    from masw.build.adaptor.stream import stream_block

    block = stream_block(MemoryRule.full(total), torch.tensor([sample.ids]))
    hidden, _ = model.run(block, attend)
    return model.logits(hidden[0, prompt - 1 : total - 1])


def test_snapkv_equals_its_plain_restatement(decoder):
    model, snapkv = decoder("llama"), SnapKV(capacity=20, observed=6, kernel=5)
    sample = Sample(tuple(random_ids(48)), tuple(random_ids(12, 5)))
    memory = DraftMemory("snapkv", snapkv=snapkv)
    stream, attend = memory.stream(Family.alone(sample), "cpu")
    hidden, _ = model.run(stream.block, attend)
    found = model.logits(hidden[0, 47:59])
    torch.testing.assert_close(found, plain_snapkv(model, sample, snapkv), atol=1e-4, rtol=0)
    stream, attend = DraftMemory("full", MemoryRule.full(60)).stream(Family.alone(sample), "cpu")
    everything = model.logits(model.run(stream.block, attend)[0][0, 47:59])
    assert (everything - found).abs().max() > 0.01  # the choice left something out
    assert torch.allclose(found[0], everything[0], atol=1e-5)  # the prompt's last token sees all
    assert memory.entries(48) == 20


def test_snapkv_keeps_a_short_prompt_whole(decoder):
    model, sample = decoder("llama"), Sample(tuple(random_ids(30)), tuple(random_ids(9, 1)))
    memories = [DraftMemory("s", snapkv=SnapKV(64, 8)), DraftMemory("f", MemoryRule.full(39))]
    [outcomes] = Evaluator(model).run(Family.alone(sample), memories)
    assert outcomes["s"].hits == outcomes["f"].hits


def related(seed, *tails, shared=90):
    """Samples that begin with the same tokens; tails are (rest of the prompt, answer) lengths."""
    begin = random_ids(shared, seed)
    for number, (rest, answer) in enumerate(tails):
        prompt = [*begin, *random_ids(rest, seed + number + 1)]
        yield Sample(tuple(prompt), tuple(random_ids(answer, number)), name=f"{seed}-{number}")


@pytest.mark.parametrize("visibility", ["evicted", "materialized"])
@pytest.mark.parametrize("shared", [90, 91, 93])  # before, at and after a boundary
def test_a_family_is_evaluated_as_each_sample_alone(decoder, visibility, shared):
    model, rule = decoder("llama"), MemoryRule(8, 16, 16, 4, visibility)
    memories = [
        DraftMemory("slots", rule, random_adaptor(model, rule)),
        DraftMemory("window", MemoryRule.windowed(8, 24)),
        DraftMemory("full", MemoryRule.full(MAX_POSITIONS)),
        DraftMemory("snapkv", snapkv=SnapKV(40, 8)),
    ]
    samples = list(related(7, (20, 12), (3, 30), (41, 1), shared=shared))
    [family] = families(samples)
    assert family == Family(tuple(samples), shared)
    evaluator = Evaluator(model)
    for sample, found in zip(samples, evaluator.run(family, memories), strict=True):
        [alone] = evaluator.run(Family.alone(sample), memories)
        for memory in memories:
            hidden = [
                evaluator._hidden(memory, part)[place]
                for part, place in ((family, samples.index(sample)), (Family.alone(sample), 0))
            ]
            torch.testing.assert_close(*hidden, atol=1e-5, rtol=0)
            assert found[memory.name].hits == alone[memory.name].hits
            assert found[memory.name].distance.keys() == alone[memory.name].distance.keys()


def test_families_share_at_least_half_a_prompt():
    alike = list(related(1, (20, 5), (30, 5)))
    other = list(related(2, (20, 5)))
    short = list(related(3, (60, 5), (60, 5), shared=50))
    mixed = [alike[0], *other, short[0], alike[1], short[1]]
    found = [[sample.name for sample in family.samples] for family in families(mixed)]
    assert found == [["1-0", "1-1"], ["2-0"], ["3-0"], ["3-1"]]
    many = list(related(4, *[(5, 5)] * 11))
    assert [len(family.samples) for family in families(many)] == [8, 3]


def test_distance_buckets_hold_nll_and_divergence(decoder):
    """A full memory diverges by nothing; a window's NLL is that of its own logits."""
    model = decoder("llama")
    sample = Sample(tuple(random_ids(90)), tuple(random_ids(10, 1)))
    rule = MemoryRule.windowed(8, 200)
    wide, narrow = DraftMemory("wide", rule), DraftMemory("narrow", MemoryRule.windowed(4, 8))
    [outcome] = Evaluator(model).run(Family.alone(sample), [wide, narrow])
    assert outcome["wide"].distance == {}  # nothing is beyond this window
    [(count, nll, kl)] = outcome["narrow"].distance.values()
    assert count == len(range(12, 99, 8)) and nll > 0 and kl > 0


def test_comparison_covers_every_memory_and_counts_entries(decoder, tmp_path):
    model = decoder("llama")
    rule = MemoryRule(8, 16, 16, 4, "evicted")
    adaptor = random_adaptor(model, rule, trained=True)
    adaptor.save(tmp_path / "a.safetensors")
    ids = random_ids(120)
    samples = [
        Sample(tuple(ids), tuple(random_ids(10, i)), kind, 120) for i, kind in enumerate("xy")
    ]
    comparison = Comparison(
        {"trained": tmp_path / "a.safetensors"},
        transferred=((4, 24, 8),),
        untrained=((16, 4),),
        equal=(4,),
        windows=(40,),
        swa=(32,),
        sink=8,
        window=16,
        max_tokens=10,
    )
    summaries = compare(comparison, model, samples, lambda text: None)
    entries = {s.memory: s.entries for s in summaries}
    slots = 8 + 16 + (120 - 8) // 4
    assert entries == {
        "full": 120,
        "window = r4": slots,
        "window-40": 40,
        "swa-32": 32,
        "snapkv": 64,
        "untrained W16 r4": slots,
        "trained": slots,
        "trained S4 W24 r8": 4 + 24 + (120 - 4) // 8,
    }
    assert {s.kind for s in summaries} == {"x", "y"}
    assert overall(summaries)["120"].keys() == entries.keys()


def test_a_transferred_adaptor_counts_as_one_made_for_that_memory(decoder, tmp_path):
    model, rule = decoder("llama"), MemoryRule(8, 16, 16, 4, "materialized")
    adaptor, other = random_adaptor(model, rule, trained=True), {"sink": 4, "window": 24}
    adaptor.save(tmp_path / "a.safetensors")
    adaptor.save(tmp_path / "b.safetensors", **other, interval=8)
    sample = Sample(tuple(random_ids(120)), tuple(random_ids(10, 1)), "x", 120)
    nothing = {"untrained": (), "equal": (), "swa": (), "snapkv": False, "max_tokens": 10}
    files = {name: tmp_path / f"{name}.safetensors" for name in "ab"}
    comparison = Comparison(files, transferred=((4, 24, 8),), **nothing)
    kept = {s.memory: s for s in compare(comparison, model, [sample], lambda text: None)}
    moved = replace(kept["a S4 W24 r8"], memory="b")
    assert moved == kept["b"] and moved.nll != kept["a"].nll


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": ()}, "sample 'n' has no answer"),
        ({"answer": range(5)}, "sample 'n' has an answer of 5 tokens; max_tokens is 4"),
        ({"prefix": 0}, "sample 'n' has prefix 0; it must be 1 or more"),
        (
            {"prompt": (1,) * (MAX_POSITIONS - 2)},
            f"have {MAX_POSITIONS + 1} tokens; the model takes {MAX_POSITIONS}",
        ),
    ],
)
def test_samples_that_have_no_tok_iter_are_refused(decoder, change, message):
    sample = replace(Sample((1, 2), (3, 4, 5), prefix=2, name="n"), **change)
    with pytest.raises(DataError, match=message):
        compare(Comparison({}, max_tokens=4), decoder("llama"), [sample], lambda text: None)


def test_nothing_to_compare_is_refused(decoder):
    with pytest.raises(DataError, match="there are no samples"):
        compare(Comparison({}), decoder("llama"), [], lambda text: None)
    samples = [Sample((1, 2), (3,), kind, 2) for kind in ("x", "y")]
    with pytest.raises(DataError, match=r"prefixes has 9999; the samples have 2 \(x\), 2 \(y\)"):
        first_of_each(samples, 0, (2, 9999))
    assert first_of_each(samples, 0, (2,)) == samples


@pytest.mark.parametrize(
    ("names", "change", "name"),
    [
        ((), {"windows": (40, 40)}, "window-40"),
        (("full",), {}, "full"),
        (("mine", "mine S4 W8 r2"), {"transferred": ((4, 8, 2),)}, "mine S4 W8 r2"),
    ],
)
def test_memories_of_one_name_are_refused_before_any_forward(
    decoder, tmp_path, names, change, name
):
    model = decoder("llama")
    adaptor = random_adaptor(model, MemoryRule(8, 16, 16, 4, "evicted"), trained=True)
    adaptor.save(tmp_path / "a.safetensors")
    files = {name: tmp_path / "a.safetensors" for name in names}
    sample, kept = Sample((1, 2), (3,), "x", 2), tmp_path / "outcomes.jsonl"
    with pytest.raises(ValueError, match=f"2 memories are named '{name}'"):
        compare(Comparison(files, **change), model, [sample], pytest.fail, kept=kept)
    assert not kept.exists()


def test_an_adaptor_that_is_not_finite_is_refused(decoder, tmp_path):
    model = decoder("llama")
    adaptor = random_adaptor(model, MemoryRule(8, 16, 16, 4, "evicted"), trained=True)
    next(adaptor.parameters())[0] = torch.nan
    adaptor.save(tmp_path / "a.safetensors")
    comparison = Comparison({"mine": tmp_path / "a.safetensors"})
    with pytest.raises(ValueError, match=r"a\.safetensors has weights that are not finite"):
        compare(comparison, model, [Sample((1, 2), (3,), "x", 2)], pytest.fail)


@pytest.mark.parametrize("name", ["swa-32", "windowed", "snapkv2", "untrained"])
def test_an_adaptor_is_not_named_like_another_memory(name):
    with pytest.raises(ValueError, match=f"adaptor '{name}' is named like another memory"):
        Comparison({name: Path("a.safetensors")})


def test_summary_adds_tokens_and_iterations_of_all_samples():
    outcomes = [Outcome((True,) * 12), Outcome((False,) * 4)]
    summary = summarise("k", 9, DraftMemory("m", MemoryRule.full(9)), outcomes, 5, 12)
    assert (summary.tokens, summary.iterations) == (16, 2 + 4)
    assert summary.tok_iter == pytest.approx(16 / 6)
    assert summary.by_position[0] == pytest.approx(2 / 6)


def summary(memory, kind, *each):
    tokens, iterations = (sum(column) for column in zip(*each, strict=True))
    row = (kind, 96, memory, len(each), 9, tokens, iterations, tokens / iterations)
    return Summary(*row, by_position=(), each=each, nll={}, kl={})


def test_intervals_span_what_other_prompts_could_have_given():
    rows = [
        summary("window-9", "x", (12, 4), (12, 6)),
        summary("slots", "x", (12, 3), (12, 6)),
        summary("window-9", "y", (10, 5)),
        summary("slots", "y", (10, 4)),
    ]
    # Of the two x prompts, 0, 1 or 2 draws may be the first; y always gives 2 and 2.5.
    drawn = [(24 / x + 2.5) / (24 / w + 2) for x, w in ((6, 8), (9, 10), (12, 12))]
    told = beside_windows(rows)
    assert told.keys() == {"96"} and told["96"].keys() == {"window-9"}
    ratio, low, high = told["96"]["window-9"]["slots"]
    assert ratio == pytest.approx(drawn[1], abs=1e-4)
    assert (low, high) == pytest.approx((min(drawn), max(drawn)), abs=1e-4)


def test_what_is_the_same_on_every_prompt_has_no_interval():
    each = [(12, n) for n in (2, 3, 4, 6)]
    rows = [summary("window = r8", "x", *each)]
    rows += [summary("slots", "x", *((2 * tokens, n) for tokens, n in each))]
    assert beside_windows(rows)["96"]["window = r8"]["slots"] == [2, 2, 2]


def arm(name, tok_iter, group="window"):
    return {"group": group, "name": name, "tok_iter": tok_iter}


def test_bars_have_gaps_where_an_arm_lacks_a_prefix_or_a_memory():
    results = [
        arm("a", {"2048": {"r = 8": 1.0}}),
        arm("b", {"1024": {"r = 4": 2.0}, "2048": {"r = 8": 3.0, "r = 4": 4.0}}),
    ]
    [axis] = draw_bars(results, "t").axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b, r = 4", "b, r = 8"]
    bars = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axis.containers}
    assert bars == {"1024 tokens": [2.0], "2048 tokens": [1.0, 4.0, 3.0]}


def test_results_are_drawn_in_the_order_of_the_arms():
    names = ["own", "S = W = 128", "S = W = 32", "S = W = 64"]
    found = in_order([arm(name, {}) for name in names])
    assert [result["name"] for result in found] == [*names[2:], "S = W = 128", "own"]


@pytest.mark.parametrize(
    ("steps", "stages", "first", "last", "count"),
    [(60, 1, 1, 60, 60), (500, 1, 1, 499, 250), (801, 2, 1, 797, 200), (1, 2, 1, 2, 2)],
)
def test_curves_keep_steps_at_a_stride(steps, stages, first, last, count):
    kept = curve_steps(steps, stages)
    assert (kept[0], kept[-1], len(kept)) == (first, last, count)


def test_curves_are_drawn_over_the_steps_they_keep():
    curve = [1.0] * 250
    result = arm("copy", {}) | {"settings": {"steps": 500}, "stages": ["sft"]}
    figure = draw_initialisation([result | {"loss": curve, "gradient_norm": curve}])
    for axis in figure.axes:
        assert list(axis.lines[0].get_xdata()) == list(range(1, 501, 2))
