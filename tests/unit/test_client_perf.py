"""Load measurement without a server: profile export, counting, rows, finding perf_analyzer."""

import json
import stat
import sys

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from masw.clients import perf_analyzer
from masw.clients.perf import ServingLoad, measure_serving, read_profile, token_counter
from masw.clients.perf_analyzer import PerfAnalyzerError, prepare_perf_analyzer
from masw.clients.report import Served, ServingRow, Spread

MS = 1_000_000  # ns
STATISTICS = {
    "prefix_tokens": 100,
    "new_tokens": 5,
    "iterations": 2,
    "drafted": 10,
    "accepted": 3,
    "drafted_at": [2] * 5,
    "accepted_at": [2, 1, 0, 0, 0],
    "rollbacks": 2,
    "slots_materialized": 0,
    "slots_discarded": 0,
    "prefill_ms": 1.0,
    "draft_ms": 1.0,
    "verify_ms": 1.0,
    "host_ms": 1.0,
    "draft_failures": 0,
    "finish_reason": "end_id",
}


def request(sent_ms, responses, statistics=True):
    """A request of a profile export; responses as (ms, text), the last one with statistics."""
    outputs = [{"text_output": text, "statistics": "", "is_final": ""} for _, text in responses]
    if statistics:
        outputs[-1]["statistics"] = json.dumps(STATISTICS)
    return {
        "timestamp": sent_ms * MS,
        "request_inputs": {"text_input": "a long document", "max_tokens": 5, "stream": True},
        "response_timestamps": [at * MS for at, _ in responses],
        "response_outputs": outputs,
    }


def profile(*requests):
    experiment = {"mode": "concurrency", "value": 1}
    return {
        "experiments": [{"experiment": experiment, "requests": list(requests)}],
        "version": "0.0.0",
        "service_kind": "triton",
        "endpoint": "",
    }


def words(text):
    return len(text.split())


# profile


def test_tokens_are_counted_in_the_text_not_in_the_responses():
    [served] = read_profile(
        profile(request(0, [(50, "a b"), (70, " c d"), (90, " e"), (95, "")])), words
    )
    assert (served.tokens, served.responses) == (5, 4)
    assert served.ttft_s == 0.05
    assert served.time_per_output_token_s == pytest.approx(0.04 / 4)
    assert served.latency_s == 0.095
    assert served.statistics.iterations == 2


def test_a_word_over_two_responses_is_one_token():
    [served] = read_profile(profile(request(0, [(1, "sum"), (2, "mary")])), words)
    assert served.tokens == 1
    assert served.time_per_output_token_s is None


def test_the_first_response_with_text_counts_for_the_ttft():
    [served] = read_profile(profile(request(10, [(20, ""), (30, "a"), (40, " b")])), words)
    assert served.ttft_s == 0.02


def test_a_profile_without_requests_or_text_is_an_error():
    with pytest.raises(PerfAnalyzerError, match="holds no request"):
        read_profile(profile(), words)
    with pytest.raises(PerfAnalyzerError, match="'a long document' was answered without any text"):
        read_profile(profile(request(0, [(1, "")])), words)


def test_a_row_sums_up_its_requests():
    served = read_profile(
        profile(
            request(0, [(100, "a"), (180, " b c d e")]),
            request(0, [(200, "a"), (500, " b c d e")]),
        ),
        words,
    )
    row = ServingRow.of(5, 2, served)
    assert (row.requests, row.responses, row.tokens, row.server_tokens) == (2, 4, 10, 10)
    assert row.tok_s == 20
    assert row.requests_s == 4
    assert row.ttft_ms == Spread(150, 195)
    assert row.time_per_output_token_ms == Spread(47.5, 72.25)
    assert row.latency_ms == Spread(340, 484)
    assert (row.prefix_tokens, row.tok_per_iter, row.acceptance_rate) == (100, 2.5, 0.3)
    assert row.drafted_per_iter == 5


def test_a_row_without_statistics_says_so():
    row = ServingRow.of(None, 1, [Served(0, MS, MS, MS, 1, 1, None)])
    assert row.tok_per_iter is row.acceptance_rate is row.server_tokens is None
    assert row.time_per_output_token_ms == Spread(None, None)


# load


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"texts": ()}, "at least one text"),
        ({"texts": ("a", "")}, "none of them empty"),
        ({"concurrencies": (1, 0)}, r"concurrencies \(1, 0\) must be at least 1"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"draft_lengths": ()}, "at least one value"),
        ({"concurrencies": ()}, "at least one value"),
    ],
)
def test_a_load_that_measures_nothing_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ServingLoad(**{"texts": ("a",)} | wrong)


def test_input_data_names_the_draft_length_only_when_it_is_set():
    load = ServingLoad(("a", "b"), max_tokens=7)
    assert "num_draft_tokens" not in load.input_data(None)["data"][0]
    assert load.input_data(0)["data"][1] == {
        "text_input": ["b"],
        "max_tokens": [7],
        "stream": [True],
        "return_perf_metrics": [True],
        "apply_chat_template": [True],
        "num_draft_tokens": [0],
    }


# perf_analyzer


@pytest.fixture
def tokenizer_dir(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


def install(folder, body):
    """An executable named perf_analyzer that runs `body` with the options in `options`."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "perf_analyzer"
    head = "import json, sys\nif '--version' in sys.argv: sys.exit(0)\n"
    options = "words = sys.argv[1:]\noptions = dict(zip(words, words[1:]))\n"
    script.write_text(f"#!{sys.executable}\n{head}{options}{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def test_measuring_runs_the_grid_and_reads_each_profile(tmp_path, tokenizer_dir, monkeypatch):
    export = profile(request(0, [(100, "a"), (180, " b c d e")]))
    install(
        tmp_path / "bin",
        f"export = json.loads({json.dumps(export)!r})\n"
        "[experiment] = export['experiments']\n"
        "experiment['requests'] *= int(options['--request-count'])\n"
        "json.dump(export, open(options['--profile-export-file'], 'w'))\n",
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    said = []
    load = ServingLoad(("a",), concurrencies=(1, 2), draft_lengths=(None, 0), requests_per_client=2)
    report = measure_serving(load, tokenizer_dir, url="here:1", say=said.append)
    cells = [(row.num_draft_tokens, row.concurrency, row.requests) for row in report.rows]
    assert cells == [(None, 1, 2), (None, 2, 4), (0, 1, 2), (0, 2, 4)]
    assert report.rows[0].tokens == 10
    assert json.loads(report.to_json()) == json.loads(json.dumps(report.to_dict()))
    assert said[0] == "perf_analyzer: default draft, 1 at once"
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report.table())
    assert "20.0 / 20.0" in capture.get()


def test_a_failing_perf_analyzer_is_quoted(tmp_path, tokenizer_dir, monkeypatch):
    install(tmp_path / "bin", "print('Thread [0] had error: too long', file=sys.stderr)\nexit(99)")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(PerfAnalyzerError, match=r"exit code 99\):\nThread \[0\] had error: too lo"):
        measure_serving(ServingLoad(("a",)), tokenizer_dir)


def test_a_perf_analyzer_that_does_not_end_is_stopped(tmp_path, tokenizer_dir, monkeypatch):
    install(tmp_path / "bin", "import time\ntime.sleep(60)")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(PerfAnalyzerError, match=r"did not finish in 0\.5 s"):
        measure_serving(ServingLoad(("a",)), tokenizer_dir, timeout_s=0.5)


def test_a_working_perf_analyzer_on_the_path_is_used(tmp_path, monkeypatch):
    script = install(tmp_path / "bin", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert prepare_perf_analyzer() == [str(script)]


def test_a_prepared_perf_analyzer_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MASW_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    folder = tmp_path / f"perf_analyzer-{perf_analyzer.VERSION}" / "wheel" / "perf_analyzer" / "bin"
    script = install(folder, "")
    assert prepare_perf_analyzer() == [str(script)]


def test_without_apt_the_message_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("MASW_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    folder = tmp_path / f"perf_analyzer-{perf_analyzer.VERSION}" / "wheel" / "perf_analyzer" / "bin"
    install(folder, "").write_text("no program\n")
    with pytest.raises(PerfAnalyzerError, match=r"needs glibc 2\.38.*no apt-get.*on PATH"):
        prepare_perf_analyzer()
    assert not list((tmp_path / f"perf_analyzer-{perf_analyzer.VERSION}").glob(".making-*"))


def test_token_counter_adds_no_special_tokens(tokenizer_dir):
    assert token_counter(tokenizer_dir)("one two  three") == 3
