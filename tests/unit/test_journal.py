"""Results kept one by one: resumed, shared, and never written over something else."""

import json
import multiprocessing

import pytest

from masw.build.adaptor.journal import Journal
from masw.build.adaptor.samples import DataError

BELONGS = {"model": "a", "tokens": 128}


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path, BELONGS)
    for number in range(3):
        journal.append({"n": number})
    path.write_bytes(path.read_bytes()[:-4])
    journal.append({"n": 3})  # beside one that was killed in its row
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [BELONGS, {"n": 0}, {"n": 1}, {"n": 3}]
    path.write_bytes(path.read_bytes()[:-4])
    again = Journal(path, BELONGS)
    assert again.rows == [{"n": 0}, {"n": 1}]
    again.append({"n": 7})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [BELONGS, {"n": 0}, {"n": 1}, {"n": 7}]


def test_other_settings_are_named(tmp_path):
    Journal(tmp_path / "j", BELONGS)
    with pytest.raises(DataError, match=r"begun with other settings \(dtype, tokens\)"):
        Journal(tmp_path / "j", BELONGS | {"tokens": 64, "dtype": None})


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08" * 50, b"text", b"[1]\n", b'{"a": 1', b"\n"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(DataError, match="precious holds something else"):
        Journal(path, BELONGS)
    assert path.read_bytes() == content


def test_a_compressed_name_is_refused_before_any_result(tmp_path):
    with pytest.raises(DataError, match=r"without \.gz"):
        Journal(tmp_path / "o.jsonl.gz", BELONGS)
    assert not list(tmp_path.iterdir())


def test_a_journal_for_one_process_is_not_lent_to_another(tmp_path):
    first = Journal(tmp_path / "j", BELONGS, alone=True)
    with pytest.raises(DataError, match="in use"):
        Journal(tmp_path / "j", BELONGS, alone=True)
    first.append({"n": 1})
    del first
    assert Journal(tmp_path / "j", BELONGS, alone=True).rows == [{"n": 1}]


def test_a_journal_that_holds_nothing_is_begun_anew_with_other_settings(tmp_path):
    Journal(tmp_path / "j", BELONGS, alone=True).close()
    journal = Journal(tmp_path / "j", BELONGS | {"tokens": 64}, alone=True)
    journal.append({"n": 1})
    journal.close()
    with pytest.raises(DataError, match=r"begun with other settings \(tokens\)"):
        Journal(tmp_path / "j", BELONGS, alone=True)
    (tmp_path / "other").write_text('{"results": 1}\n')
    with pytest.raises(DataError, match="begun with other settings"):
        Journal(tmp_path / "other", BELONGS, alone=True)


def append_long_rows(path, name):
    journal = Journal(path, BELONGS)
    for number in range(40):
        journal.append({"name": name, "n": number, "filling": "x" * 50_000})


def test_processes_that_share_a_journal_lose_and_mix_nothing(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=append_long_rows, args=(tmp_path / "j", n)) for n in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    rows = Journal(tmp_path / "j", BELONGS).rows
    for name in "ab":
        assert [row["n"] for row in rows if row["name"] == name] == list(range(40))
