"""Timed sentences as files: JSONL, SubRip (.srt), WebVTT (.vtt), and the trace of every frame."""
from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path

from streams.live import is_live
from support.common.disk import check_distinct, check_writable, naming
from support.common.errors import BadData
from support.files.own_videos import NARRATIONS

FORMS = ("jsonl", "srt", "vtt", "trace", "html", "state")      # options that name output files
WRITTEN = FORMS[:4]                                     # line by line, as the stream goes on
# How the files of this program begin
BEGINS = {
    "jsonl": rb'\{"n": ',
    "trace": rb'\{"frame": ',
    "srt": rb"\d+\r?\n[\d:]+,\d",
    "vtt": rb"WEBVTT",
    "html": rb'<!doctype html>\n<html lang="en">\n<!-- The player and the live page',
}
TAIL = 2 ** 20          # bytes at the end of a file in which its last line or cue is looked for


@dataclass
class Input:
    """One input of a command line, and where its narrations go.

    source      as given
    name        of its outputs; "" of a single input
    files       {one of FORMS: path, or None}
    live        its newest pictures count, and it cannot be read again
    """
    source: str
    name: str
    files: dict[str, str | None]
    live: bool = False


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
    """Writes the output files of an input: jsonl, srt, vtt, trace. As a context manager, closes them.

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
            if not os.path.isfile(file.name):   # a pipe, or a terminal
                continue
            if given.live:
                remove_half_line(form, file.name)
            elif saved:
                file.truncate(saved["bytes"][form])
            else:
                file.truncate(0)
        if "vtt" in self.files and self.size("vtt") == 0:
            self.put("vtt", "WEBVTT\n\n")

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_) -> None:
        self.finish()
        for file in self.files.values():
            with naming(file.name):             # closing writes again what a full disk did not take
                file.close()

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


def remove_half_line(form: str, path: str) -> None:
    """Cut off what comes after the last whole line or cue: a killed process may have left it."""
    separator = b"\n\n" if form in ("srt", "vtt") else b"\n"
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        _, _, half = file.read().rpartition(separator)
    os.truncate(path, size - len(half))


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


def check_ours(given: Input) -> None:
    """BadData if an output would be written into a file that must stay as it is.

    That is a file that this program has not written, or a narration file beside the video, under
    its name: `train.py --data FOLDER` takes such a file for narrations that people wrote.
    """
    video = Path(re.sub(r"(\.safetensors):.*", r"\1", given.source)).resolve()
    for form in BEGINS:
        path = given.files[form]
        if not path or not Path(path).is_file() or os.path.getsize(path) == 0:
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

def inputs_of(args: Namespace) -> list[Input]:
    """The inputs of a command line.

    The options name the output files of a single input, which has no name. With several inputs, the
    options name folders. BadData if two inputs have the same name or a file in common, or if an
    output cannot be written, or only into a file that must stay (`check_ours`).
    """
    options = {form: getattr(args, form) for form in FORMS}
    inputs = []
    for source in args.input:
        live = is_live(source, args.live)
        if len(args.input) == 1:
            inputs.append(Input(source, "", options, live))
            continue
        name = name_of(source)
        if name in [other.name for other in inputs]:
            raise BadData(f"several inputs are called {name}; rename one of them, or narrate "
                          f"it in another command, so that their outputs differ")
        inputs.append(Input(source, name, files_in_folders(name, options), live))

    outputs = [file for given in inputs for file in given.files.values() if file]
    for given in inputs:
        check_distinct("" if given.live else given.source, *outputs)
        for form, path in given.files.items():
            check_writable(path, in_place=form in WRITTEN)
        # a stream that continues from its state continues its files, too
        state = given.files["state"]
        resumes = state and os.path.exists(state)
        if given.live or not resumes and not args.overwrite:
            check_ours(given)
    return inputs


def name_of(source: str) -> str:
    """The name of an input's outputs: a.mp4 is called a, and a.safetensors:NAME is called NAME."""
    return Path(re.sub(r"\.safetensors:(.)", r"/\1", source)).stem


def files_in_folders(name: str, folders: dict[str, str | None]) -> dict[str, str | None]:
    """The output files of the input called `name`: {format: FOLDER/name.format}."""
    files = {}
    for form, folder in folders.items():
        suffix = "trace.jsonl" if form == "trace" else form
        files[form] = f"{folder}/{name}.{suffix}" if folder else None
    return files
