"""Where training data comes from: data sets, local files, prompts; and what is refused."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from masw.build.adaptor.prompts import CODE, QUOTE, SUMMARY, PromptMaker, read_meetings
from masw.build.adaptor.rows import exchange_sample, pretraining_rows, tuning_rows
from masw.build.adaptor.samples import DataError, Sample, read_samples, write_samples
from masw.build.adaptor.sources import DATA_SETS, Exchange, Source
from masw.engines.text import TextCodec
from tests.tiny_tokenizers import byte_level

# One row of each data set as its card describes it.
ROWS = {
    "redpajama": {"text": "some web text", "meta": "{}"},
    "longalpaca": {"instruction": "a long paper and a question", "output": "its answer"},
    "booksum": {"chapter": "it was a dark night", "summary_text": "a night", "book_id": "x"},
    "qmsum": {
        "meeting_id": "m",
        "transcript": "A: hello\nB: hi",
        "queries": [{"query": "who?", "answer": "A and B"}, {"query": "what?", "answer": "hi"}],
    },
    "govreport": {"report": "a long report", "summary": "short"},
    "multinews": {"document": "news ||||| more news", "summary": "news in short"},
}
DOCUMENTS = {
    "redpajama": "some web text",
    "longalpaca": "a long paper and a question\n\nits answer",
    "booksum": "it was a dark night",
    "qmsum": "A: hello\nB: hi",
    "govreport": "a long report",
    "multinews": "news ||||| more news",
}
EXCHANGES = {
    "redpajama": [],
    "longalpaca": [("", "a long paper and a question", "its answer")],
    "booksum": [("it was a dark night", "Summarise this chapter.", "a night")],
    "qmsum": [("A: hello\nB: hi", "who?", "A and B"), ("A: hello\nB: hi", "what?", "hi")],
    "govreport": [("a long report", "Summarise this report.", "short")],
    "multinews": [("news ||||| more news", "Summarise this collection of news.", "news in short")],
}


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return TextCodec(byte_level(tmp_path_factory.mktemp("tokenizer")))


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_data_set_has_a_row_here():
    assert ROWS.keys() == DATA_SETS.keys() == EXCHANGES.keys()


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_documents_and_exchanges(name, tmp_path):
    source = Source.parse(f"{name}={write_rows(tmp_path / 'rows.jsonl', ROWS[name])}")
    [document] = source.documents()
    assert document == DOCUMENTS[name]
    found = [(e.document, e.question, e.answer) for e in source.exchanges()]
    assert found == EXCHANGES[name]


def test_a_data_set_by_name_is_read_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(*where, **options):
        asked.append((where, options))
        return [ROWS["govreport"]]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(Source("govreport").documents()) == ["a long report"]
    where = ("ccdv/govreport-summarization", None)
    assert asked == [(where, {"split": "train", "streaming": True})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wikipedia", "data is 'wikipedia'; known: redpajama"),
        ("qmsum", "data 'qmsum' needs a file: qmsum=PATH"),
        ("text", "data 'text' needs a file"),
        ("govreport=/no/such", "the file does not exist"),
    ],
)
def test_sources_are_refused_by_name(text, message):
    with pytest.raises(DataError, match=message):
        Source.parse(text)


def test_a_wrong_row_is_named_by_file_and_line(tmp_path):
    path = write_rows(tmp_path / "r.jsonl", ROWS["govreport"], {"report": "x"})
    with pytest.raises(DataError, match=r"r.jsonl:2: no row of govreport: .*summary"):
        list(Source("govreport", path).exchanges())
    path.write_text('{"report": \n')
    with pytest.raises(DataError, match=r"r\.jsonl:1: no JSON"):
        list(Source("govreport", path).documents())


def test_pretraining_packs_text_files_and_ids(codec, tmp_path):
    plain, lines, ids = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.npy"
    plain.write_text("one two three. " * 20)
    write_rows(lines, {"text": "four five. " * 20}, {"text": "six. " * 20})
    np.save(ids, np.arange(40, dtype=np.uint16))
    sources = [Source("text", plain), Source("text", lines), Source("ids", ids)]
    [rows] = pretraining_rows(sources, codec, 16, 2, lambda text: None)
    stream = rows.ids.flatten().tolist()
    expected = []
    for text in ("one two three. " * 20, "four five. " * 20, "six. " * 20):
        expected += [*codec.tokenizer(text, add_special_tokens=False)["input_ids"], 2]
    expected += [*range(40), 2]
    assert stream == expected[: len(stream)] and len(expected) - len(stream) < 16


def test_tuning_rows_come_from_exchanges_and_samples(codec, tmp_path):
    meetings = write_rows(tmp_path / "q.jsonl", ROWS["qmsum"])
    samples = tmp_path / "s.jsonl.gz"
    write_samples(samples, [Sample((5, 6), (7,)), Sample((8,), ())])  # the second has no answer
    sources = [Source("qmsum", meetings), Source("samples", samples)]
    rows = tuning_rows(sources, codec, (128,), 2, 0.0, lambda text: None)
    assert [len(part) for part in rows] == [3]
    answer = codec.tokenizer("A and B", add_special_tokens=False)["input_ids"]
    weighted = rows[0].ids[0][1:][rows[0].weight[0, :-1] == 1].tolist()
    assert weighted == [*answer, 2]  # exactly the answer and its end id


def test_a_long_document_is_cut_before_question_and_answer(codec):
    exchange = Exchange("word " * 500, "What is it?", "A word.")
    sample = exchange_sample(exchange, codec, 96, end_id=2)
    assert 80 <= len(sample.ids) <= 96
    assert "What is it?" in codec.decode(sample.prompt)
    assert sample.answer[-1] == 2


def meeting(name, turns=40):
    lines = [
        f"Speaker {i % 3}: " + " ".join(f"word{i}x{j}" for j in range(60)) for i in range(turns)
    ]
    queries = [{"query": f"question {k}", "answer": "a"} for k in range(2)]
    return {"meeting_id": name, "transcript": "\n".join(lines), "queries": queries}


@pytest.fixture(scope="module")
def meetings(tmp_path_factory):
    path = tmp_path_factory.mktemp("meetings") / "m.jsonl"
    return read_meetings(write_rows(path, meeting("a"), meeting("b")))


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_prompts_have_the_wanted_length_and_end_in_the_question(codec, meetings):
    maker = PromptMaker(codec, 2000)
    for sample, question in zip(take(maker.summaries(meetings), 4), (0, 0, 1, 1), strict=True):
        assert 1980 <= len(sample.prompt) <= 2000 and sample.prefix == 2000
        assert f"question {question}" in codec.decode(sample.prompt[-80:])
        assert sample.kind == SUMMARY


def test_quotes_give_the_first_words_of_a_turn_of_the_document(codec, meetings):
    for sample in take(PromptMaker(codec, 3000).quotes(meetings), 4):
        text = codec.decode(sample.prompt)
        given = text[text.rindex(": ") + 2 :]
        assert len(given.split()) == 8 and sample.kind == QUOTE
        assert text.count(given) == 3  # in the document, in the question, and to begin with
        assert len(sample.prompt) <= 3000


def test_random_starts_differ_and_are_seeded(codec):
    texts = [("long", "".join(f"line {i} of a long file\n" for i in range(4000)))] * 3

    def drawn(**options):
        maker = PromptMaker(codec, 400, **options)
        return [sample.prompt for sample in maker.continuations(texts, CODE)]

    assert len(set(drawn())) == 1
    assert len(set(drawn(random_start=True))) == 3
    assert drawn(random_start=True, seed=1) == drawn(random_start=True, seed=1)
    assert drawn(random_start=True, seed=1) != drawn(random_start=True, seed=2)


def test_a_text_that_is_too_short_gives_no_prompt(codec):
    assert list(PromptMaker(codec, 400).continuations([("s", "short")], CODE)) == []


def test_samples_come_back_as_written(tmp_path):
    samples = [Sample((1, 2), (3,), "k", 2, "n"), Sample((4,))]
    for name in ("s.jsonl", "s.jsonl.gz"):
        write_samples(tmp_path / name, samples)
        assert read_samples(tmp_path / name) == samples
    (tmp_path / "bad.jsonl").write_text('{"ids": [1]}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:1: no sample"):
        read_samples(tmp_path / "bad.jsonl")
    with pytest.raises(DataError, match="empty prompt"):
        Sample(())
