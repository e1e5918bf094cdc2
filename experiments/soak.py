"""A day of streaming in minutes: is a stream without end bounded (streams/bounds.py), in memory, in positions, in time?

    python -m experiments.soak                          # 24 hours
    python -m experiments.soak --hours 2 --model DIR

FlowNar-C with the bounds of a live source narrates the frames of a video again and again, with narrations given at a
data set's rate. In the 2nd, 13th and 22nd of its 24 parts it is dark, and the trigger never fires; ten times the camera
is away for a minute, and the segment is restarted; once, at a random moment, the stream is saved, thrown away and read
from its file (streams/suspend.py). The frames are encoded beforehand: this is the cost of the loop.

    part        an hour of 24
    tokens      the most that the cache held, with what was read ahead
    bytes       of the cache's buffers and of the memories' states, free slots included
    position    the highest value of the position counter
    frames/s    for each second of processor time, which other programs do not change

Ends with exit code 1 if anything passed its bound or went on growing.
"""
import argparse
import json
import random
import time
from collections.abc import Iterator
from functools import partial
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
from streams.fast import open_stream
from streams.suspend import model_answers, read_state, unpack, write_state
from support.common.devices import device_and_dtype, vision_dtype
from support.common.errors import BadData, command_line
from support.common.options import (
    DEFAULT_MODEL, Parser, device_options, positive_float, positive_int,
)
from support.common.progress import progress
from support.files.video import Video

AWAY = 60.0                                # seconds of an outage
OUTAGES, PARTS, DARK = 10, 24, (1, 12, 21)
COMPARED = 500                             # frames at the end, with a young stream's


class Day:
    """The frames of so many hours, what is said about them, and when."""

    def __init__(self, narrator: nar.Narrator, pictures: list[Tensor], black: Tensor, hours: float, every: int,
                 words: int, dark: tuple[int, ...] = DARK):
        self.fps, self.frames = narrator.config.fps, round(hours * 3600 * narrator.config.fps)
        self.pictures, self.black = pictures, black
        self.part, self.without_light = max(1, self.frames // PARTS), dark
        self.outages = {self.frames * (2 * i + 1) // (2 * OUTAGES) for i in range(OUTAGES)}
        ids = (narrator.layout.newline * words)[:words]
        self.given = {t: ids for t in range(0, self.frames, every) if not self.dark(t)}
        self.begin, self.seconds = 0, 0.0

    def dark(self, t: int) -> bool:
        return t // self.part in self.without_light

    def __iter__(self) -> Iterator[Tensor]:
        for t in range(self.begin, self.frames):
            self.seconds = (t + 1) / self.fps + AWAY * sum(outage <= t for outage in self.outages)
            yield self.black if self.dark(t) else self.pictures[t % len(self.pictures)]

    def clock(self) -> float:
        return self.seconds


def lived(narrator: nar.Narrator, day: Day, lookahead: int) -> Iterator[tuple[stream.Context, stream.Decision]]:
    """Each frame of the day. Once, before its last part, the Context is written to a file, and a new one is read."""
    how = {"lookahead": lookahead, "clock": day.clock, "guesses": 0}
    context, end = open_stream(narrator, **how), random.randrange(day.frames - day.part + 1)
    while True:
        for step in stream.narrate(narrator, day, forced=day.given, context=context):
            yield context, step
            if step.frame >= end and not context.ahead:
                break
        else:
            return
        with TemporaryDirectory() as folder:
            write_state(f"{folder}/state", context, {}, {})
            about, tensors = read_state(f"{folder}/state")
        context, end, day.begin = open_stream(narrator, **how), day.frames, step.frame + 1
        model_answers(narrator, context, None)
        unpack(context, about["stream"], tensors)


def soak(narrator: nar.Narrator, day: Day, other: Day, lookahead: int) -> tuple[list[dict], float]:
    """Stream the day. For each part, frames and frames/s; narrations, restarts and the most that was held until then.
    And the processor time of its last frames, divided by that of a stream of the other day that takes turns with it."""
    rows, tokens, position, narrations = [], 0, 0, 0
    old, seconds, compared = lived(narrator, day, lookahead), [], []
    young = stream.narrate(narrator, other, forced=other.given,
                           context=open_stream(narrator, lookahead=lookahead, guesses=0))
    last = min(COMPARED, day.part)
    for t in progress(range(day.frames), unit="frame", leave=False, mininterval=1):
        began = time.process_time()
        context, step = next(old)
        seconds.append(time.process_time() - began)
        tokens = max(tokens, len(context.cache.used) - len(context.cache.free))
        position, narrations = max(position, step.position), narrations + (step.narration is not None)
        if t + 1 in day.outages:
            context.restart()
        if (t + 1) % day.part == 0 or t + 1 == day.frames:
            rows.append({"frames": len(seconds), "narrations": narrations, "restarts": context.bounds.restarts,
                         "turned": context.bounds.rewound, "fps": len(seconds) / sum(seconds), "tokens": tokens,
                         "bytes": context.cache.held() + state_bytes(context),
                         "position": position, "process_bytes": peak_memory(narrator.device)})
            ratio, seconds = sum(seconds[-last:]), []
        if t >= day.frames - 2 * last:                                     # its first turns are not counted
            began = time.process_time()
            next(young)
            compared.append(time.process_time() - began)
    return rows, ratio / sum(compared[-last:])


def run_soak(args: argparse.Namespace):
    narrator = load_narrator(args.model or DEFAULT_MODEL, args.llm, *device_and_dtype(args.device, args.dtype)).merge()
    live_bounds(narrator)
    narrator.config.max_segment, narrator.config.max_position = args.max_segment, args.max_position
    encoder = narrator.vision_encoder(args.vision, vision_dtype(args))
    video = torch.stack([torch.from_numpy(y) for y in islice(Video(args.video, narrator.config.fps), args.pictures)])
    pictures = [x for part in video.split(16) for x in encoder(part)]
    new_day = partial(Day, narrator, pictures, encoder(torch.zeros_like(video[:1]))[0], args.hours, args.every,
                      args.words)
    day = new_day()
    print(f"{args.hours:g} hours, {day.frames} frames")
    rows, ratio = soak(narrator, day, new_day(dark=()), args.lookahead)
    print("part    frames/s  narrations  restarts  turned  tokens       bytes  position    process")
    for n, row in enumerate(rows, 1):
        print("{n:4}  {fps:10.1f}  {narrations:10}  {restarts:8}  {turned:6}  {tokens:6}  {bytes:10}  {position:8}  "
              "{mb:6.0f} MB".format(n=n, mb=(row["process_bytes"] or 0) / 1e6, **row))
    config, layout, last = narrator.config, narrator.layout, rows[-1]
    frames = round(config.max_segment * config.fps)
    segment = len(layout.opening(1)) + frames * len(layout.frame(1)) + len(layout.closing(1)) + args.words
    limits = {"tokens": most_tokens(narrator, args.words, args.lookahead - 1),
              "position": config.max_position + segment, "bytes": rows[min(DARK[0], len(rows) - 1)]["bytes"]}
    print(f"tokens: at most {last['tokens']}, bound {limits['tokens']}; position: at most {last['position']}, bound "
          f"{limits['position']}; bytes: {last['bytes']}, after the first dark part {limits['bytes']}")
    print(f"processor time of the last frames / a young stream's: {ratio:.3f}")
    if args.json:
        print(json.dumps({"hours": args.hours, "frames": day.frames, "outages": OUTAGES, "bounds": limits,
                          "last_to_young": ratio, "rows": rows}))
    if passed := [name for name, limit in limits.items() if last[name] > limit]:
        raise BadData(f"not bounded: {', '.join(passed)}")


def main():
    parser = Parser(prog="python -m experiments.soak", description="A day of streaming in minutes: "
                    "memory, positions and speed of a stream without end.")
    parser.add_argument("--hours", type=positive_float, default=24.0, help="length of the stream (default 24)")
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the bundled toy)")
    device_options(parser)
    parser.add_argument("--video", default=str(Path(DEFAULT_MODEL).parent / "kitchen.mp4"),
                        help="its frames are shown again and again (default: the toy's)")
    parser.add_argument("--max-segment", type=positive_float, default=LIVE_BOUNDS["max_segment"], metavar="SECONDS",
                        help="after which a segment is restarted (default %(default)s)")
    for name, default, text in (("max-position", LIVE_BOUNDS["max_position"], "of the counter, before it turns back"),
                                ("every", 9, "frames between two narrations"), ("words", 12, "tokens of a narration"),
                                ("pictures", 300, "frames of the video"),
                                ("lookahead", 4, "frames in one pass of the language model")):
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"{text} (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    args = parser.parse_args()
    command_line(lambda: run_soak(args))


if __name__ == "__main__":
    main()
