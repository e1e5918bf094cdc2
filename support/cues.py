"""Narrations that people write: subtitles (.srt, .vtt) and tables (.csv) as sentences in time.

    cue     a text on screen from `start` to `end` (seconds); as a narration it stands at its end, as in stream.py's
    .csv    time,text with or without that first line; times are seconds, or h:m:s

What is put right is counted in Notes (annotations.py); what cannot be is refused with file and line.
"""
from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from html import unescape
from io import StringIO
from pathlib import Path

from support.annotations import Notes
from support.common import BadData, one_line, read_text

MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|<\d[\d:.]*>|\{\\[^{}]*\}")                  # <i>, <v Ann>, <00:01.5>, {\an8}
CLOCK = re.compile(r"(?:(?:(\d{1,6}):)?(\d{1,6}):)?(\d{1,9}(?:[.,]\d{0,9})?)")
ENDS = re.compile(r"""[.!?…。！？]['")\]’”»]*$""")


@dataclass
class Cue:
    start: float
    end: float
    text: str


def read_cues(path: Path, notes: Notes) -> list[tuple[float, str]]:
    """(seconds, sentence) of a .srt, .vtt or .csv file, sorted. Raises BadData naming the line that is wrong."""
    cues = read_table(path) if path.suffix.lower() == ".csv" else read_subtitles(path, notes)
    ordered = sorted(cues, key=lambda cue: cue.start)
    notes.add("narrations that were not in order of time", sum(a is not b for a, b in zip(cues, ordered)))
    latest = 0.0
    for cue in ordered:
        notes.add("overlapping cues, each put at its end", int(cue.start < latest - 0.002))  # what rounding cannot do
        latest = max(latest, cue.end)
    rows = [(cue.end, as_sentence(cue.text, notes)) for cue in sorted(cues, key=lambda cue: cue.end)]
    return [(time, text) for time, text in rows if text]


def as_sentence(text: str, notes: Notes) -> str:
    """One line that ends as a sentence does; "" if there are no words."""
    text = one_line(text)
    if not any(map(str.isalnum, text)):
        notes.add("narrations without words left out")
        return ""
    if not ENDS.search(text):
        notes.add("sentences without a full stop given one")
        text = text.rstrip(" ,;:-–") + "."
    return text


def read_clock(text: str) -> float | None:
    """"1:02.5", "00:01:02,500" or "62.5" -> 62.5; None for anything else."""
    match = CLOCK.fullmatch(text.strip())
    if match is None:
        return None
    hours, minutes, rest = int(match[1] or 0), int(match[2] or 0), float(match[3].replace(",", "."))
    if match[2] and rest >= 60 or match[1] and minutes >= 60:
        return None
    return 3600 * hours + 60 * minutes + rest


def read_subtitles(path: Path, notes: Notes) -> list[Cue]:
    """The cues of a .srt or .vtt file in the order of the file; texts without markup."""
    lines, vtt = read_text(path).splitlines(), path.suffix.lower() == ".vtt"
    if vtt and not (lines and lines[0].startswith("WEBVTT")):
        raise BadData(f"{path}, line 1: a .vtt file begins with WEBVTT")
    cues, cue, skip = [], None, False                              # skip: inside the head, or a block without cues
    for n, line in enumerate(map(str.strip, lines), 1):
        named = n < len(lines) and "-->" in lines[n]               # the next line has a cue's times
        if not line:
            cue, skip = None, False
        elif skip:
            continue
        elif "-->" in line:
            cue = Cue(*read_times(line, f"{path}, line {n}"), "")
            cues.append(cue)
        elif cue is not None:
            cue.text += f" {line}" if not (named and line.isdecimal()) else ""
        elif vtt and (n == 1 or line.startswith(("NOTE", "STYLE", "REGION"))):
            skip = True
        elif not named:                                            # else it is the number or the name of a cue
            raise BadData(f"{path}, line {n}: expected a cue's number and times, not {line[:60]!r}; is there an empty "
                          f"line inside a text?")
    for cue in cues:
        text = MARKUP.sub("", cue.text)
        notes.add("cues with markup cleaned", int(text != cue.text))
        cue.text = unescape(text)
    return cues


def read_times(line: str, where: str) -> tuple[float, float]:
    """"00:01:02,500 --> 00:01:04,000", perhaps with settings after it -> (62.5, 64.0)"""
    match = re.fullmatch(r"(\S+)\s*-->\s*(\S+)(?:\s.*)?", line)
    start, end = map(read_clock, match.groups()) if match else (None, None)
    if start is None or end is None:
        raise BadData(f"{where}: expected times such as 00:01:02,500 --> 00:01:04,000, not {line[:60]!r}")
    if end < start:
        raise BadData(f"{where}: the cue ends before it begins")
    return start, end


def read_table(path: Path) -> list[Cue]:
    """The rows of a .csv file as cues without length. Without a first line that names columns, these are time, text;
    a "time" may be called "end"; other named columns are not read."""
    content = read_text(path)
    separator = re.match(r'\s*"?[\w:.]*(?:,\d+(?=[;\t]))?"?\s*([,;\t])', content)
    reader, columns, cues = csv.reader(StringIO(content), delimiter=separator[1] if separator else ","), None, []
    try:
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if not any(map(str.strip, row)):
                continue
            if columns is None:
                columns, named = columns_of(row, where)
                if named:
                    continue
            if len(row) != columns[2]:
                raise BadData(f"{where}: has {len(row)} columns, not {columns[2]}; quote a text that has commas")
            time, text = read_clock(row[columns[0]]), row[columns[1]]
            if time is None:
                raise BadData(f"{where}: the time must be seconds or h:m:s, not {row[columns[0]][:60]!r}")
            cues.append(Cue(time, time, text))
    except csv.Error as error:
        raise BadData(f"{path}, line {reader.line_num}: is not CSV ({error})") from None
    return cues


def columns_of(row: list[str], where: str) -> tuple[tuple[int, int, int], bool]:
    """The columns of time and text and the number of columns, from the first row; and whether it names them."""
    names = [cell.strip().lower() for cell in row]
    time = next((names.index(name) for name in ("time", "end") if name in names), None)
    if time is not None and "text" in names:
        return (time, names.index("text"), len(row)), True
    if len(row) != 2 or read_clock(row[0]) is None:
        raise BadData(f"{where}: expected time,text: a time in seconds or h:m:s, and a sentence (in quotes, if it has "
                      f"commas); or a first line that names the columns time and text")
    return (0, 1, 2), False
