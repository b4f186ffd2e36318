"""Files and folders that appear whole, readable by those who serve them, or not at all."""

import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from masw.build.output_folder import staged
from masw.engines.whole_file import whole_file


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_safetensors_can_be_read_by_another_user(tmp_path):
    with whole_file(tmp_path / "t.safetensors") as part:
        save_file({"x": torch.zeros(1)}, part)
    assert mode(tmp_path / "t.safetensors") == 0o644
    with staged(tmp_path / "folder") as stage:
        (stage / "deep").mkdir()
        save_file({"x": torch.zeros(1)}, stage / "deep" / "t.safetensors")
        (stage / "link").symlink_to("/nowhere")
    assert mode(tmp_path / "folder" / "deep" / "t.safetensors") & 0o444 == 0o444


def test_of_two_that_write_at_once_the_last_one_stays_whole(tmp_path, monkeypatch):
    with whole_file(tmp_path / "f") as part:
        part.write_text("first")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with whole_file(tmp_path / "f") as other:
            other.write_text("second")
        assert (tmp_path / "f").read_text() == "second"
    assert (tmp_path / "f").read_text() == "first"
    assert list(tmp_path.iterdir()) == [tmp_path / "f"]


def test_a_link_still_leads_to_the_file(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "link").symlink_to("deep/f")
    with whole_file(tmp_path / "link") as part:
        part.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "deep" / "f").read_text() == "new"


def test_a_pipe_is_written_and_stays_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(tmp_path / "pipe") as part:
        part.write_text("told")
    assert os.read(reader, 9) == b"told"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    os.close(reader)
