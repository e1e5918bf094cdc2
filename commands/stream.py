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
from streams.live import Camera, Recording, is_live, is_pipe_or_url, paced, source_option
from streams.serve import HOST, PORT, Page, serve
from streams.speech import Speaker, find_voice
from streams.subtitles import Writers, outputs, timestamp
from streams.suspend import State
from support.common.devices import device_and_dtype, dtype_name, vision_dtype
from support.common.disk import check_writable
from support.common.errors import BadData, command_line, say_once
from support.common.options import (
    DEFAULT_MODEL, Parser, config_changes, frame_rate, in_range, model_options,
    non_negative_int, positive_float, positive_int, report_static, trigger_options,
)
from support.common.progress import progress
from support.common.text import without_secrets
from support.engine.checkpoint import check_vision
from support.engine.compiled import compile_narrator
from support.engine.cpu import speed_up
from support.files.features import check_inputs, is_features, open_frames
from support.files.video import Video
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


def first_and_last_kept(tokens: Tokens) -> list[int]:
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
        "kept": first_and_last_kept(cache.tokens),
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
    page            its page (--html, --serve), or None
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
        self.html = files.pop("html", None)
        self.page = None
        self.state = State(state_file, self)
        self.read_out = None
        self.knows: dict[int, str] = {}

    def decisions(self, narrator: Narrator, encoder: VisionEncoder | None,
                  args: argparse.Namespace) -> Iterator[tuple[Decision, dict | None]]:
        """Narrate the input, and write its files.

        Yields each Decision, and the JSONL row of its narration if it has one.
        """
        # The state is locked first and released last, after the files are closed. The page ends
        # with the input, also if nothing is narrated.
        with self.state, ExitStack() as stack:
            if self.page is not None:
                stack.enter_context(self.page)
            guesses = 0 if args.explain else args.guesses
            self.context = open_stream(
                narrator,
                lookahead=args.lookahead,
                guesses=guesses,
                clock=(lambda: self.video.time) if self.live else None,
            )
            if not self.state.resume(narrator, encoder, args.static):
                return
            frames = self.open(narrator, encoder, args)
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
                if self.page is not None:
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

    def open(self, narrator: Narrator, encoder: VisionEncoder | None,
             args: argparse.Namespace) -> Iterator[Tensor]:
        """The input's frame tokens [J, D]; sets `video` and `total`."""
        def encode(pictures: Tensor) -> Tensor:
            if self.page is not None:
                self.page.picture = pictures[-1]
            return encoder(pictures)

        largest = None                                  # pixels; no larger picture is needed
        if encoder is not None:
            largest = 2 * encoder.image_size
        options = dict(args.source_option)
        open_video = partial(Video, options=options)
        if self.live:
            open_video = partial(Camera, options=options, retries=args.retries)
        elif is_pipe_or_url(self.source):
            open_video = partial(Recording, options=options)
        frames, self.total, self.video = open_frames(
            self.source, narrator.config, encode, args.lookahead, largest, open_video,
            self.state.skip
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


def check_options(args: argparse.Namespace) -> bool:
    """Refuse what cannot work, before anything is loaded; returns whether the input is live.

    Options without effect are reported on stderr.
    """
    first = without_secrets(args.input[0])
    live = is_live(args.input[0], args.live)
    if len(args.input) > 1:
        for source in args.input:
            if is_live(source, args.live) or is_pipe_or_url(source):
                raise BadData(f"{without_secrets(source)}: is no file, and the next input would "
                              f"wait for its end; start a process for each")
        if args.serve is not None:
            raise BadData("--serve shows one input; give one, or --html FOLDER for a page of each")
    if args.html and args.state:
        raise BadData("--html with --state would be a page of what came after the last start; "
                      "make it at the end, by python -m streams.page VIDEO JSONL --trace TRACE")
    if live and args.pace:
        raise BadData(f"--pace is for recordings; {first} is live, and comes as it happens")
    if live and (args.lookahead or 1) > 1:
        raise BadData(f"--lookahead: {first} is live, and its frames cannot wait for later ones; "
                      f"leave it out")
    if args.lookahead is None:
        args.lookahead = 1 if live or args.pace or args.explain else LOOKAHEAD
    if args.retries is not None and not live:
        print("--retries: only live inputs are opened again, so it has no effect", file=sys.stderr)
    report_static(args)

    if not live and not is_pipe_or_url(args.input[0]):
        check_inputs(args.input)
    return live


def run_files(args: argparse.Namespace) -> None:
    live = check_options(args)
    has_videos = not all(is_features(source) for source in args.input)
    voice = find_voice() if args.speak else None
    runs = [Input(source, name, files, live) for source, name, files in outputs(args)]
    for run in runs:
        check_writable(*run.files.values(), in_place=True)
        check_writable(run.html, run.state.path)
        if run.html or args.serve is not None:
            run.page = Page(run.source, run.html, live)
    device, dtype = device_and_dtype(args.device, args.dtype)
    if args.serve is not None:
        url = serve(runs[0].page, args.serve)
        print(f"page: {url}", file=sys.stderr, flush=True)

    model = DEFAULT_MODEL if args.model is None else args.model
    changes = config_changes(args)
    if has_videos:
        check_vision(model, args.vision, Config.vision)
    if args.dtype == "auto" and device == "cpu":
        dtype = None                                    # what is faster here
    narrator = load_narrator(model, args.llm, device, dtype, **changes).merge()
    if dtype is None and dtype_name(narrator.llm.dtype) == "bfloat16":
        say_once("The language model computes in bfloat16, which is faster on this processor; "
                 "--dtype float32 is exact")
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
    else:
        speed_up(narrator)
    if encoder is not None:
        speed_up(encoder)

    with ExitStack() as stack:
        speaker = stack.enter_context(Speaker(voice)) if voice else None
        failed = show(runs, narrator, encoder, args, speaker)
    if failed:
        raise BadData(f"{len(failed)} of {len(runs)} inputs could not be narrated to their end")
    if args.serve is not None:
        print(f"done; the page stays at {url} until Ctrl-C", file=sys.stderr, flush=True)
        while True:
            time.sleep(3600)


def show(runs: list[Input], narrator: Narrator, encoder: VisionEncoder | None,
         args: argparse.Namespace, speaker: Speaker | None) -> list[Input]:
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
    with bar:
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
                   args: argparse.Namespace, speaker: Speaker | None) -> None:
    name = f"{run.name} " if run.name else ""
    lines = []
    if args.explain:
        lines.append(name + explain(decision, narrator.layout, narrator.config, args.static))
    if row is not None and (args.repeats or "repeat" not in row):
        lines.append(f"[{name}{timestamp(row['end'])}] {row['text']}")
        if speaker is not None:
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
    """Options of inputs (streams/live.py), and of bounds for streams without end
    (streams/bounds.py).
    """
    parser.add_argument(
        "input", nargs="+",
        help="video file; frame features [T, J, D]: FILE.safetensors[:NAME] or FILE.pt; "
             "camera[:N], /dev/video0, rtsp://..., http://..., - (stdin); of several files, "
             "the output options name folders")
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
    parser.add_argument(
        "--html", metavar="FILE", help="also write a page that plays the video with its narrations")
    parser.add_argument(
        "--serve", nargs="?", const=PORT, metavar="PORT",
        type=in_range(int, 0, 65535, "a port, 0 to 65535 (0: any free one)"),
        help=f"show the same page while narrating, at http://{HOST}:{PORT}/ or another port")
    parser.add_argument(
        "--speak", action="store_true",
        help="speak the narrations (espeak-ng; on macOS also say)")
    args = parser.parse_args()
    # without it, Ctrl-C takes seconds to free torch
    atexit.register(gc.freeze)
    command_line(lambda: run_files(args))
