"""Timed sentences as files: JSONL, SubRip (.srt), WebVTT (.vtt), and the trace of every frame."""
from __future__ import annotations

import json
import os
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

from support.common import BadData, apart, is_number, read_jsonl
from support.sources import source_name


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


class Writers:
    """The files to be written, by format: jsonl, srt, vtt, trace. Every line is flushed, so they are valid
    whenever the stream stops. Texts must be single lines (common.py: one_line). BadData if one is the `source`.
    before: what `written` said at an earlier moment, from which the files go on (suspend.py)."""

    def __init__(self, paths: dict[str, str | None], stack: ExitStack, source: str = "", before: dict | None = None):
        paths = {name: path for name, path in paths.items() if path}
        apart(source, *paths.values())
        for path in paths.values():                       # before one is emptied, all must be writable
            open(path, "a", encoding="utf-8").close()
        mode = "a" if before else "w"
        self.files = {name: stack.enter_context(open(path, mode, encoding="utf-8")) for name, path in paths.items()}
        self.last: dict | None = before["last"] if before else None
        for name, size in before["bytes"].items() if before else ():
            if os.path.getsize(paths[name]) > size:
                self.files[name].truncate(size)
        if not before:
            self.put("vtt", "WEBVTT\n\n")
        stack.callback(self.finish)

    def written(self) -> dict:
        """The bytes of each file, and the row of the trace that waits for the next one."""
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self.files.items()}
        return {"bytes": sizes, "last": self.last}

    def put(self, name: str, text: str) -> None:
        if name in self.files:
            self.files[name].write(text)
            self.files[name].flush()

    def sentence(self, row: dict) -> None:
        """row: n, start, end (seconds), text, and any further fields of the JSONL line; a "repeat" is no subtitle."""
        self.put("jsonl", json.dumps(row) + "\n")
        if row.get("repeat"):
            return
        self.put("srt", srt_cue(row["n"], row["start"], row["end"], row["text"]))
        self.put("vtt", vtt_cue(row["start"], row["end"], row["text"]))

    def trace(self, row: dict) -> None:
        """row: at least "frame"; of two rows of one frame (the last frame may be decided twice) the second counts."""
        if self.last is not None and self.last["frame"] != row["frame"]:
            self.put("trace", json.dumps(self.last) + "\n")
        self.last = row

    def finish(self) -> None:
        if self.last is not None:
            self.put("trace", json.dumps(self.last) + "\n")
        self.last = None


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
    the same name.
    """
    forms, sources = ("jsonl", "srt", "vtt", "trace", "state"), args.input
    folders = {form: getattr(args, form) for form in forms}
    if len(sources) == 1:
        return [(sources[0], "", folders)]
    names = [source_name(source) for source in sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadData(f"several inputs are called {twice[0]}; rename one of them, or narrate it in another command, "
                      f"so that their outputs differ")
    for folder in filter(None, folders.values()):
        Path(folder).mkdir(parents=True, exist_ok=True)
    suffix = {"trace": "trace.jsonl"}
    return [(source, name, {form: folder and f"{folder}/{name}.{suffix.get(form, form)}"
                            for form, folder in folders.items()}) for source, name in zip(sources, names)]
