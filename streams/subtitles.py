"""Timed sentences as files: JSONL, SubRip (.srt), WebVTT (.vtt), and the trace of every frame."""
from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from streams.sources import is_live, source_names
from support.common.disk import check_distinct, check_writable, is_number, naming, read_jsonl
from support.common.errors import BadData
from support.files.own_videos import NARRATIONS


def timestamp(seconds: float, separator: str = ".", digits: int = 1) -> str:
    """74.5 -> 00:01:14.5"""
    ticks = round(seconds * 10 ** digits)
    whole, part = divmod(ticks, 10 ** digits)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{separator}{part:0{digits}}"


def srt_cue(n: int, start: float, end: float, text: str) -> str:
    """Cue n >= 0. SubRip has no escapes: an arrow in the text, which would look like a time, is shortened."""
    return f"{n + 1}\n{timestamp(start, ',', 3)} --> {timestamp(end, ',', 3)}\n{text.replace('-->', '->')}\n\n"


def vtt_cue(start: float, end: float, text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"{timestamp(start, '.', 3)} --> {timestamp(end, '.', 3)}\n{text}\n\n"


# How a file begins that this program wrote
BEGINS = {"jsonl": rb'\{"n": ', "trace": rb'\{"frame": ', "srt": rb"\d+\r?\n[\d:]+,\d", "vtt": rb"WEBVTT"}
TAIL = 2 ** 20                              # bytes at the end of a file in which its last line or cue is looked for
CUE = rb"(?:(\d+)\n)?[\d:]+[.,]\d{3} --> [\d:]+[.,]\d{3}\n.*"     # all of a cue but its empty line


class Writers:
    """The files to be written, by format: jsonl, srt, vtt, trace. Every line is flushed, so they are valid
    whenever the stream stops. Texts must be single lines (support/common/disk.py: one_line). BadData if one is the `source`.
    before: what `written` said at an earlier moment, from which the files go on (suspend.py).
    live: of a source that cannot be seen again. Every whole line and cue that is in the files stays, and what comes is
    appended: its numbers (`n`, `frame`, those of cues) go on from the last ones, whatever they are in the stream."""

    def __init__(self, paths: dict[str, str | None], stack: ExitStack, source: str = "", before: dict | None = None,
                 live: bool = False):
        paths = {name: path for name, path in paths.items() if path}
        check_distinct(source, *paths.values())
        ends = {name: read_end(name, path) for name, path in paths.items()} if live else {}
        check_writable(*paths.values(), in_place=True)    # before one is emptied, all must be writable
        for path in paths.values():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            open(path, "a", encoding="utf-8").close()
        mode = "a" if before or live else "w"
        self.files = {}
        for name, path in paths.items():
            stack.enter_context(naming(path))             # closing it writes what a full disk did not take
            self.files[name] = stack.enter_context(open(path, mode, encoding="utf-8"))
        self.live, self.row_at = live, 0                  # row_at: where the last row of a live trace begins
        self.last: dict | None = before["last"] if before else None
        self.shift: dict[str, int] = {}                   # what is added to the numbers of a row; see `numbered`
        self.least = before.get("shift", {}) if before else {}
        self.following = {"n": 0, "frame": 0}             # the first numbers that no row in the files has
        if live:
            self.go_on(ends)
        else:
            for name, size in before["bytes"].items() if before else ():
                if os.path.getsize(paths[name]) > size:
                    self.files[name].truncate(size)
        if "vtt" in self.files and os.fstat(self.files["vtt"].fileno()).st_size == 0:
            self.put("vtt", "WEBVTT\n\n")
        stack.callback(self.finish)

    def go_on(self, ends: dict[str, End]) -> None:
        """Cut off half a last line or cue, and see from which numbers a live source goes on."""
        for name, end in ends.items():
            if end.size < end.whole:
                self.put(name, "\n" * (end.whole - end.size))
            elif end.size > end.whole:
                self.files[name].truncate(end.whole)
            for key, number in end.numbers.items():
                self.following[key] = max(self.following[key], number + 1)
        self.last = None                                  # rows of a live trace do not wait

    def numbered(self, row: dict) -> dict:
        """A row with the numbers that it has in the files: those of its stream, unless a live source's files have rows
        with these numbers already, of an earlier stream or of what came after the last saving."""
        for key in self.following.keys() & row.keys() - self.shift.keys():
            self.shift[key] = max(self.least.get(key, 0), self.following[key] - row[key])
        return row | {key: row[key] + shift for key, shift in self.shift.items() if key in row}

    def written(self) -> dict:
        """The bytes of each file, the row of the trace that waits for the next one, and what is added to numbers."""
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self.files.items()}
        return {"bytes": sizes, "last": self.last, "shift": self.least | self.shift}

    def put(self, name: str, text: str) -> None:
        if name in self.files:
            with naming(self.files[name].name):
                self.files[name].write(text)
                self.files[name].flush()

    def sentence(self, row: dict) -> None:
        """row: n, start, end (seconds), text, and any further fields of the JSONL line; a "repeat" is no subtitle."""
        row = self.numbered(row)
        self.put("jsonl", json.dumps(row) + "\n")
        if row.get("repeat"):
            return
        self.put("srt", srt_cue(row["n"], row["start"], row["end"], row["text"]))
        self.put("vtt", vtt_cue(row["start"], row["end"], row["text"]))

    def trace(self, row: dict) -> None:
        """row: at least "frame"; of two rows of one frame (the last frame may be decided twice) the second counts. So a
        row waits for the next one; that of a live source, which a kill would lose, is written at once."""
        row = self.numbered(row)
        again = self.last is not None and self.last["frame"] == row["frame"]
        if self.live and "trace" in self.files:
            if again:
                self.files["trace"].truncate(self.row_at)
            self.row_at = os.fstat(self.files["trace"].fileno()).st_size
            self.put("trace", json.dumps(row) + "\n")
        elif self.last is not None and not again:
            self.put("trace", json.dumps(self.last) + "\n")
        self.last = row

    def finish(self) -> None:
        if self.last is not None and not self.live:
            self.put("trace", json.dumps(self.last) + "\n")
        self.last = None


@dataclass
class End:
    """How a file of a live source ends: its size in bytes, the size with whole lines or cues alone (one more than the
    size if the last empty line is missing), and the numbers of the last one."""
    size: int = 0
    whole: int = 0
    numbers: dict[str, int] = field(default_factory=dict)


def read_end(form: str, path: str) -> End:
    """The End of a file; an empty one if it is not there, or no file on a disk. BadData if it is not ours."""
    if not Path(path).is_file():
        return End()
    if not is_ours(form, path):
        raise BadData(f"{path}: is not what --{form} writes, and what is there is never overwritten by a live source; "
                      f"choose another name")
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = file.seek(max(0, size - TAIL))
        tail = file.read()
    line_end = b"\n" if form in ("jsonl", "trace") else b"\n\n"
    at = tail.rfind(line_end)
    whole = at + len(line_end) if at >= 0 else 0
    rest = tail[whole:]
    if not whole and begin:
        raise BadData(f"{path}: has no line in its last {TAIL} bytes; is it damaged? choose another name")
    if line_end == b"\n\n" and re.fullmatch(CUE + rb"\n", rest):           # all but the empty line is there
        tail += b"\n"
        whole = len(tail)
    last = tail[:whole].rstrip(b"\n").rsplit(line_end, 1)[-1]
    return End(size, begin + whole, last_numbers(form, path, last))


def last_numbers(form: str, path: str, last: bytes) -> dict[str, int]:
    """The numbers of a file's last line or cue, as `Writers.numbered` needs them."""
    if form == "srt":
        match = re.fullmatch(CUE, last)
        return {"n": int(match[1]) - 1} if match and match[1] else {}
    if form == "vtt" or not last:
        return {}
    try:
        row = json.loads(last)
        return {key: int(row[key]) for key in ("n", "frame") if key in row}
    except (ValueError, TypeError, RecursionError):
        raise BadData(f"{path}: its last line is damaged; delete that line, or choose another name") from None


def is_ours(form: str, path: str) -> bool:
    """Does a file begin as those do that this program writes? An empty one does."""
    with open(path, "rb") as file:
        first = file.read(100)
    return not first or re.match(BEGINS[form], first) is not None


def check_replaced(source: str, files: dict[str, str | None]) -> None:
    """BadData if the outputs of a recording would replace what this program has not written, or narrations beside the
    video: there, under the video's name, `train.py --data FOLDER` looks for those that people wrote."""
    video = Path(re.sub(r"(\.safetensors):.*", r"\1", source)).resolve()
    for form, path in files.items():
        if form not in BEGINS or not path or not Path(path).is_file() or not os.path.getsize(path):
            continue
        place = Path(path).resolve()
        beside = place.parent == video.parent and place.stem == video.stem and place.suffix.lower() in NARRATIONS
        if beside:
            raise BadData(f"{path}: is there already, and beside a video narrations of its name are taken for your own "
                          f"(train.py --data); choose another name or folder, or give --overwrite")
        if not is_ours(form, path):
            raise BadData(f"{path}: is there already, and is not what --{form} writes; choose another name, or give "
                          f"--overwrite")


def read_narrations(path: Path) -> list[dict]:
    """The lines of stream.py's --jsonl: start, end (s), text, ... BadData names one that is not like that."""
    rows = read_jsonl(path)
    for n, row in enumerate(rows, 1):
        times = row.get("start"), row.get("end")
        if not all(map(is_number, times)) or not 0 <= times[0] <= times[1] or not isinstance(row.get("text"), str):
            raise BadData(f'{path}, line {n}: expected {{"start": seconds, "end": seconds, "text": "..."}}, as '
                          f'stream.py --jsonl writes')
    return rows


def outputs(args: Namespace) -> list[tuple[str, str, dict[str, str | None]]]:
    """(source, name, file of each format) of each of the inputs of a command line.

    One input has no name, and the options name its files; with several, they name folders. BadData if two inputs have
    the same name or a file in common, or if a recording's file would replace another one's (`check_replaced`).
    """
    forms, sources = ("jsonl", "srt", "vtt", "trace", "state"), args.input
    found = [(sources[0], "", {form: getattr(args, form) for form in forms})]
    if len(sources) > 1:
        found = several_outputs(sources, found[0][2])
    every_file = [file for _, _, files in found for file in files.values() if file]
    check_distinct(*every_file)
    for source, _, files in found:
        if is_live(source, getattr(args, "live", False)):
            continue
        check_distinct(source, *every_file)
        goes_on = files["state"] and os.path.exists(files["state"])
        if not goes_on and not getattr(args, "overwrite", False):
            check_replaced(source, files)
    return found


def several_outputs(sources: list[str],
                    folders: dict[str, str | None]) -> list[tuple[str, str, dict[str, str | None]]]:
    """See `outputs`."""
    names = source_names(sources)
    suffix = {"trace": "trace.jsonl"}
    return [(source, name, {form: folder and f"{folder}/{name}.{suffix.get(form, form)}"
                            for form, folder in folders.items()}) for source, name in zip(sources, names)]
