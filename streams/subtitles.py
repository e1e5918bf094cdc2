"""Timed sentences as files: JSONL, SubRip (.srt), WebVTT (.vtt), and the trace of every frame."""
from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from contextlib import ExitStack
from hashlib import sha256
from html import escape
from pathlib import Path

from streams.live import is_live
from support.common.disk import check_distinct, check_writable, naming
from support.common.errors import BadData
from support.files.own_videos import NARRATIONS

FORMS = ("jsonl", "srt", "vtt", "trace", "html", "state")      # options that name output files
Files = dict[str, str | None]                           # {format: path, or None}
# How the files of this program begin
BEGINS = {
    "jsonl": rb'\{"n": ',
    "trace": rb'\{"frame": ',
    "srt": rb"\d+\r?\n[\d:]+,\d",
    "vtt": rb"WEBVTT",
    "html": rb'<!doctype html>\n<html lang="en">\n<!-- The player and the live page',
}
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
    live        the source is live, and cannot be seen again: the files are appended to
    """

    def __init__(self, paths: Files, stack: ExitStack, source: str = "",
                 saved: dict | None = None, live: bool = False):
        paths = {form: path for form, path in paths.items() if path}
        check_distinct(source, *paths.values())
        check_writable(*paths.values(), in_place=True)
        self.files = {}
        self.last_row = None                    # of the trace; it waits for the next one
        if saved and not live:
            self.last_row = saved["last"]
        for form, path in paths.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # closing a file writes again what a full disk did not take; `naming` names the file then
            stack.enter_context(naming(path))
            self.files[form] = stack.enter_context(open(path, "a", encoding="utf-8"))
        # all files can be written: only now are they emptied
        for form, file in self.files.items():
            if not os.path.isfile(file.name):   # a pipe, or a terminal
                continue
            if live:
                file.truncate(whole_size(form, file.name))
            elif saved:
                file.truncate(saved["bytes"][form])
            else:
                file.truncate(0)
        if "vtt" in self.files and self.size("vtt") == 0:
            self.put("vtt", "WEBVTT\n\n")
        stack.callback(self.finish)

    def size(self, form: str) -> int:
        """Bytes of a file."""
        return os.fstat(self.files[form].fileno()).st_size

    def written(self) -> dict:
        """How far the files are.

        bytes       the size of each file
        ends        a hash of the last bytes of each
        last        the row of the trace that waits for the next row
        """
        return {
            "bytes": {form: self.size(form) for form in self.files},
            "ends": {form: hash_of_end(file.name, self.size(form))
                     for form, file in self.files.items()},
            "last": self.last_row,
        }

    def put(self, form: str, text: str) -> None:
        with naming(self.files[form].name):
            self.files[form].write(text)
            self.files[form].flush()

    def sentence(self, row: dict) -> None:
        """Write a narration: n, start, end (seconds), text, and further fields of the JSONL line.

        A row with a "repeat" is no subtitle.
        """
        if "jsonl" in self.files:
            self.put("jsonl", json.dumps(row) + "\n")
        if row.get("repeat"):
            return
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


def whole_size(form: str, path: str) -> int:
    """Bytes of a file up to its last whole line or cue: a killed process may have left half of one.
    """
    separator = b"\n\n" if form in ("srt", "vtt") else b"\n"
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        tail_start = file.seek(max(0, size - TAIL))
        tail = file.read()
    place = tail.rfind(separator)
    if place < 0:
        return tail_start
    return tail_start + place + len(separator)


def hash_of_end(path: str, size: int) -> str:
    """A hash of the last bytes of a file that has, or had, this size. "" if it is no regular file.
    """
    if not Path(path).is_file():
        return ""
    start = max(0, size - 4096)
    with open(path, "rb") as file:
        file.seek(start)
        return sha256(file.read(size - start)).hexdigest()


# ---------------------------------------------------------------------- files that are there already

def is_ours(form: str, path: str) -> bool:
    """Whether a file begins like a file of this program."""
    with open(path, "rb") as file:
        return re.match(BEGINS[form], file.read(100)) is not None


def check_ours(source: str, files: Files) -> None:
    """BadData if an output would be written into a file that must stay as it is.

    That is a file that this program has not written, or a narration file beside the video, under
    its name: `train.py --data FOLDER` takes such a file for narrations that people wrote.
    """
    video = Path(re.sub(r"(\.safetensors):.*", r"\1", source)).resolve()
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


# ---------------------------------------------------------------------- the command line

def outputs(args: Namespace) -> list[tuple[str, str, Files]]:
    """For each input of a command line: source, name, output files.

    The options name the files of a single input, which has no name. With several inputs, the
    options name folders. BadData if two inputs have the same name or a file in common, or if an
    output would be written into a file that must stay (`check_ours`).
    """
    options = {form: getattr(args, form) for form in FORMS}
    if len(args.input) == 1:
        inputs = [(args.input[0], "", options)]
    else:
        names = [name_of(source) for source in args.input]
        for name in names:
            if names.count(name) > 1:
                raise BadData(f"several inputs are called {name}; rename one of them, or narrate "
                              f"it in another command, so that their outputs differ")
        inputs = [(source, name, files_in_folders(name, options))
                  for source, name in zip(args.input, names)]

    every_file = []
    for _, _, files in inputs:
        every_file += [file for file in files.values() if file]
    for source, _, files in inputs:
        live = is_live(source, args.live)
        check_distinct("" if live else source, *every_file)
        # a stream that continues from its state continues its files, too
        resumes = files["state"] and os.path.exists(files["state"])
        if live or not resumes and not args.overwrite:
            check_ours(source, files)
    return inputs


def name_of(source: str) -> str:
    """The name of an input's outputs: a.mp4 is called a, and a.safetensors:NAME is called NAME."""
    return Path(re.sub(r"\.safetensors:(.)", r"/\1", source)).stem


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
