"""python stream.py: narrate videos, features and cameras from the command line."""
from __future__ import annotations

import argparse
import atexit
import gc
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import groupby

from tqdm import tqdm

from baselines.variants import load_narrator
from commands.narrator import spell
from narrator import VISUAL, Config, Layout, Narrator, VisionEncoder
from stream import Decision, narrate
from streams.bounds import live_bounds
from streams.camera import open_pictures, paced
from streams.checks import check_stream
from streams.fast import open_stream
from streams.serve import Page, Pages, page_options
from streams.sources import all_live, source_option
from streams.speech import Speaker, speech_options
from streams.subtitles import Writers, outputs, timestamp
from streams.suspend import State, save_on_ctrl_c
from streams.together import SharedPasses, Failed, side_by_side
from support.common.addresses import without_secrets
from support.common.devices import device_and_dtype, vision_dtype
from support.common.errors import BadData, command_line, say_once
from support.common.options import (
    DEFAULT_MODEL, Parser, config_changes, lookahead_option, model_options, positive_float,
    positive_int, trigger_options, non_negative_int,
)
from support.common.progress import progress
from support.engine.passes import compile_memory
from support.engine.vision import check_vision
from support.engine.weights import advise
from support.files.features import is_features, open_frames

TOY_SIZE = (96, 96)                     # pixels of the videos that the bundled narrator was trained on
LEGEND = """\
legend: fed: prompt, x a token of the frame, m of the memory, n of the narrations' memory, $ end of text
        (x x 10: ten of them); [SKIP] says that the frame before had no narration
        p([SKIP]) <= theta: the segment ends here, and its narration follows (Eq. 1)
        l: the position counter; cache after the frame: text (prompt, narrations) + visual (memory, frames) tokens"""


def restarted(decision: Decision, layout: Layout) -> bool:
    """Whether the segment was restarted before the frame: it was opened without a narration before it."""
    fed = decision.fed
    return len(fed) > 0 and fed.kind[0] == VISUAL and fed.ids[0] != layout.skip


def trace_row(decision: Decision, layout: Layout) -> dict:
    """A line of --trace."""
    row = {"frame": decision.frame, "p_skip": decision.p_skip, "theta": decision.theta,
           "narrate": decision.narration is not None, "position": decision.position,
           "text_tokens": decision.text_tokens, "visual_tokens": decision.visual_tokens,
           "forced": decision.forced, "kept": decision.kept}
    if restarted(decision, layout):
        row["restart"] = True
    return row


def explain(decision, layout, config, static: bool = False) -> str:
    """One frame in words: what was fed, p([SKIP]) and its threshold, what was pruned, the counter, the cache."""
    runs = [(name, len(list(run))) for name, run in groupby(spell(layout, decision.fed, prompt="prompt"))]
    fed = " ".join(name + (f" x {n}" if n > 1 else "") for name, n in runs) or "nothing more"
    line = f"frame {decision.frame}: {'the segment is restarted; ' if restarted(decision, layout) else ''}fed {fed}"
    if decision.p_skip is None:
        line += "; the first frame always narrates"
    else:
        which = "theta" if static or decision.theta == config.theta else f"theta_low, within {config.refractory:g} s"
        sign = "<=" if decision.p_skip <= decision.theta else ">"
        line += f"; p([SKIP]) = {decision.p_skip:.4f} {sign} {decision.theta:g} ({which})"
        line += "; the last frame always narrates" if decision.forced else ""
    if decision.narration:
        line += f"; narration {decision.narration.n}, {decision.pruned} tokens removed"
    return line + f"; l = {decision.position}, cache {decision.text_tokens} text + {decision.visual_tokens} visual"


class Input:
    """One input of the command line: where its narrations go, and what came of it."""

    def __init__(self, source: str, name: str, files: dict[str, str | None], live: bool):
        self.source, self.name, self.files, self.live = source, name, files, live
        self.context, self.video, self.total, self.count, self.peak = None, None, None, 0, 0
        self.page, self.state = Page(source, wanted=False), State(files.pop("state", None), self)

    def decisions(self, narrator: Narrator, encoder: VisionEncoder | None, args: argparse.Namespace,
                  ask: SharedPasses) -> Iterator[tuple[Decision, dict | None]]:
        """Narrate it, and write the files: each Decision, with the row of its narration in the JSONL if it has one."""
        with self.state:
            yield from self.narrated(narrator, encoder, args, ask)

    def narrated(self, narrator: Narrator, encoder: VisionEncoder | None, args: argparse.Namespace,
                 ask: SharedPasses) -> Iterator[tuple[Decision, dict | None]]:
        """See `decisions`, which locks the state."""
        lookahead = 1 if self.live or args.pace else args.lookahead
        clock = (lambda: self.video.time) if self.live else None
        self.context = open_stream(narrator, lookahead=lookahead, clock=clock,
                                   run=lambda part: ask(narrator.decoder, part))
        if not self.state.resume(narrator, encoder and partial(ask, encoder.encode_batches), args.static):
            return
        frames, self.total, self.video = open_frames(
            self.source, narrator.config, lambda pictures: ask(encoder.encode_batches, self.page.see(pictures)), lookahead,
            encoder and 2 * encoder.image_size, partial(open_pictures, args=args, wait=ask.wait), self.state.skip)
        unknown = self.video is None or self.video.size is None and not self.live      # features; a pipe
        if args.model is None and not unknown and self.video.size != TOY_SIZE:
            say_once("The bundled narrator knows only its miniature kitchen (toy/kitchen.mp4). For other videos, "
                     "give --model a narrator trained for them, such as zeyun-zhong/flownar-1B-ego4d")
        if args.pace:
            frames = paced(frames, args.pace * narrator.config.fps, ask.wait)
        with ExitStack() as stack:
            source = "" if self.live else self.source
            writers = Writers(self.files, stack, source, self.state.files, self.live)
            if self.live:
                frames = self.video.restart_after_outage(self.state.frames(frames), self.context.restart)
                stack.callback(self.report, time.perf_counter())               # it ends with Ctrl-C, or an error
            stack.callback(getattr(self.video, "close", lambda: None))
            stack.enter_context(self.page)
            for decision in narrate(narrator, frames, args.static, context=self.context):
                row = decision.narration and vars(decision.narration)
                row = self.video.with_time_of_day(row) if row and self.live else row
                trace = trace_row(decision, narrator.layout) | ({"time": self.video.time} if self.live else {})
                writers.trace(trace)
                if row:
                    writers.sentence(row)
                self.page.tell(trace, row)
                self.count = decision.frame + 1
                self.peak = max(self.peak, decision.text_tokens + decision.visual_tokens)
                self.state.keep(writers, row is not None)
                yield decision, row
                if self.state.stopped:
                    return
            self.state.end(writers)
        if not self.count:
            raise BadData(f"{without_secrets(self.source)} has no frames")

    def report(self, began: float):
        if not self.count:
            return
        cache, name = self.context.cache, f"{self.name}: " if self.name else ""
        rate = (self.count - self.state.began) / (time.perf_counter() - began)
        tqdm.write(f"{name}{self.count} frames, {self.context.segment} narrations{self.context.bounds.report()}, "
                   f"{rate:.1f} frames/s; cache at most {self.peak} tokens, now "
                   f"{cache.text} text + {cache.visual} visual = {cache.bytes() / 1e6:.2f} MB", file=sys.stderr)
        if self.video is not None:
            self.video.report()


def run_files(args: argparse.Namespace):
    live = all_live(args.input, args.live)
    videos = not all(map(is_features, args.input))
    check_stream(args, live)
    (device, dtype), runs = device_and_dtype(args.device, args.dtype), [Input(*one, live) for one in outputs(args)]
    pages = Pages(args, runs)
    if videos:
        check_vision(args.model or DEFAULT_MODEL, args.vision, Config.vision)
    narrator = load_narrator(args.model or DEFAULT_MODEL, args.llm, device, dtype, **config_changes(args)).merge()
    encoder = narrator.vision_encoder(args.vision, vision_dtype(args)) if videos else None
    if live:
        print(f"live: newest pictures first; {live_bounds(narrator, config_changes(args))}", file=sys.stderr)
    advise(narrator.llm, args.dtype)
    if narrator.slow_because:
        print(f"{narrator.config.llm} {narrator.slow_because}: it takes the plain path, which is slower", file=sys.stderr)
    if args.compile:
        compile_memory(narrator.memory)
        narrator.decoder.compile()
    jobs, began = [partial(run.decisions, narrator, encoder, args) for run in runs], time.perf_counter()
    width = len(runs) if live else min(args.batch, len(runs))                  # no camera waits for another one's end
    with save_on_ctrl_c(runs), closing(side_by_side(jobs, width)) as items:
        failed = show(items, runs, narrator, args)
    for run in runs:
        if run not in failed and not live:
            run.report(began)
    if failed:
        raise BadData(f"{len(failed)} of {len(runs)} inputs could not be narrated to their end")
    pages.wait()


def show(items: Iterator, runs: list[Input], narrator: Narrator, args: argparse.Namespace) -> list[Input]:
    """Print what comes of all inputs: (number of the input, its Decision and row, or Failed); returns what failed."""
    failed, delay = [], 0 if runs[0].live else 0.5
    if args.explain:
        print(LEGEND, flush=True)
    counting = progress(None, "streaming", unit="frame", leave=False, mininterval=0.5, delay=delay)
    with counting as bar, Speaker(args) as speaker:
        for number, item in items:
            run, lines = runs[number], []
            name = run.name and run.name + " "
            if isinstance(item, Failed):
                if len(runs) == 1 or not isinstance(item.error, BadData | OSError):
                    raise item.error
                failed.append(run)
                tqdm.write(f"{run.name}: {item.error}", sys.stderr)
            else:
                decision, row = item
                endless = any(run.count and run.total is None for run in runs)
                bar.total = None if endless else sum(run.total or 0 for run in runs)
                bar.update(sum(run.count for run in runs) - bar.n)
                state = {"cache": f"{decision.text_tokens}+{decision.visual_tokens} tokens"}
                if run.live and run.video.latencies:
                    state["late"] = f"{run.video.latencies[-1]:.1f} s"
                bar.set_postfix(state, refresh=False)
                if args.explain:
                    lines.append(name + explain(decision, narrator.layout, narrator.config, args.static))
                if row and (args.repeats or "repeat" not in row):
                    lines.append(f"[{name}{timestamp(row['end'])}] {row['text']}")
                    speaker.say(row["text"])
            if lines:
                with tqdm.external_write_mode(file=sys.stdout):
                    print("\n".join(lines), flush=True)
    return failed


def input_options(parser: ArgumentParser):
    """The inputs (streams/sources.py, streams/camera.py), and bounds for streams without end (streams/bounds.py)."""
    parser.add_argument("input", nargs="+",
                        help="video file; frame features [T, J, D]: FILE.safetensors[:NAME] or FILE.pt; camera[:N], "
                             "/dev/video0, rtsp://..., http://..., - (stdin); of several, the output options name "
                             "folders")
    parser.add_argument("--live", action="store_true",
                        help="http(s) or - (standard input) is live: newest pictures first, not all of them")
    parser.add_argument("--retries", type=non_negative_int, metavar="N",
                        help="give a live source up after N openings in a row without a picture (default: never)")
    parser.add_argument("--source-option", type=source_option, action="append", default=[], metavar="NAME=VALUE",
                        help="an option of FFmpeg for sources that are no files, such as rtsp_transport=udp")
    parser.add_argument("--pace", type=positive_float, metavar="X",
                        help="a recording's frames come as it plays (1), X times as fast, ...; for --serve and --speak "
                             "(default: as fast as possible)")
    parser.add_argument("--max-segment", type=positive_float, metavar="S",
                        help="begin a segment anew, silently, after S seconds (default: live 30, else never)")
    parser.add_argument("--max-position", type=positive_int, metavar="N",
                        help="beyond position N, turn back to the prompt (default: live 16384, else never)")
    parser.add_argument("--repeats", action="store_true",
                        help="live: also print a sentence that is the last one again within 30 s")


def main():
    parser = Parser(description="Narrate a video as it plays.")
    input_options(parser)
    parser.add_argument("--batch", type=positive_int, default=16, metavar="B",
                        help="inputs that are narrated at once and share the passes of the models "
                             "(default 16); the narrations are those of each alone in float32, in "
                             "bfloat16 up to rounding")
    parser.add_argument("--fps", type=positive_float, help="frames per second (default: the checkpoint's, 2)")
    model_options(parser)
    trigger_options(parser)
    parser.add_argument("--keep-newline", action="store_true", default=None,
                        help="with --last-k: keep every newline, as the published code does (the cache then grows)")
    lookahead_option(parser)
    parser.add_argument("--compile", action="store_true", help="compile CLAM and, for one input, the model's passes")
    parser.add_argument("--explain", action="store_true", help="print what each frame fed, decided and pruned")
    for name in ("jsonl", "srt", "vtt"):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"also write {name.upper()}")
    parser.add_argument("--trace", metavar="FILE", help="also write one line per frame")
    parser.add_argument("--state", metavar="FILE", help="save all that a stream carries; go on if FILE is there")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace output files that stream.py has not written, and narrations beside the video "
                             "under its name (a.srt beside a.mp4), which train.py --data takes for your own")
    page_options(parser)
    speech_options(parser)
    args = parser.parse_args()
    atexit.register(gc.freeze)                                  # or Ctrl-C takes seconds to free torch
    command_line(lambda: run_files(args))
