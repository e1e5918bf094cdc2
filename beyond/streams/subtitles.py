"""Timed sentences as files: JSONL, SubRip (.srt), WebVTT (.vtt), and the trace of every frame."""
import json
import os
from contextlib import AbstractContextManager, suppress
from hashlib import sha256
from html import escape
from pathlib import Path

from beyond.streams.inputs import WRITTEN, Input
from support.common.disk import naming
from support.common.errors import BadData
from support.common.progress import say
from support.common.text import one_line
from support.files.cues import srt_text

ENDS = {"jsonl": b"\n", "srt": b"\n\n", "vtt": b"\n\n", "trace": b"\n"}       # of a line or cue
TAIL = 2 ** 20          # bytes at the end of a file in which its last line or cue is looked for


def timestamp(seconds: float, separator: str = ".", digits: int = 1) -> str:
    """74.5 -> 00:01:14.5"""
    # rounded first, so that 59.96 becomes 00:01:00.0 and not 00:00:60.0
    whole, fraction = divmod(round(seconds * 10 ** digits), 10 ** digits)
    minutes, seconds = divmod(whole, 60)
    clock = f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"
    return f"{clock}{separator}{fraction:0{digits}}"


def srt_cue(n: int, start: float, end: float, text: str) -> str:
    """Cue n >= 0 of a SubRip file."""
    first = timestamp(start, ",", 3)
    last = timestamp(end, ",", 3)
    return f"{n + 1}\n{first} --> {last}\n{srt_text(text)}\n\n"


def vtt_cue(start: float, end: float, text: str) -> str:
    first = timestamp(start, ".", 3)
    last = timestamp(end, ".", 3)
    text = escape(one_line(text), quote=False)
    return f"{first} --> {last}\n{text}\n\n"


# ---------------------------------------------------------------------- writing

class Writers(AbstractContextManager):
    """Writes the output files of an input: jsonl, srt, vtt, trace. As a `with`, closes them.

    Every line is flushed, so the files are valid whenever the stream stops. A text is exact in
    jsonl. In vtt it is in one line (support/common/text.py: one_line), in srt it is what that form
    can hold (support/files/cues.py: srt_text).

    A recording's files begin anew, or go on from `saved`: what `written` returned at an earlier
    moment (beyond/streams/suspend.py). A live source's files are appended to.
    """

    def __init__(self, given: Input, saved: dict | None = None):
        self.files = {}
        for form in WRITTEN:
            if form in given.files:
                path = Path(given.files[form])
                path.parent.mkdir(parents=True, exist_ok=True)
                self.files[form] = open(path, "a", encoding="utf-8")
        # All files can be written: only now are they cut.
        for form, file in self.files.items():
            length = 0
            if given.source.is_live:
                length = None
            elif saved:
                length, _ = saved[form]
            cut(form, file.name, length)
            if form == "vtt" and os.fstat(file.fileno()).st_size == 0:
                self.put("vtt", "WEBVTT\n\n")

    def __exit__(self, *_) -> None:
        for form, file in self.files.items():
            try:
                with naming(file.name):
                    file.close()                # writes again what a full disk did not take
            finally:
                cut(form, file.name)

    def written(self) -> dict[str, tuple[int, str]]:
        """How far each file is: its bytes, and a hash of the last ones."""
        written = {}
        for form, file in self.files.items():
            with suppress(OSError):             # a pipe
                os.fsync(file.fileno())         # or a power cut may leave less than the state says
            size = os.fstat(file.fileno()).st_size
            written[form] = (size, hash_of_end(file.name, size))
        return written

    def put(self, form: str, text: str) -> None:
        """Write a text, if there is such a file."""
        if file := self.files.get(form):
            with naming(file.name):
                file.write(text)
                file.flush()

    def write(self, trace: dict, row: dict | None) -> None:
        """Write a row of the trace and the narration of its frame, if any: n, start, end (seconds),
        text, and further fields for the JSONL.

        The last frame may be decided twice; its last row of the trace counts.
        """
        self.put("trace", json.dumps(trace) + "\n")
        if row is not None:
            self.put("jsonl", json.dumps(row) + "\n")
            self.put("srt", srt_cue(row["n"], row["start"], row["end"], row["text"]))
            self.put("vtt", vtt_cue(row["start"], row["end"], row["text"]))


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
    """The length of a file up to its last whole line or cue. BadData if its line breaks are not
    those of this program: nothing of it would be whole.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        file.seek(max(0, size - TAIL))
        end = file.read()
    half = end.rpartition(ENDS[form])[2]
    if b"\r" in half:
        raise BadData(f"{path}: has other line breaks than those of this program (LF), which would "
                      f"append to it; choose another name")
    if half:
        say(f"{path}: its last line or cue is not whole, and is cut off")
    return size - len(half)


def written_since(given: Input, saved: dict[str, tuple[int, str]]) -> dict[str, int]:
    """How many lines or cues each file has that came after what `written` returned."""
    counts = dict.fromkeys(WRITTEN, 0)
    for form, (size, _) in saved.items():
        path = given.files.get(form)
        if path and os.path.isfile(path):
            with open(path, "rb") as file:
                file.seek(size)
                counts[form] = file.read().count(ENDS[form])
    return counts


def hash_of_end(path: str, size: int) -> str:
    """A hash of the last bytes of a file that has, or had, this size. "" if it is no regular file.
    """
    if not Path(path).is_file():
        return ""
    start = max(0, size - 4096)
    with open(path, "rb") as file:
        file.seek(start)
        return sha256(file.read(size - start)).hexdigest()
