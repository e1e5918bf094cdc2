"""What all files share (common.py): how commands end, and files that appear whole."""
import argparse
import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from support import common
from support.common import (BadData, NotDownloaded, command_line, non_negative, positive_float, positive_int, read_json,
                            replacing, whole, write_json)
from helpers import ROOT


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
    code = "from support.common import command_line\ncommand_line(lambda: [print('x' * 100) for _ in range(10_000)])"
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
    common.write_tensors(file, {"x": torch.ones(3, 2).T}, {"about": "x"})
    plain.touch()
    assert torch.equal(load_file(file)["x"], torch.ones(2, 3)) and file.stat().st_mode == plain.stat().st_mode

    def full(*_):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(common, "save_file", full)
    with pytest.raises(BadData, match="a.safetensors: cannot be written .I/O error.*is the disk full"):
        common.write_tensors(file, {"x": torch.zeros(1)})
    assert torch.equal(load_file(file)["x"], torch.ones(2, 3)) and len(list(tmp_path.iterdir())) == 2


def test_unwritable_files_are_said(tmp_path):
    for file in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(BadData, match=str(file)):
            write_json(file, {})


@pytest.mark.parametrize("kind, good, bad", [
    (positive_int, ["1", "1000000000"], ["0", "1.5", "9" * 30]), (whole, ["0", "5000000"], ["-1", "9" * 30]),
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
    code = "import sys, time\nfrom support.common import new_part\nfrom pathlib import Path\n" \
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
