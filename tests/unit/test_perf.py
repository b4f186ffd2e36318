"""`masw-perf` on a tiny random pair: what is counted and compared is counted and compared truly."""

import json
import pydoc_data.topics
import time
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from masw.build import perf
from masw.build.bench import (
    draft_step,
    generation,
    record,
    serving,
    shapes,
    speedup,
    step_report,
    texts,
)
from masw.clients.perf import ServingLoad
from masw.clients.perf_analyzer import PerfAnalyzerError
from masw.engines.adaptor import AdaptorConfig
from masw.engines.architectures import architecture
from masw.engines.decoder import Decoder
from masw.engines.int8 import Int8Linear
from masw.engines.linear import Linear
from masw.engines.messages import TargetCall
from masw.engines.pair import Pair, PairError
from masw.engines.sequence import GenerationRequest
from masw.engines.target import TorchTarget
from masw.engines.text import TextCodec
from masw.plugins.slot_attention.rule import MemoryRule
from tests.models import random_ids, save_model

MEMORY = MemoryRule(sink=8, window=16, rollback=16, interval=4)
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}\n"
STEPS = draft_step.StepSettings(
    prefixes=(20, 64), intervals=(4, 8), rounds=2, steps=16, chunk=24, memory=MEMORY
)
SPEED = speedup.SpeedSettings(prefixes=(48,), new_tokens=20, prompts=2, draft_tokens=3, pairs=1)


def save_tokenizer(folder):
    """One token per byte, three special ones, and a chat template."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab |= {letter: 3 + place for place, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A prepared pair that drafts for itself."""
    folder = tmp_path_factory.mktemp("pair")
    for role in ("target", "draft"):
        save_model(folder / role, "llama", num_hidden_layers=2)
        save_tokenizer(folder / role)
    decoder = Decoder.load(folder / "draft")
    shape = MEMORY.sink, MEMORY.window, MEMORY.interval, MEMORY.visibility
    decoder.copy_adaptor(AdaptorConfig(decoder.fingerprint(), *shape)).save(
        folder / "adaptor.safetensors"
    )
    Pair(memory=MEMORY, max_length=512, draft_tokens=3, chunk=24).save(folder)
    return folder


@pytest.fixture(scope="module")
def bench(folder):
    return speedup.Bench.load(folder)


@pytest.fixture(scope="module")
def prompts(folder):
    codec = TextCodec(folder / "target")
    return {length: texts.build_prompts(codec, None, length, 2) for length in SPEED.prefixes}


@pytest.fixture
def masw_perf():
    """masw_perf(*words) -> the finished command."""
    return lambda *words: CliRunner().invoke(perf.app, [str(word) for word in words])


def last_json(result):
    """The JSON object of a command's last line of standard output."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.rstrip("\n").splitlines()[-1])


# draft-step


@pytest.fixture(scope="module")
def step_rows(bench):
    ticks = []
    ids = list(range(3, 3 + max(STEPS.prefixes)))
    rows = draft_step.measure_steps(
        draft_step.Decoders(bench.draft, bench.draft), ids, STEPS, ticks.append
    )
    assert len(ticks) == draft_step.ticks(STEPS)
    return {(row.mode, row.prefix): row for row in rows}


def test_every_mode_has_a_row_at_every_prefix(step_rows):
    modes = ("slots r=4", "slots r=8", "window", "full")
    assert set(step_rows) == {(mode, prefix) for mode in modes for prefix in STEPS.prefixes}
    assert all(row.step_ms > 0 and row.prefill_ms > 0 for row in step_rows.values())


@pytest.mark.parametrize(
    "mode, prefix, entries",
    [
        ("full", 64, 64),
        ("window", 64, 8 + 16 + 16),
        ("slots r=4", 64, 8 + 16 + 16 + 14),
        ("slots r=8", 64, 8 + 16 + 16 + 7),
        ("full", 20, 20),
        ("window", 20, 20),
    ],
)
def test_entries_follow_the_formula(step_rows, mode, prefix, entries):
    assert step_rows[mode, prefix].entries == entries


def test_measured_bytes_are_those_of_the_formula(step_rows):
    per_entry = 2 * 2 * 2 * 8 * 4  # K and V, layers, key heads, head size, float32
    for row in step_rows.values():
        assert row.bytes == row.formula_bytes == row.capacity * per_entry
    row = step_rows["slots r=4", 64]
    assert row.capacity == 8 + 16 + 16 + (row.max_length - 8) // 4


def test_a_memory_of_32_768_tokens_is_measured_by_allocation(bench):
    found = step_report.long_memory(bench.draft, replace(STEPS, memory=MemoryRule()))
    assert found["slots r=8"]["entries"] == 128 + 128 + 16 + (32_768 - 128) // 8
    assert found["slots r=8"]["saved"] == pytest.approx(0.87, abs=0.005)
    assert found["slots r=8"]["bytes"] * 7 < found["full"]["bytes"]


def test_steps_stay_near_the_prefix_and_hold_their_memory(bench):
    decoders = draft_step.Decoders(bench.draft, bench.draft)
    cells = draft_step._cells(decoders, STEPS, 64)
    for cell in cells:
        cell.feed(list(range(3, 67)))
        for count in (1, 2, 3):
            before = cell.draft.fed_tokens
            cell.step()
            assert cell.draft.fed_tokens - before == STEPS.steps
            assert cell.draft.memory.fed == [64 + count + STEPS.steps - 1]
        cell.draft.memory.check_integrity()


def test_growth_compares_the_longest_prefix_with_the_one_nearest_to_1024(step_rows):
    template = step_rows["full", 64]
    rows = [
        replace(template, prefix=prefix, step_ms=ms)
        for prefix, ms in ((512, 1.0), (1024, 2.0), (8000, 3.0))
    ]
    assert step_report.growth(rows, "full") == (8000, 1024, 1.5)
    assert step_report.growth(rows[:1], "full") == (512, 512, None)


def test_a_limit_that_is_passed_is_said():
    assert record.Check("step", 1.2, 1.15).within is False
    assert "ABOVE 1.15" in str(record.Check("step", 1.2, 1.15))
    assert record.Check("step", None, 1.15).within is None


# speedup


@pytest.fixture(scope="module")
def speed_rows(bench, prompts):
    ticks = []
    rows = speedup.measure_speed(bench, prompts, SPEED, ticks.append)
    assert len(ticks) == speedup.ticks(SPEED)
    return {row.system: row for row in rows}


def test_all_systems_run_and_equal_hugging_face(speed_rows):
    assert set(speed_rows) == {"hf-generate", "hf-assisted", *speedup.MODES}
    assert all(row.equal for row in speed_rows.values())
    assert {row.new_tokens for row in speed_rows.values()} == {speed_rows["none"].new_tokens}


def test_the_rates_of_full_and_plain_drafting_are_as_they_must_be(speed_rows):
    plain, full = speed_rows["none"], speed_rows["full"]
    assert (plain.tok_per_iter, plain.acceptance) == (1.0, None)
    assert speed_rows["hf-generate"].tok_per_iter == 1.0
    assert full.acceptance == 1.0  # the model drafts for itself
    assert full.tok_per_iter > 3
    assert full.tok_per_iter == speed_rows["hf-assisted"].tok_per_iter
    assert 0 < full.host_ms < 1000 and speed_rows["hf-generate"].host_ms is None
    assert speed_rows["hf-generate"].vs_hf == plain.vs_none == 1.0


def test_the_equal_window_has_the_entries_of_slots(bench, speed_rows):
    length = SPEED.prefixes[0] + SPEED.new_tokens
    slots = bench.rule("slots", length).extent(length)
    assert bench.rule("window-equal", length).extent(length) == slots
    assert speed_rows["window"].entries < speed_rows["slots"].entries


def test_an_int8_draft_takes_the_place_of_the_pairs_own(folder, bench):
    assert type(bench.draft.lm_head) is Linear
    models = speedup.Bench.load(folder, "int8")
    assert type(models.draft.lm_head) is Int8Linear and type(models.target.lm_head) is Linear
    with pytest.raises(PairError, match="draft_quantization is 'int3'; use one of none, int8"):
        speedup.Bench.load(folder, "int3")


def test_a_mode_whose_output_differs_is_told(bench, prompts, tmp_path):
    other = Decoder.load(save_model(tmp_path, "llama", seed=5, num_hidden_layers=2))
    broken = replace(bench, target=other)
    settings = replace(SPEED, modes=("full",))
    rows = speedup.measure_speed(broken, prompts, settings, lambda text: None)
    equal = {row.system: row.equal for row in rows}
    assert equal == {"hf-generate": True, "hf-assisted": True, "full": False}
    overhead = generation.Overhead(1.0, 1, 1.0, 1.0)
    assert speedup.speed_record(rows, overhead, settings, {}).ratios["equal"] is False


def test_the_bare_loop_makes_the_calls_of_the_loop_without_a_draft(bench, prompts):
    seen = []

    class Counting(TorchTarget):
        def verify(self, calls):
            seen.append([(len(call.ids), call.output_tokens) for call in calls])
            return super().verify(calls)

    target = Counting(bench.target, max_sequences=1, max_length=512)
    settings = replace(bench.settings(None), target_chunk=0)
    request = GenerationRequest(prompts[48][0].ids, 40, draft_tokens=0)
    bare = generation.run_bare(target, settings, request)
    calls, seen[:] = list(seen), []
    loop = generation.run_loop(target, None, settings, request)
    assert (calls, bare.ids) == (seen, loop.ids)
    overhead = generation.measure_overhead(target, settings, request, 2)
    assert overhead.pairs == 2 and overhead.ratio > 0


def test_host_time_is_what_engines_do_not_take(bench, prompts):
    class Slow(TorchTarget):
        def verify(self, calls: list[TargetCall]):
            time.sleep(0.05)
            return super().verify(calls)

    target = Slow(bench.target, max_sequences=1, max_length=512)
    request = GenerationRequest(prompts[48][0].ids, 32, draft_tokens=0)
    run = generation.run_loop(target, None, bench.settings(None), request)
    assert len(run.host_ms) == len(run.arrivals) == 2
    assert max(run.host_ms) < 40


def test_the_decode_rate_leaves_out_the_prompt():
    run = generation.Run((1, 2, 3, 4, 5), ((10.0, 2), (11.0, 1), (12.0, 2)), 3)
    assert (run.first_s, run.total_s, run.tok_s) == (10.0, 12.0, 1.5)
    assert generation.Run((1,), ((1.0, 1),), 1).tok_s is None


# documents


def write_documents(path, *items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def meeting(text, query="What was said?"):
    return {"meeting_id": "m", "transcript": text, "queries": [{"query": query, "answer": "a"}]}


@pytest.mark.parametrize("length", [60, 200, 333])
def test_prompts_have_the_length_that_was_asked_for(folder, length):
    codec = TextCodec(folder / "target")
    for prompt in texts.build_prompts(codec, None, length, 3):
        assert length - 8 <= len(prompt.ids) <= length
        assert prompt.text.endswith(texts.QUERY)
    assert len({p.name for p in texts.build_prompts(codec, None, length, 3)}) == 3


def test_short_meetings_are_passed_over(folder, tmp_path):
    path = write_documents(tmp_path / "m.jsonl", meeting("too short"), meeting("word " * 99))
    codec = TextCodec(folder / "target")
    [prompt] = texts.build_prompts(codec, path, 100, 1)
    assert prompt.text.startswith("word word") and prompt.text.endswith("What was said?")
    with pytest.raises(record.BenchError, match="1 documents of 100 tokens or more, 2 are wanted"):
        texts.build_prompts(codec, path, 100, 2)


@pytest.mark.parametrize("line", ["no json", "[]", '{"meeting_id": 1, "queries": []}'])
def test_a_line_that_is_no_meeting_is_refused_with_its_place(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(meeting("x")) + "\n" + line + "\n")
    with pytest.raises(record.BenchError, match=r"m\.jsonl:2: no meeting"):
        list(texts.read_documents(path))


# the commands


def test_draft_step_ends_with_one_json_object(folder, masw_perf, tmp_path):
    file = tmp_path / "out.json"
    options = ("--prefixes", "24,48", "--interval", "4", "--rounds", "1", "--json", file)
    options += ("--draft-quantization", "int8")
    result = masw_perf("draft-step", "--recipe", folder, *options)
    found = last_json(result)
    assert json.loads(file.read_text()) == found
    assert found["command"] == "draft-step" and len(found["rows"]) == 2 * 3
    assert {"cpu", "cores", "threads"} <= set(found["machine"])
    assert {"python", "torch", "transformers", "masw", "commit"} <= set(found["versions"])
    assert found["settings"]["dtype"] == "float32" and found["date"]
    assert found["settings"]["draft_quantization"] == "int8"
    assert {check["name"].split(":")[0] for check in found["checks"]} >= {"slots r=4"}
    assert "prefill of" in result.stderr and "prefill of" not in result.stdout


def test_speedup_ends_with_one_json_object(folder, masw_perf, tmp_path):
    path = write_documents(tmp_path / "m.jsonl", meeting("All agreed. " * 20))
    options = ("--prefixes", "100", "--new-tokens", "20", "--prompts", "1", "--pairs", "1")
    options += ("--modes", "slots,none", "--documents", path, "--draft-quantization", "int8")
    found = last_json(masw_perf("speedup", "--recipe", folder, *options))
    assert [row["system"] for row in found["rows"]] == [
        "hf-generate",
        "hf-assisted",
        "slots",
        "none",
    ]
    assert found["ratios"]["equal"] is True
    assert found["settings"]["draft_quantization"] == "int8"
    assert found["settings"]["text"].startswith("m.jsonl sha256:")
    assert found["ratios"]["plain_overhead"]["pairs"] == 1


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["draft-step", "--prefixes", "1,x"], 2, "whole numbers"),
        (["draft-step", "--steps", "17"], 2, "rollback window allows 1 to 16"),
        (["draft-step", "--rounds", "0"], 2, "must be 1 or more"),
        (["draft-step", "--draft-quantization", "fp8"], 1, "a torch draft has one of none, int8"),
        (["draft-step", "--prefixes", "5000"], 1, "the model has 1024 positions"),
        (["speedup", "--modes", "slots,fast"], 2, "choose from slots, full, window"),
        (["speedup", "--new-tokens", "1"], 2, "new_tokens is 1"),
        (["speedup", "--prompts", "0"], 2, "prompts is 0"),
        (["speedup", "--documents", "/no/such/file"], 2, "does not exist"),
        (
            ["speedup", "--prefixes", "500"],
            2,
            "500 with 64 new tokens; the pair's max_length is 512",
        ),
        (["speedup", "--prefixes", "48", "--draft-tokens", "17"], 2, "max_draft_tokens is 16"),
        (["speedup", "--prefixes", "5"], 1, "the manual has 0 documents of 5 tokens or more"),
        (["speedup", "--threads", "-1"], 2, "greater than or equal to 0"),
        (["draft-step", "--threads", "-1"], 2, "greater than or equal to 0"),
        (["draft-step", "--prefixes", "99999999"], 1, "the model has 1024 positions"),
        (["serve", "--prompts", "0"], 2, "greater than or equal to 1"),
        (["serve", "--draft-tokens", "-1"], 2, "draft_lengths holds -1"),
    ],
)
def test_bad_options_give_a_clear_error(folder, masw_perf, words, code, message):
    result = masw_perf(*words, "--recipe", folder)
    assert result.exit_code == code
    assert message in " ".join(result.output.replace("│", " ").split())


def test_no_two_rows_of_a_load_send_the_same_text():
    load = ServingLoad(("a", "b"), concurrencies=(1, 2), requests_per_client=2)
    parts = serving.separate_loads(load)
    cells = [(part.draft_lengths, part.concurrencies) for part in parts]
    assert cells == [((None,), (1,)), ((None,), (2,)), ((0,), (1,)), ((0,), (2,))]
    texts = [text for part in parts for text in part.texts]
    assert len(set(texts)) == len(texts) == 2 * (2 + 4)
    assert {text[-1] for text in texts} == {"a", "b"}


def test_serve_says_why_perf_analyzer_cannot_run(folder, masw_perf, monkeypatch):
    def refuse(say):
        raise PerfAnalyzerError("cannot get the wheel")

    monkeypatch.setattr("masw.clients.perf_analyzer.prepare_perf_analyzer", refuse)
    result = masw_perf("serve", "--recipe", folder)
    assert result.exit_code == 1
    assert "masw-perf: cannot get the wheel" in result.output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--prefix", "0"], 2, "prefix is 0; it must be 1 or more"),
        (["--prefix", "449"], 2, "449 with 64 new tokens; the pair's max_length is 512"),
        (["--prefix", "8"], 1, "the manual has 0 documents of 8 tokens or more, 4 are wanted"),
    ],
)
def test_serve_refuses_a_prefix_before_it_starts(
    folder, masw_perf, monkeypatch, words, code, message
):
    monkeypatch.setattr("masw.clients.perf_analyzer.prepare_perf_analyzer", lambda say: [])
    result = masw_perf("serve", "--recipe", folder, *words)
    assert result.exit_code == code
    assert message in " ".join(result.output.replace("│", " ").split())


def test_the_manual_begins_once_at_every_topic():
    found = [document.name for document in texts.read_documents(None)]
    assert sorted(found) == sorted(pydoc_data.topics.topics)


def test_the_plain_baseline_computes_what_the_decoder_does(folder):
    """Chunks, catch-up and single tokens through torch's own attention, weights shared."""
    decoder, rule = Decoder.load(folder / "draft"), MemoryRule.full(80)
    plain, ids = shapes.with_plain_attention(decoder), random_ids(77)
    assert plain.lm_head.weight.data_ptr() == decoder.lm_head.weight.data_ptr()
    memories = [decoder.new_memory(rule, 1, 80) for _ in range(2)]
    for start, end in ((0, 40), (40, 43), (43, 44), (44, 76), (76, 77)):
        found, expected = (
            model.feed(memory, [0], [ids[start:end]])[0]
            for model, memory in zip((plain, decoder), memories, strict=True)
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(memories[0].k[0], memories[1].k[0])
    memories[0].check_integrity()


def test_random_decoders_have_the_sizes_of_their_shape():
    tiny = replace(
        architecture("llama-3.2-3b"), layers=1, hidden_size=64, intermediate_size=96,
        vocab_size=99, max_positions=64,
    )  # fmt: skip
    decoder = shapes.random_decoder(tiny, torch.bfloat16, torch.device("cpu"))
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    assert decoder.embed_tokens.weight.dtype == torch.bfloat16
    assert decoder.rotary.cos.dtype == torch.float32 and len(decoder.rotary.cos) == 65
    assert decoder.norm.weight.eq(1).all() and decoder.embed_tokens.weight.float().std() > 0.01
    hidden, _ = decoder.feed(decoder.new_memory(MemoryRule.full(9), 1, 9), [0], [[3, 4, 5]])
    assert hidden.isfinite().all()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["kernel", "--shapes", "70b"], 2, "choose from 1b, 3b, 8b"),
        (["kernel", "--entries", "100"], 2, "above 272"),
        (["draft-step", "--shape", "gpt"], 2, "known: llama-3.2-3b"),
        (["draft-step", "--device", "cuda"], 2, "give --shape"),
        (
            ["draft-step", "--shape", "llama-3.2-3b", "--draft-quantization", "int8"],
            2,
            "is for a recipe's draft",
        ),
    ],
)
def test_measurements_on_a_device_refuse_wrong_settings(words, code, message):
    done = CliRunner().invoke(perf.app, words, terminal_width=200)
    assert done.exit_code == code and message in " ".join(done.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "words", [["kernel"], ["draft-step", "--shape", "llama-3.2-3b", "--device", "cuda"]]
)
def test_without_a_cuda_device_one_line_says_so(words):
    done = CliRunner().invoke(perf.app, words)
    assert done.exit_code == 1 and "CUDA device" in done.stderr.splitlines()[-1]


def test_records_name_files_without_their_folders():
    words = ["/home/me/a.jsonl", "trained=/home/me/b.safetensors", "--equal=", "W 512", "x=1"]
    told = [record.without_folder(word) for word in words]
    assert told == ["a.jsonl", "trained=b.safetensors", "--equal=", "W 512", "x=1"]
