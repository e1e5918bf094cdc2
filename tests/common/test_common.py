"""support/common: how commands end, files that appear whole, progress, options, texts."""
import argparse
import errno
import json
import os
import re
import resource
import subprocess
import sys
import time
import unicodedata
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import unquote

import pytest
import torch
from safetensors.torch import load_file

from forks import Forked
from helpers import ROOT
from beyond.streams.inputs import Input
from beyond.streams.subtitles import Writers
from support.common.disk import (
    check_writable, file_name, read_json, read_jsonl, read_text, replacing, write_json,
    write_tensors,
)
from support.common.errors import BadData, NotDownloaded, command_line
from support.common.options import in_range, positive_int
from support.common.progress import progress
from support.common.text import one_line, without_secrets
from support.files.sources import source_of

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@pytest.mark.parametrize("error, code, line", [
    (None, 0, ""), (BadData("two\nlines of a\x1b[31mred.mp4"), 1, "error: two lines of a[31mred.mp4\n"),
    (NotDownloaded("two\nlines"), 1, "error: two\nlines\n"),
    (RuntimeError("[enforce fail] you tried to allocate memory\nat"), 1,
     "error: out of memory ([enforce fail] you tried to allocate memory); "
     "use a smaller model or --dtype bfloat16\n"),
    (FileNotFoundError(2, "No such file", "x.y"), 1, "error: x.y: No such file\n"),
    (OSError("hub: no\n such model"), 1, "error: hub: no such model\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
])
def test_exit_codes(capsys, error, code, line):
    with pytest.raises(SystemExit) as exited:
        command_line(Mock(side_effect=error))
    assert exited.value.code == code and capsys.readouterr().err == line
    with pytest.raises(ZeroDivisionError):     # a bug keeps its traceback
        command_line(lambda: 1 / 0)


def test_an_end_at_once_leaves_no_semaphore_and_loses_no_line():
    """Python says so where processes are not forked: on macOS, and on Linux from 3.14 on. What is
    printed waits in a buffer where it goes to a pipe."""
    code = ("import multiprocessing, support.common.errors as errors\n"
            "from support.common.progress import say\n"
            "multiprocessing.set_start_method('spawn')\n"
            "errors.end_at_once()\n"
            "def main():\n    say('said')\n    print('told')\n    raise errors.BadData('no')\n"
            "errors.command_line(main)")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                         env=os.environ | {"PYTHONUNBUFFERED": ""})
    assert (run.stdout, run.stderr) == ("told\n", "said\nerror: no\n")


def run_code(main: str, **how) -> subprocess.CompletedProcess:
    code = f"from support.common.errors import command_line\ncommand_line(lambda: {main})"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, **how)


def test_a_closed_pipe_is_quiet():
    reading, writing = os.pipe()
    os.close(reading)
    process = run_code("print('x')", stdout=writing)
    os.close(writing)
    assert process.returncode == 141 and process.stderr == b""


@needs_full
def test_what_stderr_does_not_take_ends_nothing(tmp_path):
    """A log on a full disk: the work goes on, in all threads, and its exit code is its own."""
    code = ("import os, sys, threading; from support.common.errors import command_line\n"
            "from support.common.progress import progress, say\n"
            "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"
            "def main():\n"
            "    say('x' * 100_000), say('y'), print('z', file=sys.stderr, flush=True)\n"
            "    list(progress(range(9)))\n"
            "    thread = threading.Thread(target=lambda: say('a') or os.mkdir('said'))\n"
            "    thread.start(), thread.join(), os.mkdir('done')\n"
            "command_line(main)")
    code, _ = Forked(["-c", code], tmp_path, os.environ).end()
    assert code == 0 and sorted(path.name for path in tmp_path.iterdir()) == ["done", "said"]


def test_characters_that_stdout_cannot_encode_are_question_marks():
    process = run_code(r"print('a\u0416\udcffb')", stdout=subprocess.PIPE,
                       env=os.environ | {"PYTHONIOENCODING": "cp1252"})
    assert (process.returncode, process.stdout.split(), process.stderr) == (0, [b"a??b"], b"")


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, [1])
    with pytest.raises(ZeroDivisionError):
        with replacing(file) as part:
            part.write_text("half")
            1 / 0
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE):
        with pytest.raises(BadData, match=f"{file}: cannot be written .*; is there room"):
            with replacing(file):
                raise OSError(number, os.strerror(number))
    with pytest.raises(FileNotFoundError, match="other"):      # of another file, which is read
        with replacing(file):
            open(tmp_path / "other")
    assert file.read_text() == "[\n 1\n]\n"
    assert list(tmp_path.iterdir()) == [file]

    code = ("import os; from support.common.disk import replacing\n"
            f"with replacing({str(file)!r}): os._exit(7)")
    assert Forked(["-c", code], ROOT, os.environ).end()[0] == 7
    assert len([*tmp_path.iterdir()]) == 2
    with replacing(file) as part:
        write_json(file, [2])                  # another one at the same time leaves this one alone
        part.write_text("3")
    assert file.read_text() == "3" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", [255 * "a", 85 * "厨", "new/folder/a", "link"])
def test_where_a_file_is_written(tmp_path, monkeypatch, name):
    """Its folders are made, a link stays, no disk needs to know rights. After a power cut, an empty
    file would stand in its place, were it not on the disk before it has its name."""
    events = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda file: events.append(os.fstat(file).st_size))
    monkeypatch.setattr(os, "replace", lambda *args: events.append("replaced") or replace(*args))
    monkeypatch.setattr(os, "chmod", Mock(side_effect=PermissionError(errno.EPERM, "")))
    (tmp_path / "link").symlink_to("b")
    check_writable(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["link"]
    for content in (1, 2):
        write_json(tmp_path / name, content)
        assert read_json(tmp_path / name) == content
    assert events == 2 * [2, "replaced"] and (tmp_path / "link").is_symlink()


@contextmanager
def no_room():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_of_tensors_is_as_other_files(tmp_path):
    file = tmp_path / "a.safetensors"
    write_tensors(file, {"x": torch.ones(3, 2).T}, {"about": "x"})
    plain = tmp_path / "plain"
    plain.touch()
    assert file.stat().st_mode == plain.stat().st_mode
    with no_room(), pytest.raises(BadData, match="a.safetensors: cannot be written .*is there room"):
        write_tensors(file, {"x": torch.zeros(1000)})
    assert torch.equal(load_file(file)["x"], torch.ones(2, 3))
    assert sorted(tmp_path.iterdir()) == [file, plain]


def test_no_output_ends_in_half_a_line(tmp_path):
    given = Input(source_of(""), "", {"jsonl": str(tmp_path / "a.jsonl"), "trace": str(tmp_path / "b.jsonl")})
    with no_room(), pytest.raises(BadData, match="[ab].jsonl: cannot be written .*too large"):
        with Writers(given) as writers:
            for n in range(100):
                writers.write({"frame": n}, {"n": n, "start": n, "end": n, "text": "You look."})
    rows = read_jsonl(tmp_path / "a.jsonl")
    assert [row["n"] for row in rows] == list(range(len(rows)))
    assert len(read_jsonl(tmp_path / "b.jsonl")) == len(rows) + 1


@needs_full
def test_a_full_disk_in_the_middle_of_a_stream():
    with open("/dev/full", "w") as output:
        process = run_code("print('x')", stdout=output, text=True)
    assert process.returncode == 1
    assert process.stderr == "error: standard output: cannot be written, the disk is full\n"


@pytest.mark.parametrize("name", ["folder", "pipe", "file/folder/a", "-"])
def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, name):
    """Asked before and when it is written. A pipe stays a pipe, and so would /dev/null."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for write in (check_writable, lambda path: write_json(path, 1)):
        with pytest.raises(BadData, match=f"{name}.*(is a folder, a device|cannot be written)"):
            write(name)
    assert (tmp_path / "pipe").is_fifo()


def test_what_json_may_hold(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(tmp_path / "a.json") == [1]
    rows = [{"text": "one\u2028two\x85"}, {"text": ""}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    for end in ("", "\n", "\n\n"):
        (tmp_path / "a.jsonl").write_text("\n".join(lines) + end, encoding="utf-8")
        assert read_jsonl(tmp_path / "a.jsonl") == rows


@pytest.mark.parametrize("encoding", ["latin1", "shift_jis", "iso-2022-jp", "utf-16-le"])
def test_no_text_is_garbled(tmp_path, encoding):
    for text in ("You wash it.", "Öffne.", "赤いカップを洗う。", "설거지를 한다."):
        content = text.encode(encoding, "ignore")
        (tmp_path / "a.srt").write_bytes(content)
        try:
            assert read_text(tmp_path / "a.srt") == content.decode(encoding) and content.isascii()
        except BadData as error:
            assert "a.srt: is not UTF-8 text (" in str(error)


def test_what_stands_in_place_of_a_file_is_named(tmp_path):
    file = tmp_path / "a.json"
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '0'}\nsize 999\n".encode()
    for content, words in ((b"", "expected JSON (JSONDecodeError: "), (pointer, "is a Git LFS pointer"),
                           (b"fine" * 2000 + b"\xff", "is not UTF-8 text (invalid start byte at byte 8000"),
                           (b"[1", "expected JSON (JSONDecodeError: "),
                           (b"[-Infinity]", "expected JSON (ValueError: -Infinity is no number")):
        file.write_bytes(content)
        with pytest.raises(BadData, match=re.escape(f"{file}: {words}")):
            read_json(file)


def test_what_is_taken_out_of_a_text():
    """Of all characters, those that terminals obey, and no other; line breaks become blanks."""
    for code in range(0x10000):
        character = chr(code)
        bidirectional = 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
        expected = f"a{character}b"
        if character == " " or len(f"a{character}b".splitlines()) > 1 or character in "\t\x1f":
            expected = "a b"
        elif unicodedata.category(character) in ("Cc", "Cs") or bidirectional:
            expected = "ab"
        assert one_line(expected) == one_line(f"a{character}b") == expected, hex(code)


@pytest.mark.parametrize("name", ["a b", "a/b", "100%", "..", "厨" * 60, "厨/" * 40])
def test_names_of_videos_are_names_of_files(tmp_path, name):
    file = tmp_path / f"{file_name(name)}.jsonl"
    file.touch()
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert unquote(file.stem) == name


def test_progress_in_a_pipe_is_a_line_a_minute(capsys, monkeypatch):
    """No bar that moves, and nothing if all is done within the first minute."""
    monkeypatch.setattr("support.common.progress.EVERY", 0.2)
    assert list(progress("abc", "short", unit="step")) == ["a", "b", "c"]
    with progress(None, "long", 100, "step") as bar:
        for _ in range(100):
            time.sleep(0.005)
            bar.update(1)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 6
    assert all(line.startswith("long: ") and "/100 [" in line for line in lines)


@pytest.mark.parametrize("kind, good, bad", [
    (positive_int, ["1", "1000000000"], ["0", "1.5", "9" * 30]),
    (in_range(float, 0, 1e9), ["0", "1e-9"], ["-1e-9", "1e300", "inf", "nan"]),
])
def test_numbers_are_of_a_size_that_libraries_can_take(kind, good, bad):
    assert [kind(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


@pytest.mark.parametrize("source, shown", [
    ("rtsp://u:S/EC@R?E=1&T#@a:554/b", "rtsp://a:554/..."),
    ("http://u%3ASECRET%40a/", "http://a/..."),
    ("http://a?token=SECRET", "http://a/..."),
    ("rtsp://[::1]:554/1", "rtsp://[::1]:554/..."),
    ("lavfi:movie=http://u:SECRET@a/b", "lavfi:movie=http://a/..."),
    ("a@b.mp4", "a@b.mp4"),
    ("lavfi:a=b:c=d@e", "lavfi:a=b:c=d@e"),
])
def test_of_an_address_only_the_host_is_shown(source, shown):
    assert without_secrets(source) == without_secrets(shown) == shown


def test_a_name_that_stands_twice_is_refused(tmp_path):
    file = tmp_path / "x"
    file.write_text('{"v": [{"a": 1, "b": 2, "a": 3}]}\n')
    for read in (read_json, read_jsonl):
        with pytest.raises(BadData, match=f"{file}.* 'a' stands twice"):
            read(file)
