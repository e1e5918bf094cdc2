"""A recording with its narrations as one HTML page (not in the paper): what the model sees, frame by
frame.

    python stream.py toy/kitchen.mp4 --html kitchen.html
    python -m streams.page VIDEO NARRATIONS.jsonl --trace TRACE.jsonl -o kitchen.html

The page is page.html with the data in it; it needs no network and no server. Beside the video and
its sentences it shows p([SKIP]) and the context of every frame: prompt, kept sentences, memory
tokens, frames of the segment. A trace has numbers of tokens and the numbers of the kept sentences.
From these and the lengths of the sentences, `Record` computes what the tokens are.
"""
from __future__ import annotations

import base64
import gzip
import html
import json
import mimetypes
import os
import re
from collections import deque
from pathlib import Path
from urllib.parse import quote

from streams.inputs import is_ours
from support.common.disk import check_distinct, is_number, read_jsonl, write_text
from support.common.errors import BadData, command_line
from support.common.options import Parser
from support.files.video import Video

KEPT = 172_800                          # rows that a page has at most: a day at 2 frames a second
ASSISTANT = 2                           # tokens of "Assistant:"
END = 2                                 # tokens after the words of a narration: EOT and newline
TEMPLATE = Path(__file__).with_suffix(".html")


class Record:
    """What a page shows of a stream, the last KEPT rows: columns of the trace, and the narrations.

    narrations  each with its `size` in tokens, and how many are `kept` for the segment after it
    sizes       tokens of the prompt, of the memory with its brackets, and of a frame with its
                [SKIP]; 0: not known yet
    columns     p and theta (in 1/10,000, -1 for None), position, text, visual; time (ms) if the
                rows have a time (s)
    restarts    frames before which a segment was opened again
    fps         frames a second; None: as the narrations say
    """

    def __init__(self):
        self.fps: float | None = None
        names = ("p", "theta", "position", "text", "visual", "time")
        self.columns = {name: deque(maxlen=KEPT) for name in names}
        self.last = -1                              # the newest frame
        self.narrations = []
        self.sizes = {"prompt": 0, "memory": 0, "frame": 0}
        self.restarts = []
        self.rows_since_narration = 0

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.columns["p"])

    @property
    def first(self) -> int:
        """The oldest frame."""
        return self.last - len(self) + 1

    def add(self, row: dict, narration: dict | None = None) -> dict:
        """Add a row of the trace and the narration of its frame, if any.

        Returns the event for the page. The last frame of a file may come twice: the second row
        replaces the first.
        """
        values = {
            "p": ten_thousandths(row["p_skip"]),
            "theta": ten_thousandths(row["theta"]),
            "position": row["position"],
            "text": row["text_tokens"],
            "visual": row["visual_tokens"],
        }
        if "time" in row:
            values["time"] = round(row["time"] * 1000)
        if len(self) > 0 and row["frame"] == self.last:
            for name in values:
                self.columns[name].pop()
        for name, value in values.items():
            self.columns[name].append(value)
        self.last = row["frame"]

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
        self.forget()
        return event

    def add_narration(self, narration: dict, row: dict | None = None) -> dict:
        """Add a narration with the row of its frame; returns its entry in `narrations`.

        Without a row, its place in the cache is not known.
        """
        entry = {}
        for name in ("n", "frame", "start", "end", "text", "wall", "repeat"):
            if narration.get(name) is not None:
                entry[name] = narration[name]
        entry |= {"size": 0, "kept": 0}
        self.narrations.append(entry)
        if row is not None:
            entry["size"] = ASSISTANT + len(narration["tokens"]) + END
            if row["kept"]:
                first, last = row["kept"]
                entry["kept"] = last - first + 1
            self.measure_prompt(entry["kept"], row["text_tokens"])
        return entry

    def measure_prompt(self, kept: int, text_tokens: int) -> None:
        """Count the tokens of the prompt, after a narration: those that are of no kept narration."""
        if self.sizes["prompt"] or kept > len(self.narrations):
            return
        in_cache = self.narrations[len(self.narrations) - kept:]
        narration_tokens = sum(narration["size"] for narration in in_cache)
        if kept:
            narration_tokens -= END             # the end of the newest comes with the next row
        self.sizes["prompt"] = max(0, text_tokens - narration_tokens)

    def measure_frames(self) -> None:
        """Count the tokens of a frame and of the memory, from the first two frames of a segment."""
        visual = self.columns["visual"]
        before, first, second = visual[-3], visual[-2], visual[-1]
        self.sizes["frame"] = second - first
        # 0 before the first frame: the segment before has been pruned, and the rest is the memory
        self.sizes["memory"] = 0 if before else max(0, 2 * first - second)

    def forget(self) -> None:
        """Remove the narrations and restarts of rows that are gone."""
        while self.narrations and self.narrations[0]["frame"] < self.first:
            del self.narrations[0]
        while self.restarts and self.restarts[0] < self.first:
            del self.restarts[0]

    def content(self, live: dict | None = None) -> dict:
        """The page's data, as it is now. A frame is a row.

        live: where and how the page goes on (serve.py); None: it does not
        """
        rows = {name: list(column) for name, column in self.columns.items()}
        return {
            "fps": self.fps or fps_of(self.narrations),
            "said": list(self.narrations),
            "rows": {"first": self.first, **rows},
            "sizes": dict(self.sizes),
            "restarts": list(self.restarts),
            "live": live,
        }


def fps_of(narrations: list[dict]) -> float:
    """Frames a second, by the first narration whose frame is known: frame f ends at (f + 1) / fps.
    """
    for narration in narrations:
        if "frame" in narration and narration["end"] > 0:
            return (narration["frame"] + 1) / narration["end"]
    return 2.0


def ten_thousandths(value: float | None) -> int:
    return -1 if value is None else round(value * 10_000)


# ---------------------------------------------------------------------- the page

def make_page(title: str, content: dict, video: str | None = None) -> str:
    """The HTML page. video: its address or data; None: there is none."""
    title = title.encode("utf-8", "replace").decode()           # a file's name may be no UTF-8
    # no sentence is HTML: the data are gzip in base64, and the script shows them as text
    data = base64.b64encode(gzip.compress(json.dumps(content).encode(), mtime=0)).decode()
    values = {"title": html.escape(title), "data": data,
              "video": f'src="{html.escape(video)}"' if video else ""}
    page = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"@(title|video|data)@", lambda match: values[match[1]], page)


def video_address(video: Path, page: Path) -> str:
    """The address of the video in the page, relative to the page."""
    relative = Path(os.path.relpath(video.resolve(), page.resolve().parent)).as_posix()
    return quote(os.fsencode(relative))                         # it may be no UTF-8


def embed(video: Path) -> str:
    """The video as a data: address."""
    kind = mimetypes.guess_type(video.name)[0] or "video/mp4"
    return f"data:{kind};base64,{base64.b64encode(video.read_bytes()).decode()}"


# ---------------------------------------------------------------------- files of stream.py

def read_narrations(path: Path) -> list[dict]:
    """The rows of a file that stream.py --jsonl wrote: start, end (seconds), text, ...

    Raises BadData, with the number of the line, if a row is something else.
    """
    rows = read_jsonl(path)
    for number, row in enumerate(rows, 1):
        start = row.get("start")
        end = row.get("end")
        timed = is_number(start) and is_number(end) and 0 <= start <= end
        numbered = isinstance(row.get("frame", 0), int)
        if not (timed and numbered and isinstance(row.get("text"), str)):
            raise BadData(f'{path}, line {number}: expected {{"start": seconds, "end": seconds, '
                          f'"text": "..."}}, as stream.py --jsonl writes')
        row.setdefault("n", number - 1)
    return rows


def read_record(narrations: Path, trace: Path | None) -> Record:
    """Read stream.py's --jsonl and --trace of one video.

    BadData if a line lacks a field, or if the files are not of the same stream.
    """
    record = Record()
    sentences = read_narrations(narrations)
    if trace is None:
        for sentence in sentences:
            record.add_narration(sentence)
        return record

    rows = read_jsonl(trace)
    sentence_at = {sentence.get("frame"): sentence for sentence in sentences}
    if list(sentence_at) != [row.get("frame") for row in rows if row.get("narrate")]:
        raise BadData(f"{trace}: is not of the same stream as {narrations}: "
                      f"the frames with a sentence differ")
    for number, row in enumerate(rows, 1):
        try:
            assert row["frame"] == record.last + 1 or number == 1
            record.add(row, sentence_at.get(row["frame"]))
        except (AssertionError, LookupError, TypeError, ValueError, OverflowError):
            raise BadData(f"{trace}, line {number}: is no row of a trace, or its sentence has no "
                          f"tokens; give stream.py's --trace and --jsonl") from None
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
        Video(video)                                # BadData if it is missing, or no video
        output = Path(args.output or video.with_suffix(".html"))
        check_distinct(video, args.narrations, args.trace or "", output)
        if output.is_file() and not is_ours("html", str(output)):
            raise BadData(f"{output}: is there already, and is no such page; choose another -o")
        record = read_record(Path(args.narrations), args.trace and Path(args.trace))
        source = embed(video) if args.embed else video_address(video, output)
        write_text(output, make_page(video.name, record.content(), source))
        print(f"written: {output}")

    command_line(run)


if __name__ == "__main__":
    main()
