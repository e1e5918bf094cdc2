"""Narrations that people write: subtitles (.srt, .vtt) and tables (.csv) as sentences in time.

    cue     a text that is on screen from `start` to `end` (seconds). As a narration it is placed at
            its end, as stream.py does
    .csv    rows time,text. A first line that names the columns is optional. Times are seconds or
            h:m:s

Corrections are counted in Notes (tracks.py). Other errors raise BadData with file and line.
"""
from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from html import unescape
from io import StringIO
from pathlib import Path

from support.common.disk import read_text
from support.common.errors import BadData
from support.common.text import one_line
from support.files.tracks import Notes

# <i>, <v Ann>, <00:01.5>, {\an8}
MARKUP = re.compile(r"</?[A-Za-z][^<>]*>|<\d[\d:.]*>|\{\\[^{}]*\}")
# hours, minutes, seconds; the first two are optional
CLOCK = re.compile(r"(?:(?:(\d{1,6}):)?(\d{1,6}):)?(\d{1,9}(?:[.,]\d{0,9})?)")
END_OF_SENTENCE = re.compile(r"""[.!?…。！？]['")\]’”»]*$""")
ROUNDING = 0.002                               # seconds; cues that overlap by less do not count


@dataclass
class Cue:
    """A text and its time on screen (seconds)."""
    start: float
    end: float
    text: str


def read_cues(path: Path, notes: Notes) -> list[tuple[float, str]]:
    """The (seconds, sentence) of a .srt, .vtt or .csv file, sorted by time.

    Raises BadData, which names the line, if the file is malformed.
    """
    if path.suffix.lower() == ".csv":
        cues = read_table(path)
    else:
        cues = read_subtitles(path, notes)

    by_start = sorted(cues, key=lambda cue: cue.start)
    moved = sum(1 for before, after in zip(cues, by_start) if before is not after)
    notes.add("narrations that were not in order of time", moved)

    latest_end = 0.0
    for cue in by_start:
        overlaps = cue.start < latest_end - ROUNDING
        notes.add("overlapping cues, each put at its end", int(overlaps))
        latest_end = max(latest_end, cue.end)

    narrations = []
    for cue in sorted(cues, key=lambda cue: cue.end):
        sentence = as_sentence(cue.text, notes)
        if sentence:
            narrations.append((cue.end, sentence))
    return narrations


def as_sentence(text: str, notes: Notes) -> str:
    """The text in one line and with a full stop at its end; "" if it has no words."""
    text = one_line(text)
    if not any(map(str.isalnum, text)):
        notes.add("narrations without words left out")
        return ""
    if not END_OF_SENTENCE.search(text):
        notes.add("sentences without a full stop given one")
        text = text.rstrip(" ,;:-–") + "."
    return text


def read_clock(text: str) -> float | None:
    """"1:02.5", "00:01:02,500" or "62.5" -> 62.5 (seconds); None for anything else."""
    match = CLOCK.fullmatch(text.strip())
    if match is None:
        return None
    hours = int(match[1] or 0)
    minutes = int(match[2] or 0)
    rest = float(match[3].replace(",", "."))
    # without a larger unit before it, a number may exceed 59
    if match[2] and rest >= 60:
        return None
    if match[1] and minutes >= 60:
        return None
    return 3600 * hours + 60 * minutes + rest


# --------------------------------------------------------------------------------------- subtitles

def read_subtitles(path: Path, notes: Notes) -> list[Cue]:
    """The cues of a .srt or .vtt file in the order of the file; their texts without markup."""
    lines = read_text(path).split("\n")
    is_vtt = path.suffix.lower() == ".vtt"
    if is_vtt and not lines[0].startswith("WEBVTT"):
        raise BadData(f"{path}, line 1: a .vtt file begins with WEBVTT")

    cues = []
    cue = None                                 # the cue whose text is being read
    in_skipped_block = False                   # the head of a .vtt file, or one of its NOTE blocks
    for number, line in enumerate(lines, 1):
        next_line_has_times = number < len(lines) and "-->" in lines[number]
        ends_cue = line == ""            # some texts have a line of one blank
        line = line.strip()
        if ends_cue:
            cue = None
            in_skipped_block = False
        elif in_skipped_block:
            continue
        elif "-->" in line:
            start, end = read_times(line, f"{path}, line {number}")
            cue = Cue(start, end, "")
            cues.append(cue)
        elif cue is not None:
            # some files have no empty line before the number of the next cue
            if not (next_line_has_times and line.isdecimal()):
                cue.text += f" {line}"
        elif is_vtt and (number == 1 or line.startswith(("NOTE", "STYLE", "REGION"))):
            in_skipped_block = True
        elif line and not next_line_has_times:  # otherwise, it is the number or name of a cue
            raise BadData(f"{path}, line {number}: expected a cue's number and times, "
                          f"not {line[:60]!r}; is there an empty line inside a text?")

    for cue in cues:
        text = MARKUP.sub("", cue.text)
        notes.add("cues with markup cleaned", int(text != cue.text))
        cue.text = unescape(text)
    return cues


def read_times(line: str, place: str) -> tuple[float, float]:
    """"00:01:02,500 --> 00:01:04,000" -> (62.5, 64.0). Settings after the times are ignored.

    place: file and line, for errors.
    """
    match = re.fullmatch(r"(\S+)\s*-->\s*(\S+)(?:\s.*)?", line)
    start = end = None
    if match:
        start = read_clock(match[1])
        end = read_clock(match[2])
    if start is None or end is None:
        raise BadData(f"{place}: expected times such as 00:01:02,500 --> 00:01:04,000, "
                      f"not {line[:60]!r}")
    if end < start:
        raise BadData(f"{place}: the cue ends before it begins")
    return start, end


# ------------------------------------------------------------------------------------------ tables

def read_table(path: Path) -> list[Cue]:
    """The rows of a .csv file as cues of length 0.

    The first line may name the columns: "time" (or "end") and "text" are read, others ignored.
    Without such a line, the columns are time and text.
    """
    content = read_text(path)
    # the separator follows the first cell, which may be a time with a decimal comma
    match = re.match(r'\s*"?[\w:.]*(?:,\d+(?=[;\t]))?"?\s*([,;\t])', content)
    separator = match[1] if match else ","
    # strict: an unbalanced quote is an error, and does not take in the lines that follow
    reader = csv.reader(StringIO(content), delimiter=separator, strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise BadData(f"{path}, line {reader.line_num}: is not CSV ({error})") from None
    if not rows:
        return []

    first_number, first = rows[0]
    names = [cell.strip().lower() for cell in first]
    time_name = "time" if "time" in names else "end"
    if time_name in names and "text" in names:
        time_column, text_column = names.index(time_name), names.index("text")
        rows = rows[1:]
    elif len(first) == 2 and read_clock(first[0]) is not None:
        time_column, text_column = 0, 1
    else:
        raise BadData(f"{path}, line {first_number}: expected time,text: a time in seconds or "
                      f"h:m:s, and a sentence (in quotes, if it has commas); or a first line that "
                      f"names the columns time and text")

    cues = []
    for number, row in rows:
        if len(row) != len(first):
            raise BadData(f"{path}, line {number}: has {len(row)} columns, not {len(first)}; "
                          f"quote a text that has commas")
        time = read_clock(row[time_column])
        if time is None:
            raise BadData(f"{path}, line {number}: the time must be seconds or h:m:s, "
                          f"not {row[time_column][:60]!r}")
        cues.append(Cue(time, time, row[text_column]))
    return cues
