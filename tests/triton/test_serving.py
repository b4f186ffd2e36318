"""The endpoint for people on a running server: text, ids, sampling, many at once, cancellation."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from masw.build.repository import DRAFT, TARGET
from masw.clients.messages import GenerationRequest
from tests.triton.pair import PAIR
from tests.triton.serving import flag, int32, stream, text, wait_until

pytestmark = pytest.mark.triton

PROMPTS = (
    "Hello",
    "中文测试 and 🙂🎉 more",
    "مرحبا, wie geht's? ö é ж 本",
    "one two three " * 12,  # over the memory's edges
    "the quick brown 🦊 " * 90,  # many chunks
)
LONG = "once upon a time 🙂 " * 10


def ask(prompt=PROMPTS[1], tokens=40, **options):
    return GenerationRequest(text=prompt, max_tokens=tokens, **options)


def wait_until_idle(server, seconds=2.0):
    wait_until(lambda: server.metric("masw_requests_inflight") == 0, "no request runs", seconds)


def start(client, prompt=LONG, tokens=1500, **options):
    """A long stream that has begun to answer."""
    running = client.stream(ask(prompt, tokens, **options))
    next(running)
    return running


@pytest.mark.parametrize("draft_tokens", [None, 0, 1, 16])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "cjk", "scripts", "edges", "chunks"])
def test_text_is_what_plain_decoding_gives(client, tiny, prompt, draft_tokens):
    wanted = tiny.answer(prompt, 40)
    streamed = client.generate(ask(prompt, num_draft_tokens=draft_tokens))
    whole = client.generate(ask(prompt, num_draft_tokens=draft_tokens, stream=False))
    assert streamed.text == whole.text == wanted
    assert len(streamed.chunks) > 1 and len(whole.chunks) == 1
    assert streamed.statistics.finish_reason == "length"
    assert (streamed.statistics.drafted > 0) == (draft_tokens != 0)
    assert whole.new_tokens == streamed.new_tokens == 40


def test_streamed_pieces_hold_only_whole_characters(client, tiny):
    prompt = next(p for p in PROMPTS if "\ufffd" in tiny.answer(p, 40))
    chunks = client.generate(ask(prompt)).chunks
    assert "".join(chunk.text for chunk in chunks) == tiny.answer(prompt, 40)
    assert all(chunk.text for chunk in chunks)


@pytest.mark.parametrize("streamed", [True, False])
def test_ids_are_those_of_plain_decoding(server, tiny, streamed):
    prompt = tiny.encode(LONG)
    wanted = tiny.answer_ids(prompt, 40)
    inputs = {"input_ids": prompt, "max_tokens": [40]}
    inputs = {name: int32(*value) for name, value in inputs.items()}
    responses = stream(server.url, inputs | {"stream": flag(streamed)})
    assert (len(responses) > 1) == streamed
    lengths = [0]
    for response in responses:
        ids = response["output_ids"]
        lengths.append(int(response["sequence_length"][0, 0]))
        assert ids.shape == (1, 1, lengths[-1]), "ids are cumulative"
        assert ids[0, 0].tolist() == wanted[: lengths[-1]]
        assert response["emitted_length"][0, 0] == lengths[-2]
        assert response["is_final"][0, 0] == (response is responses[-1])
    assert lengths[-1] == 40 and all(a <= b for a, b in pairwise(lengths))


def test_the_prompt_is_echoed_on_demand(client, tiny, server):
    prompt, echo = "中文 and 🙂", {"exclude_input_in_output": False}
    wanted = prompt + tiny.answer(prompt, 20)
    assert client.generate(ask(prompt, 20, **echo)).text == wanted
    assert client.generate(ask(prompt, 20, stream=False, **echo)).text == wanted
    ids = tiny.encode(prompt)
    inputs = {"input_ids": int32(*ids), "max_tokens": int32(20)}
    last = stream(server.url, inputs | {"exclude_input_in_output": flag(False)})[-1]
    assert last["output_ids"][0, 0].tolist() == ids + tiny.answer_ids(ids, 20)


def test_the_chat_template_is_applied_on_demand(client, tiny):
    plain, wrapped = tiny.answer(LONG, 24), tiny.answer(LONG, 24, template=True)
    assert plain != wrapped
    assert client.generate(ask(LONG, 24, apply_chat_template=True)).text == wrapped
    result = client.generate(ask(LONG, 24, apply_chat_template=False))
    assert result.text == plain
    assert result.statistics.prefix_tokens == len(tiny.encode(LONG))


def stop_words(tiny, prompt):
    """Strings of the oracle's own answer: inside a token, over two, over many, and one absent."""
    ids = tiny.answer_ids(tiny.encode(prompt), 40)
    whole = tiny.decode(ids)
    place = len(tiny.decode(ids[:20]))
    over_two = whole[place - 1 : place + 2]
    return [
        (over_two,),
        (whole[place : place + 8],),
        (whole[-1],),
        ("absent", whole[place - 2 : place + 1], whole[place + 4 :]),
        ("absent",),
    ]


def cut(whole, words):
    """The text before the stop word that is complete first."""
    for end in range(len(whole) + 1):
        ended = [word for word in words if whole[:end].endswith(word)]
        if ended:
            return whole[: end - max(map(len, ended))]
    return whole


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_stop_words_cut_the_text(client, tiny, prompt):
    whole = tiny.answer(prompt, 40)
    for words in stop_words(tiny, prompt):
        wanted = cut(whole, words)
        for streamed in (True, False):
            result = client.generate(ask(prompt, stop_words=words, stream=streamed))
            assert result.text == wanted, words
            reason = "length" if wanted == whole else "stop_words"
            assert result.statistics.finish_reason == reason


def test_a_stop_word_ends_the_generation(client, tiny):
    word = tiny.answer(PROMPTS[1], 8)
    result = client.generate(ask(tokens=1500, stop_words=(word,)))
    assert result.text == "" and result.new_tokens < 40


def test_an_end_id_ends_the_generation_with_or_without_it_in_an_accepted_run(client, tiny):
    ids = tiny.encode(PROMPTS[1])
    whole = tiny.answer_ids(ids, 40)
    for end_id in sorted(set(whole)):
        place = whole.index(end_id) + 1
        result = client.generate(ask(end_id=end_id))
        assert result.text == tiny.decode(whole[:place])
        assert result.new_tokens == place
        assert result.statistics.finish_reason == "end_id"


def test_min_tokens_puts_the_end_off(client, tiny):
    ids = tiny.encode(PROMPTS[1])
    end_id = tiny.answer_ids(ids, 40)[2]
    wanted = tiny.answer_ids(ids, 40, end_ids=[end_id], min_tokens=20)
    assert len(wanted) > 3
    for gamma in (0, 5):
        result = client.generate(ask(end_id=end_id, min_tokens=20, num_draft_tokens=gamma))
        assert result.text == tiny.decode(wanted) and result.new_tokens == len(wanted)


def test_a_single_token_is_a_whole_answer(client, tiny):
    for streamed in (True, False):
        result = client.generate(ask(tokens=1, stream=streamed))
        assert result.text == tiny.answer(PROMPTS[1], 1) and result.new_tokens == 1


def test_the_longest_request_that_fits_is_served(client, tiny):
    ids = (tiny.encode(LONG) * 60)[: PAIR.max_length - 8]
    result = client.generate(GenerationRequest(ids=tuple(ids), max_tokens=8))
    assert list(result.ids) == tiny.answer_ids(ids, 8)


def test_the_adaptive_draft_length_changes_nothing_but_drafts(client, tiny):
    result = client.generate(ask(adaptive_draft=True))
    assert result.text == tiny.answer(PROMPTS[1], 40)


SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}


@pytest.mark.parametrize("logits", [True, False])
def test_a_seed_gives_its_text_alone_and_among_others(client, logits):
    def sample(seed):
        options = SAMPLED | {"seed": seed, "use_draft_logits": logits}
        return client.generate(ask(LONG, 16, **options)).text

    alone = [sample(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(sample, range(8))) == alone
    assert len(set(alone)) > 4


def test_sampling_streams_what_it_gives_whole(client):
    options = SAMPLED | {"seed": 7}
    streamed = client.generate(ask(LONG, 40, **options))
    whole = client.generate(ask(LONG, 40, stream=False, **options))
    assert streamed.text == whole.text and len(streamed.chunks) > 1
    assert streamed.statistics.drafted > 0
    assert client.generate(ask(LONG, 40, **SAMPLED)).text != streamed.text, "no seed: a random one"


def test_eight_clients_at_once_get_what_each_gets_alone(client, server, tiny):
    wanted = {prompt: tiny.answer(prompt, 60) for prompt in PROMPTS}
    before = {name: server.metric(f"nv_inference_{name}", model=DRAFT) for name in COUNTS}

    def check(number):
        prompt = PROMPTS[number % len(PROMPTS)]
        gamma = 0 if number % 7 == 6 else None
        tokens = 60 if number % 3 else 10
        result = client.generate(ask(prompt, tokens, stream=number % 4 > 0, num_draft_tokens=gamma))
        return wanted[prompt].startswith(result.text) and result.new_tokens == tokens

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(24)))
    grown = {n: server.metric(f"nv_inference_{n}", model=DRAFT) - before[n] for n in COUNTS}
    assert grown["exec_count"] < 0.8 * grown["count"], "draft calls of several requests join"


COUNTS = ("count", "exec_count")


def test_each_iteration_is_one_call_of_each_model(client, server):
    def calls(model):
        return server.metric("nv_inference_count", model=model)

    before = {model: calls(model) for model in (DRAFT, TARGET)}
    statistics = client.generate(ask(PROMPTS[3] * 4, 60)).statistics
    chunks = -(-(statistics.prefix_tokens - 1) // PAIR.chunk)
    drafts, ends, canaries = statistics.drafted_at[0], 1, 1  # the supervisor's, now and then
    assert calls(DRAFT) - before[DRAFT] - drafts - chunks in range(ends + canaries + 1)
    steps = calls(TARGET) - before[TARGET] - chunks
    assert drafts <= steps <= statistics.iterations + canaries


def test_a_cancelled_stream_is_gone_within_an_iteration(client, server, tiny):
    cancelled = server.metric("masw_cancelled_total")
    running = start(client)
    assert server.metric("masw_requests_inflight") == 1
    running.close()
    wait_until_idle(server)
    assert server.metric("masw_cancelled_total") == cancelled + 1
    assert client.generate(ask()).text == tiny.answer(PROMPTS[1], 40)


def test_a_stream_cancelled_in_its_prefill_is_gone(client, server):
    cancelled = server.metric("masw_cancelled_total")
    running = client.stream(ask("the quick brown fox " * 350, 600))
    wait_until(lambda: server.metric("masw_requests_inflight"), "the request has begun")
    running.close()
    wait_until_idle(server)
    assert server.metric("masw_cancelled_total") == cancelled + 1


def test_thirty_disconnects_leave_nothing_behind(client, server, tiny):
    cancelled, memory = server.metric("masw_cancelled_total"), server.shared_memory()
    for round in range(5):
        running = [start(client, f"{round} {place} {LONG}") for place in range(6)]
        for each in running:
            each.close()
    wait_until_idle(server)
    assert server.metric("masw_cancelled_total") == cancelled + 30
    assert server.shared_memory() - memory <= 16 << 20
    with ThreadPoolExecutor(8) as pool:  # as many at once as the draft has rows
        results = list(pool.map(lambda _: client.generate(ask()), range(8)))
    assert {result.text for result in results} == {tiny.answer(PROMPTS[1], 40)}
    assert all(result.statistics.draft_failures == 0 for result in results)


def test_a_time_limit_ends_the_generation(client, tiny):
    began = time.monotonic()
    result = client.generate(ask(LONG, 1500, time_limit=0.5))
    assert 0.5 <= time.monotonic() - began < 10
    assert result.statistics.finish_reason == "time_limit"
    assert 0 < result.new_tokens < 1500
    assert tiny.answer(LONG, result.new_tokens) == result.text


METRICS = {
    "masw_drafts_total": lambda s: s.drafted_at[0],
    "masw_draft_tokens_total": lambda s: s.drafted,
    "masw_accepted_tokens_total": lambda s: s.accepted,
    "masw_emitted_tokens_total": lambda s: s.new_tokens,
    "masw_accepted_tokens_per_pos_total": lambda s: sum(s.accepted_at),
}


def test_metrics_count_what_the_statistics_say(client, server):
    def read():
        page = {name: server.metric(name) for name in METRICS}
        for phase in ("draft", "verify", "host"):
            page[phase] = server.metric("masw_iteration_seconds_count", phase=phase)
        for place in range(5):
            name = "masw_accepted_tokens_per_pos_total"
            page[place] = server.metric(name, position=str(place))
        return page

    wait_until_idle(server)
    before = read()
    all_statistics = [client.generate(ask(prompt, 40)).statistics for prompt in PROMPTS]
    wait_until_idle(server)
    grown = {name: value - before[name] for name, value in read().items()}
    assert all(s.accepted and s.rollbacks for s in all_statistics)
    for name, of in METRICS.items():
        assert grown[name] == sum(map(of, all_statistics)), name
    for place in range(5):
        assert grown[place] == sum(s.accepted_at[place] for s in all_statistics)
    drafts = sum(s.drafted_at[0] for s in all_statistics)
    for phase in ("draft", "verify", "host"):
        assert drafts <= grown[phase] <= drafts + len(PROMPTS)


def test_the_performance_outputs_agree_with_the_statistics(server, tiny):
    inputs = {"text_input": text(LONG), "max_tokens": int32(40), "stream": flag(True)}
    *partial, last = stream(server.url, inputs | {"return_perf_metrics": flag(True)})
    assert all("statistics" not in response for response in partial)
    drafted, accepted = (last[f"total_{name}draft_tokens"].item() for name in ("", "accepted_"))
    assert last["acceptance_rate"].item() == pytest.approx(accepted / drafted)
    times = [last[f"{name}_time_ns"].item() for name in TIMES]
    assert times == sorted(times) and abs(times[0] / 1e9 - time.time()) < 60
    without = stream(server.url, inputs)[-1]
    assert "statistics" not in without and "acceptance_rate" not in without


TIMES = ("arrival", "first_scheduled", "first_token", "last_token")
