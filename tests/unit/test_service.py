"""The endpoint without a server: admission, replies, stop words, limits, cancellation, metrics."""

import asyncio
import json
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from masw.clients.messages import Statistics
from masw.engines.messages import (
    DraftUnavailable,
    InvalidRequest,
    Proposal,
    TargetError,
    Verdict,
)
from masw.engines.speculative import LoopSettings, SpeculativeLoop
from masw.engines.target import common_prefix
from masw.engines.text import TextCodec
from masw.triton_repo.metrics import Metrics
from masw.triton_repo.service import Overloaded, Service, ServiceLimits
from tests.tiny_tokenizers import byte_level

VOCAB, MAX_LENGTH, CHUNK = 300, 400, 8
TEXT = "the cat and the 🙂 dog 中文 sat the end\n" * 4
PROMPT = "the dog"


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return TextCodec(byte_level(tmp_path_factory.mktemp("tokenizer")))


class Script:
    """A target that says `ids`, and a draft that guesses them but for every third one.

    Each call first waits for `pause()`; `calls` are all that came, in order.
    """

    def __init__(self, ids, prompt_length):
        self.ids, self.prompt_length = ids, prompt_length
        self.draft_calls, self.target_calls = [], []
        self.error: Exception | None = None
        self.draft_error: Exception | None = None
        self.pause = lambda: asyncio.sleep(0)

    async def target(self, call):
        self.target_calls.append(call)
        await self.pause()
        if self.error:
            raise self.error
        start = max(0, len(call.ids) - self.prompt_length)
        own = self.ids[start : start + call.output_tokens]
        drafts = call.proposal.ids
        kept = common_prefix(np.array(own), np.array(drafts))
        return Verdict(tuple(own[: kept + 1] if drafts else own))

    async def draft(self, call):
        self.draft_calls.append(call)
        await self.pause()
        if self.draft_error and not call.end:
            raise self.draft_error
        start = call.start_position + len(call.new_ids) - self.prompt_length
        guess = [self.ids[start + i] if (start + i) % 3 else 0 for i in range(call.draft_tokens)]
        return Proposal(tuple(guess))

    @property
    def ended(self):
        """Ids of the sequences that the draft was told to forget."""
        return [call.sequence_id for call in self.draft_calls if call.end]


class FakeMetric(SimpleNamespace):
    """A Triton metric that keeps what it is told."""

    def increment(self, value):
        self.family.values[self.key] += value

    def set(self, value):
        self.family.values[self.key] = value
        self.family.history.append(value)

    def observe(self, value):
        assert value >= 0
        self.family.values[self.key] += 1
        self.family.history.append(value)


class FakeTriton:
    """Triton's `pb_utils` as far as metrics go; `[name]` are a family's values by label."""

    def __init__(self):
        self.families = {}
        self.MetricFamily = partial(FakeFamily, self.families)
        for number, kind in enumerate(("COUNTER", "GAUGE", "HISTOGRAM")):
            setattr(self.MetricFamily, kind, number)

    def __getitem__(self, name):
        return self.families[name].values


class FakeFamily:
    """A Triton metric family."""

    def __init__(self, families, name, description, kind):
        self.values, self.history = Counter(), []
        families[name] = self

    def Metric(self, labels, buckets=None):
        return FakeMetric(family=self, key=next(iter(labels.values()), ""))


class Bench:
    """A service over a script, with what its metrics said."""

    def __init__(self, codec, prompt=PROMPT, **limits):
        self.codec, self.prompt = codec, prompt
        self.ids = codec.encode(TEXT)
        self.script = Script(self.ids, len(codec.encode(prompt)))
        self.metrics = FakeTriton()
        settings = LoopSettings(MAX_LENGTH, draft_chunk=CHUNK, target_chunk=CHUNK, plain_tokens=4)
        self.service = Service(
            SpeculativeLoop(self.script.target, self.script.draft, settings),
            codec,
            Metrics(self.metrics, 16),
            ServiceLimits(**{"max_sequences": 2, "max_waiting": 1} | limits),
            VOCAB,
            (),
        )

    async def serve(self, is_cancelled=lambda: False, **fields):
        """All replies to one request."""
        inputs = {"max_tokens": np.array([40], np.int32), "text_input": text(self.prompt)}
        inputs |= {name: as_array(value) for name, value in fields.items()}
        return [reply async for reply in self.service.serve(inputs, is_cancelled)]

    def run(self, **fields):
        """The same in an event loop of its own; exactly the last reply is final."""
        replies = asyncio.run(self.serve(**fields))
        assert [reply.final for reply in replies] == [False] * (len(replies) - 1) + [True]
        return replies

    @property
    def inflight(self):
        return self.metrics["masw_requests_inflight"][""]


def text(*words):
    return np.array([word.encode() for word in words], object)


def as_array(value):
    if isinstance(value, str | tuple):
        return text(*([value] if isinstance(value, str) else value))
    kind = {bool: np.bool_, int: np.int32, float: np.float32}[type(value)]
    return np.array([value], kind)


def text_of(replies):
    return "".join(reply.outputs["text_output"][0].decode() for reply in replies)


def statistics_of(reply):
    return Statistics.from_json(reply.outputs["statistics"].item().decode())


@pytest.fixture
def bench(codec):
    return Bench(codec)


@pytest.mark.parametrize("gamma", [0, 1, 5, 16])
def test_streamed_text_adds_up_to_the_whole(bench, gamma):
    wanted = bench.codec.decode(bench.ids[:40])
    streamed = bench.run(stream=True, num_draft_tokens=gamma)
    whole = bench.run(stream=False, num_draft_tokens=gamma)
    assert text_of(streamed) == text_of(whole) == wanted
    assert len(streamed) > 3 and len(whole) == 1


def test_no_reply_is_empty_but_the_last(bench):
    replies = bench.run(stream=True, num_draft_tokens=1)
    assert all(reply.outputs["text_output"][0] for reply in replies[:-1])


def test_ids_are_cumulative_and_say_what_was_given_before(bench):
    inputs = {"max_tokens": np.array([40], np.int32), "stream": np.array([True])}
    inputs["input_ids"] = np.array(bench.codec.encode(PROMPT), np.int32)

    async def serve():
        return [reply.outputs async for reply in bench.service.serve(inputs, lambda: False)]

    given = 0
    for outputs in (all_outputs := asyncio.run(serve())):
        length = outputs["sequence_length"].item()
        assert outputs["output_ids"].shape == (1, 1, length)
        assert outputs["output_ids"].ravel().tolist() == bench.ids[:length]
        assert outputs["emitted_length"].item() == given
        assert outputs["is_final"].item() == (outputs is all_outputs[-1])
        given = length
    assert given == 40 and len(all_outputs) > 3


def test_the_echo_comes_before_the_answer(bench):
    wanted = PROMPT + bench.codec.decode(bench.ids[:40])
    for streamed in (True, False):
        assert text_of(bench.run(exclude_input_in_output=False, stream=streamed)) == wanted


@pytest.mark.parametrize("gamma", [0, 1, 5])
@pytest.mark.parametrize("words", [("🙂",), ("e 🙂 d", "and  "), ("and", "the"), ("never",)])
def test_stop_words_end_text_and_generation(bench, words, gamma):
    whole = bench.codec.decode(bench.ids[:40])
    places = [whole.find(word) for word in words if word in whole]
    wanted = whole[: min(places)] if places else whole
    for streamed in (True, False):
        replies = bench.run(
            stop_words=words, stream=streamed, return_perf_metrics=True, num_draft_tokens=gamma
        )
        statistics = statistics_of(replies[-1])
        assert text_of(replies) == wanted
        assert statistics.finish_reason == ("stop_words" if places else "length")
        assert statistics.new_tokens == 40 or places
    assert len(bench.script.ended) == (2 if gamma else 0), "the draft has forgotten both"


def test_statistics_come_with_the_final_reply_when_wanted(bench):
    *partial, final = bench.run(stream=True, return_perf_metrics=True)
    statistics = statistics_of(final)
    assert statistics.prefix_tokens == len(bench.codec.encode(PROMPT))
    assert statistics.new_tokens == 40 and 0 < statistics.accepted < statistics.drafted
    assert final.outputs["total_draft_tokens"].item() == statistics.drafted
    assert final.outputs["total_accepted_draft_tokens"].item() == statistics.accepted
    rate = statistics.accepted / statistics.drafted
    assert final.outputs["acceptance_rate"].item() == pytest.approx(rate)
    assert all("statistics" not in reply.outputs for reply in partial)
    assert "statistics" not in bench.run(stream=True)[-1].outputs


STATISTICS = (
    "prefix_tokens new_tokens iterations drafted accepted drafted_at accepted_at rollbacks"
    " slots_materialized slots_discarded prefill_ms draft_ms verify_ms host_ms draft_failures"
    " finish_reason"
)


def test_the_statistics_have_the_keys_of_the_contract(bench):
    final = bench.run(return_perf_metrics=True)[-1]
    assert " ".join(json.loads(final.outputs["statistics"].item())) == STATISTICS


def test_metrics_count_what_the_statistics_say(bench):
    all_statistics = [
        statistics_of(bench.run(return_perf_metrics=True, num_draft_tokens=gamma)[-1])
        for gamma in (0, 2, 5)
    ]
    drafts = sum(s.drafted_at[0] for s in all_statistics if s.drafted_at)
    totals = {
        "masw_drafts_total": drafts,
        "masw_draft_tokens_total": sum(s.drafted for s in all_statistics),
        "masw_accepted_tokens_total": sum(s.accepted for s in all_statistics),
        "masw_emitted_tokens_total": 120,
        "masw_cancelled_total": 0,
    }
    assert {name: bench.metrics[name][""] for name in totals} == totals
    at = bench.metrics["masw_accepted_tokens_per_pos_total"]
    for place in range(5):
        wanted = sum(s.accepted_at[place] for s in all_statistics if len(s.accepted_at) > place)
        assert at[str(place)] == wanted
    seconds = bench.metrics["masw_iteration_seconds"]
    assert seconds["draft"] == seconds["verify"] == seconds["host"] >= drafts


def test_requests_beyond_the_places_are_refused_at_once(bench):
    async def scenario():
        gate = asyncio.Event()
        bench.script.pause = gate.wait
        admitted = [asyncio.create_task(bench.serve()) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert bench.inflight == 3 and len(bench.script.target_calls) == 2, "one waits"
        with pytest.raises(Overloaded, match=r"max_sequences 2 \+ max_waiting 1.*try again later"):
            await bench.serve()
        with pytest.raises(InvalidRequest, match="max_tokens"):  # bad input is told first
            await bench.serve(max_tokens=0)
        gate.set()
        return [text_of(answer) for answer in await asyncio.gather(*admitted)]

    assert asyncio.run(scenario()) == [bench.codec.decode(bench.ids[:40])] * 3


def test_the_time_in_the_queue_is_measured(bench):
    async def scenario():
        gate = asyncio.Event()
        bench.script.pause = gate.wait
        admitted = [asyncio.create_task(bench.serve()) for _ in range(3)]
        await asyncio.sleep(0.3)
        gate.set()
        await asyncio.gather(*admitted)
        gate.clear()
        running = [asyncio.create_task(bench.serve()) for _ in range(2)]
        await asyncio.sleep(0)
        assert await bench.serve(is_cancelled=lambda: True) == []  # leaves while it waits
        gate.set()
        await asyncio.gather(*running)

    asyncio.run(scenario())
    assert bench.metrics["masw_queue_seconds"][""] == 6, "each request once"
    *at_once, left, waited = sorted(bench.metrics.families["masw_queue_seconds"].history)
    assert min(left, waited) > 0.05 and max(at_once) < 0.05


def test_a_place_is_free_again_after_each_end(bench):
    async def scenario():
        for _ in range(10):
            await asyncio.gather(*(bench.serve() for _ in range(3)))
            assert bench.inflight == 0

    asyncio.run(scenario())
    assert max(bench.metrics.families["masw_requests_inflight"].history) == 3


def test_bad_input_costs_no_place_and_no_call(bench):
    for fields in ({"max_tokens": 0}, {"num_draft_tokens": 17}, {"top_p": 2.0}):
        with pytest.raises(InvalidRequest, match=next(iter(fields))):
            asyncio.run(bench.serve(**fields))
    assert not bench.script.target_calls and not bench.script.draft_calls
    assert bench.metrics.families["masw_requests_inflight"].history == [0]


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_a_cancelled_request_gives_nothing_more_and_frees_everything(codec, steps):
    bench = Bench(codec, prompt="the cat sat " * 3)  # several chunks: early steps are prefill
    asked = Counter()

    def is_cancelled():
        asked["times"] += 1
        return asked["times"] >= steps

    replies = asyncio.run(bench.serve(is_cancelled, stream=True))
    assert all(not reply.final for reply in replies) and len(replies) < steps
    assert asked["times"] == steps, "it was not asked again"
    assert bench.metrics["masw_cancelled_total"][""] == 1 and bench.inflight == 0
    sequences = {call.sequence_id for call in bench.script.draft_calls}
    assert set(bench.script.ended) == sequences
    assert bench.run(), "the next request is served"


def test_a_reader_that_leaves_ends_the_generation(bench):
    async def scenario():
        inputs = {"max_tokens": np.array([40], np.int32), "text_input": text(PROMPT)}
        inputs["stream"] = np.array([True])
        replies = bench.service.serve(inputs, lambda: False)
        await anext(replies)
        await replies.aclose()

    asyncio.run(scenario())
    assert bench.inflight == 0 and len(bench.script.ended) == 1


@pytest.mark.parametrize("by_request", [True, False])
def test_a_time_limit_ends_with_what_there_is(codec, by_request):
    bench = Bench(codec, **{} if by_request else {"time_limit": 0.05})
    bench.script.pause = lambda: asyncio.sleep(0.01)
    fields = {"time_limit": 0.05} if by_request else {}
    replies = bench.run(stream=True, return_perf_metrics=True, max_tokens=100, **fields)
    statistics = statistics_of(replies[-1])
    assert statistics.finish_reason == "time_limit" and statistics.new_tokens < 100
    assert text_of(replies) == bench.codec.decode(bench.ids[: statistics.new_tokens])
    assert len(bench.script.ended) == 1 and bench.inflight == 0


def test_a_failed_target_is_an_error_that_leaves_nothing_behind(bench):
    bench.script.error = TargetError("the target failed: gone")
    with pytest.raises(TargetError, match="gone"):
        bench.run()
    assert bench.inflight == 0
    bench.script.error = None
    assert text_of(bench.run()) == bench.codec.decode(bench.ids[:40])


def test_a_draft_that_is_away_costs_no_text(bench):
    bench.script.draft_error = DraftUnavailable("gone")
    replies = bench.run(stream=True, return_perf_metrics=True)
    assert text_of(replies) == bench.codec.decode(bench.ids[:40])
    assert statistics_of(replies[-1]).draft_failures > 0
