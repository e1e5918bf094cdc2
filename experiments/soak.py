"""A day of streaming in minutes: is a stream without end bounded in memory, positions and time?

    python -m experiments.soak                          # 24 hours
    python -m experiments.soak --hours 2 --model DIR

FlowNar-C with the bounds of a live source (streams/bounds.py) narrates the frames of a video again
and again. Its narrations are given, as often as in a data set. Three things happen on the way:

    * In the 2nd, 13th and 22nd of 24 parts of the day it is dark, and no sentence is given.
    * Ten times the camera is away for a minute, and the segment is restarted.
    * Once, at a random moment, the stream is saved and thrown away, and continues from its file
      (streams/suspend.py).

The frames are encoded beforehand, so that only the streaming loop is measured.

    part        one hour of 24
    tokens      the most that the cache held, with frames that were read ahead
    bytes       of the cache's buffers, with free slots, and of the memories' states
    position    the highest value of the position counter
    frames/s    per second of processor time, on which other programs have no influence

Ends with exit code 1 if anything exceeded its bound or continued to grow.
"""
import argparse
import json
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import narrator as nar
import stream
from baselines.variants import load_narrator
from experiments.efficiency import peak_memory
from experiments.timing import state_bytes
from streams.bounds import LIVE_BOUNDS, live_bounds, most_tokens
from streams.bounds import open_stream
from streams.suspend import model_answers, read_state, unpack, write_state
from support.common.devices import device_and_dtype, vision_dtype
from support.common.errors import BadData, command_line
from support.common.options import (
    DEFAULT_MODEL, Parser, device_options, positive_float, positive_int,
)
from support.common.progress import progress
from support.files.video import Video

AWAY = 60.0                                # seconds of an outage
OUTAGES = 10
PARTS = 24
DARK = (1, 12, 21)                         # parts, counted from 0
COMPARED = 500                             # frames at the end, compared with a fresh stream's


class Day:
    """The frames of a day, the narrations given for them, and a clock.

    frames          how many frames the day has
    part            how many frames each of its parts has
    outages         frames before which the camera was away
    narrations      {frame: ids}; every `every` frames, but not in the dark
    begin           the frame with which the next iteration begins
    seconds         the time of the latest frame, outages included
    """

    def __init__(self, narrator: nar.Narrator, pictures: list[Tensor], black: Tensor, hours: float,
                 every: int, words: int, dark: tuple[int, ...] = DARK):
        self.fps = narrator.config.fps
        self.frames = round(hours * 3600 * self.fps)
        self.pictures = pictures
        self.black = black
        self.dark_parts = dark
        self.part = max(1, self.frames // PARTS)
        # in the middle of each tenth of the day
        self.outages = {self.frames * (2 * i + 1) // (2 * OUTAGES) for i in range(OUTAGES)}
        ids = (narrator.layout.newline * words)[:words]
        self.narrations = {t: ids for t in range(0, self.frames, every) if not self.dark(t)}
        self.begin = 0
        self.seconds = 0.0

    def dark(self, t: int) -> bool:
        return t // self.part in self.dark_parts

    def __iter__(self) -> Iterator[Tensor]:
        for t in range(self.begin, self.frames):
            outages_before = sum(outage <= t for outage in self.outages)
            self.seconds = (t + 1) / self.fps + AWAY * outages_before
            if self.dark(t):
                yield self.black
            else:
                yield self.pictures[t % len(self.pictures)]

    def clock(self) -> float:
        return self.seconds


def stream_the_day(narrator: nar.Narrator, day: Day,
                   lookahead: int) -> Iterator[tuple[stream.Context, stream.Decision]]:
    """Narrate each frame of the day.

    Once, at a random moment before the last part, the Context is written to a file, and a new
    Context is read from it.
    """
    options = {"lookahead": lookahead, "clock": day.clock, "guesses": 0}
    save_at = random.randrange(day.frames - day.part + 1)
    context = open_stream(narrator, **options)
    saved = False
    while True:
        decisions = stream.narrate(narrator, day, given=day.narrations, context=context)
        for decision in decisions:
            yield context, decision
            if not saved and decision.frame >= save_at and not context.ahead:
                break
        else:
            return                             # the day has ended
        with TemporaryDirectory() as folder:
            write_state(f"{folder}/state", context, {}, {})
            header, tensors = read_state(f"{folder}/state")
        saved = True
        day.begin = decision.frame + 1
        context = open_stream(narrator, **options)
        model_answers(narrator, context, None)                 # makes its buffers
        unpack(context, header["stream"], tensors)


def soak(narrator: nar.Narrator, day: Day, other_day: Day,
         lookahead: int) -> tuple[list[dict], float]:
    """Stream the day; returns a row for each part, and the ratio of processor times.

    rows        of each part: frames and frames/s. Until its end: narrations, restarts, and the most
                that was held
    ratio       the processor time of the day's last frames, divided by that of a fresh stream of
                the other day, which takes turns with it
    """
    aged = stream_the_day(narrator, day, lookahead)
    fresh_context = open_stream(narrator, lookahead=lookahead, guesses=0)
    fresh = stream.narrate(narrator, other_day, given=other_day.narrations, context=fresh_context)
    compared = min(COMPARED, day.part)
    rows = []
    tokens = 0
    position = 0
    narrations = 0
    aged_seconds = []                          # of each frame of this part
    fresh_seconds = []
    for t in progress(range(day.frames), unit="frame", leave=False, mininterval=1):
        began = time.process_time()
        context, decision = next(aged)
        aged_seconds.append(time.process_time() - began)
        tokens = max(tokens, len(context.cache.used) - len(context.cache.free))
        position = max(position, decision.position)
        if decision.narration is not None:
            narrations += 1
        if t + 1 in day.outages:
            context.restart()
        if (t + 1) % day.part == 0 or t + 1 == day.frames:
            rows.append({
                "frames": len(aged_seconds),
                "narrations": narrations,
                "restarts": context.bounds.restarts,
                "turned": context.bounds.rewound,
                "fps": len(aged_seconds) / sum(aged_seconds),
                "tokens": tokens,
                "bytes": context.cache.held() + state_bytes(context),
                "position": position,
                "process_bytes": peak_memory(narrator.device),
            })
            last_aged_seconds = sum(aged_seconds[-compared:])
            aged_seconds = []
        # the first half of the fresh stream's turns warms it up, and is not compared
        if t >= day.frames - 2 * compared:
            began = time.process_time()
            next(fresh)
            fresh_seconds.append(time.process_time() - began)
    return rows, last_aged_seconds / sum(fresh_seconds[-compared:])


def run_soak(args: argparse.Namespace) -> None:
    device, dtype = device_and_dtype(args.device, args.dtype)
    narrator = load_narrator(args.model or DEFAULT_MODEL, args.llm, device, dtype).merge()
    config = narrator.config
    live_bounds(narrator)
    config.max_segment = args.max_segment
    config.max_position = args.max_position

    encoder = narrator.vision_encoder(args.vision, vision_dtype(args))
    pictures = islice(Video(args.video, config.fps), args.pictures)
    video = torch.stack([torch.from_numpy(picture) for picture in pictures])        # [T, H, W, 3]
    frames = [x for batch in video.split(16) for x in encoder(batch)]
    black = encoder(torch.zeros_like(video[:1]))[0]
    day = Day(narrator, frames, black, args.hours, args.every, args.words)
    # the fresh stream has to say as much as the other at its end, where it is light
    light_day = Day(narrator, frames, black, args.hours, args.every, args.words, dark=())
    print(f"{args.hours:g} hours, {day.frames} frames")
    rows, ratio = soak(narrator, day, light_day, args.lookahead)

    print("part    frames/s  narrations  restarts  turned  tokens       bytes  position    process")
    for number, row in enumerate(rows, 1):
        megabytes = (row["process_bytes"] or 0) / 1e6
        print(f"{number:4}  {row['fps']:10.1f}  {row['narrations']:10}  {row['restarts']:8}  "
              f"{row['turned']:6}  {row['tokens']:6}  {row['bytes']:10}  {row['position']:8}  "
              f"{megabytes:6.0f} MB")
    limits = soak_limits(narrator, args, rows)
    last = rows[-1]
    print(f"tokens: at most {last['tokens']}, bound {limits['tokens']}; "
          f"position: at most {last['position']}, bound {limits['position']}; "
          f"bytes: {last['bytes']}, after the first dark part {limits['bytes']}")
    print(f"processor time of the last frames / a young stream's: {ratio:.3f}")
    if args.json:
        print(json.dumps({
            "hours": args.hours,
            "frames": day.frames,
            "outages": OUTAGES,
            "bounds": limits,
            "last_to_young": ratio,
            "rows": rows,
        }))
    exceeded = [name for name, limit in limits.items() if last[name] > limit]
    if exceeded:
        raise BadData(f"not bounded: {', '.join(exceeded)}")


def soak_limits(narrator: nar.Narrator, args: argparse.Namespace, rows: list[dict]) -> dict:
    """What the last of the rows must not exceed."""
    config = narrator.config
    layout = narrator.layout
    # the counter turns back only at the end of a segment
    frames = round(config.max_segment * config.fps)
    segment = len(layout.opening(1)) + frames * len(layout.frame(1))
    segment += len(layout.closing(1)) + args.words
    # the first dark part fills the cache as far as it can be filled
    first_dark = min(DARK[0], len(rows) - 1)
    return {
        "tokens": most_tokens(narrator, args.words, args.lookahead - 1),
        "position": config.max_position + segment,
        "bytes": rows[first_dark]["bytes"],
    }


def main() -> None:
    parser = Parser(prog="python -m experiments.soak",
                    description="A day of streaming in minutes: memory, positions and speed of a "
                                "stream without end.")
    parser.add_argument("--hours", type=positive_float, default=24.0,
                        help="length of the stream (default 24)")
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the bundled toy)")
    device_options(parser)
    parser.add_argument("--video", default=str(Path(DEFAULT_MODEL).parent / "kitchen.mp4"),
                        help="its frames are shown again and again (default: the toy's)")
    parser.add_argument("--max-segment", type=positive_float, default=LIVE_BOUNDS["max_segment"],
                        metavar="SECONDS",
                        help="after which a segment is restarted (default %(default)s)")
    max_position = LIVE_BOUNDS["max_position"]
    for name, default, text in (
        ("max-position", max_position, "of the counter, before it turns back"),
        ("every", 9, "frames between two narrations"),
        ("words", 12, "tokens of a narration"),
        ("pictures", 300, "frames of the video"),
        ("lookahead", 4, "frames in one pass of the language model"),
    ):
        parser.add_argument(f"--{name}", type=positive_int, default=default,
                            help=f"{text} (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    args = parser.parse_args()
    command_line(lambda: run_soak(args))


if __name__ == "__main__":
    main()
