"""What all files share (support/common/): how commands end, and files that appear whole."""
import argparse
import errno
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from helpers import ROOT
from streams.subtitles import Writers
from support.common import disk
from support.common.disk import read_json, replacing, write_json
from support.common.errors import BadData, NotDownloaded, command_line
from support.common.options import non_negative, positive_float, positive_int, non_negative_int
from support.common.progress import progress


@pytest.mark.parametrize("error, code, line", [
    (None, 0, ""), (BadData("two\nlines"), 1, "error: two lines\n"),
    (NotDownloaded("two\nlines"), 1, "error: two\nlines\n"),
    (RuntimeError("[enforce fail] you tried to allocate memory\nat"), 1,
     "error: out of memory ([enforce fail] you tried "
     "to allocate memory); use a smaller model or --dtype bfloat16\n"),
    (FileNotFoundError(2, "No such file", "x.y"), 1, "error: x.y: No such file\n"),
    (OSError("hub: no\n such model"), 1, "error: hub: no such model\n"), (KeyboardInterrupt(), 130, "interrupted\n")])
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
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141 and error == b""


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, [1])
    with pytest.raises(ZeroDivisionError):
        with replacing(file) as part:
            part.write_text("half")
            1 / 0
    assert file.read_text() == "[\n 1\n]\n" and [f.name for f in tmp_path.iterdir()] == ["a.json"]


def test_tensors_are_files_as_others(tmp_path, monkeypatch):
    """With the rights that the user's umask gives, which safetensors does not; one line where the disk is full."""
    file, plain = tmp_path / "a.safetensors", tmp_path / "plain"
    disk.write_tensors(file, {"x": torch.ones(3, 2).T}, {"about": "x"})
    plain.touch()
    assert torch.equal(load_file(file)["x"], torch.ones(2, 3)) and file.stat().st_mode == plain.stat().st_mode

    def full(*_):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(disk, "save_file", full)
    with pytest.raises(BadData, match="a.safetensors: cannot be written .I/O error.*is the disk full"):
        disk.write_tensors(file, {"x": torch.zeros(1)})
    assert torch.equal(load_file(file)["x"], torch.ones(2, 3)) and len(list(tmp_path.iterdir())) == 2


def test_unwritable_files_are_said(tmp_path):
    (tmp_path / "file").touch()
    for file in (tmp_path, tmp_path / "file" / "a", tmp_path / "file" / "folder" / "a"):
        for write in (disk.check_writable, lambda path: write_json(path, {})):
            with pytest.raises(BadData, match=str(file)):
                write(file)


def test_folders_of_outputs_are_made_when_they_are_written(tmp_path):
    """The check before does not make them, and leaves nothing behind."""
    file = tmp_path / "new" / "folder" / "a.json"
    disk.check_writable(file, None)
    assert not list(tmp_path.iterdir())
    write_json(file, 1)
    assert [one.name for one in file.parent.iterdir()] == ["a.json"]


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """What was there before stays."""
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "a.json"
    file.write_text("before")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BadData, match=f"{file}: cannot be written, the disk is full"):
        write_json(file, [])
    assert file.read_text() == "before" and [one.name for one in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_in_the_middle_of_a_stream(tmp_path):
    """The narrations' file or stdout: one line says which of them, and nothing complains at the end."""
    with pytest.raises(BadData, match="/dev/full: cannot be written, the disk is full"), ExitStack() as stack:
        Writers({"jsonl": "/dev/full"}, stack).sentence({"n": 0, "start": 0, "end": 1, "text": "You look."})
    code = "from support.common.errors import command_line\ncommand_line(lambda: print('x'))"
    with open("/dev/full", "w") as output:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr == "error: standard output: cannot be written, the disk is full\n"


def test_what_stdout_cannot_encode_is_a_question_mark():
    code = ("from support.common.errors import command_line\n"
            "command_line(lambda: print('a\\u0416\\udcffb'))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONIOENCODING": "cp1252"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "a??b\n", "")


def test_progress_in_a_pipe_is_a_line_a_minute(capsys, monkeypatch):
    """No bar, and nothing before the first minute is over."""
    now = [0.0]
    monkeypatch.setattr(disk.time, "monotonic", lambda: now[0])
    for item in progress(range(10), "encoding", unit="video"):
        now[0] += 25
    assert capsys.readouterr().err == ("encoding: 3 of 10 videos in 75 s, 0.04 a second\n"
                                       "encoding: 6 of 10 videos in 150 s, 0.04 a second\n"
                                       "encoding: 9 of 10 videos in 225 s, 0.04 a second\n")
    with progress(None, "streaming", unit="frame") as bar:
        bar.update(100)
        bar.set_postfix({"cache": "3 tokens"}, refresh=False)
        now[0] += 60
        bar.update(20)
    assert capsys.readouterr().err == "streaming: 120 frames in 60 s, 2 a second; cache 3 tokens\n"


def test_progress_on_a_terminal_is_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for shown, rank in ((True, "0"), (False, "1")):                # of several processes, one shows it
        monkeypatch.setenv("RANK", rank)
        assert list(progress("abc", "x", 3, "step", mininterval=0)) == ["a", "b", "c"]
        assert ("100%" in capsys.readouterr().err) == shown


@pytest.mark.parametrize("kind, good, bad", [
    (positive_int, ["1", "1000000000"], ["0", "1.5", "9" * 30]), (non_negative_int, ["0", "5000000"], ["-1", "9" * 30]),
    (positive_float, ["1e-9", "2"], ["0", "1e-300", "1e300", "nan"]), (non_negative, ["0"], ["-1e-9", "1e300", "inf"])])
def test_numbers_are_of_a_size_that_libraries_can_take(kind, good, bad):
    assert [kind(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


def test_a_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(tmp_path / "a.json") == [1]


def test_parts_of_killed_processes_are_removed(tmp_path):
    """And no others: neither those of a process that is writing now, nor young ones of another machine."""
    code = "import sys, time\nfrom pathlib import Path\nfrom support.common.disk import new_part\n" \
           "print(new_part(Path(sys.argv[1])).name, flush=True)\ntime.sleep(60)"
    line = [sys.executable, "-c", code, str(tmp_path / "a.json")]
    killed, writing = (subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2))
    parts = [process.stdout.readline().strip() for process in (killed, writing)]
    killed.kill()
    killed.communicate()
    elsewhere = {age: tmp_path / f".a.json.01234567-{killed.pid}-{age:08x}.part" for age in (60, 200_000)}
    earlier = tmp_path / ".a.json.89abcdef.part"                   # as they were called before
    users = tmp_path / ".a.json.part"
    for age, path in [*elsewhere.items(), (200_000, earlier), (200_000, users)]:
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    write_json(tmp_path / "a.json", [1])
    writing.kill()
    writing.communicate()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a.json", parts[1], elsewhere[60].name, users.name}
