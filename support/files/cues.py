"""Narrations that people write, each form by its specification: subtitles (.srt, .vtt) and tables
(.csv) as sentences in time.

    .srt    cues with an empty line between them: a number, a line with the times, lines of text
    .vtt    the same, as https://www.w3.org/TR/webvtt1 has it: a head, names in place of numbers,
            blocks of NOTE, STYLE and REGION, references such as &lt;
    .csv    as RFC 4180 has it; a first line names time,text or start,end,text. Rows may stand in
            any order

A cue counts at its end, as stream.py places a narration. Its lines are joined, markup is taken out,
and a text is in one line (support/common/text.py: one_line); else it is as it is written. What is
not as it is read raises BadData with the file and a line: a cue's first, a table row's last.
"""
import csv
import re
from collections.abc import Iterator
from html import unescape
from io import StringIO
from operator import attrgetter
from pathlib import Path

from support.common.disk import read_text
from support.common.errors import BadData
from support.common.text import one_line, seconds_of
from support.files.sentences import Notes, Sentence

READ = {
    ".srt": "cues with an empty line between them, each a number, a line such as 00:00:01,500 --> "
            "00:00:02,000, and a text; starts do not go back",
    ".vtt": "a line WEBVTT, and, with empty lines between them, cues: a line such as 00:01.500 --> "
            "00:02.000, and a text, with & and < as &amp; and &lt;; starts do not go back",
    ".csv": "a first line time,text or start,end,text, and such rows; times are seconds or h:m:s, "
            "a text with a comma stands in quotes",
}
# hours, minutes, seconds
CLOCKS = {
    ".srt": r"([0-9]{2,6}):([0-5][0-9]):([0-5][0-9],[0-9]{3})",
    ".vtt": r"(?:([0-9]{2,6}):)?([0-5][0-9]):([0-5][0-9]\.[0-9]{3})",
    ".csv": r"([0-9]{1,6}):([0-5]?[0-9]):([0-5]?[0-9](?:\.[0-9]*)?)",
}
SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]*)?")
ARROW = r"[ \t]+-->[ \t]+"
# such as align:start of .vtt, and X1:40 of .srt
SETTINGS = r"(?:[ \t]+(?:align|line|position|region|size|vertical|[XY][12]):\S+)*[ \t]*"
# an arrow in them would be that of the next cue, without an empty line before it
LINES = r"((?:\n(?!.*-->).*)*)"
CUES = {                                       # the times (six groups), and the lines of the text
    ".srt": re.compile(r"[0-9]+\n" + CLOCKS[".srt"] + ARROW + CLOCKS[".srt"] + SETTINGS + LINES),
    ".vtt": re.compile(r"(?:(?!.*-->).*\n)?" + CLOCKS[".vtt"] + ARROW + CLOCKS[".vtt"] + SETTINGS
                       + LINES),
}
HEAD = re.compile(r"WEBVTT(?:[ \t].*)?" + LINES)
OTHER_BLOCK = re.compile(r"(?:NOTE|STYLE|REGION)(?:[ \t](?!.*-->).*)?" + LINES)
MARKUP = {
    ".srt": re.compile(r"(?i)</?[bius]>|<font[^<>\n]*>|</font>|\{\\[^{}\n]*\}"),
    ".vtt": re.compile(r"</?(?:[bciuv]|lang|rt|ruby)(?:[. \t][^<>]*)?>|<[0-9:.]+>"),
}
# .srt has no escapes: readers, FFmpeg's among them, take <..> and {..} for markup, \N for a new line
WIDE = str.maketrans("<>{}\\", "\uff1c\uff1e\uff5b\uff5d\uff3c")
COLUMNS = ["time", "text"], ["start", "end", "text"]


def read_cues(path: Path, notes: Notes) -> list[Sentence]:
    """The sentences of a .srt, .vtt or .csv file, sorted by time."""
    read = read_table if path.suffix.lower() == ".csv" else read_subtitles
    return sorted(read(path, notes), key=attrgetter("time"))


def check_line(is_right, path: Path, line: int) -> None:
    if not is_right:
        raise BadData(f"{path}, line {line}: expected {READ[path.suffix.lower()]}")


# --------------------------------------------------------------------------------------- subtitles


def read_subtitles(path: Path, notes: Notes) -> Iterator[Sentence]:
    """The cues of a .srt or .vtt file at their ends, in the order of the file."""
    form = path.suffix.lower()
    blocks = blocks_of(read_text(path))
    if form == ".vtt":
        line, head = next(blocks, (1, ""))
        check_line(line == 1 and HEAD.fullmatch(head), path, 1)

    start = 0.0
    shown = []                                 # its lines
    repeating = 0
    for line, block in blocks:
        if form == ".vtt" and OTHER_BLOCK.fullmatch(block):
            continue
        cue = CUES[form].fullmatch(block)
        check_line(cue, path, line)
        *clocks, lines = cue.groups()
        start_before, start = start, seconds_of(clocks[:3])
        end = seconds_of(clocks[3:])
        text = MARKUP[form].sub("", lines)
        if form == ".vtt":
            # up to the next ">", all is lost that comes after a "<"
            check_line("<" not in text, path, line)
            text = unescape(text)
        check_line(start_before <= start <= end, path, line)

        shown_before, shown = shown, text.split("\n")
        repeating += any(words.strip() and words in shown_before for words in shown)
        yield Sentence(end, one_line(text))
    notes.add("cues that repeat a line of the cue before (do captions roll?)", repeating, path.name)


def blocks_of(content: str) -> Iterator[tuple[int, str]]:
    """(the number of its first line, the text) of what stands between empty lines."""
    block = []
    for number, line in enumerate([*content.split("\n"), ""], 1):
        if line:
            block.append(line)
        elif block:
            yield number - len(block), "\n".join(block)
            block = []


def srt_text(text: str) -> str:
    """What an .srt file can hold of a text: WIDE forms of what readers would not take for text."""
    return one_line(text).translate(WIDE)


# ------------------------------------------------------------------------------------------ tables


def read_table(path: Path, notes: Notes) -> Iterator[Sentence]:
    """The rows of a .csv file, in the order of the file."""
    # strict: an unbalanced quote is an error, and does not take in the lines that follow
    rows = csv.reader(StringIO(read_text(path)), strict=True, skipinitialspace=True)
    try:
        names = next(rows, [])
        check_line(names in COLUMNS, path, 1)
        for row in filter(None, rows):
            check_line(len(row) == len(names), path, rows.line_num)
            times = [time_of_cell(cell) for cell in row[:-1]]
            check_line(None not in times and times == sorted(times), path, rows.line_num)
            yield Sentence(times[-1], one_line(row[-1]))
    except csv.Error:
        check_line(False, path, rows.line_num)


def time_of_cell(cell: str) -> float | None:
    """"62.5" or "0:01:02.5" -> 62.5; None if it is no time."""
    cell = cell.strip()
    if SECONDS.fullmatch(cell):
        return float(cell)
    clock = re.fullmatch(CLOCKS[".csv"], cell)
    return seconds_of(clock.groups()) if clock else None
