"""A recording with its narrations as one HTML page (not in the paper): what the model sees, frame by frame.

    python stream.py toy/kitchen.mp4 --html kitchen.html
    python -m streams.page VIDEO NARRATIONS.jsonl --trace TRACE.jsonl -o kitchen.html

The page is player.html with the data in it; it needs no network and no server. Beside the video and its sentences it
shows p([SKIP]) and the context of every frame: prompt, kept sentences, memory tokens, frames of the segment. A trace
has the numbers of tokens and of the sentences that are kept; with the lengths of the sentences they say what the tokens
are (`Record`). Of an old trace without "kept" the text is shown as a whole.
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

from streams.subtitles import read_narrations
from support.common.disk import check_distinct, is_number, read_jsonl, write_text
from support.common.errors import BadData, command_line
from support.common.options import Parser

KEPT = 172_800                          # rows that a page has at most: a day at 2 frames a second
ASSISTANT, END = 2, 2                   # tokens of a narration: "Assistant:" (of most models); end of text and newline
PIECE = 1000                            # numbers or sentences that are turned into JSON at once
EMBEDDED = 300_000_000                  # bytes of a video that browsers still take inside a page
TEMPLATE = Path(__file__).with_suffix(".html")


class Record:
    """What a page shows of a stream, at most the last KEPT rows: columns of the trace, and the sentences.

    said        each narration, with its `size` in tokens and how many are `kept` for the segment after it
    sizes       tokens of the prompt, of the memory with its brackets, and of a frame with its [SKIP]; 0: not known yet
    columns     p and theta (in 1/10,000, -1 for None), position, text, visual; time (ms) if the rows have a time (s)
    """

    def __init__(self):
        self.first = 0                              # the number of the first row
        self.count = 0                              # rows
        self.columns = {x: array("q") for x in ("p", "theta", "position", "text", "visual", "time")}
        self.said, self.sizes = [], {"prompt": 0, "memory": 0, "frame": 0}
        self.text = 0                               # tokens of text after the last row
        self.oldest = None                          # the first narration that the last one found kept
        self.since = 0                              # rows since a narration
        self.assistant = ASSISTANT                  # tokens before the words of a narration
        self.counted = False                        # were these counted?
        self.restarts = []                          # frames before which a segment was opened again

    def __len__(self) -> int:
        return self.count

    @property
    def last(self) -> int:
        """The newest frame; -1 if there is none."""
        return self.first + len(self) - 1

    def so_far(self) -> Record:
        """A record that stays as this one is now. The columns, to which rows are only added, are
        shared, not copied."""
        same = copy(self)
        same.said = list(self.said)
        same.sizes = dict(self.sizes)
        same.restarts = list(self.restarts)
        return same

    def add(self, row: dict, narration: dict | None = None) -> dict:
        """A row of the trace and the narration of its frame, if any; returns what is new, as the page takes it.

        The last frame of a file may come twice: the second row replaces the first. BadData if
        p([SKIP]) is not finite.
        """
        if row["p_skip"] is not None and not isfinite(row["p_skip"]):
            raise BadData(f"frame {row['frame']}: p([SKIP]) is {row['p_skip']}, which is not finite; "
                          f"use --dtype float32, and check the features and the weights")
        if not len(self):
            self.first = row["frame"]
        share = lambda value: -1 if value is None else round(value * 10_000)
        values = {"p": share(row["p_skip"]), "theta": share(row["theta"]), "position": row["position"],
                  "text": row["text_tokens"], "visual": row["visual_tokens"]}
        if "time" in row:
            values["time"] = round(row["time"] * 1000)
        again = len(self) > 0 and row["frame"] == self.last
        for name, value in values.items():
            if again:
                self.columns[name][-1] = value
            else:
                self.columns[name].append(value)
        if not again:
            self.count += 1
        if not row["narrate"] and not row.get("restart") and self.since == 1 and len(self) > 2:
            self.measure()
        news = {"row": {"frame": row["frame"], **values}, "sizes": self.sizes}
        if row.get("restart"):
            self.restarts.append(row["frame"])
            news["restart"] = True
        if narration is not None:
            news["said"] = self.say(narration, row)
        self.since = 0 if row["narrate"] else self.since + 1
        self.text = row["text_tokens"]
        self.forget()
        return news

    def say(self, narration: dict, row: dict | None = None) -> dict:
        """A narration, and the row of its frame. Without its `tokens`, and in a row without "kept"
        (traces had none at first), nothing is known of its place in the cache."""
        y = {name: narration[name] for name in ("n", "frame", "start", "end", "text", "wall", "repeat")
             if narration.get(name) is not None} | {"size": 0, "kept": 0}
        self.said.append(y)
        if row is not None and row.get("kept") is not None and "tokens" in narration:
            self.measure_text(y, row, len(narration["tokens"]))
        return y

    def measure_text(self, y: dict, row: dict, words: int):
        """Tokens of text: of the narration y with so many words, and of the prompt; which ones are kept."""
        kept, text = row["kept"], row["text_tokens"]
        oldest = kept[0] if kept else None
        if oldest is not None and oldest == self.oldest and not self.counted:
            # Nothing was removed, so the text has grown by "Assistant:" and the words. If the frame
            # before was narrated, too, the end of that narration has come with this row.
            assistant = text - self.text - words - (0 if self.since else END)
            for before in self.said[:-1]:
                before["size"] += assistant - self.assistant
            self.assistant, self.counted = assistant, True
            self.sizes["prompt"] = 0
        self.oldest = oldest
        y["size"] = self.assistant + words + END
        if kept:
            y["kept"] = kept[1] - kept[0] + 1
        if not self.sizes["prompt"] and y["kept"] <= len(self.said):
            there = self.said[len(self.said) - y["kept"]:]
            # The end of the newest narration will come with the next row.
            narrations = sum(one["size"] for one in there) - (END if kept else 0)
            self.sizes["prompt"] = max(0, text - narrations)

    def measure(self):
        """Tokens of a frame and of the memory, from the first two frames of a segment."""
        before, first, second = self.columns["visual"][-3:]
        self.sizes["frame"] = second - first
        self.sizes["memory"] = 0 if before else max(0, 2 * first - second)

    def forget(self):
        """The oldest rows and sentences, when there is twice as much as is kept."""
        gone = len(self) - KEPT
        if gone >= KEPT:
            # New columns: those before may be shared (`so_far`).
            self.columns = {name: column[gone:] for name, column in self.columns.items()}
            self.first += gone
            self.count -= gone
            self.said = [y for y in self.said if y["frame"] >= self.first]
            self.restarts = [frame for frame in self.restarts if frame >= self.first]

    def content(self, **more) -> dict:
        """The page's data. A frame is a row; fps is that of the sentences, whose frame f ends at
        (f + 1) / fps, or, if the rows have times of their own, that of the last ones."""
        timed = (y for y in self.said if "frame" in y and y["end"] > 0)
        fps = next(((y["frame"] + 1) / y["end"] for y in timed), 2.0)
        times = self.columns["time"][:len(self)][-101:]
        steps = sorted(after - before for before, after in zip(times, times[1:]))
        if steps and steps[len(steps) // 2] > 0:
            fps = 1000 / steps[len(steps) // 2]
        rows = {name: column[:len(self)] for name, column in self.columns.items()}
        return {"fps": fps, "said": list(self.said), "rows": {"first": self.first, **rows}, "sizes": dict(self.sizes),
                "restarts": list(self.restarts), **more}


def json_pieces(value) -> Iterator[str]:
    """json.dumps(value), an array as a list, in short pieces: while a long one is made, all other
    threads wait."""
    if isinstance(value, dict):
        yield "{"
        for n, (key, one) in enumerate(value.items()):
            yield (", " if n else "") + json.dumps(key) + ": "
            yield from json_pieces(one)
        yield "}"
    elif isinstance(value, list | array):
        yield "["
        for begin in range(0, len(value), PIECE):
            some = list(value[begin:begin + PIECE])
            yield (", " if begin else "") + json.dumps(some)[1:-1]
        yield "]"
    else:
        yield json.dumps(value)


def packed(content: dict) -> str:
    """The page's data, gzip in base64."""
    gzip = zlib.compressobj(6, wbits=31)
    pieces = [gzip.compress(piece.encode()) for piece in json_pieces(content)]
    return base64.b64encode(b"".join(pieces) + gzip.flush()).decode()


def script_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def make_page(title: str, content: dict, video: str | None = None) -> str:
    """The HTML page. video: its address or data; None: there is none. What is run is only the template's own script."""
    page = TEMPLATE.read_text(encoding="utf-8")
    title = title.encode("utf-8", "replace").decode()                      # a file's name may be no UTF-8
    (style,), (script,) = (re.findall(f"{tag}>(.*?)</s[a-z]+>", page, re.S) for tag in ("<style", '"module"'))
    own = "'self'" if content["live"] else "'self' file:"
    policy = (f"default-src 'none'; style-src {script_hash(style)}; script-src {script_hash(script)}; "
              f"img-src {own} data:; media-src {own} data:; base-uri 'none'; form-action 'none'"
              + ("; connect-src 'self'" if content["live"] else ""))
    filled = {"policy": policy, "title": html.escape(title), "data": packed(content),
              "video": f'src="{html.escape(video)}"' if video else ""}
    return re.sub(r"@(policy|title|video|data)@", lambda found: filled[found[1]], page)


def video_address(video: Path, page: Path) -> str:
    """The video as the page names it: relative where that is possible."""
    try:
        relative = Path(os.path.relpath(video.resolve(), page.resolve().parent)).as_posix()
        return quote(os.fsencode(relative))                                # it may be no UTF-8
    except ValueError:                                                               # another drive of Windows
        return video.resolve().as_uri()


def embed(video: Path) -> str:
    if video.stat().st_size > EMBEDDED:
        raise BadData(f"{video}: is too large for a page ({EMBEDDED // 10 ** 6} MB at most); leave out --embed")
    kind = mimetypes.guess_type(video.name)[0] or "video/mp4"
    return f"data:{kind};base64,{base64.b64encode(video.read_bytes()).decode()}"


def check_sentence(y: dict) -> bool:
    """Has a line of --jsonl what the page needs beside times and text, as far as it is there?"""
    whole = [y[name] for name in ("n", "frame") if y.get(name) is not None]
    if not isinstance(y.get("tokens", []), list) or not isinstance(y.get("wall") or "", str):
        return False
    return all(isinstance(x, int) and is_number(x) for x in whole)


def check_row(row: dict) -> bool:
    """Has a row of --trace what the page needs?"""
    kept = row.get("kept", [])
    if not isinstance(kept, list) or len(kept) not in (0, 2):
        return False
    whole = [row.get(name) for name in ("frame", "position", "text_tokens", "visual_tokens")] + kept
    numbers = [row.get(name, "missing") for name in ("p_skip", "theta")]
    numbers = [value for value in numbers if value is not None] + [row.get("time", 0)]
    return (all(isinstance(x, int) and is_number(x) for x in whole) and all(map(is_number, numbers))
            and kept == sorted(kept) and isinstance(row.get("narrate"), bool))


def read_record(narrations: Path, trace: Path | None) -> Record:
    """stream.py's --jsonl and --trace of one video. BadData if a line has not what is needed, or if they differ."""
    sentences, rows, record = read_narrations(narrations), read_jsonl(trace) if trace else [], Record()
    for n, y in enumerate(sentences):
        if not check_sentence(y):
            raise BadData(f"{narrations}, line {n + 1}: its n, frame, tokens or wall are not as "
                          f"stream.py --jsonl writes them; give stream.py's --jsonl")
        y.setdefault("n", n)
    for n, row in enumerate(rows, 1):
        if not check_row(row) or row["frame"] != rows[0]["frame"] + n - 1:
            raise BadData(f"{trace}, line {n}: is no row of a trace; give stream.py's --trace")
    frames = {y.get("frame"): y for y in sentences}
    written = {row["frame"] for row in rows if row["narrate"]}
    if rows and written != {frame for frame in frames if frame is not None and frame <= rows[-1]["frame"]}:
        raise BadData(f"{trace}: is not of the same stream as {narrations}: the frames with a sentence differ")
    for row in rows:
        record.add(row, frames.pop(row["frame"], None))
    for y in frames.values() if rows else sentences:
        record.say(y)
    return record


def main():
    parser = Parser(prog="python -m streams.page",
                    description="Make a page of a video and its narrations.")
    parser.add_argument("video", help="a video that browsers play, such as .mp4 (H.264)")
    parser.add_argument("narrations", help="stream.py's --jsonl")
    parser.add_argument("--trace", metavar="FILE", help="stream.py's --trace: shows p([SKIP]) and the cache, too")
    parser.add_argument("--embed", action="store_true", help="put the video into the page, which is then one file")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (default: the video's name with .html)")
    args = parser.parse_args()

    def run():
        video = Path(args.video)
        output = Path(args.output or video.with_suffix(".html"))
        if not video.is_file():
            raise BadData(f"{video}: no such file")
        check_distinct(video, args.narrations, args.trace or "", output)
        record = read_record(Path(args.narrations), args.trace and Path(args.trace))
        source = embed(video) if args.embed else video_address(video, output)
        write_text(output, make_page(video.name, record.content(live=None), source))
        print(f"written: {output}")

    command_line(run)


if __name__ == "__main__":
    main()
