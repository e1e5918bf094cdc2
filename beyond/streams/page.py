"""A recording with its narrations as one HTML page (not in the paper): what the model sees, frame
by frame.

    python stream.py toy/kitchen.mp4 --html kitchen.html
    python -m beyond.streams.page VIDEO NARRATIONS.jsonl --trace TRACE.jsonl -o kitchen.html

The page is page.html with the data in it; it needs no network and no server. Beside the video and
its sentences it shows p([SKIP]) and the context of every frame: prompt, kept sentences, memory
tokens, frames of the segment; of the toy's kitchens, what the memory knows (toy/places.py). A small
video is in the page, as a copy that is smaller still; a larger one has to be beside it.
"""
import base64
import gzip
import html
import json
import os
import re
from array import array
from collections import deque
from math import isnan, nan
from pathlib import Path
from urllib.parse import quote

from support.common.disk import check_apart, expecting, read_jsonl, write_text
from support.common.errors import BadData, command_line
from support.common.options import Parser
from support.files.video import (
    COPY_SIZE, Video, open_file, small_copy, start_of, video_stream,
)

KEPT = 172_800                          # rows that a page has at most: a day at 2 frames a second
SENTENCES_KEPT = 20_000
ASSISTANT = 2                           # tokens of "Assistant:"
END = 2                                 # tokens after the words of a narration: EOT and newline
TEMPLATE = Path(__file__).with_suffix(".html")
SMALL = 2_000_000                       # bytes of a video of which the page has a copy
# columns of the page, and their names in a trace
COLUMNS = {"p": "p_skip", "theta": "theta", "position": "position", "text": "text_tokens",
           "visual": "visual_tokens"}
COUNTS = ("position", "text", "visual")             # of these columns: whole numbers


class Record:
    """What a page shows of a stream: the newest rows of its trace, and the narrations.

    fps         frames a second
    sizes       tokens of the prompt, of the memory with its brackets, and of a frame with its
                [SKIP]; {}: not known
    columns     by name, a number for each row, or nan for none: a day has to be small. There is no
                time (s) where it follows from the frame's number
    last        the newest frame
    narrations  each with its `size` in tokens, and how many are `kept` for the segment after it; of
                the toy, what the memory says of each of the `places` after it (toy/places.py), and
                which words `needed` the memory
    restarts    frames before which a segment was opened again
    kitchen     what the page has to know of the toy's kitchen (toy/places.py), or None
    """

    def __init__(self):
        self.fps = 2.0
        self.sizes = {}
        self.columns = {name: array("q" if name in COUNTS else "d")
                        for name in (*COLUMNS, "time")}
        self.last = -1
        self.narrations = deque(maxlen=SENTENCES_KEPT)
        self.restarts = deque(maxlen=SENTENCES_KEPT)
        self.kitchen = None

    def add(self, row: dict, narration: dict | None = None) -> dict:
        """Add a row of the trace and the narration of its frame, if any.

        Returns the event for the page. The last frame of a file may come twice: the second row
        replaces the first.
        """
        values = {name: row[in_trace] for name, in_trace in COLUMNS.items()}
        values["time"] = row.get("time")
        if values["p"] is not None:
            values["p"] = round(values["p"], 4)
        for name, column in self.columns.items():
            if row["frame"] == self.last:
                column.pop()
            column.append(nan if values[name] is None else values[name])
            if len(column) > KEPT:
                del column[0]
        self.last = row["frame"]

        event = {"row": {"frame": row["frame"], **values}}
        if row.get("restart"):
            self.restarts.append(row["frame"])
            event["restart"] = True
        if narration is not None:
            event["said"] = self.add_narration(narration, row["kept"], row.get("places"))
        event["sentences"] = len(self.narrations)       # a page that has fewer has missed some
        return event

    def add_narration(self, narration: dict, kept: list[int] | None = None,
                      places: list | None = None) -> dict:
        """Add a narration, and return its entry in `narrations`.

        kept    the first and the last narration in the cache after it
        places  what the memory says of each place after it
        """
        entry = {name: narration[name] for name in ("n", "frame", "start", "end", "text")}
        if "wall" in narration:
            entry["wall"] = narration["wall"]
        entry["size"] = ASSISTANT + len(narration["tokens"]) + END
        entry["kept"] = kept[1] - kept[0] + 1 if kept else 0
        if self.kitchen is not None:
            from toy.places import words_of_memory
            entry["needed"] = words_of_memory(narration["text"])
            entry["places"] = places
        self.narrations.append(entry)
        return entry

    def content(self, live: dict | None = None) -> dict:
        """The page's data, as it is now. A frame is a row.

        live: where and how the page goes on (serve.py); None: it does not
        """
        rows = {name: [None if isnan(value) else value for value in column]
                for name, column in self.columns.items()}
        rows["first"] = self.last - len(rows["p"]) + 1
        return {"fps": self.fps, "said": list(self.narrations), "rows": rows, "sizes": self.sizes,
                "restarts": list(self.restarts), "kitchen": self.kitchen, "live": live}


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


def video_source(video: Path, page: Path, embed: bool = False) -> str:
    """Where the page has its video from: from a copy in itself, if the video is small or `embed`
    says so; else from the video's address, relative to the page, and by how many seconds the clocks
    of players are behind ours, where they are.
    """
    if embed or video.stat().st_size <= SMALL:
        return f"data:video/mp4;base64,{base64.b64encode(small_copy(video)).decode()}"
    relative = Path(os.path.relpath(video.resolve(), page.resolve().parent)).as_posix()
    address = quote(os.fsencode(relative))                      # it may be no UTF-8
    behind = seconds_behind(video)
    if any(behind):
        address += "#behind={:.3f},{:.3f}".format(*behind)
    return address


def seconds_behind(video: Path) -> tuple[float, float]:
    """By how many seconds the clocks of Firefox (140) and of other browsers are behind ours.

    For Firefox a film without sound begins with the first picture that is stored, even if it is to
    be shown later, or not at all; for others, where the file's clock shows 0.
    """
    with open_file(video) as container:
        stream = video_stream(container, str(video), "AUTO")
        stored = next(container.demux(stream))
        start = start_of(container) or 0.0
        return float((stored.pts or 0) * stored.time_base) - start, min(0.0, -start)


# ---------------------------------------------------------------------- files of stream.py

def read_record(narrations: Path, trace: Path, video: Path | None = None) -> Record:
    """Read stream.py's --jsonl and --trace of one video.

    BadData if a line lacks a field, or if the files are not of the same stream.
    """
    record = Record()
    sentences = read_jsonl(narrations)
    rows = read_jsonl(trace)
    with expecting(narrations, "the --jsonl of stream.py"):
        first = sentences[0]
        record.fps = (first["frame"] + 1) / first["end"]        # frame f ends at (f + 1) / fps
        sentence_at = {sentence["frame"]: sentence for sentence in sentences}

    with expecting(trace, "the --trace of stream.py"):
        record.sizes = rows[0]["sizes"]
        if "places" in rows[0]:                         # frame 0 always narrates
            from toy.places import kitchen_of
            record.kitchen = kitchen_of(video)
        if len(rows) > 1 and rows[-1]["frame"] == rows[-2]["frame"]:
            del rows[-2]                    # the last frame was decided twice: its last row counts
        if [row["frame"] for row in rows] != list(range(len(rows))):
            raise BadData(f"{trace}: is of several streams, or lines are missing")
        if list(sentence_at) != [row["frame"] for row in rows if row["narrate"]]:
            raise BadData(f"{trace}: is not of the same stream as {narrations}: "
                          f"the frames with a sentence differ")
        for row in rows:
            record.add(row, sentence_at.get(row["frame"]))
    return record


def main():
    parser = Parser(prog="python -m beyond.streams.page",
                    description="Make a page of a video and its narrations.")
    parser.add_argument("video", help="a video that browsers play, such as .mp4 (H.264)")
    parser.add_argument("narrations", help="stream.py's --jsonl")
    parser.add_argument("--trace", metavar="FILE", required=True, help="stream.py's --trace")
    parser.add_argument("--embed", action="store_true",
                        help=f"put a copy of the video into the page, as is done anyway with a "
                             f"video of at most {SMALL / 1e6:g} MB: at most {COPY_SIZE} pixels "
                             f"wide or high, without sound")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the page")
    args = parser.parse_args()

    def run():
        video = Path(args.video)
        output = Path(args.output)
        Video(video)                                # BadData if it is missing, or no video
        check_apart([video, args.narrations, args.trace], [output])
        record = read_record(Path(args.narrations), Path(args.trace), video)
        source = video_source(video, output, args.embed)
        write_text(output, make_page(video.name, record.content(), source))
        print(f"written: {output}")

    command_line(run)


if __name__ == "__main__":
    main()
