"""A recording with its narrations as one HTML page (not in the paper): what the model sees, frame by
frame.

    python stream.py toy/kitchen.mp4 --html kitchen.html
    python -m streams.page VIDEO NARRATIONS.jsonl --trace TRACE.jsonl -o kitchen.html

The page is page.html with the data in it; it needs no network and no server. Beside the video and
its sentences it shows p([SKIP]) and the context of every frame: prompt, kept sentences, memory
tokens, frames of the segment. A trace has numbers of tokens and the numbers of the kept sentences.
From these and the lengths of the sentences, `Record` computes what the tokens are. For an old trace
without "kept", the text is shown as a whole.
"""
from __future__ import annotations

import base64
import hashlib
import html
import json
import mimetypes
import os
import re
import zlib
from array import array
from collections.abc import Iterator
from copy import copy
from math import isfinite
from pathlib import Path
from urllib.parse import quote

from streams.subtitles import is_ours, read_narrations
from support.common.disk import check_distinct, is_number, read_jsonl, write_text
from support.common.errors import BadData, command_line
from support.common.options import Parser
from support.files.video import Video

KEPT = 172_800                          # rows that a page has at most: a day at 2 frames a second
ASSISTANT = 2                           # tokens of "Assistant:", for most models
END = 2                                 # tokens after the words of a narration: EOT and newline
PIECE = 1000                            # numbers or sentences that become JSON at once
EMBEDDED = 300_000_000                  # bytes of a video that browsers still take inside a page
TEMPLATE = Path(__file__).with_suffix(".html")


class Record:
    """What a page shows of a stream, at most the last 2 x KEPT rows: columns of the trace, and the
    narrations.

    narrations  each with its `size` in tokens, and how many are `kept` for the segment after it
    sizes       tokens of the prompt, of the memory with its brackets, and of a frame with its
                [SKIP]; 0: not known yet
    columns     p and theta (in 1/10,000, -1 for None), position, text, visual; time (ms) if the
                rows have a time (s)
    """

    def __init__(self):
        self.first = 0                              # the number of the first row
        self.count = 0                              # rows
        names = ("p", "theta", "position", "text", "visual", "time")
        self.columns = {name: array("q") for name in names}
        self.narrations = []
        self.sizes = {"prompt": 0, "memory": 0, "frame": 0}
        self.restarts = []                          # frames before which a segment was opened again
        self.text_tokens = 0                        # after the last row
        self.oldest_kept = None                     # of the narrations kept after the last one
        self.rows_since_narration = 0
        self.assistant_tokens = ASSISTANT           # before the words of a narration
        self.assistant_counted = False              # False: this number is the default

    def __len__(self) -> int:
        return self.count

    @property
    def last(self) -> int:
        """The newest frame; -1 if there is none."""
        return self.first + len(self) - 1

    def so_far(self) -> Record:
        """A record that stays as this one is now.

        The columns, to which rows are only added, are shared, not copied.
        """
        record = copy(self)
        record.narrations = list(self.narrations)
        record.sizes = dict(self.sizes)
        record.restarts = list(self.restarts)
        return record

    def add(self, row: dict, narration: dict | None = None) -> dict:
        """Add a row of the trace and the narration of its frame, if any.

        Returns the event for the page. The last frame of a file may come twice: the second row
        replaces the first. BadData if p([SKIP]) is not finite.
        """
        if row["p_skip"] is not None and not isfinite(row["p_skip"]):
            raise BadData(f"frame {row['frame']}: p([SKIP]) is {row['p_skip']}, which is not "
                          f"finite; use --dtype float32, and check the features and the weights")
        if not len(self):
            self.first = row["frame"]
        values = {"p": ten_thousandths(row["p_skip"]), "theta": ten_thousandths(row["theta"]),
                  "position": row["position"], "text": row["text_tokens"],
                  "visual": row["visual_tokens"]}
        if "time" in row:
            values["time"] = round(row["time"] * 1000)
        replaces = len(self) > 0 and row["frame"] == self.last
        for name, value in values.items():
            if replaces:
                self.columns[name][-1] = value
            else:
                self.columns[name].append(value)
        if not replaces:
            self.count += 1

        second_of_segment = self.rows_since_narration == 1 and not row["narrate"]
        if second_of_segment and not row.get("restart") and len(self) > 2:
            self.measure_frames()
        event = {"row": {"frame": row["frame"], **values}, "sizes": self.sizes}
        if row.get("restart"):
            self.restarts.append(row["frame"])
            event["restart"] = True
        if narration is not None:
            event["said"] = self.add_narration(narration, row)
        if row["narrate"]:
            self.rows_since_narration = 0
        else:
            self.rows_since_narration += 1
        self.text_tokens = row["text_tokens"]
        self.forget()
        return event

    def add_narration(self, narration: dict, row: dict | None = None) -> dict:
        """Add a narration with the row of its frame; returns its entry in `narrations`.

        Its place in the cache is known only if it has `tokens` and the row has "kept", which the
        first traces did not have.
        """
        entry = {}
        for name in ("n", "frame", "start", "end", "text", "wall", "repeat"):
            if narration.get(name) is not None:
                entry[name] = narration[name]
        entry |= {"size": 0, "kept": 0}
        self.narrations.append(entry)
        if row is not None and row.get("kept") is not None and "tokens" in narration:
            self.measure_text(entry, row, len(narration["tokens"]))
        return entry

    def measure_text(self, entry: dict, row: dict, words: int):
        """Count the tokens of a narration with `words` tokens of words, and those of the prompt.

        row: of the narration's frame; its "kept" is (first, last) of the kept narrations, or [].
        """
        kept = row["kept"]
        text_tokens = row["text_tokens"]
        oldest = kept[0] if kept else None
        if oldest is not None and oldest == self.oldest_kept and not self.assistant_counted:
            # Nothing was removed, so the text has grown by "Assistant:" and the words. If the frame
            # before was narrated, too, the end of that narration has come with this row.
            assistant_tokens = text_tokens - self.text_tokens - words
            if self.rows_since_narration == 0:
                assistant_tokens -= END
            for earlier in self.narrations[:-1]:
                earlier["size"] += assistant_tokens - self.assistant_tokens
            self.assistant_tokens = assistant_tokens
            self.assistant_counted = True
            self.sizes["prompt"] = 0
        self.oldest_kept = oldest

        entry["size"] = self.assistant_tokens + words + END
        if kept:
            entry["kept"] = kept[1] - kept[0] + 1
        if not self.sizes["prompt"] and entry["kept"] <= len(self.narrations):
            in_cache = self.narrations[len(self.narrations) - entry["kept"]:]
            narration_tokens = sum(narration["size"] for narration in in_cache)
            if kept:
                narration_tokens -= END             # the end of the newest comes with the next row
            self.sizes["prompt"] = max(0, text_tokens - narration_tokens)

    def measure_frames(self):
        """Count the tokens of a frame and of the memory, from the first two frames of a segment."""
        before, first, second = self.columns["visual"][-3:]
        self.sizes["frame"] = second - first
        # 0 before the first frame: the segment before has been pruned, and the rest is the memory
        self.sizes["memory"] = 0 if before else max(0, 2 * first - second)

    def forget(self):
        """Remove the oldest rows and narrations, when there are twice as many as are kept."""
        surplus = len(self) - KEPT
        if surplus >= KEPT:
            # new columns, because `so_far` may share the old ones
            self.columns = {name: column[surplus:] for name, column in self.columns.items()}
            self.first += surplus
            self.count -= surplus
            self.narrations = [narration for narration in self.narrations
                               if narration["frame"] >= self.first]
            self.restarts = [frame for frame in self.restarts if frame >= self.first]

    def content(self, **more) -> dict:
        """The page's data. A frame is a row."""
        rows = {name: column[:len(self)] for name, column in self.columns.items()}
        return {"fps": self.fps(), "said": list(self.narrations),
                "rows": {"first": self.first, **rows}, "sizes": dict(self.sizes),
                "restarts": list(self.restarts), **more}

    def fps(self) -> float:
        """Rows a second: of the last 100 rows, if rows have times; else of the first narration."""
        times = self.columns["time"][:len(self)][-101:]
        steps = sorted(after - before for before, after in zip(times, times[1:]))
        if steps:
            median = steps[len(steps) // 2]         # milliseconds
            if median > 0:
                return 1000 / median
        for narration in self.narrations:
            if "frame" in narration and narration["end"] > 0:
                # frame f ends at (f + 1) / fps
                return (narration["frame"] + 1) / narration["end"]
        return 2.0


def ten_thousandths(value: float | None) -> int:
    return -1 if value is None else round(value * 10_000)


# ---------------------------------------------------------------------- the page

def json_pieces(value) -> Iterator[str]:
    """json.dumps(value), where an array is a list, in short pieces.

    Other threads wait while a piece is made, so a long list is not made at once.
    """
    if isinstance(value, dict):
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            separator = ", " if number else ""
            yield f"{separator}{json.dumps(key)}: "
            yield from json_pieces(item)
        yield "}"
    elif isinstance(value, list | array):
        yield "["
        for begin in range(0, len(value), PIECE):
            separator = ", " if begin else ""
            items = json.dumps(list(value[begin:begin + PIECE]))
            yield separator + items[1:-1]           # without its brackets
        yield "]"
    else:
        yield json.dumps(value)


def packed(content: dict) -> str:
    """The page's data, gzip in base64."""
    compressor = zlib.compressobj(6, wbits=31)      # 31: gzip
    pieces = [compressor.compress(piece.encode()) for piece in json_pieces(content)]
    pieces.append(compressor.flush())
    return base64.b64encode(b"".join(pieces)).decode()


def script_hash(text: str) -> str:
    """A script or a style as a content security policy names it."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def make_page(title: str, content: dict, video: str | None = None) -> str:
    """The HTML page.

    video: its address or data; None: there is none. The page's policy allows no script but the
    template's own.
    """
    page = TEMPLATE.read_text(encoding="utf-8")
    title = title.encode("utf-8", "replace").decode()           # a file's name may be no UTF-8
    (style,) = re.findall("<style>(.*?)</s[a-z]+>", page, re.S)
    (script,) = re.findall('"module">(.*?)</s[a-z]+>', page, re.S)
    live = content["live"]
    sources = "'self'" if live else "'self' file:"
    policy = (f"default-src 'none'; style-src {script_hash(style)}; "
              f"script-src {script_hash(script)}; img-src {sources} data:; "
              f"media-src {sources} data:; base-uri 'none'; form-action 'none'")
    if live:
        policy += "; connect-src 'self'"
    values = {"policy": policy, "title": html.escape(title), "data": packed(content),
              "video": f'src="{html.escape(video)}"' if video else ""}
    return re.sub(r"@(policy|title|video|data)@", lambda match: values[match[1]], page)


def video_address(video: Path, page: Path) -> str:
    """The address of the video in the page: relative where that is possible."""
    try:
        relative = Path(os.path.relpath(video.resolve(), page.resolve().parent)).as_posix()
        return quote(os.fsencode(relative))                     # it may be no UTF-8
    except ValueError:                                          # another drive of Windows
        return video.resolve().as_uri()


def embed(video: Path) -> str:
    """The video as a data: address."""
    if video.stat().st_size > EMBEDDED:
        raise BadData(f"{video}: is too large for a page ({EMBEDDED // 10 ** 6} MB at most); "
                      f"leave out --embed")
    kind = mimetypes.guess_type(video.name)[0] or "video/mp4"
    return f"data:{kind};base64,{base64.b64encode(video.read_bytes()).decode()}"


# ---------------------------------------------------------------------- files of stream.py

def is_count(value) -> bool:
    return isinstance(value, int) and is_number(value)


def check_sentence(sentence: dict) -> bool:
    """Are the fields of a line of --jsonl right that the page needs beside times and text?

    Each of them may be missing.
    """
    if not isinstance(sentence.get("tokens", []), list):
        return False
    if not isinstance(sentence.get("wall") or "", str):
        return False
    counts = [sentence.get("n"), sentence.get("frame")]
    return all(count is None or is_count(count) for count in counts)


def check_row(row: dict) -> bool:
    """Are the fields of a row of --trace right that the page needs?"""
    kept = row.get("kept", [])
    if not isinstance(kept, list) or len(kept) not in (0, 2):
        return False
    counts = [row.get(name) for name in ("frame", "position", "text_tokens", "visual_tokens")]
    if not all(is_count(count) for count in counts + kept) or kept != sorted(kept):
        return False
    for name in ("p_skip", "theta"):
        # there must be a value; None is one
        if name not in row or row[name] is not None and not is_number(row[name]):
            return False
    return is_number(row.get("time", 0)) and isinstance(row.get("narrate"), bool)


def read_record(narrations: Path, trace: Path | None) -> Record:
    """Read stream.py's --jsonl and --trace of one video.

    BadData if a line lacks a field, or if the files are not of the same stream.
    """
    sentences = read_narrations(narrations)
    rows = read_jsonl(trace) if trace else []
    for n, sentence in enumerate(sentences):
        if not check_sentence(sentence):
            raise BadData(f"{narrations}, line {n + 1}: its n, frame, tokens or wall are not as "
                          f"stream.py --jsonl writes them; give stream.py's --jsonl")
        sentence.setdefault("n", n)
    for n, row in enumerate(rows):
        if not check_row(row) or row["frame"] != rows[0]["frame"] + n:
            raise BadData(f"{trace}, line {n + 1}: is no row of a trace; "
                          f"give stream.py's --trace")

    record = Record()
    if not rows:
        for sentence in sentences:
            record.add_narration(sentence)
        return record

    sentence_at = {sentence.get("frame"): sentence for sentence in sentences}
    narrated = {row["frame"] for row in rows if row["narrate"]}
    last = rows[-1]["frame"]
    if narrated != {frame for frame in sentence_at if frame is not None and frame <= last}:
        raise BadData(f"{trace}: is not of the same stream as {narrations}: "
                      f"the frames with a sentence differ")
    for row in rows:
        record.add(row, sentence_at.pop(row["frame"], None))
    for sentence in sentence_at.values():           # after the last row
        record.add_narration(sentence)
    return record


def main():
    parser = Parser(prog="python -m streams.page",
                    description="Make a page of a video and its narrations.")
    parser.add_argument("video", help="a video that browsers play, such as .mp4 (H.264)")
    parser.add_argument("narrations", help="stream.py's --jsonl")
    parser.add_argument("--trace", metavar="FILE",
                        help="stream.py's --trace: shows p([SKIP]) and the cache, too")
    parser.add_argument("--embed", action="store_true",
                        help="put the video into the page, which is then one file")
    parser.add_argument("-o", "--output", metavar="FILE",
                        help="the page (default: the video's name with .html)")
    args = parser.parse_args()

    def run():
        video = Path(args.video)
        Video(str(video))                           # BadData if it is missing, empty or no video
        output = Path(args.output or video.with_suffix(".html"))
        check_distinct(video, args.narrations, args.trace or "", output)
        if output.is_file() and not is_ours("html", str(output)):
            raise BadData(f"{output}: is there already, and is no such page; choose another -o")
        record = read_record(Path(args.narrations), args.trace and Path(args.trace))
        source = embed(video) if args.embed else video_address(video, output)
        write_text(output, make_page(video.name, record.content(live=None), source))
        print(f"written: {output}")

    command_line(run)


if __name__ == "__main__":
    main()
