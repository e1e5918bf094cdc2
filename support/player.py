"""A recording with its narrations as one HTML page (not in the paper): what the model sees, frame by frame.

    python stream.py toy/kitchen.mp4 --html kitchen.html
    python -m support.player VIDEO NARRATIONS.jsonl --trace TRACE.jsonl -o kitchen.html

The page is player.html with the data in it; it needs no network and no server. Beside the video and its sentences it
shows p([SKIP]) and the context of every frame: prompt, kept sentences, memory tokens, frames of the segment. A trace
only has the numbers of tokens; with the lengths of the sentences they say what these tokens are (`Record`).
"""
from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import html
import json
import mimetypes
import os
import re
from array import array
from collections import deque
from pathlib import Path
from urllib.parse import quote

from support.common import BadData, apart, command_line, is_number, read_jsonl, write_text
from support.subtitles import read_narrations

KEPT = 172_800                          # rows that a page has at most: a day at 2 frames a second
ASSISTANT, END = 2, 2                   # tokens of a narration: "Assistant:" (of most models); end of text and newline
EMBEDDED = 300_000_000                  # bytes of a video that browsers still take inside a page
TEMPLATE = Path(__file__).with_suffix(".html")


class Record:
    """What a page shows of a stream, at most the last KEPT rows: columns of the trace, and the sentences.

    said        each narration, with its `size` in tokens and how many are `kept` for the segment after it
    sizes       tokens of the prompt, of the memory with its brackets, and of a frame with its [SKIP]; 0: not known yet
    columns     p and theta (in 1/10,000, -1 for None), position, text, visual; time (ms) if the rows have a time (s)
    """

    def __init__(self):
        self.first, self.columns = 0, {x: array("q") for x in ("p", "theta", "position", "text", "visual", "time")}
        self.said, self.sizes = [], {"prompt": 0, "memory": 0, "frame": 0}
        self.context, self.left = deque(), 0        # sizes of the narrations in the cache; tokens of others left there
        self.since, self.assistant = 0, ASSISTANT   # rows since a narration; tokens before its words
        self.restarts = []                          # frames before which a segment was opened again

    def __len__(self) -> int:
        return len(self.columns["p"])

    @property
    def last(self) -> int:
        """The newest frame; -1 if there is none."""
        return self.first + len(self) - 1

    def add(self, row: dict, narration: dict | None = None) -> dict:
        """A row of the trace and the narration of its frame, if any; returns what is new, as the page takes it.

        The last frame of a file may come twice: the second row replaces the first.
        """
        if not len(self):
            self.first = row["frame"]
        share = lambda value: -1 if value is None else round(value * 10_000)
        values = {"p": share(row["p_skip"]), "theta": share(row["theta"]), "position": row["position"],
                  "text": row["text_tokens"], "visual": row["visual_tokens"]}
        if "time" in row:
            values["time"] = round(row["time"] * 1000)
        again = len(self) and row["frame"] == self.last
        for name, value in values.items():
            self.columns[name][len(self.columns[name]) - again:] = array("q", [value])
        if not row["narrate"] and self.since == 1 and len(self) > 2:
            self.measure()
        news = {"row": {"frame": row["frame"], **values}, "sizes": self.sizes}
        if row.get("restart"):
            self.restarts.append(row["frame"])
            news["restart"] = True
        if narration is not None:
            news["said"] = self.say(narration)
        self.since = 0 if row["narrate"] else self.since + 1
        self.forget()
        return news

    def say(self, narration: dict) -> dict:
        """A narration, after its row. Without its `tokens`, how long it is in the cache is not known."""
        y = {name: narration[name] for name in ("n", "frame", "start", "end", "text", "wall", "repeat")
             if narration.get(name) is not None} | {"size": 0, "kept": 0}
        self.said.append(y)
        if len(self) and "tokens" in narration:
            y["size"] = self.assistant + len(narration["tokens"]) + END
            self.count(y, self.columns["text"][-2:])
        return y

    def count(self, y: dict, text: array):
        """The narrations that are kept after y; text: tokens of text before and after it."""
        if y["frame"] == 0:
            self.sizes["prompt"] = max(0, text[-1] + END - y["size"])
        grown = text[-1] - text[0] + (END if self.since else 0) - y["size"]
        if len(self.said) == 2 and grown > -self.assistant:
            for one in self.said:                                     # nothing was removed: "Assistant:" is longer
                one["size"] += grown
            self.context[0] += grown
            self.assistant += grown
            self.sizes["prompt"] -= grown
        room = text[-1] + END - self.sizes["prompt"] - self.left
        if room < y["size"] and y["frame"]:                           # not even this one is kept: none was (last_k = 0)
            self.sizes["prompt"], room = text[-1], 0
            for one in self.said:
                one["kept"] = 0
        self.context.append(y["size"])
        while sum(self.context) > room:
            self.context.popleft()
        self.left += max(0, room - sum(self.context))                 # --keep-newline: one of each narration
        y["kept"] = len(self.context)

    def measure(self):
        """Tokens of a frame and of the memory, from the first two frames of a segment."""
        before, first, second = self.columns["visual"][-3:]
        self.sizes["frame"] = second - first
        self.sizes["memory"] = 0 if before else max(0, 2 * first - second)

    def forget(self):
        """The oldest rows and sentences, when there is twice as much as is kept."""
        if (gone := len(self) - KEPT) >= KEPT:
            for column in self.columns.values():
                del column[:gone]
            self.first += gone
            self.said = [y for y in self.said if y["frame"] >= self.first]
            self.restarts = [frame for frame in self.restarts if frame >= self.first]

    def content(self, **more) -> dict:
        """The page's data. A frame is a row; fps is that of the sentences, whose frame f ends at (f + 1) / fps."""
        timed = (y for y in self.said if "frame" in y and y["end"] > 0)
        fps = next(((y["frame"] + 1) / y["end"] for y in timed), 2.0)
        rows = {name: column.tolist() for name, column in self.columns.items()}
        return {"fps": fps, "said": list(self.said), "rows": {"first": self.first, **rows}, "sizes": dict(self.sizes),
                "restarts": list(self.restarts), **more}


def script_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def make_page(title: str, content: dict, video: str | None = None) -> str:
    """The HTML page. video: its address or data; None: there is none. What is run is only the template's own script."""
    page = TEMPLATE.read_text(encoding="utf-8")
    (style,), (script,) = (re.findall(f"{tag}>(.*?)</s[a-z]+>", page, re.S) for tag in ("<style", '"module"'))
    own = "'self'" if content["live"] else "'self' file:"
    policy = (f"default-src 'none'; style-src {script_hash(style)}; script-src {script_hash(script)}; "
              f"img-src {own} data:; media-src {own} data:; base-uri 'none'; form-action 'none'"
              + ("; connect-src 'self'" if content["live"] else ""))
    data = base64.b64encode(gzip.compress(json.dumps(content).encode(), 6, mtime=0)).decode()
    filled = {"policy": policy, "title": html.escape(title), "data": data,
              "video": f'src="{html.escape(video)}"' if video else ""}
    return re.sub(r"@(policy|title|video|data)@", lambda found: filled[found[1]], page)


def video_address(video: Path, page: Path) -> str:
    """The video as the page names it: relative where that is possible."""
    try:
        return quote(Path(os.path.relpath(video.resolve(), page.resolve().parent)).as_posix())
    except ValueError:                                                               # another drive of Windows
        return video.resolve().as_uri()


def embed(video: Path) -> str:
    if video.stat().st_size > EMBEDDED:
        raise BadData(f"{video}: is too large for a page ({EMBEDDED // 10 ** 6} MB at most); leave out --embed")
    kind = mimetypes.guess_type(video.name)[0] or "video/mp4"
    return f"data:{kind};base64,{base64.b64encode(video.read_bytes()).decode()}"


def read_record(narrations: Path, trace: Path | None) -> Record:
    """stream.py's --jsonl and --trace of one video. BadData if a line has not what is needed, or if they differ."""
    sentences, rows, record = read_narrations(narrations), read_jsonl(trace) if trace else [], Record()
    for n, y in enumerate(sentences):
        y.setdefault("n", n)
    for n, row in enumerate(rows, 1):
        whole = [row.get(name) for name in ("frame", "position", "text_tokens", "visual_tokens")]
        shares = [row.get("p_skip", ""), row.get("theta", "")]
        if not (all(isinstance(x, int) and is_number(x) for x in whole) and isinstance(row.get("narrate"), bool)
                and row["frame"] == rows[0]["frame"] + n - 1 and all(x is None or is_number(x)
                                                                                for x in shares)):
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
    parser = argparse.ArgumentParser(description="Make a page of a video and its narrations.")
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
        apart(video, args.narrations, args.trace or "", output)
        record = read_record(Path(args.narrations), args.trace and Path(args.trace))
        source = embed(video) if args.embed else video_address(video, output)
        write_text(output, make_page(video.name, record.content(live=None), source))
        print(f"written: {output}")

    command_line(run)


if __name__ == "__main__":
    main()
