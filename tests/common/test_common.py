"""What all files share (support/common/): how commands end, and files that appear whole."""
import argparse
import errno
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from helpers import ROOT
from streams.subtitles import Writers
from support.common import disk
from support.common.disk import (
    check_writable, file_name, read_json, read_jsonl, replacing, write_json,
)
from support.common.errors import BadData, NotDownloaded, command_line
from support.common.iterate import MOST, prefetch
from support.common.options import (
    named_file, non_negative, non_negative_int, positive_float, positive_int,
)
from support.common.progress import progress
from support.common.text import without_secrets


# ---------------------------------------------------------------------- how commands end

@pytest.mark.parametrize("error, code, line", [
    (None, 0, ""),
    (BadData("two\nlines"), 1, "error: two lines\n"),
    (NotDownloaded("two\nlines"), 1, "error: two\nlines\n"),
    (RuntimeError("[enforce fail] you tried to allocate memory\nat"), 1,
     "error: out of memory ([enforce fail] you tried to allocate memory); "
     "use a smaller model or --dtype bfloat16\n"),
    (FileNotFoundError(2, "No such file", "x.y"), 1, "error: x.y: No such file\n"),
    (OSError("hub: no\n such model"), 1, "error: hub: no such model\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
])
def test_exit_codes(capsys, error, code, line):
    def main():
        if error is not None:
            raise error
    with pytest.raises(SystemExit) as exited:
        command_line(main)
    assert exited.value.code == code and capsys.readouterr().err == line


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        command_line(lambda: 1 / 0)


def test_a_closed_pipe_is_quiet():
    code = ("from support.common.errors import command_line\n"
            "command_line(lambda: [print('x' * 100) for _ in range(10_000)])")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141 and error == b""


# ---------------------------------------------------------------------- files

def test_a_file_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, [1])
    with pytest.raises(ZeroDivisionError):
        with replacing(file) as part:
            part.write_text("half")
            1 / 0
    assert file.read_text() == "[\n 1\n]\n"
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_of_tensors_is_as_other_files(tmp_path, monkeypatch):
    """It has the rights that the umask gives, which safetensors does not give; a full disk is
    one line, and the file stays."""
    file = tmp_path / "a.safetensors"
    disk.write_tensors(file, {"x": torch.ones(3, 2).T}, {"about": "x"})
    plain = tmp_path / "plain"
    plain.touch()
    assert torch.equal(load_file(file)["x"], torch.ones(2, 3))
    assert file.stat().st_mode == plain.stat().st_mode

    def full(*_):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(disk, "save_file", full)
    message = "a.safetensors: cannot be written .I/O error.*is the disk full"
    with pytest.raises(BadData, match=message):
        disk.write_tensors(file, {"x": torch.zeros(1)})
    assert torch.equal(load_file(file)["x"], torch.ones(2, 3))
    assert sorted(tmp_path.iterdir()) == [file, plain]


def test_unwritable_files_are_named(tmp_path):
    (tmp_path / "file").touch()
    for file in (tmp_path, tmp_path / "file" / "a", tmp_path / "file" / "folder" / "a"):
        with pytest.raises(BadData, match=str(file)):
            disk.check_writable(file)
        with pytest.raises(BadData, match=str(file)):
            write_json(file, {})


def test_folders_of_outputs_are_made_when_they_are_written(tmp_path):
    """The check before does not make them, and leaves nothing behind."""
    file = tmp_path / "new" / "folder" / "a.json"
    disk.check_writable(file, None)
    assert not list(tmp_path.iterdir())
    write_json(file, 1)
    assert list(file.parent.iterdir()) == [file]


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """The file before stays."""
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "a.json"
    file.write_text("before")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BadData, match=f"{file}: cannot be written, the disk is full"):
        write_json(file, [])
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_in_the_middle_of_a_stream(tmp_path):
    """One line names the file, or stdout, and Python's end adds nothing."""
    sentence = {"n": 0, "start": 0, "end": 1, "text": "You look."}
    with pytest.raises(BadData, match="/dev/full: cannot be written, the disk is full"):
        with ExitStack() as stack:
            Writers({"jsonl": "/dev/full"}, stack).sentence(sentence)
    code = "from support.common.errors import command_line\ncommand_line(lambda: print('x'))"
    with open("/dev/full", "w") as output:
        process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=output,
                                 stderr=subprocess.PIPE, text=True)
    assert process.returncode == 1
    assert process.stderr == "error: standard output: cannot be written, the disk is full\n"


def test_characters_that_stdout_cannot_encode_are_question_marks():
    code = ("from support.common.errors import command_line\n"
            "command_line(lambda: print('a\\u0416\\udcffb'))")
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                             env=os.environ | {"PYTHONIOENCODING": "cp1252"})
    assert (process.returncode, process.stdout, process.stderr) == (0, "a??b\n", "")


# ---------------------------------------------------------------------- progress and options

def test_progress_in_a_pipe_is_a_line_a_minute(capsys, monkeypatch):
    """No bar that moves, and nothing if all is done within the first minute."""
    monkeypatch.setattr("support.common.progress.EVERY", 0.2)
    assert list(progress("abc", "short", unit="step")) == ["a", "b", "c"]
    with progress(None, "long", 100, "step") as bar:
        for _ in range(100):
            time.sleep(0.005)
            bar.update(1)
    lines = capsys.readouterr().err.split("\n")
    assert lines.pop() == ""
    assert 2 <= len(lines) <= 6
    assert all(line.startswith("long: ") and "/100 [" in line for line in lines)


def test_progress_on_a_terminal_is_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for rank, shown in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert list(progress("abc", "x", 3, "step", mininterval=0)) == ["a", "b", "c"]
        assert ("100%" in capsys.readouterr().err) == shown


@pytest.mark.parametrize("kind, good, bad", [
    (positive_int, ["1", "1000000000"], ["0", "1.5", "9" * 30]),
    (non_negative_int, ["0", "5000000"], ["-1", "9" * 30]),
    (positive_float, ["1e-9", "2"], ["0", "1e-300", "1e300", "nan"]),
    (non_negative, ["0"], ["-1e-9", "1e300", "inf"]),
])
def test_numbers_are_of_a_size_that_libraries_can_take(kind, good, bad):
    assert [kind(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


# ---------------------------------------------------------------------- more about files

def test_prefetch_is_bounded():
    """However many items are asked for: each waits in memory."""
    made = []
    items = prefetch((made.append(n) or n for n in range(10 * MOST)), 10 ** 9)
    assert next(items) == 0
    items.close()
    assert len(made) <= MOST + 1


def test_a_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(tmp_path / "a.json") == [1]


def test_a_name_that_is_twice_in_an_object_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"v1": [1], "v2": {"v1": 2}, "v1": []}')
    with pytest.raises(BadData, match="a.json: is not JSON .'v1' is there twice"):
        read_json(tmp_path / "a.json")


def test_a_line_of_jsonl_may_hold_any_character(tmp_path):
    rows = [{"text": "one\u2028two\x85"}, {"text": ""}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    for end in ("", "\n"):
        (tmp_path / "a.jsonl").write_text("\n".join(lines) + end, encoding="utf-8")
        assert read_jsonl(tmp_path / "a.jsonl") == rows


@pytest.mark.parametrize("name", ["", "folder", "pipe"])
def test_only_regular_files_are_replaced(tmp_path, monkeypatch, name):
    """A pipe stays a pipe, and so would /dev/null."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for write in (check_writable, lambda path: write_json(path, 1)):
        with pytest.raises(BadData, match="empty|is a directory|is a device or a pipe"):
            write(name)
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "link.json").symlink_to("a.json")
    for content in (1, 2):
        write_json(tmp_path / "link.json", content)
        assert (tmp_path / "link.json").is_symlink()
        assert read_json(tmp_path / "a.json") == content


@pytest.mark.parametrize("name", ["a b", "a/b", "100%", "..", "厨" * 60, "厨/" * 40])
def test_names_of_videos_are_names_of_files(tmp_path, name):
    """Each can be made, and tells the video's name."""
    file = tmp_path / f"{file_name(name)}.jsonl"
    file.touch()
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert unquote(file.stem) == name


def test_names_with_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "lr=1" / "k.json").touch()
    assert named_file("a=lr=1/k.json") == ("a", Path("lr=1/k.json"))
    assert named_file("lr=1/k.json") == ("k", Path("lr=1/k.json"))


# ---------------------------------------------------------------------- texts

@pytest.mark.parametrize("source, shown", [
    ("rtsp://u:SECRET@a:554/b", "rtsp://a:554/..."),
    ("rtsp://u:SEC/RET@a/b", "rtsp://a/..."),
    ("rtsp://u:SEC@RET@a/b", "rtsp://a/..."),
    ("rtsp://u:20#SECRET@a:1/x", "rtsp://a:1/..."),
    ("rtsp://u:S?EC=1&RET@a/x", "rtsp://a/..."),
    ("http://u%3ASECRET%40a/", "http://a/..."),
    ("http://a?token=SECRET", "http://a/..."),
    ("http://a/password:SECRET/x", "http://a/..."),
    ("rtsp://[::1]:554/1", "rtsp://[::1]:554/..."),
    ("lavfi:movie=http://u:SECRET@a/b", "lavfi:movie=http://a/..."),
    ("file:///a.mp4?token=SECRET", "file:///..."),
])
def test_of_an_address_only_the_host_is_shown(source, shown):
    assert without_secrets(source) == shown
    assert without_secrets(shown) == shown


@pytest.mark.parametrize("source", ["a.mp4", "a@b.mp4", "camera:1", "lavfi:a=b:c=d@e"])
def test_what_is_no_address_is_shown(source):
    assert without_secrets(source) == source
