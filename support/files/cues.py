"""Narrations that people write: subtitles (.srt, .vtt) and tables (.csv) as sentences in time.

    cue     a text that is on screen from one time to another. As a narration it is placed at its
            end, as stream.py does
    .csv    rows time,text, or start,end,text. Without a first line that names the columns, other
            tables are refused. Times are seconds or h:m:s

Corrections are counted in Notes (tracks.py). Other errors raise BadData with file and line.
"""
from __future__ import annotations

import csv
import re
from dataclasses import replace
from html import unescape
from io import StringIO
from pathlib import Path

import regex

from support.common.disk import read_text
from support.common.errors import BadData
from support.common.signatures import what_is
from support.common.text import one_line
from support.files.tracks import Notes, Sentence

# the names of the time of a narration, in tables and JSON: ours, of the JSONL and whisper's,
# EgoExo4D's
TIME_NAMES = ("end", "time", "timestamp")
# a column, or key, that says of which video a narration is: video_id, Take UID, clip_uid. (A file,
# or the number of a clip, may be one of each narration.)
VIDEO_NAME = re.compile(r"(?i)(?:video|take)[ _-]*(?:id|uid|name)?|clip[ _-]*uid")

# {\p1} and the drawing after it, {\an8}, {y:i}, <i>, <v Ann>, <c.red>, <00:01.5>
MARKUP = re.compile(
    r"\{\\p[1-9].*|\{(?:\\|[A-Za-z]:)[^{}]*\}|<\d[\d:.]*>"
    r"|</?(?i:[biscuv]|br|em|font|lang|rt|ruby|span|strong)(?:[\s./][^<>]*)?>"
)
# 00:00:01,500 --> 00:00:02,000 and settings, or the text. Some write another arrow, begin before
# time 0, or have characters that cannot be seen beside them
TIMES = regex.compile(r"[\s\p{Cf}]*(-?[\d:.,]+)\s*(?:[-–—=]+(?:>|&gt;)|→)\s*([\d:.,]+)"
                      r"((?:[\s\p{Cf}].*)?)")
# align:start position:10%, or X1:40 X2:600
SETTINGS = regex.compile(r"(?i)[\s\p{Cf}]*(?:align|line|position|region|size|vertical|[xy][12])\s*:")
# hours, minutes, seconds; the first two are optional
CLOCK = re.compile(r"(?:(?:(\d{1,6}):)?(\d{1,6}):)?(\d{1,9}(?:[.,]\d{0,9})?)")
# in any script (Unicode's Sentence_Terminal), with quotes, brackets and what cannot be seen after it
END_OF_SENTENCE = regex.compile(r"""[\p{STerm}…][\p{Pe}\p{Pf}\p{Pi}\p{Cf}\s'"]*$""")
# what is left of a time that has been taken apart
NUMBER_FIRST = re.compile(r"\s*\d+\s*[,;|\t]")
LOST = "\N{REPLACEMENT CHARACTER}"
# what a .vtt file has besides cues
VTT_BLOCK = re.compile(r"(?:NOTE|STYLE|REGION)\b")
ANOTHER_FILE = "here another file begins, whose times may begin anew; give the files one by one"
# between cues that show one text, which rolls or is coloured word after word [s]
PAUSE = 0.5


def read_cues(path: Path, notes: Notes) -> list[Sentence]:
    """The sentences of a .srt, .vtt or .csv file, sorted by time.

    Raises BadData, which names the line, if the file is malformed.
    """
    read = read_table if path.suffix.lower() == ".csv" else read_subtitles
    cues = sorted(read(path, notes), key=lambda cue: cue[0])
    return whole_sentences([Sentence(time, text) for time, text in cues], notes)


def whole_sentences(narrations: list[Sentence], notes: Notes) -> list[Sentence]:
    """Each in one line and with a full stop at its end; those without words are left out."""
    whole = []
    for narration in narrations:
        text = one_line(narration.text)
        if not any(map(str.isalnum, text)):
            notes.add("narrations without words left out")
            continue
        notes.add("sentences with characters that a conversion has lost", LOST in text)
        if not END_OF_SENTENCE.search(text):
            notes.add("sentences without a full stop given one")
            text = text.rstrip(" ,;:-–") + "."
        whole.append(replace(narration, text=text))
    return whole


def read_clock(text: str) -> float | None:
    """"1:02.5", "00:01:02,500" or "62.5" -> 62.5 (seconds); None for anything else."""
    match = CLOCK.fullmatch(text.strip())
    if match is None:
        return None
    hours, minutes, seconds = (float((group or "0").replace(",", ".")) for group in match.groups())
    # without a larger unit before it, a number may exceed 59
    if match[2] and seconds >= 60 or match[1] and minutes >= 60:
        return None
    return 3600 * hours + 60 * minutes + seconds


# --------------------------------------------------------------------------------------- subtitles


def read_subtitles(path: Path, notes: Notes) -> list[tuple[float, str]]:
    """(end, text without markup) of the cues of a .srt or .vtt file, in the order of the file.

    A cue is a line with times, and the lines after it up to an empty one. What stands elsewhere is
    its number or name, or the head or a comment of a .vtt file.
    """
    lines = read_text(path).split("\n")
    if not any(lines[1::2]):                   # each line ends twice: \r\r\n
        lines = lines[::2]
    is_vtt = lines[0].startswith("WEBVTT")
    if path.suffix.lower() == ".vtt" and not is_vtt:
        raise BadData(f"{path}, line 1: a .vtt file begins with WEBVTT (is it an .srt file? Rename "
                      f"it); {what_else(path)}")

    cues = []                                  # (start, end, lines)
    in_cue = False
    cue_number = None                          # of the next cue, if it has one
    numbers = set()                            # of those before
    ignored = False                            # in a comment or a style of a .vtt file
    for number, line in enumerate(lines, 1):
        text = line.strip(" \t")
        place = f"{path}, line {number}"
        ahead = [*lines[number:number + 9], ""]
        are_next = has_times(ahead[0])
        are_near = has_times(next(filter(str.strip, ahead), ""))
        if has_times(line):
            start, end = times_of_cue(line, place)
            if cue_number in numbers and start < cues[-1][0]:
                raise BadData(f"{place}: {ANOTHER_FILE}")
            if cue_number is not None:
                numbers.add(cue_number)
                cue_number = None
            cues.append((start, end, text_beside_times(line)))
            in_cue = True
        elif line == "":                       # some texts have a line of one blank
            in_cue = ignored = False
        elif text.isdecimal() and (are_next or are_near and not in_cue):
            in_cue = False                     # a number, with no empty line before it, or one after
            cue_number = int(text)
        elif in_cue:
            cues[-1][2].append(text)
        elif number > 1 and text.startswith("WEBVTT"):
            raise BadData(f"{place}: {ANOTHER_FILE}")
        elif is_vtt and (not cues or VTT_BLOCK.match(text)):
            ignored = True
        elif text and not ignored and not are_next:
            hint = "is there an empty line inside a text? Remove it, or this line"
            if not any(map(has_times, lines)):
                hint = what_else(path)
            raise BadData(f"{place}: expected a cue's number and times, not {line[:60]!r}; {hint}")
    return fresh_texts(cues, notes)


def fresh_texts(
    cues: list[tuple[float, float, list[str]]],
    notes: Notes,
) -> list[tuple[float, str]]:
    """(end, text without markup) of cues (start, end, lines), each text once. If the next cue does
    not begin at once, its text is another one, also if it has the same words.
    """
    texts = []
    before = []                                # lines, and what they show
    shown_before = []
    start_before = end_before = 0.0
    for start, end, lines in cues:
        if not start_before <= start <= end_before + PAUSE:
            shown_before = []
        shown = [unescape(re.sub(r"\\[Nnh]", " ", MARKUP.sub("", line))).strip() for line in lines]
        fresh = list(filter(None, shown))
        if fresh and shown == shown_before and lines != before:
            # word after word in another colour: one sentence, up to the end of the last word
            notes.add("cues that differ from the one before in their markup alone joined")
            texts.pop()
        elif max(len(shown), len(shown_before)) > 1:
            # captions that roll: their first lines are the last ones that were shown
            old = list(filter(None, shown_before))
            rolled = max(n for n in range(len(fresh) + 1) if fresh[:n] == old[len(old) - n:])
            notes.add("lines that the cue before has shown left out", rolled)
            fresh = fresh[rolled:]
        texts.append((end, " ".join(fresh)))
        before, shown_before = lines, shown
        start_before, end_before = start, end
    return texts


def what_else(path: Path) -> str:
    """What a file is that was refused as subtitles, and what to do."""
    return (f"it {what_is(path) or 'is no text'}; convert subtitles of another kind by a subtitle "
            f"editor or, of most kinds, by ffmpeg -i FILE NEW.srt")


def has_times(line: str) -> bool:
    """Whether a line is, or tries to be, one with the times of a cue; an arrow may be in a text."""
    return TIMES.fullmatch(line) is not None or re.match(r"\s*[-\d].*-->", line) is not None


def times_of_cue(line: str, place: str) -> tuple[float, float]:
    """"00:01:02,500 --> 00:01:04,000" -> 62.5, 64.0.

    place: file and line, for errors.
    """
    times = TIMES.fullmatch(line)
    begin, end, _ = times.groups() if times else ("", "", "")
    start = 0.0 if begin.startswith("-") else read_clock(begin)
    end = read_clock(end)
    if start is None or end is None:
        raise BadData(f"{place}: expected times such as 00:01:02,500 --> 00:01:04,000, "
                      f"not {line[:60]!r}")
    if end < start:
        raise BadData(f"{place}: the cue ends before it begins")
    return start, end


def text_beside_times(line: str) -> list[str]:
    """What stands behind the times of a cue, unless it is settings or cannot be seen."""
    _, _, rest = TIMES.fullmatch(line).groups()
    if SETTINGS.match(rest) or not any(map(str.isalnum, rest)):
        return []
    return [rest.strip()]


# ------------------------------------------------------------------------------------------ tables


def read_table(path: Path, notes: Notes) -> list[tuple[float, str]]:
    """(time, text) of the rows of a .csv file, whatever separates its cells.

    The first line may name the columns: one of TIME_NAMES and "text" are read, others ignored.
    Without such a line there are two columns, time and text, or three of which the first two can be
    a start and an end, or a number and an end.
    """
    content = read_text(path)
    told = re.match(r"sep=(.)\n", content)     # as Excel has it
    content = content[told.end():] if told else content
    rows = read_rows(path, content, told[1] if told else separator_of(path, content))
    if not rows:
        return []
    names = [cell.strip().lower() for cell in rows[0][1]]
    columns = len(names)
    time_column, text_column = columns - 2, columns - 1
    time_name = next((name for name in TIME_NAMES if name in names), None)
    if time_name and "text" in names:
        for name in (time_name, "text"):
            if names.count(name) > 1:
                raise BadData(f"{path}: {names.count(name)} columns are named {name}; rename one")
        time_column, text_column = names.index(time_name), names.index("text")
        rows = rows[1:]
        for n in (n for n in range(columns) if VIDEO_NAME.fullmatch(names[n])):
            check_one_video([row[n:n + 1] for _, row in rows], path)
        if time_name == "end" and "start" in names:
            check_order(rows, names.index("start"), time_column, path)
    elif columns > 3 or columns == 3 and not have_start_and_end([row for _, row in rows]):
        raise BadData(f"{path}: its first line does not name its {columns} columns as they are "
                      f"read, and what they are cannot be known; add or change it: time and text "
                      f"are read, others can have any name")

    texts = []
    for line, row in rows:
        if len(row) != columns or columns < 2 or not is_time(row[time_column:]):
            what = what_is(path, quotes=False)
            raise BadData(f"{path}, line {line}: expected time,text: a time in seconds or h:m:s, "
                          f"without frames, and a sentence (in quotes, if it has commas); or a "
                          f"first line that names the columns time and text"
                          + (f"; it {what}" if what else ""))
        texts.append((read_clock(row[time_column]), row[text_column]))
    if texts and all(is_time([text]) or NUMBER_FIRST.match(text) for _, text in texts):
        raise BadData(f"{path}: the sentences are numbers, or begin with one ({texts[0][1]!r:.40}); "
                      f"which column is the text? A first line can name the columns time and text; "
                      f"times have no frames, as in 00:00:05;12: give seconds")
    return texts


def check_order(rows: list[tuple[int, list[str]]], start: int, end: int, path: Path) -> None:
    """BadData if a row ends before it begins. start, end: columns."""
    for line, row in rows:
        times = [read_clock(cell) for cell in row[start:start + 1] + row[end:end + 1]]
        if None not in times and times != sorted(times):
            raise BadData(f"{path}, line {line}: it ends before it begins")


def check_one_video(videos: list, place) -> None:
    """BadData if narrations that are read as those of one video are of several."""
    different = {str(video) for video in videos}
    if len(different) > 1:
        raise BadData(f"{place}: has narrations of {len(different)} videos; give each a file of its "
                      f"own, or write {{video: narrations}} as JSON")


def have_start_and_end(rows: list[list[str]]) -> bool:
    """Whether rows of three cells, whose columns have no names, begin with a start and an end (or a
    number and an end), and can be nothing else.
    """
    cells = [cell for row in rows for cell in row[:2]]
    times = [read_clock(cell) for cell in cells]
    if len(cells) < 2 * len(rows) or None in times:
        return False
    starts = times[0::2]
    ends = times[1::2]
    if any(end < start for start, end in zip(starts, ends)):
        return False
    # 0:02,25 or 0:02;25: a fraction, or the number of a frame
    if any(":" in start and ":" not in end for start, end in zip(cells[0::2], cells[1::2])):
        return False
    # of whole numbers, two may be one with a decimal comma
    one_after_another = any(end <= start for end, start in zip(ends, starts[1:]))
    return one_after_another or not all(cell.strip().isdecimal() for cell in cells)


def is_time(cells: list[str]) -> bool:
    """Whether there is a first cell, and a time in it."""
    return bool(cells) and read_clock(cells[0]) is not None


def separator_of(path: Path, content: str) -> str:
    """What separates the cells of a table: of each row equally many, with a time in the last row.
    """
    for separator in "\t;,|":
        try:
            rows = [row for _, row in read_rows(path, content, separator)]
        except BadData:
            continue
        widths = {len(row) for row in rows}
        if len(widths) == 1 and min(widths) > 1 and any(is_time([cell]) for cell in rows[-1]):
            return separator
    # the one after the first cell, which may be a time with a decimal comma
    match = re.match(r'"?[\w:.]*(?:,\d+(?="?[;\t]))?"?\s*([,;\t])', content.lstrip())
    return match[1] if match else ","


def read_rows(path: Path, content: str, separator: str) -> list[tuple[int, list[str]]]:
    """(line, cells) of the rows of a table that are not empty."""
    # strict: an unbalanced quote is an error, and does not take in the lines that follow
    reader = csv.reader(StringIO(content), delimiter=separator, strict=True, skipinitialspace=True)
    try:
        return [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise BadData(f"{path}, line {reader.line_num}: is not CSV ({error})") from None
