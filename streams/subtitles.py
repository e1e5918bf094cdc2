"""Timed sentences as files: JSONL, SubRip (.srt), WebVTT (.vtt), and the trace of every frame."""
from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from pathlib import Path

from streams.sources import is_live, source_names
from support.common.disk import check_distinct, check_writable, is_number, naming, read_jsonl
from support.common.errors import BadData
from support.files.own_videos import NARRATIONS

FORMS = ("jsonl", "srt", "vtt", "trace", "state")      # options that name output files
Files = dict[str, str | None]                           # {format: path, or None}
# How the files of this program begin
BEGINS = {
    "jsonl": rb'\{"n": ',
    "trace": rb'\{"frame": ',
    "srt": rb"\d+\r?\n[\d:]+,\d",
    "vtt": rb"WEBVTT",
    "html": rb'<!doctype html>\n<html lang="en">\n<!-- The player and the live page',
}
# A whole cue without its empty line. Group 1 is its number
CUE = rb"(?:(\d+)\n)?[\d:]+[.,]\d{3} --> [\d:]+[.,]\d{3}\n.*"
TAIL = 2 ** 20          # bytes at the end of a file in which its last line or cue is looked for


def timestamp(seconds: float, separator: str = ".", digits: int = 1) -> str:
    """74.5 -> 00:01:14.5"""
    # rounded first, so that 59.96 becomes 00:01:00.0 and not 00:00:60.0
    ticks = round(seconds * 10 ** digits)
    whole_seconds, fraction = divmod(ticks, 10 ** digits)
    minutes, seconds = divmod(whole_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    clock = f"{hours:02}:{minutes:02}:{seconds:02}"
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
    """Writes the output files of one input: jsonl, srt, vtt, trace.

    Every line is flushed, so the files are valid whenever the stream stops. Texts must be single
    lines (support/common/text.py: one_line).

    paths       {format: path, or None}
    stack       closes the files
    source      the input; BadData if it is one of the files
    saved       what `written` returned at an earlier moment, from which the files continue
                (streams/suspend.py)
    live        the source is live, and cannot be seen again. All whole lines and cues in the files
                stay, and new ones are appended. The numbers of rows and cues (`n`, `frame`)
                continue from the last ones in the files, whatever they are in the stream
    """

    def __init__(self, paths: Files, stack: ExitStack, source: str = "",
                 saved: dict | None = None, live: bool = False):
        paths = {form: path for form, path in paths.items() if path}
        check_distinct(source, *paths.values())
        ends = {}
        if live:
            ends = {form: read_end(form, path) for form, path in paths.items()}
        # all files must be writable before one is emptied
        check_writable(*paths.values(), in_place=True)
        for path in paths.values():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            open(path, "a", encoding="utf-8").close()
        mode = "a" if saved or live else "w"
        self.files = {}
        for form, path in paths.items():
            # closing a file writes again what a full disk did not take; `naming` names the file then
            stack.enter_context(naming(path))
            self.files[form] = stack.enter_context(open(path, mode, encoding="utf-8"))

        self.live = live
        self.last_row_start = 0                 # bytes: where the last row of a live trace begins
        self.last_row: dict | None = None       # of the trace
        self.shift: dict[str, int] = {}         # what is added to the numbers of a row
        self.least_shift: dict[str, int] = {}   # of the stream before it was saved
        self.next_number = {"n": 0, "frame": 0}     # the first numbers that no row in the files has
        if saved:
            self.last_row = saved["last"]
            self.least_shift = saved.get("shift", {})
        if live:
            self.continue_after(ends)
        elif saved:
            for form, size in saved["bytes"].items():
                if os.path.getsize(paths[form]) > size:
                    self.files[form].truncate(size)
        if "vtt" in self.files and self.size("vtt") == 0:
            self.put("vtt", "WEBVTT\n\n")
        stack.callback(self.finish)

    def continue_after(self, ends: dict[str, End]) -> None:
        """Remove or complete a last line or cue that is not whole, and continue its numbers."""
        for form, end in ends.items():
            if end.size < end.whole_size:
                self.put(form, "\n" * (end.whole_size - end.size))
            elif end.size > end.whole_size:
                self.files[form].truncate(end.whole_size)
            for key, number in end.numbers.items():
                self.next_number[key] = max(self.next_number[key], number + 1)
        self.last_row = None                    # a live trace is written without delay

    def size(self, form: str) -> int:
        """Bytes of a file."""
        return os.fstat(self.files[form].fileno()).st_size

    def numbered(self, row: dict) -> dict:
        """A row with its numbers in the files.

        These are the numbers of its stream, unless the files of a live source have such rows
        already: rows of an earlier stream, or rows that came after the last save.
        """
        numbered = dict(row)
        for key, next_number in self.next_number.items():
            if key not in row:
                continue
            if key not in self.shift:           # this is the first row with such a number
                least = self.least_shift.get(key, 0)
                self.shift[key] = max(least, next_number - row[key])
            numbered[key] = row[key] + self.shift[key]
        return numbered

    def written(self) -> dict:
        """How far the files are.

        bytes       the size of each file
        ends        a hash of the last bytes of each
        last        the row of the trace that waits for the next row
        shift       what is added to the numbers of rows
        """
        return {
            "bytes": {form: self.size(form) for form in self.files},
            "ends": {form: hash_of_end(file.name, self.size(form))
                     for form, file in self.files.items()},
            "last": self.last_row,
            "shift": self.least_shift | self.shift,
        }

    def put(self, form: str, text: str) -> None:
        if form in self.files:
            with naming(self.files[form].name):
                self.files[form].write(text)
                self.files[form].flush()

    def sentence(self, row: dict) -> None:
        """Write a narration: n, start, end (seconds), text, and further fields of the JSONL line.

        A row with a "repeat" is no subtitle.
        """
        row = self.numbered(row)
        self.put("jsonl", json.dumps(row) + "\n")
        if row.get("repeat"):
            return
        start = row["start"]
        end = row["end"]
        text = row["text"]
        self.put("srt", srt_cue(row["n"], start, end, text))
        self.put("vtt", vtt_cue(start, end, text))

    def trace(self, row: dict) -> None:
        """Write a row of the trace, with at least "frame".

        The last frame may be decided twice; then its second row replaces the first. Therefore a row
        waits for the next one. A row of a live source would be lost when the process is killed, so
        it is written at once.
        """
        row = self.numbered(row)
        waits = self.last_row is not None
        replaces = waits and self.last_row["frame"] == row["frame"]
        if self.live and "trace" in self.files:
            if replaces:
                self.files["trace"].truncate(self.last_row_start)
            self.last_row_start = self.size("trace")
            self.put("trace", json.dumps(row) + "\n")
        elif waits and not replaces:
            self.put("trace", json.dumps(self.last_row) + "\n")
        self.last_row = row

    def finish(self) -> None:
        """Write the row that waits."""
        if self.last_row is not None and not self.live:
            self.put("trace", json.dumps(self.last_row) + "\n")
        self.last_row = None


# ---------------------------------------------------------------------- files that are there already

@dataclass
class End:
    """How a file of a live source ends.

    size            bytes
    whole_size      bytes with whole lines or cues only; one more than `size` if only the empty line
                    of the last cue is missing
    numbers         the numbers of the last line or cue
    """
    size: int = 0
    whole_size: int = 0
    numbers: dict[str, int] = field(default_factory=dict)


def read_end(form: str, path: str) -> End:
    """The End of a file; an empty End if the file is missing, or is no regular file.

    Raises BadData if this program has not written the file.
    """
    if not Path(path).is_file():
        return End()
    if not is_ours(form, path):
        raise BadData(f"{path}: is not what --{form} writes, and what is there is never "
                      f"overwritten by a live source; choose another name")
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        tail_start = file.seek(max(0, size - TAIL))
        tail = file.read()
    separator = b"\n" if form in ("jsonl", "trace") else b"\n\n"
    last_separator = tail.rfind(separator)
    whole = 0                                   # bytes of the tail
    if last_separator >= 0:
        whole = last_separator + len(separator)
    elif tail_start > 0:
        raise BadData(f"{path}: has no line in its last {TAIL} bytes; "
                      f"is it damaged? choose another name")
    if separator == b"\n\n" and re.fullmatch(CUE + rb"\n", tail[whole:]):
        tail += b"\n"                           # only the empty line was missing
        whole = len(tail)
    _, _, last = tail[:whole].rstrip(b"\n").rpartition(separator)
    return End(size, tail_start + whole, last_numbers(form, path, last))


def last_numbers(form: str, path: str, last: bytes) -> dict[str, int]:
    """The numbers of a file's last line or cue, for `Writers.numbered`."""
    if form == "srt":
        # A cue without words ends with its times, whose line break `last` lacks.
        match = re.fullmatch(CUE, last) or re.fullmatch(CUE, last + b"\n")
        if match and match[1]:
            return {"n": int(match[1]) - 1}
        return {}
    if form == "vtt" or not last:
        return {}
    try:
        row = json.loads(last)
        return {key: int(row[key]) for key in ("n", "frame") if key in row}
    except (ValueError, TypeError, RecursionError):
        raise BadData(f"{path}: its last line is damaged; "
                      f"delete that line, or choose another name") from None


def hash_of_end(path: str, size: int) -> str:
    """A hash of the last bytes of a file that has, or had, this size. "" if it is no regular file.
    """
    if not Path(path).is_file():
        return ""
    start = max(0, size - 4096)
    with open(path, "rb") as file:
        file.seek(start)
        return sha256(file.read(size - start)).hexdigest()


def is_ours(form: str, path: str) -> bool:
    """Whether a file is empty, or begins like a file of this program."""
    with open(path, "rb") as file:
        first = file.read(100)
    return not first or re.match(BEGINS[form], first) is not None


def check_replaced(source: str, files: Files) -> None:
    """BadData if an output of a recording would replace a file that must stay.

    That is a file that this program has not written, or a narration file beside the video, under
    its name: `train.py --data FOLDER` takes such a file for narrations that people wrote.
    """
    without_name = re.sub(r"(\.safetensors):.*", r"\1", source)
    video = Path(without_name).resolve()
    for form, path in files.items():
        if form not in BEGINS or not path:
            continue
        if not Path(path).is_file() or os.path.getsize(path) == 0:
            continue
        place = Path(path).resolve()
        beside_video = place.parent == video.parent and place.stem == video.stem
        if beside_video and place.suffix.lower() in NARRATIONS:
            raise BadData(f"{path}: is there already, and beside a video narrations of its name "
                          f"are taken for your own (train.py --data); choose another name or "
                          f"folder, or give --overwrite")
        if not is_ours(form, path):
            raise BadData(f"{path}: is there already, and is not what --{form} writes; "
                          f"choose another name, or give --overwrite")


def read_narrations(path: Path) -> list[dict]:
    """The rows of a file that stream.py --jsonl wrote: start, end (seconds), text, ...

    Raises BadData, with the number of the line, if a row is something else.
    """
    rows = read_jsonl(path)
    for number, row in enumerate(rows, 1):
        start = row.get("start")
        end = row.get("end")
        timed = is_number(start) and is_number(end) and 0 <= start <= end
        if not timed or not isinstance(row.get("text"), str):
            raise BadData(f'{path}, line {number}: expected {{"start": seconds, "end": seconds, '
                          f'"text": "..."}}, as stream.py --jsonl writes')
    return rows


# ---------------------------------------------------------------------- the command line

def outputs(args: Namespace) -> list[tuple[str, str, Files]]:
    """For each input of a command line: source, name, output files.

    The options name the files of a single input, which has no name. With several inputs, the
    options name folders. BadData if two inputs have the same name or a file in common, or if an
    output of a recording would replace a file that must stay (`check_replaced`).
    """
    options = {form: getattr(args, form) for form in FORMS}
    if len(args.input) == 1:
        inputs = [(args.input[0], "", options)]
    else:
        inputs = []
        for source, name in zip(args.input, source_names(args.input)):
            inputs.append((source, name, files_in_folders(name, options)))

    every_file = []
    for _, _, files in inputs:
        every_file += [file for file in files.values() if file]
    check_distinct(*every_file)
    for source, _, files in inputs:
        if is_live(source, getattr(args, "live", False)):
            continue
        check_distinct(source, *every_file)
        # a stream that continues from its state continues its files, too
        resumes = files["state"] and os.path.exists(files["state"])
        overwrite = getattr(args, "overwrite", False)
        if not resumes and not overwrite:
            check_replaced(source, files)
    return inputs


def files_in_folders(name: str, folders: Files) -> Files:
    """The output files of the input called `name`: {format: FOLDER/name.format}."""
    files = {}
    for form, folder in folders.items():
        suffix = "trace.jsonl" if form == "trace" else form
        files[form] = folder
        if folder:
            # evaluate.py reads %41 in the name of a .jsonl as A (support/common/disk.py: file_name)
            base = name.replace("%", "%25") if form == "jsonl" else name
            files[form] = f"{folder}/{base}.{suffix}"
    return files
