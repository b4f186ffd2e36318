"""The TensorRT-LLM target over a double of its executor: output, odd answers, errors, opening."""

import json
import random
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from masw.engines.acceptance import adjust
from masw.engines.engine_folder import EngineFolderError
from masw.engines.local import generate_all
from masw.engines.messages import InvalidRequest, Proposal, Sampling, TargetCall, TargetError
from masw.engines.pair import Pair, PairError, load_target
from masw.engines.trtllm_folder import TargetEngine
from masw.engines.trtllm_target import ExecutorSettings, TrtllmTarget
from masw.plugins.slot_attention.rule import MemoryRule
from tests.models import VOCAB, random_ids
from tests.pairs import (
    CHUNK,
    MAX_LENGTH,
    RecordingTarget,
    loop_settings,
    new_draft,
    new_target,
    reference,
    requests_of,
)
from tests.trtllm_double import Behaviour, install, write_engine

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 20
DRAFTS = 16
PROMPTS = [tuple(random_ids(n, seed=n)) for n in (1, 3, 17, 48, 130, 240)]


@pytest.fixture(scope="module")
def expected(pair):
    """What Hugging Face generates for each prompt, without an end id."""
    return [reference(pair.hf, ids, NEW) for ids in PROMPTS]


@pytest.fixture
def engine(pair, tmp_path, monkeypatch):
    """engine(behaviour) -> (target, the double's executor), of an engine for MAX_LENGTH tokens."""

    def make(behaviour=None, ranks=1, **settings):
        inner = new_target(pair.target, max_length=MAX_LENGTH + DRAFTS, max_draft_tokens=DRAFTS)
        made = install(monkeypatch, inner, behaviour)
        folder = write_engine(tmp_path / "engine", inner, ranks)
        target = TrtllmTarget(folder, settings=ExecutorSettings(**settings))
        return target, made[0]

    return make


def call(ids, output_tokens=1, drafts=(), logits=None, **fields):
    proposal = Proposal(tuple(drafts), logits)
    return TargetCall(np.array(ids, np.int32), output_tokens, proposal, **{"end_ids": ()} | fields)


def answer(target, *args, **fields):
    (verdict,) = target.verify([call(*args, **fields)])
    if isinstance(verdict, Exception):
        raise verdict
    return list(verdict.ids)


def generations(pair, target, requests, draft="near", **settings):
    """([new ids], statistics) of whole generations with a draft, or without (None)."""
    size = {"max_sequences": len(requests)}
    engine = new_draft(pair.drafts[draft], **size) if draft else None
    answers = generate_all(target, engine, loop_settings(**settings), requests)
    return [ids for ids, _ in answers], [stats for _, stats in answers]


def hostile(seed):
    """An executor that uses fewer drafts, or none, as it likes."""
    chance = random.Random(seed)
    return Behaviour(
        kept_drafts=lambda number, request: chance.randint(0, len(request.drafts)),
        whole_steps=bool(seed % 2),
        echo=bool(seed % 2),
        end_in_output=bool(seed // 2 % 2),
    )


# --- whole generations --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "gamma"), [("near", 1), ("near", 5), ("same", DRAFTS), ("other", 5), (None, 5)]
)
def test_generations_equal_hugging_face(pair, expected, engine, draft, gamma):
    target, executor = engine()
    outputs, stats = generations(
        pair, target, requests_of(PROMPTS, NEW, draft_tokens=gamma), draft, target_chunk=CHUNK
    )
    assert outputs == expected
    assert all(s.new_tokens == NEW and s.draft_failures == 0 for s in stats)
    assert any(request.drafts for request in executor.requests) == (draft is not None)
    assert max(len(request.drafts) for request in executor.requests) <= gamma
    assert not executor.open and not executor.ready


@pytest.mark.parametrize("seed", range(4))
def test_fewer_drafts_and_echoed_prompts_do_not_change_the_output(pair, expected, engine, seed):
    target, _ = engine(hostile(seed))
    outputs, stats = generations(pair, target, requests_of(PROMPTS, NEW), "same")
    assert outputs == expected
    assert any(0 < s.accepted < s.drafted for s in stats)


def ends_of(expected, places=(0, 7, 12, 3)):
    """Of each expected output one token as end id, beside one that seldom comes."""
    chosen = [places[i % len(places)] for i in range(len(expected))]
    return [(ids[place], VOCAB - 1) for ids, place in zip(expected, chosen, strict=True)]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("draft", "seed"), [("same", 0), ("near", 1), ("same", 2), (None, 3)])
def test_end_ids_end_the_output(pair, expected, engine, draft, seed, known):
    """The engine knows one end id and leaves it out of its output; others are cut after it."""
    ends = [end if known else end[::-1] for end in ends_of(expected)]
    wanted = [reference(pair.hf, ids, NEW, end) for ids, end in zip(PROMPTS, ends, strict=True)]
    target, _ = engine(hostile(seed))
    requests = [
        replace(request, end_ids=end)
        for request, end in zip(requests_of(PROMPTS, NEW), ends, strict=True)
    ]
    outputs, stats = generations(pair, target, requests, draft)
    assert outputs == wanted
    assert {s.finish_reason for s in stats} == {"end_id"}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("draft", "seed"), [("same", 0), ("same", 1), (None, 0)])
def test_min_tokens_forbids_all_end_ids(pair, expected, engine, draft, seed, several):
    shortest = 9
    ends = [end if several else end[:1] for end in ends_of(expected)]
    ends = [end[::-1] for end in ends]  # the one that matters is not the engine's own
    wanted = [
        reference(pair.hf, ids, NEW, end, shortest) for ids, end in zip(PROMPTS, ends, strict=True)
    ]
    target, executor = engine(replace(hostile(seed), kept_drafts=lambda n, r: len(r.drafts)))
    requests = [
        replace(request, end_ids=end, min_tokens=shortest)
        for request, end in zip(requests_of(PROMPTS, NEW), ends, strict=True)
    ]
    outputs, _ = generations(pair, target, requests, draft)
    assert outputs == wanted
    assert any(ids != free[: len(ids)] for ids, free in zip(outputs, expected, strict=True))
    assert any(request.bad_words for request in executor.requests) == several


def test_min_tokens_without_an_end_id_is_not_sent(pair, engine):
    """TensorRT-LLM would write outside the logits, and there is nothing to forbid."""
    target, executor = engine()
    ids = random_ids(40)
    own = reference(pair.hf, ids, 6)
    assert answer(target, ids, 1, own[:5], min_tokens=2) == own
    assert executor.requests[-1].sampling_config.min_tokens is None


def test_a_generation_fills_the_engine_to_its_last_token(pair, engine):
    """Prompt + output = max_seq_len - max_draft_len: TensorRT-LLM shortens requests beyond."""
    target, _ = engine()
    ids = tuple(random_ids(MAX_LENGTH - NEW, seed=1))
    requests = requests_of([ids], NEW, draft_tokens=DRAFTS)
    outputs, _ = generations(pair, target, requests, "same")
    assert outputs == [reference(pair.hf, ids, NEW)]
    with pytest.raises(InvalidRequest, match=f"are {MAX_LENGTH + 1}; the engine's limit is 288"):
        answer(target, random_ids(MAX_LENGTH), 1)


# --- single calls -------------------------------------------------------------------------------


def test_a_step_gives_the_accepted_drafts_and_one_token(pair, engine):
    target, executor = engine()
    ids = random_ids(40)
    own = reference(pair.hf, ids, 6)
    wrong = (own[3] + 1) % VOCAB
    assert answer(target, ids, 1, own[:5]) == own
    assert answer(target, ids, 1, [*own[:3], wrong, own[4]]) == own[:4]
    assert answer(target, ids, 1, [(own[0] + 1) % VOCAB]) == own[:1]
    assert answer(target, ids, 4) == own[:4]
    assert [r.max_tokens for r in executor.requests[1:]] == [6, 6, 2, 4]
    for ends in ((own[2], VOCAB - 1), (VOCAB - 1, own[2])):  # known to the engine, or not
        assert answer(target, ids, 6, end_ids=ends) == own[:3]
        assert answer(target, ids, 1, own[:5], end_ids=ends) == own[:3]
    config = executor.config
    assert config.kv_cache_config.enable_block_reuse and config.enable_chunked_context


@pytest.mark.parametrize("ranks", [1, 2])  # two pad 307 columns to 308
def test_sampling_draws_what_the_torch_target_draws_from_the_same_seed(pair, engine, ranks):
    target, executor = engine(ranks=ranks)
    torch_target = new_target(pair.target)
    ids, sampling = random_ids(30), Sampling(0.8, 40, 0.9)
    for seed in range(20):
        drafts = random_ids(4, seed=seed)
        logits = adjust(torch.randn(4, VOCAB, generator=torch.manual_seed(seed)) * 3, sampling)
        drafts = [int(row.argmax()) for row in logits]
        for given in (logits, None):
            fields = {"sampling": sampling, "seed": seed}
            used = drafts if given is not None else []  # the runtime would favour the draft
            (wanted,) = torch_target.verify([call(ids, 1, used, given, **fields)])
            assert answer(target, ids, 1, drafts, given, **fields) == list(wanted.ids)
    sent = executor.requests[-1].sampling_config
    assert (sent.temperature, sent.top_k, sent.top_p, sent.seed) == (0.8, 40, 0.9, 19)


@pytest.mark.parametrize("unknown", [VOCAB, VOCAB + 1, VOCAB + 5])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)])
def test_a_draft_of_a_larger_vocabulary_is_cut_not_refused(pair, engine, sampling, unknown):
    """Two ranks pad 307 ids to 308 columns; the padding is no id either."""
    target, executor = engine(ranks=2)
    ids = random_ids(30)
    own = reference(pair.hf, ids, 3)
    logits = torch.full((3, VOCAB + 6), -torch.inf)
    logits[range(3), [*own[:2], unknown]] = 0.0
    given = None if sampling.greedy else logits
    found = answer(target, ids, 1, [*own[:2], unknown], given, sampling=sampling)
    sent = executor.requests[-1].external_draft_tokens_config
    assert sent.tokens == own[:2] and 1 <= len(found) <= 3 and max(found) < VOCAB
    assert sampling.greedy == (sent.logits is None)
    assert not sampling.greedy or found == own


@pytest.mark.parametrize(
    ("args", "fields", "message"),
    [
        (([], 1), {}, "input_ids is empty"),
        (([5], 0), {}, "request_output_len is 0; it must be 1 or more"),
        (([5], 1, [4] * 17), {}, r"has 17 ids; the engine's limit is 16 .*--max_draft_len"),
        (([5, VOCAB], 1), {}, f"input_ids has an id outside 0 to {VOCAB - 1}"),
        (([5], 1, [-1]), {}, "draft_input_ids has an id outside"),
        (([5], 1), {"end_ids": (VOCAB,)}, "end_id has an id outside"),
        (([5], 1, [4, 4]), {"logits": torch.zeros(1, VOCAB)}, r"draft_logits is \(1, 307\)"),
    ],
)
def test_a_bad_call_is_refused_and_leaves_the_others_alone(pair, engine, args, fields, message):
    target, executor = engine()
    ids = random_ids(20)
    good = call(ids, 3)
    first, bad, last = target.verify([good, call(*args, **fields), good])
    assert isinstance(bad, InvalidRequest)
    with pytest.raises(InvalidRequest, match=message):
        raise bad
    assert list(first.ids) == list(last.ids) == reference(pair.hf, ids, 3)
    assert len(executor.requests) == 3  # the first request on opening, and the good ones


def test_the_engines_own_errors_stay_with_their_call(pair, engine):
    def error(number, request):
        return "out of blocks" if len(request.input_token_ids) == 7 else ""

    target, executor = engine(Behaviour(error=error))
    ids = random_ids(20)
    first, bad, last = target.verify([call(ids, 3), call(random_ids(7), 3), call(ids, 3)])
    assert isinstance(bad, TargetError) and "out of blocks" in str(bad)
    assert list(first.ids) == list(last.ids) == reference(pair.hf, ids, 3)
    executor.shutdown()
    (refused,) = target.verify([call(ids, 3)])
    assert isinstance(refused, TargetError) and "executor was shut down" in str(refused)


def test_a_request_without_answer_is_cancelled_at_the_time_limit(pair, engine):
    silent = Behaviour(silent=lambda number, request: len(request.input_token_ids) == 7)
    target, executor = engine(silent, time_limit=0.2)
    ids = random_ids(20)
    started = time.monotonic()
    late, good = target.verify([call(random_ids(7), 3), call(ids, 3)])
    assert 0.2 <= time.monotonic() - started < 2
    assert isinstance(late, TargetError) and "time_limit 0.2 s" in str(late)
    assert executor.cancelled == [1]
    assert list(good.ids) == reference(pair.hf, ids, 3)  # finished, though nobody waited for it
    assert list(executor.ready) == [1]
    answer(target, ids, 1)
    assert not executor.ready and not target._cancelled  # its late answer was taken


def test_a_result_without_token_is_an_error_and_too_many_are_too(pair, engine):
    target, executor = engine()
    executor.behaviour.kept_drafts = lambda number, request: 0
    executor._decode = lambda request: [5] * (request.max_tokens + 1)
    with pytest.raises(TargetError, match="gave 4 tokens; 3 were asked"):
        answer(target, [3], 3)
    del executor._decode
    executor.cancel_request(executor.enqueue_request(executor.requests[0]))
    executor._answer = lambda number, request: executor.ready.pop(2)
    with pytest.raises(TargetError, match=r"no token; it finished with FinishReason\.CANCELLED"):
        answer(target, [3], 3)


def test_many_requests_leave_nothing_behind(pair, engine):
    target, executor = engine()
    ids = random_ids(9)
    for turn in range(200):
        answer(target, ids, 2, [turn % VOCAB])
    assert not executor.open and not executor.ready and not target._cancelled


# --- opening ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ({"speculative_decoding_mode": 1}, "mode 1; .*--speculative_decoding_mode draft_tokens_"),
        ({"kv_cache_type": "KVCacheType.DISABLED"}, "'DISABLED'; .*--kv_cache_type paged"),
        ({"max_draft_len": 0}, "max_draft_len 0; .*trtllm-build --max_draft_len"),
        ({"kv_cache_type": "CONTINUOUS"}, "'CONTINUOUS'; .*--kv_cache_type paged"),
        ({"plugin_config": {}}, "None; .*--use_paged_context_fmha enable"),
    ],
)
def test_an_unfit_engine_is_refused_with_the_flag_to_change(pair, tmp_path, build, message):
    folder = write_engine(tmp_path / "engine", new_target(pair.target), **build)
    with pytest.raises(EngineFolderError, match=message):
        TrtllmTarget(folder)


def test_an_engine_with_logits_in_half_precision_is_refused(pair, tmp_path):
    folder = write_engine(tmp_path / "engine", new_target(pair.target))
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"float32"', '"float16"'))
    with pytest.raises(EngineFolderError, match=r"'float16'; .*--logits_dtype float32"):
        TrtllmTarget(folder)


def test_a_folder_without_its_ranks_or_of_another_kind_is_refused(pair, tmp_path, model_dir):
    folder = write_engine(tmp_path / "engine", new_target(pair.target), ranks=4)
    assert TargetEngine.load(folder).ranks == 4
    (folder / "rank2.engine").unlink()
    with pytest.raises(EngineFolderError, match=r"lacks rank2\.engine of 4 ranks"):
        TrtllmTarget(folder)
    with pytest.raises(EngineFolderError, match="no TensorRT-LLM engine"):
        TrtllmTarget(model_dir("llama"))


def test_without_tensorrt_llm_the_container_is_named(pair, tmp_path, monkeypatch):
    folder = write_engine(tmp_path / "engine", new_target(pair.target))
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ImportError, match=r"run in the container tritonserver:26"):
        TrtllmTarget(folder)


def test_a_version_without_tensorrt_engines_is_named(pair, tmp_path, monkeypatch):
    install(monkeypatch, new_target(pair.target))
    del sys.modules["tensorrt_llm.bindings.executor"].Executor
    folder = write_engine(tmp_path / "engine", new_target(pair.target))
    with pytest.raises(ImportError, match="has no Executor: it no longer runs TensorRT engines"):
        TrtllmTarget(folder)


def test_several_ranks_are_spawned_by_an_orchestrator(pair, tmp_path, monkeypatch):
    made = install(monkeypatch, new_target(pair.target))
    folder = write_engine(tmp_path / "engine", new_target(pair.target), ranks=2)
    with pytest.raises(ValueError, match=r"gpus is \[0\]; the engine has 2 ranks"):
        TrtllmTarget(folder, settings=ExecutorSettings(gpus=(0,)))
    TrtllmTarget(folder, settings=ExecutorSettings(gpus=(4, 5)))
    parallel = made[0].config.parallel_config
    assert parallel.communication_mode.name == "ORCHESTRATOR" and parallel.device_ids == [4, 5]
    worker = parallel.orchestrator_config.worker_executable_path
    assert worker == "/opt/tensorrt_llm/bin/executorWorker"


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (Behaviour(silent=lambda number, request: True), r"within time_limit 0\.1 s"),
        (Behaviour(leader=False), "no leader"),
    ],
)
def test_an_engine_that_does_not_answer_is_ended_on_opening(
    pair, tmp_path, monkeypatch, behaviour, message
):
    made = install(monkeypatch, new_target(pair.target), behaviour)
    folder = write_engine(tmp_path / "engine", new_target(pair.target))
    with pytest.raises(TargetError, match=message):
        TrtllmTarget(folder, settings=ExecutorSettings(time_limit=0.1))
    assert made[0].is_shut_down


@pytest.mark.parametrize("change", [{"time_limit": 0}, {"kv_fraction": 1.0}])
def test_bad_settings_are_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        ExecutorSettings(**change)


# --- in a pair ----------------------------------------------------------------------------------


@pytest.fixture
def folder(pair, tmp_path, monkeypatch, model_dir):
    """A pair folder whose target is an engine, and the double behind it."""
    inner = new_target(pair.target, max_length=200, max_draft_tokens=8)
    install(monkeypatch, inner)
    Pair(memory=MemoryRule(16, 16, 16, 4), max_length=192, max_draft_tokens=8).save(tmp_path)
    write_engine(tmp_path / "target", inner)
    (tmp_path / "target" / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    return tmp_path


def test_the_kind_of_target_follows_from_its_folder(pair, folder, tmp_path, model_dir):
    ids = random_ids(20)
    target = load_target(folder)
    assert isinstance(target, TrtllmTarget) and target.end_ids == (2, 7)
    assert answer(target, ids, 5, end_ids=None) == reference(pair.hf, ids, 5, (2, 7))
    engine = (folder / "target").rename(folder / "engine")
    (folder / "target").symlink_to(model_dir("llama"))
    assert not isinstance(load_target(folder), TrtllmTarget)
    beside = load_target(folder, engine=engine, settings=ExecutorSettings(time_limit=7))
    assert isinstance(beside, TrtllmTarget) and beside.end_ids == (2,)
    assert beside.settings.time_limit == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seq_len": 199}, "max_length is 192; .*up to 191: .*larger --max_seq_len"),
        ({"max_draft_len": 9}, "max_length is 192; .*up to 191: .*larger --max_seq_len"),
        ({"max_draft_len": 7}, "max_draft_tokens is 8; .*up to 7: .*larger --max_draft_len"),
    ],
)
def test_an_engine_too_small_for_its_pair_is_refused(folder, change, message):
    path = folder / "target" / "config.json"
    data = json.loads(path.read_text())
    data["build_config"] |= change
    path.write_text(json.dumps(data))
    with pytest.raises(EngineFolderError, match=message):
        load_target(folder)
    (folder / "target" / "generation_config.json").unlink()
    with pytest.raises(PairError, match=r"no generation_config\.json; copy the model's into it"):
        load_target(folder)


def test_recording_shows_that_every_step_was_asked_with_all_ids(pair, engine):
    target, executor = engine()
    recorder = RecordingTarget(target)
    (ids,) = [PROMPTS[3]]
    generate_all(recorder, new_draft(pair.drafts["near"]), loop_settings(), requests_of([ids], NEW))
    sent = [request.input_token_ids for request in executor.requests[1:]]
    assert sent == [step.call.ids.tolist() for step in recorder.steps]
    assert all(tuple(each[: len(ids)]) == ids for each in sent)
