"""Where training data comes from: data sets, local files, prompts; and what is refused."""

import gzip
import json
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from masw.build.adaptor.prompts import CODE, QUOTE, SUMMARY, PromptMaker, read_meetings
from masw.build.adaptor.rows import answer_end_id, exchange_sample, training_rows
from masw.build.adaptor.samples import DataError, Sample, read_rows, read_samples, write_samples
from masw.build.adaptor.settings import TrainSettings
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
    where = ("ccdv/govreport-summarization",)
    assert asked == [(where, {"split": "train", "streaming": True})]


def test_a_data_set_that_cannot_be_had_by_name_tells_the_remedy(monkeypatch):
    def load_dataset(*where, **options):
        raise RuntimeError("Dataset scripts are no longer supported")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match=r"no longer supported.*or give multinews=PATH"):
        list(Source("multinews").documents())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets, or give multinews=PATH"):
        list(Source("multinews").documents())


PAPER = "Below is a paper. Memorize it.\n The paper begins. \n It was\n\nlong."


@pytest.mark.parametrize(
    ("row", "document", "question"),
    [
        ({"instruction": f"{PAPER} \n Now the paper ends. \nWhy?\n"}, PAPER, "Why?"),
        ({"instruction": f"{PAPER}\n Now the material ends. What?"}, PAPER, "What?"),
        ({"instruction": f"{PAPER} Now the second paper ends.Both?"}, PAPER, "Both?"),
        ({"instruction": "Sort these.", "input": "b, a"}, "b, a", "Sort these."),
        ({"instruction": "some text\n\nwho?\n", "input": ""}, "some text", "who?"),
        ({"instruction": "who?", "input": None, "file": ""}, "", "who?"),
    ],
)
def test_a_long_instruction_is_a_document_and_a_question(row, document, question, tmp_path):
    path = write_rows(tmp_path / "r.jsonl", row | {"output": "so"})
    [exchange] = Source("longalpaca", path).exchanges()
    assert exchange == Exchange(document, question, "so")


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


def refused(read, *where, **how):
    with pytest.raises(DataError) as raised:
        list(read(*where, **how))
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("booksum", {"chapter": "c", "summary_text": None}, "'summary_text' is null; it must be"),
        ("qmsum", {"transcript": "A: x", "queries": ["who?"]}, "is no object with 'query'"),
        ("qmsum", {"transcript": ["x"], "queries": []}, "'transcript' is [\"x\"]"),
        ("longalpaca", {"instruction": "a"}, "'output' is missing"),
        ("booksum", {"chapter": "a\ud800", "summary_text": "b"}, "'chapter' has '\\ud800' at 2"),
    ],
)
def test_a_field_that_is_no_text_is_named_with_its_place(name, row, message, tmp_path):
    path = write_rows(tmp_path / "r.jsonl", ROWS[name], row)
    told = refused(Source(name, path).exchanges)
    assert told.startswith(f"{path}:2: no row of {name}: ") and message in told


def test_meetings_of_another_shape_are_named_with_their_place(tmp_path):
    path = write_rows(tmp_path / "m.jsonl", meeting("a"), {"transcript": "A: x", "queries": []})
    assert refused(read_meetings, path) == f"{path}:2: no meeting: 'meeting_id' is missing"
    path.write_text("\n")
    assert refused(read_meetings, path) == f"{path} holds no meetings"


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_bytes_that_cannot_be_read_are_named_with_their_place(name, tmp_path):
    path = tmp_path / name
    content = b'{"text": "one"}\n{"text": "caf\xe9"}\n'
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert refused(read_rows, path) == f"{path}:2: byte 0xe9 at 14 is no UTF-8"
    plain = tmp_path / name.replace("jsonl", "txt")
    path.rename(plain)
    assert refused(Source("text", plain).documents) == f"{plain}:2: byte 0xe9 at 14 is no UTF-8"


def test_a_cut_gzip_file_is_named_with_its_place(tmp_path):
    path = tmp_path / "r.jsonl.gz"
    whole = gzip.compress(b'{"text": "one"}\n', mtime=0)
    for content in (whole[:-6], b'{"text": "one"}\n', whole[:12] + b"\xff" + whole[13:]):
        path.write_bytes(content)
        assert refused(read_rows, path).startswith(f"{path}:")
        assert "no whole gzip file" in refused(read_rows, path)


def test_text_is_read_by_its_suffix_compressed_or_not(tmp_path):
    lines, plain = '{"text": "one"}\n{"text": "two"}\n', "one\ntwo\n"
    for name, content in (("a.jsonl", lines), ("a.json", lines), ("a.txt", plain), ("a", plain)):
        expected = [plain] if content is plain else ["one", "two"]
        for path, written in (
            (tmp_path / name, content.encode()),
            (tmp_path / f"{name}.gz", gzip.compress(content.encode())),
        ):
            path.write_bytes(written)
            assert list(Source("text", path).documents()) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "abc"}, 'prompt is "abc"; it must be a list of token ids'),
        ({"prompt": [1, -5]}, "prompt has -5; token ids are whole numbers from 0 on"),
        ({"prompt": [1], "answer": [2.5]}, "answer has 2.5; token ids are whole numbers"),
        ({"prompt": [1, None]}, "prompt has null; token ids"),
        ({"prompt": [True]}, "prompt has true; token ids are whole numbers"),
        ({"prompt": [1], "prefix": "2048"}, "'prefix' is \"2048\"; it must be a whole number"),
    ],
)
def test_samples_hold_token_ids_only(fields, message, tmp_path):
    assert message in refused(lambda: Sample(**fields))
    path = write_rows(tmp_path / "s.jsonl", {"prompt": [1]}, fields)
    assert refused(read_samples, path) == f"{path}:2: {refused(lambda: Sample(**fields))}"


def rows_of(sources, codec, length, tuning=False, say=lambda text: None, vocab_size=307):
    model = SimpleNamespace(vocab_size=vocab_size, max_positions=128, eos_ids=(2,))
    memory = {"sink": 2, "window": 2, "intervals": (2,)}
    settings = TrainSettings(**memory, lengths=(length,), prompt_weight=0.0)
    return training_rows(sources, codec, model, settings, tuning, say)


def test_ids_that_the_model_lacks_are_refused(codec, tmp_path):
    samples, ids = tmp_path / "s.jsonl", tmp_path / "c.npy"
    write_samples(samples, [Sample((5, 6), (7,)), Sample((5, 307), (7,))])

    def told_of(source, tuning=False):
        return refused(rows_of, [source], codec, 16, tuning)

    told = f"{samples}: sample 2: token id 307 is not of this model: it has 0 to 306"
    assert told_of(Source("samples", samples)) == told
    assert told_of(Source("samples", samples), tuning=True) == told
    text, meetings = tmp_path / "t.txt", write_rows(tmp_path / "q.jsonl", ROWS["qmsum"])
    text.write_text("one two. " * 9)
    for source, tuning in ((Source("text", text), False), (Source("qmsum", meetings), True)):
        told = refused(rows_of, [source], codec, 128, tuning, vocab_size=70)
        assert told.startswith(f"{source}: token id ") and told.endswith("it has 0 to 69")
    for array, message in (
        (np.array([1, 307]), "id 307 at 1; it must be 0 to 306"),
        (np.array([-1, 3]), "id -1 at 0; it must be 0 to 306"),
        (np.array([0.5]), "ids are float64 of shape (1,); give integers"),
    ):
        np.save(ids, array)
        assert message in told_of(Source("ids", ids))
    ids.write_text("1 2 3")
    assert f"{ids}: no .npy array" in told_of(Source("ids", ids))
    ids.write_bytes(b"PK\3\4" + bytes(99))
    assert f"{ids}: no .npy array" in told_of(Source("ids", ids))


def test_sources_that_give_nothing_are_refused(codec, tmp_path):
    (tmp_path / "e.jsonl").write_text("\n")
    fine = tmp_path / "fine.txt"
    fine.write_text("one two three. " * 20)
    for name in ("qmsum", "samples"):
        empty = Source(name, tmp_path / "e.jsonl")
        told = refused(rows_of, [Source("text", fine), empty], codec, 16)
        assert told == f"{name}=e.jsonl has no documents"
    told = refused(rows_of, [Source("samples", tmp_path / "e.jsonl")], codec, 16, True)
    assert told == "samples=e.jsonl: none of its 0 samples has an answer"


def test_samples_that_do_not_come_whole_are_told(codec, tmp_path):
    path, told = tmp_path / "s.jsonl", []
    long = Sample(tuple(range(40)), (7,))
    write_samples(path, [Sample((5, 6), (7,)), Sample((8,), ()), long])
    [rows] = rows_of([Source("samples", path)], codec, 16, True, told.append)
    assert len(rows) == 2
    assert told[1:] == [
        "samples=s.jsonl: skipped 1 of 3 samples, without answers",
        "samples=s.jsonl: 1 samples are longer than 16 tokens and lose their beginning",
    ]


def test_pretraining_packs_text_files_and_ids(codec, tmp_path):
    plain, lines, ids = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.npy"
    plain.write_text("one two three. " * 20)
    write_rows(lines, {"text": "four five. " * 20}, {"text": "six. " * 20})
    np.save(ids, np.arange(40, dtype=np.uint16))
    sources = [Source("text", plain), Source("text", lines), Source("ids", ids)]
    [rows] = rows_of(sources, codec, 16)
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
    rows = rows_of(sources, codec, 128, tuning=True)
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


def test_questions_that_do_not_fit_are_skipped_and_counted(codec, tmp_path):
    fits, too_long = ({"instruction": text, "output": "so"} for text in ("who?", "word " * 99))
    path, told = write_rows(tmp_path / "r.jsonl", too_long, fits, too_long), []
    [rows] = rows_of([Source("longalpaca", path)], codec, 96, True, told.append)
    assert len(rows) == 1
    assert told[1] == "longalpaca=r.jsonl: skipped 2 of 3 questions, longer than 96 tokens"
    write_rows(path, too_long)
    with pytest.raises(DataError, match=r"r\.jsonl: none of its 1 questions fits into 96"):
        rows_of([Source("longalpaca", path)], codec, 96, True, told.append)


def test_an_answer_in_a_chat_ends_with_the_chats_end_id(codec, tmp_path):
    chat_end = codec.tokenizer.eos_token_id
    assert answer_end_id(codec, (7, chat_end)) == chat_end
    assert answer_end_id(codec, (7, 8)) == 7
    assert answer_end_id(codec, ()) == 0
    assert answer_end_id(TextCodec(byte_level(tmp_path, template=None)), (7, chat_end)) == 7


def meeting(name, turns=40):
    lines = [
        f"Speaker {i % 3}: " + " ".join(f"word{i}x{j}" for j in range(60)) for i in range(turns)
    ]
    lines[0] += f" {name}"
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


@pytest.mark.parametrize("random_start", [False, True])
def test_no_prompt_comes_twice(codec, random_start, tmp_path):
    one, other = meeting("one"), meeting("other")
    other["transcript"] = other["transcript"].replace("word", "term")
    other["queries"] = [{"query": f"query {k}", "answer": "a"} for k in range(5)]
    read = read_meetings(write_rows(tmp_path / "m.jsonl", one, other))
    maker = PromptMaker(codec, 3000, random_start=random_start)
    asked = [sample.prompt for sample in maker.summaries(read)]
    assert len(set(asked)) == len(asked) and (random_start or len(asked) == 2 + 5)
    quoted = [sample.prompt for sample, _ in zip(maker.quotes(read), range(12), strict=False)]
    assert len(set(quoted)) == len(quoted) > 6


def test_turns_without_a_speaker_are_not_quoted(codec, tmp_path):
    row = meeting("m")
    lines = row["transcript"].split("\n")
    row["transcript"] = "\n".join(
        line if i == 3 else line.partition(": ")[2] for i, line in enumerate(lines)
    )
    read = read_meetings(write_rows(tmp_path / "m.jsonl", row))
    [quote] = PromptMaker(codec, 3000).quotes(read)
    assert 'Speaker 0 begins with "word3x0' in codec.decode(quote.prompt)


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


def test_samples_come_back_as_written(tmp_path, monkeypatch):
    samples = [Sample((1, 2), (3,), "k", 2, "n"), Sample((4,))]
    for name in ("s.jsonl", "s.jsonl.gz"):
        write_samples(tmp_path / name, samples)
        assert read_samples(tmp_path / name) == samples
        before = (tmp_path / name).read_bytes()
        with monkeypatch.context() as patch:  # what gzip writes into a file's head
            patch.setattr(time, "time", lambda: 1e9)
            write_samples(tmp_path / name, samples)
        assert (tmp_path / name).read_bytes() == before
    (tmp_path / "bad.jsonl").write_text('{"ids": [1]}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:1: no sample"):
        read_samples(tmp_path / "bad.jsonl")
    with pytest.raises(DataError, match="empty prompt"):
        Sample(())
