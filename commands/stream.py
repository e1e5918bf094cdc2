"""python stream.py: narrate videos, features and cameras from the command line."""
from __future__ import annotations

import argparse
import atexit
import gc
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain, groupby, islice

from torch import Tensor
from tqdm import tqdm

from baselines.variants import load_narrator
from commands.narrator import spell
from narrator import NARRATION, VISUAL, Config, Layout, Narrator, Tokens, VisionEncoder
from stream import Cache, Decision, narrate
from streams.ahead import GUESSED_WORDS
from streams.bounds import live_bounds, open_stream
from streams.camera import open_pictures, paced
from streams.checks import check_stream
from streams.serve import Page, Pages, page_options
from streams.sources import all_live, source_option
from streams.speech import Speaker, speech_options
from streams.subtitles import Writers, outputs, timestamp
from streams.suspend import State
from support.common.devices import device_and_dtype, dtype_name, vision_dtype
from support.common.errors import BadData, command_line, say_once
from support.common.options import (
    DEFAULT_MODEL, Parser, config_changes, frame_rate, model_options,
    non_negative_int, positive_float, positive_int, trigger_options,
)
from support.common.progress import progress
from support.common.text import without_secrets
from support.engine.compiled import compile_narrator
from support.engine.vision import check_vision
from support.engine.weights import advise
from support.files.features import is_features, open_frames
from toy.read_out import in_words, load_read_out

LOOKAHEAD = 4                           # frames in one pass, of a recording
TOY_SIZE = (96, 96)                     # pixels of the videos that the bundled narrator was trained on
LEGEND = """\
legend: fed: prompt, x a token of the frame, m of the memory, n of the narrations' memory, $ end of text
        (x x 10: ten of them); [SKIP] says that the frame before had no narration
        p([SKIP]) <= theta: the segment ends here, and its narration follows (Eq. 1)
        l: the position counter; cache after the frame: text (prompt, narrations) + visual (memory, \
frames) tokens"""
LEGEND_OF_MEMORY = """\
        memory: which place showed what last (how sure, how long ago), as a linear map reads it from the
        memory tokens after a narration; the narrator never uses that map"""


def restarted(decision: Decision, layout: Layout) -> bool:
    """Whether the segment was restarted before the frame, that is, opened without a narration."""
    fed = decision.fed
    return len(fed) > 0 and fed.kind[0] == VISUAL and fed.ids[0] != layout.skip


def kept_narrations(tokens: Tokens) -> list[int]:
    """Numbers of the first and the last narration in the cache; [] if there are none."""
    numbers = [number for kind, number in zip(tokens.kind, tokens.number) if kind == NARRATION]
    return [min(numbers), max(numbers)] if numbers else []


def trace_row(decision: Decision, layout: Layout, cache: Cache) -> dict:
    """A line of --trace."""
    row = {
        "frame": decision.frame,
        "p_skip": decision.p_skip,
        "theta": decision.theta,
        "narrate": decision.narration is not None,
        "position": decision.position,
        "text_tokens": decision.text_tokens,
        "visual_tokens": decision.visual_tokens,
        "forced": decision.forced,
        "kept": kept_narrations(cache.tokens),
    }
    if restarted(decision, layout):
        row["restart"] = True
    return row


def explain(decision: Decision, layout: Layout, config: Config, static: bool = False) -> str:
    """A line of --explain: one frame in words.

    It says what was fed, p([SKIP]) and its threshold, what was pruned, the counter and the cache.
    """
    fed = []
    for name, group in groupby(spell(layout, decision.fed, prompt="prompt")):
        count = len(list(group))
        fed.append(f"{name} x {count}" if count > 1 else name)

    line = f"frame {decision.frame}: "
    if restarted(decision, layout):
        line += "the segment is restarted; "
    line += f"fed {' '.join(fed) or 'nothing more'}"
    if decision.p_skip is None:
        line += "; the first frame always narrates"
    else:
        sign = "<=" if decision.p_skip <= decision.theta else ">"
        if static or decision.theta == config.theta:
            which = "theta"
        else:
            which = f"theta_low, within {config.refractory:g} s"
        line += f"; p([SKIP]) = {decision.p_skip:.4f} {sign} {decision.theta:g} ({which})"
        if decision.forced:
            line += "; the last frame always narrates"
    if decision.narration:
        line += f"; narration {decision.narration.n}, {decision.pruned} tokens removed"
    line += f"; l = {decision.position}"
    line += f", cache {decision.text_tokens} text + {decision.visual_tokens} visual"
    return line


class Input:
    """One input of the command line: where its narrations go, and how far it is.

    source, name    as given, and the name of its outputs ("" of a single input)
    files           {format: path of the output file, or None}
    context         the stream
    video           the Video, or the live source; None of features
    total           the number of frames expected, or None
    count           the number of frames narrated so far
    peak            the most tokens that the cache has held after a frame
    page            its page in the browser (--serve)
    state           its state file (--state)
    read_out        says what the memory holds (--explain); None: there is none for the narrator
    knows           {frame of a narration: what the memory holds after it}, until it is printed
    """

    def __init__(self, source: str, name: str, files: dict[str, str | None], live: bool):
        self.source = source
        self.name = name
        self.live = live
        state_file = files.pop("state", None)
        self.files = files
        self.context = None
        self.video = None
        self.total = None
        self.count = 0
        self.peak = 0
        self.page = Page(source, wanted=False)
        self.state = State(state_file, self)
        self.read_out = None
        self.knows: dict[int, str] = {}

    def decisions(self, narrator: Narrator, encoder: VisionEncoder | None,
                  args: argparse.Namespace) -> Iterator[tuple[Decision, dict | None]]:
        """Narrate the input, and write its files.

        Yields each Decision, and the JSONL row of its narration if it has one. (In a file that a
        camera's rows are appended to, "n" and "frame" go on from its last ones.)
        """
        # The state is locked first and released last, after the files are closed. The page ends
        # with the input, also if nothing is narrated.
        with self.state, ExitStack() as stack:
            stack.enter_context(self.page)
            lookahead = args.lookahead
            if lookahead is None:
                # of a live source, the next frame is not there yet
                lookahead = 1 if self.live or args.pace or args.explain else LOOKAHEAD
            guesses = 0 if args.explain else args.guesses
            self.context = open_stream(
                narrator,
                lookahead=lookahead,
                guesses=guesses,
                clock=(lambda: self.video.time) if self.live else None,
            )
            if not self.state.resume(narrator, encoder, args.static):
                return
            frames = self.open(narrator, encoder, args, lookahead)
            if not self.live:
                # A URL or a pipe is there when its first frame is: only then are files replaced.
                first = list(islice(frames, 1))
                if not first and self.state.first_frame == 0:
                    raise BadData(f"{without_secrets(self.source)} has no frames")
                frames = chain(first, frames)
            source = "" if self.live else self.source
            writers = Writers(self.files, stack, source, self.state.saved_files, self.live)
            if self.live:
                frames = self.state.live_frames(frames)
                frames = self.video.restart_after_outage(frames, self.context.restart)
                # on exit, because a live stream ends with Ctrl-C or an error
                stack.callback(self.report, time.perf_counter())
            stack.callback(getattr(self.video, "close", lambda: None))

            for decision in narrate(narrator, frames, args.static, context=self.context):
                trace = trace_row(decision, narrator.layout, self.context.cache)
                row = None
                if decision.narration is not None:
                    row = vars(decision.narration)
                if self.live:
                    trace["time"] = self.video.time
                    if row is not None:
                        row = self.video.with_time_of_day(row)
                writers.trace(trace)
                if row is not None:
                    writers.sentence(row)
                self.page.tell(trace, row)
                if self.read_out is not None and decision.narration:
                    self.knows[decision.frame] = in_words(self.read_out, self.context.memory[0])
                self.count = decision.frame + 1
                tokens = decision.text_tokens + decision.visual_tokens
                self.peak = max(self.peak, tokens)
                self.state.save_if_due(writers, narrated=row is not None)
                yield decision, row
            self.state.end(writers)
        if self.live and self.count == 0:
            raise BadData(f"{without_secrets(self.source)} has no frames")

    def open(self, narrator: Narrator, encoder: VisionEncoder | None, args: argparse.Namespace,
             lookahead: int) -> Iterator[Tensor]:
        """The input's frame tokens [J, D]; sets `video` and `total`."""
        def encode(pictures: Tensor) -> Tensor:
            return encoder(self.page.see(pictures))

        largest = None                                  # pixels; no larger picture is needed
        if encoder is not None:
            largest = 2 * encoder.image_size
        open_source = partial(open_pictures, args=args)
        frames, self.total, self.video = open_frames(
            self.source, narrator.config, encode, lookahead, largest, open_source, self.state.skip
        )
        # features have no pictures, and the size of a pipe's pictures is not known yet
        has_size = self.video is not None and (self.live or self.video.size is not None)
        if args.model is None and has_size and self.video.size != TOY_SIZE:
            say_once("The bundled narrator knows only its miniature kitchen (toy/kitchen.mp4). "
                     "For other videos, give --model a narrator trained for them, such as "
                     "zeyun-zhong/flownar-1B-ego4d")
        if args.pace:
            frames = paced(frames, args.pace * narrator.config.fps)
        return frames

    def report(self, began: float) -> None:
        """Print a line about the stream on stderr.

        began       time.perf_counter() when it began
        """
        if self.count == 0:
            return
        name = f"{self.name}: " if self.name else ""
        rate = (self.count - self.state.first_frame) / (time.perf_counter() - began)
        cache = self.context.cache
        restarts = f", {self.context.restarts} restarts" if self.context.restarts else ""
        tqdm.write(f"{name}{self.count} frames, {self.context.segment} narrations"
                   f"{restarts}, {rate:.1f} frames/s; "
                   f"cache at most {self.peak} tokens, now {cache.text} text + "
                   f"{cache.visual} visual = {cache.bytes() / 1e6:.2f} MB", file=sys.stderr)
        if self.video is not None:
            self.video.report()


def run_files(args: argparse.Namespace) -> None:
    live = all_live(args.input, args.live)
    has_videos = not all(is_features(source) for source in args.input)
    check_stream(args, live)
    device, dtype = device_and_dtype(args.device, args.dtype)
    runs = [Input(source, name, files, live) for source, name, files in outputs(args)]
    pages = Pages(args, runs)

    model = DEFAULT_MODEL if args.model is None else args.model
    changes = config_changes(args)
    if has_videos:
        check_vision(model, args.vision, Config.vision)
    if args.dtype == "auto" and device == "cpu":
        dtype = None                                    # what is faster here
    narrator = load_narrator(model, args.llm, device, dtype, **changes).merge()
    advise(narrator.llm, args.dtype)
    if args.dtype == "auto":
        args.dtype = dtype_name(narrator.llm.dtype)     # the vision encoder's, too
    encoder = None
    if has_videos:
        encoder = narrator.vision_encoder(args.vision, vision_dtype(args))
    if live:
        print(f"live: newest pictures first; {live_bounds(narrator, changes)}", file=sys.stderr)
    if args.explain:
        read_out = load_read_out(model)
        for run in runs:
            run.read_out = read_out
    if args.compile:
        compile_narrator(narrator)

    failed = show(runs, narrator, encoder, args)
    if failed:
        raise BadData(f"{len(failed)} of {len(runs)} inputs could not be narrated to their end")
    pages.wait()


def show(runs: list[Input], narrator: Narrator, encoder: VisionEncoder | None,
         args: argparse.Namespace) -> list[Input]:
    """Narrate one input after the other, and print the narrations as they come; returns the inputs
    that failed.
    """
    failed = []
    if args.explain:
        print(LEGEND, flush=True)
        if runs[0].read_out is not None:
            print(LEGEND_OF_MEMORY, flush=True)
    delay = 0 if runs[0].live else 0.5
    bar = progress(None, "streaming", unit="frame", leave=False, mininterval=0.5, delay=delay)
    with bar, Speaker(args) as speaker:
        for run in runs:
            began = time.perf_counter()
            try:
                for decision, row in run.decisions(narrator, encoder, args):
                    update_bar(bar, runs, run, decision)
                    print_decision(run, decision, row, narrator, args, speaker)
            except (BadData, OSError) as error:
                if len(runs) == 1:
                    raise
                failed.append(run)
                tqdm.write(f"{run.name}: {error}", sys.stderr)
            else:
                if not run.live:                                # live inputs have reported
                    run.report(began)
    return failed


def print_decision(run: Input, decision: Decision, row: dict | None, narrator: Narrator,
                   args: argparse.Namespace, speaker: Speaker) -> None:
    name = f"{run.name} " if run.name else ""
    lines = []
    if args.explain:
        lines.append(name + explain(decision, narrator.layout, narrator.config, args.static))
    if row is not None and (args.repeats or "repeat" not in row):
        lines.append(f"[{name}{timestamp(row['end'])}] {row['text']}")
        speaker.say(row["text"])
    knows = run.knows.pop(decision.frame, None)
    if knows is not None:
        lines.append(f"{name}memory: {knows}")
    if lines:
        with tqdm.external_write_mode(file=sys.stdout):
            print("\n".join(lines), flush=True)


def update_bar(bar: tqdm, runs: list[Input], run: Input, decision: Decision) -> None:
    """Show in the bar how many frames of all inputs are done, and the cache of one of them."""
    unknown = any(other.count > 0 and other.total is None for other in runs)
    bar.total = None
    if not unknown:
        bar.total = sum(other.total or 0 for other in runs)
    # Frames of an earlier run (--state) say nothing of this one's speed.
    bar.initial = sum(other.state.first_frame for other in runs)
    bar.update(sum(other.count for other in runs) - bar.n)
    numbers = {"cache": f"{decision.text_tokens}+{decision.visual_tokens} tokens"}
    if run.live and run.video.latencies:
        numbers["late"] = f"{run.video.latencies[-1]:.1f} s"
    bar.set_postfix(numbers, refresh=False)


def input_options(parser: ArgumentParser) -> None:
    """Options of inputs (streams/sources.py, streams/camera.py), and of bounds for streams without
    end (streams/bounds.py).
    """
    parser.add_argument(
        "input", nargs="+",
        help="video file; frame features [T, J, D]: FILE.safetensors[:NAME] or FILE.pt; "
             "camera[:N], /dev/video0, rtsp://..., http://..., - (stdin); of several, the output "
             "options name folders")
    parser.add_argument(
        "--live", action="store_true",
        help="http(s) or - (standard input) is live: newest pictures first, not all of them")
    parser.add_argument(
        "--retries", type=non_negative_int, metavar="N",
        help="give a live source up after it was opened again N times in a row without a picture "
             "(default: never)")
    parser.add_argument(
        "--source-option", type=source_option, action="append", default=[], metavar="NAME=VALUE",
        help="an option of FFmpeg for sources that are no files, such as rtsp_transport=udp")
    parser.add_argument(
        "--pace", type=positive_float, metavar="X",
        help="a recording's frames come as it plays (1), X times as fast, ...; for --serve and "
             "--speak (default: as fast as possible)")
    parser.add_argument(
        "--max-segment", type=positive_float, metavar="S",
        help="begin a segment anew, silently, after S seconds (default: live 30, else never)")
    parser.add_argument(
        "--max-position", type=positive_int, metavar="N",
        help="beyond position N, turn back to the prompt (default: live 16384, else never)")
    parser.add_argument(
        "--repeats", action="store_true",
        help="live: also print a sentence that is the last one again within 30 s")


def main() -> None:
    parser = Parser(description="Narrate a video as it plays.")
    input_options(parser)
    parser.add_argument(
        "--fps", type=frame_rate, help="frames per second (default: the checkpoint's, 2)")
    model_options(parser)
    trigger_options(parser)
    parser.add_argument(
        "--keep-newline", action="store_true", default=None,
        help="with --last-k: keep every newline, as the published code does (the cache then "
             "grows)")
    parser.add_argument(
        "--lookahead", type=positive_int, metavar="K",
        help=f"frames in one pass of the language model (default {LOOKAHEAD}; live 1); the "
             "narrations are the same in float32, in bfloat16 up to rounding")
    parser.add_argument(
        "--guesses", type=non_negative_int, default=GUESSED_WORDS, metavar="N",
        help=f"words that are guessed in one pass, at most (default {GUESSED_WORDS}); "
             "--lookahead 1 --guesses 0 is the plain form")
    parser.add_argument(
        "--compile", action="store_true",
        help="compile the visual memory and the language model (torch.compile)")
    parser.add_argument(
        "--explain", action="store_true", help="print what each frame fed, decided and pruned")
    for form in ("jsonl", "srt", "vtt"):
        parser.add_argument(f"--{form}", metavar="FILE", help=f"also write {form.upper()}")
    parser.add_argument("--trace", metavar="FILE", help="also write one line per frame")
    parser.add_argument(
        "--state", metavar="FILE", help="save all that a stream carries; go on if FILE is there")
    parser.add_argument(
        "--overwrite", action="store_true",
        help="replace output files that stream.py has not written, and narrations beside the "
             "video under its name (a.srt beside a.mp4), which train.py --data takes for your own")
    page_options(parser)
    speech_options(parser)
    args = parser.parse_args()
    # without it, Ctrl-C takes seconds to free torch
    atexit.register(gc.freeze)
    command_line(lambda: run_files(args))
