"""Timed sentences as files: JSONL, SubRip (.srt), WebVTT (.vtt), and the trace of every frame."""
from __future__ import annotations

import json
import os
import re
from hashlib import sha256
from html import escape
from pathlib import Path

from streams.inputs import WRITTEN, Input
from support.common.disk import naming
from support.common.progress import say

TAIL = 2 ** 20          # bytes at the end of a file in which its last line or cue is looked for


def timestamp(seconds: float, separator: str = ".", digits: int = 1) -> str:
    """74.5 -> 00:01:14.5"""
    # rounded first, so that 59.96 becomes 00:01:00.0 and not 00:00:60.0
    whole, fraction = divmod(round(seconds * 10 ** digits), 10 ** digits)
    minutes, seconds = divmod(whole, 60)
    clock = f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
    return f"{clock}{separator}{fraction:0{digits}}"


def srt_cue(n: int, start: float, end: float, text: str) -> str:
    """Cue n >= 0 of a SubRip file.

    SubRip has no escapes: an arrow in the text, which would look like a time, is shortened.
    """
    first = timestamp(start, ",", 3)
    last = timestamp(end, ",", 3)
    text = text.replace("-->", "->")
    return f"{n + 1}\n{first} --> {last}\n{text}\n\n"


def vtt_cue(start: float, end: float, text: str) -> str:
    first = timestamp(start, ".", 3)
    last = timestamp(end, ".", 3)
    text = escape(text, quote=False)
    return f"{first} --> {last}\n{text}\n\n"


# ---------------------------------------------------------------------- writing

class Writers:
    """Writes the output files of an input: jsonl, srt, vtt, trace. As a `with`, closes them.

    Every line is flushed, so the files are valid whenever the stream stops. Texts must be single
    lines (support/common/text.py: one_line).

    A recording's files begin anew, or go on from `saved`: what `written` returned at an earlier
    moment (streams/suspend.py). A live source's files are appended to.
    """

    def __init__(self, given: Input, saved: dict | None = None):
        self.files = {}
        self.last_row = None                    # of the trace; it waits for the next one
        if saved and not given.live:
            self.last_row = saved["last"]
        for form in WRITTEN:
            path = given.files.get(form)
            if path:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self.files[form] = open(path, "a", encoding="utf-8")
        # All files can be written: only now are they cut.
        for form, file in self.files.items():
            length = 0
            if given.live:
                length = None
            elif saved:
                length = saved["bytes"][form]
            cut(form, file.name, length)
        if "vtt" in self.files and self.size("vtt") == 0:
            self.put("vtt", "WEBVTT\n\n")

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_) -> None:
        try:
            self.finish()
        finally:
            for form in self.files:
                self.close(form)

    def close(self, form: str) -> None:
        file = self.files[form]
        try:
            with naming(file.name):
                file.close()                    # writes again what a full disk did not take
        finally:
            cut(form, file.name)

    def size(self, form: str) -> int:
        """Bytes of a file."""
        return os.fstat(self.files[form].fileno()).st_size

    def written(self) -> dict:
        """How far the files are.

        bytes       the size of each file
        ends        a hash of the last bytes of each
        last        the row of the trace that waits for the next row
        """
        sizes = {form: self.size(form) for form in self.files}
        ends = {form: hash_of_end(file.name, sizes[form]) for form, file in self.files.items()}
        return {"bytes": sizes, "ends": ends, "last": self.last_row}

    def put(self, form: str, text: str) -> None:
        file = self.files[form]
        with naming(file.name):
            file.write(text)
            file.flush()

    def sentence(self, row: dict) -> None:
        """Write a narration: n, start, end (seconds), text, and further fields for the JSONL."""
        if "jsonl" in self.files:
            self.put("jsonl", json.dumps(row) + "\n")
        if "srt" in self.files:
            self.put("srt", srt_cue(row["n"], row["start"], row["end"], row["text"]))
        if "vtt" in self.files:
            self.put("vtt", vtt_cue(row["start"], row["end"], row["text"]))

    def trace(self, row: dict) -> None:
        """Write a row of the trace, with at least "frame".

        The last frame may be decided twice; then its second row replaces the first. Therefore a row
        waits for the next one.
        """
        if self.last_row is not None and self.last_row["frame"] != row["frame"]:
            self.finish()
        self.last_row = row

    def finish(self) -> None:
        """Write the row that waits."""
        if self.last_row is not None and "trace" in self.files:
            self.put("trace", json.dumps(self.last_row) + "\n")
        self.last_row = None


def cut(form: str, path: str, length: int | None = None) -> None:
    """Cut a file to a length. None: to its last whole line or cue, as a killed process or a full
    disk may have left half a one. A pipe or a terminal stays as it is.
    """
    if not os.path.isfile(path):
        return
    if length is None:
        length = end_half(form, path)
    os.truncate(path, length)


def end_half(form: str, path: str) -> int:
    """The length of a file up to its last whole line or cue.

    What is not half of what this program writes, and lacks but the line break after it, gets one:
    a whole cue, as an editor leaves it, and lines that end otherwise.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(max(0, size - TAIL))
        end = file.read()
    are_cues = form in ("srt", "vtt")
    breaks = list(re.finditer(rb"(?:\r?\n){2,}" if are_cues else rb"\n", end))
    half = end[breaks[-1].end() if breaks else 0:]
    if not half:
        return size
    is_whole = re.search(rb"-->.*\n(?:.+\n)+\Z", half) if are_cues else is_json(half)
    if is_whole or b"\r" in half:               # this program writes no \r
        with open(path, "ab") as file:
            file.write(b"\n" if is_whole else b"\n\n")
        return os.path.getsize(path)
    say(f"{path}: its last line or cue is not whole, and is cut off")
    return size - len(half)


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def hash_of_end(path: str, size: int) -> str:
    """A hash of the last bytes of a file that has, or had, this size. "" if it is no regular file.
    """
    if not Path(path).is_file():
        return ""
    start = max(0, size - 4096)
    with open(path, "rb") as file:
        file.seek(start)
        return sha256(file.read(size - start)).hexdigest()
