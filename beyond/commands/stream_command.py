"""python stream.py: narrate videos, features and cameras from the command line."""
import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from beyond.commands.explain import (
    LEGEND, LEGEND_OF_MEMORY, explain, explain_memory, sizes_of, trace_row,
)
from narrator import Config, Narrator, VisionEncoder
from stream import Decision, narrate
from beyond.streams.ahead import GUESSED_WORDS
from beyond.streams.bounds import Bounded, live_bounds, open_stream, tell_of_positions
from beyond.streams.graphs import use_graphs
from beyond.streams.inputs import Input, files_locked, inputs_of
from beyond.streams.live import Camera, paced, source_option
from beyond.streams.page import SMALL
from beyond.streams.serve import HOST, PORT, Page, serve
from beyond.streams.subtitles import Writers, timestamp
from beyond.streams.suspend import State
from support.common.devices import device_and_dtype
from support.common.disk import read_json
from support.common.errors import BadData, command_line
from support.common.marks import digest_of
from support.common.options import (
    DEFAULT_MODEL, THAT_OF_CHECKPOINT, TOY_TITLE, Parser, add_settings, in_range, model_options,
    needs_of, non_negative_int, positive_float, positive_int, refuse_without_effect, settings_given,
    trigger_has, trigger_options,
)
from support.common.progress import progress, say, say_when
from support.common.text import counted
from support.engine.checkpoint import open_checkpoint
from support.engine.compiled import compile_narrator
from support.engine.cpu import speed_up
from support.engine.frozen import find_model
from support.files.features import check_inputs, open_features, open_frames
from support.files.sources import Source, source_of
from support.files.video import Video

PROBE = "probe.safetensors"             # what says what the memory of the toy's narrator holds
LOOKAHEAD = 4                           # frames in one pass, of a recording
# The narrator of real videos, and the licence of its language model
AUTHORS = "zeyun-zhong/flownar-1B-ego4d"
LICENCE = "https://huggingface.co/meta-llama/Llama-3.2-1B-Instruct"


class NarratedInput:
    """The narration of one input, from its first frame, or from its state, to its end.

    given       the input and its output files
    page        its page (--html, --serve), or None
    context     the stream
    video       the Video, or the live source; None of features
    total       the number of frames expected, or None
    probe       says what the memory holds of the toy's kitchen, for the page; or None
    first_frame the number of frames that an earlier command has narrated (--state)
    peak        the most tokens that the cache has held, without those that were read ahead
    """

    def __init__(self, given: Input, page: Page | None = None):
        self.given = given
        self.page = page
        self.context: Bounded | None = None
        self.video = None
        self.total = None
        self.probe: torch.nn.Module | None = None
        self.first_frame = 0
        self.peak = 0

    def decisions(self, narrator: Narrator, encoder: VisionEncoder | None,
                  args: argparse.Namespace) -> Iterator[tuple[Decision, dict | None]]:
        """Narrate the input, and write its files.

        Yields each Decision, and the JSONL row of its narration if it has one.
        """
        live = self.given.source.is_live
        # Entered in this order, left in the other one: files are locked until all else is done.
        with ExitStack() as stack:
            stack.enter_context(files_locked(self.given))
            state = State(self.given, {
                "static": args.static,
                # their values may be secret
                "--source-option": args.source_option and digest_of(str(args.source_option))[:8],
            })
            if self.page is not None:
                stack.enter_context(self.page)
                self.page.record.fps = float(narrator.config.fps)
                self.page.record.sizes = sizes_of(narrator.layout)
                if self.probe is not None:
                    from toy.places import kitchen_of
                    self.page.record.kitchen = kitchen_of(self.page.video)
            self.context = open_stream(
                narrator,
                lookahead=args.lookahead,
                guesses=0 if args.explain else GUESSED_WORDS,
                clock=(lambda: self.video.time) if live else None,
            )
            if narrator.llm.device.type == "cuda" and not (args.explain or args.compile):
                use_graphs(self.context, encoder)
            if not state.resume(self.context):
                return
            self.first_frame = self.context.frame
            stack.callback(self.report, time.perf_counter())
            frames = self.open(narrator, encoder, args)
            tell_of_positions(narrator, self.given.name or str(self.given.source), self.total or 0)
            if live:
                stack.callback(self.video.close)
                frames = state.live_frames(frames, self.video)
            # A source is there when its first frame is: only then are files replaced.
            first = list(islice(frames, 1))
            if not first and self.first_frame == 0:
                raise BadData(f"{self.given.source} has no frames")
            state.writers = stack.enter_context(Writers(self.given, state.saved_files))
            if self.page is not None and self.first_frame > 0:
                self.page.remember(self.given.files["jsonl"])

            for decision in narrate(narrator, chain(first, frames), args.static,
                                    context=self.context):
                trace = trace_row(decision, narrator.layout, self.context.cache)
                row = None
                if decision.narration:
                    row = vars(decision.narration)
                    if live:
                        row = self.video.with_time_of_day(row)
                    if self.probe is not None:
                        from toy.probe import recalled
                        trace["places"] = recalled(self.probe, self.context.memory[0])
                if live:
                    trace["time"] = self.video.time
                self.peak = max(self.peak, decision.most_tokens)
                state.writers.write(trace, row)
                if self.page is not None:
                    self.page.tell(trace, row)
                state.save_if_due(narrated=row is not None)
                yield decision, row
            # a live source never is done: the next command appends to its files
            state.save(done=not live)

    def open(self, narrator: Narrator, encoder: VisionEncoder | None,
             args: argparse.Namespace) -> Iterator[Tensor]:
        """The input's frame tokens [J, D]; sets `video` and `total`."""
        def encode(pictures: Tensor) -> Tensor:
            if self.page is not None:
                self.page.picture = pictures[-1]
            return encoder(pictures)

        source = self.given.source
        largest = None                                  # pixels; no larger picture is needed
        if encoder is not None:
            largest = 2 * encoder.image_size
        options = dict(args.source_option or ())
        if options:
            names = ", ".join(options)                  # their values may be secret
            say_when(f"{source}: FFmpeg is given {names}, and ignores what it does not know")
        skip = self.first_frame                         # of a recording: these are narrated already
        open_video = partial(Video, options=options)
        if source.is_live:
            open_video = partial(Camera, options=options, retries=args.retries)
            skip = 0
        frames, self.total, self.video = open_frames(
            source, narrator.config, encode, args.lookahead, largest, open_video, skip
        )
        if args.pace:
            frames = paced(frames, args.pace * narrator.config.fps)
        return frames

    def report(self, began: float) -> None:
        """Print a line about the stream on stderr, and one about its pictures.

        began       time.perf_counter() when it began
        """
        count = self.context.frame
        if count == self.first_frame:
            return
        name = f"{self.given.name}: " if self.given.name else ""
        rate = (count - self.first_frame) / (time.perf_counter() - began)
        cache = self.context.cache
        text, visual = cache.lengths()
        frames = counted(count, "frame")
        narrations = counted(self.context.segment, "narration")
        restarts = ""
        if self.context.restarts:
            restarts = ", " + counted(self.context.restarts, "restart")
        say(f"{name}{frames}, {narrations}{restarts}, "
            f"{rate:.1f} frames/s; cache at most {self.peak} tokens, now {text} text + "
            f"{visual} visual = {cache.bytes() / 1e6:.2f} MB")
        if self.video is not None:
            self.video.report()


# as needs of settings (support/common/options.py)
NEEDS = {
    "retries": "a live source that can be opened again",
    "source_option": "pictures",
}


def check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot work, and what would have no effect, before anything is loaded."""
    first = args.input[0]
    refuse_without_effect(vars(args), NEEDS | needs_of(Config), trigger_has(args) | {
        "pictures": any(source.kind != "features" for source in args.input),
        "a live source that can be opened again": first.is_live and first.given != "-",
    })
    if len(args.input) > 1:
        for source in args.input:
            if source.kind in ("live", "pipe"):
                raise BadData(f"{source}: is no file, and the next input would "
                              f"wait for its end; start a process for each")
        if args.serve is not None:
            raise BadData("--serve shows one input; give one, or --html FOLDER for a page of each")
    if args.html and args.state:
        raise BadData("--html with --state would be a page of what came after the last start; "
                      "make it at the end, by python -m beyond.streams.page VIDEO JSONL --trace TRACE")
    if args.serve is not None and args.state and not args.jsonl:
        raise BadData("--serve with --state needs --jsonl FILE: after a restart, the page has the "
                      "earlier sentences from there")
    if first.is_live and (args.pace or (args.lookahead or 1) > 1):
        raise BadData(f"--pace and --lookahead are for recordings; {first} is live")
    if args.explain and (args.lookahead or 1) > 1:
        raise BadData("--explain shows one frame a pass, and --lookahead reads several")
    if first.kind in ("video", "features"):
        check_inputs(args.input)


def run_inputs(args: argparse.Namespace) -> None:
    args.input = [source_of(given, args.live) for given in args.input]
    check_options(args)
    inputs = inputs_of(args)
    live = args.input[0].is_live
    if args.lookahead is None:
        args.lookahead = 1 if live or args.pace or args.explain else LOOKAHEAD
    has_page = args.html or args.serve is not None
    streams = [NarratedInput(given, Page(given) if has_page else None) for given in inputs]
    if args.serve is not None:
        url = serve(streams[0].page, args.serve)
        say(f"page: {url}")

    model = args.model or default_model(args.input)
    narrator, encoder = load_models(model, args, live)
    if not args.model:
        say(f"narrator: {model}")
    probe = None
    if (Path(model) / PROBE).exists():                      # the toy's alone have one
        from toy.probe import load_probe
        probe = load_probe(model)
    if args.explain:
        print(LEGEND if probe is None else LEGEND + LEGEND_OF_MEMORY, flush=True)
    failed = 0
    for stream in streams:
        stream.probe = probe
        try:
            show(stream, narrator, encoder, args)
        except (BadData, OSError) as error:
            if len(streams) == 1:
                raise
            failed += 1
            say(f"{stream.given.name}: {error}")
    if failed:
        raise BadData(f"{failed} of {len(streams)} inputs could not be narrated to their end")
    if args.serve is not None:
        say(f"done; the page stays at {url} until Ctrl-C")
        while True:
            time.sleep(3600)


def default_model(sources: list[Source]) -> str:
    """The narrator of a command without --model: the bundled one if all inputs are of the toy, else
    the authors' one.
    """
    if all(is_of_the_toy(source) for source in sources):
        return DEFAULT_MODEL
    return AUTHORS


def is_of_the_toy(source: Source) -> bool:
    """Whether a video says that it is one of the toy, or features say that they are of its encoder.
    Of features that say nothing, the width decides. What cannot be read is no obstacle: it is
    refused when it is its turn.
    """
    try:
        if source.kind == "features":
            settings = read_json(Path(DEFAULT_MODEL) / "narrator.json")
            with open_features(source.path, source.tensor) as (x, header):
                mark = header.get("vision_mark", settings["vision_mark"])
                return x.shape[2] == settings["width"] and mark == settings["vision_mark"]
        return source.kind == "video" and Video(source.given).title == TOY_TITLE
    except (BadData, OSError):
        return True


def load_models(model: str, args: argparse.Namespace,
                live: bool) -> tuple[Narrator, VisionEncoder | None]:
    """The narrator of a command line, and its vision encoder if there are pictures to encode.

    Of the authors' narrator, which nobody may have asked for, BadData says how to get it, and
    what else there is.
    """
    device, dtype = device_and_dtype(args.device, args.dtype)
    has_videos = any(source.kind != "features" for source in args.input)
    chooses = args.dtype == "auto" and device == "cpu"
    if chooses:
        dtype = None                                    # what is faster here
    changes = settings_given(args, Config)
    try:
        checkpoint = open_checkpoint(model, **changes)
        if has_videos:
            find_model(checkpoint.config.vision, "vision")      # before the other one is loaded
        narrator = checkpoint.narrator(device, dtype).merge()
    except BadData as error:
        if args.model or model == DEFAULT_MODEL:
            raise
        raise BadData(f"what is not the toy's needs the authors' narrator: {error}. "
                      f"Accept Meta's licence at {LICENCE}, run `hf auth login` and try again; or "
                      f"give --model toy/checkpoint, which knows only the words of a miniature "
                      f"kitchen") from error
    dtype = narrator.llm.dtype
    if chooses and dtype == torch.bfloat16:
        say("The language model computes in bfloat16, which is faster on this processor; "
            "--dtype float32 is exact")
    encoder = None
    if has_videos:
        encoder = narrator.vision_encoder(dtype)
        speed_up(encoder)
    if live:
        say(f"live: newest pictures first; {live_bounds(narrator, changes)}")
    if args.compile:
        compile_narrator(narrator)
    else:
        speed_up(narrator)
    return narrator, encoder


def show(stream: NarratedInput, narrator: Narrator, encoder: VisionEncoder | None,
         args: argparse.Namespace) -> None:
    """Narrate an input, and print above a bar what is decided: its narrations, and with --explain
    each frame.
    """
    name = f"{stream.given.name} " if stream.given.name else ""
    with progress(None, name.strip() or "streaming", unit="frame", leave=False, mininterval=0.5) as bar:
        for decision, row in stream.decisions(narrator, encoder, args):
            bar.total = stream.total
            bar.initial = stream.first_frame            # says nothing of this command's speed
            bar.update(decision.frame + 1 - bar.n)
            cache = f"{decision.text_tokens}+{decision.visual_tokens} tokens"
            bar.set_postfix({"cache": cache}, refresh=False)
            lines = []
            if args.explain:
                lines.append(name + explain(decision, narrator.layout, narrator.config))
            if row is not None:
                lines.append(f"[{name}{timestamp(row['end'])}] {row['text']}")
            if args.explain and row is not None and stream.probe is not None:
                from toy.probe import in_words
                places = in_words(stream.probe, stream.context.memory[0])
                lines.append(name + explain_memory(places))
            if lines:
                with tqdm.external_write_mode(file=sys.stdout):
                    print("\n".join(lines), flush=True)


def make_parser() -> Parser:
    parser = Parser(prog="stream.py", description="Narrate a video as it plays.")
    parser.add_argument(
        "input", nargs="+",
        help="video file; frame features [T, J, D]: FILE.safetensors[:NAME] or FILE.pt; "
             "camera[:N], /dev/video0, rtsp://..., http://..., - (stdin); of several files, "
             "the output options name folders")

    models = parser.add_argument_group("model")
    model_options(models, Config,
                  help="checkpoint folder or hub id (default: the bundled one for files of "
                       "the toy's videos, which say so in their title, and for features of its "
                       f"encoder; else {AUTHORS})")
    add_settings(models, Config, ("fps",), THAT_OF_CHECKPOINT)

    trigger_options(parser.add_argument_group("when it narrates"), Config)

    outputs = parser.add_argument_group("outputs")
    for form in ("jsonl", "srt", "vtt"):
        outputs.add_argument(f"--{form}", metavar="FILE", help=f"also write {form.upper()}")
    outputs.add_argument("--trace", metavar="FILE", help="also write one line per frame")
    outputs.add_argument(
        "--html", metavar="FILE",
        help=f"also write a page that plays the video with its narrations: one file with a small "
             f"copy of the video in it, without sound; of a video above {SMALL / 1e6:g} MB, a page "
             f"that refers to the video")
    outputs.add_argument(
        "--explain", action="store_true", help="print what each frame fed, decided and pruned")
    outputs.add_argument(
        "--serve", nargs="?", const=PORT, metavar="PORT",
        type=in_range(int, 0, 65535),
        help=f"show the same page while narrating, at http://{HOST}:{PORT}/ or another port (0: any "
             f"free one)")
    outputs.add_argument(
        "--pace", type=positive_float, metavar="X",
        help="a recording's frames come as it plays (1), X times as fast, ...; for --serve "
             "(default: as fast as possible)")

    # beyond/streams/live.py, bounds.py, suspend.py
    endless = parser.add_argument_group("cameras and streams without end")
    endless.add_argument(
        "--state", metavar="FILE", help="save all that a stream carries; go on if FILE is there")
    endless.add_argument(
        "--live", action="store_true",
        help="http(s) or - (standard input) is live: newest pictures first, not all of them")
    endless.add_argument(
        "--retries", type=non_negative_int, metavar="N",
        help="give a live source up after it was opened again N times in a row without a picture "
             "(default: never)")
    endless.add_argument(
        "--source-option", type=source_option, action="append", metavar="NAME=VALUE",
        help="an option of FFmpeg for opening the input, such as rtsp_transport=udp")
    add_settings(endless, Config, ("max_segment",), "30 of a live source, else never")
    add_settings(endless, Config, ("max_position",), "16384 of a live source, else never")

    # these change none of the narrations
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--lookahead", type=positive_int, metavar="K",
        help=f"frames in one pass of the language model (default {LOOKAHEAD}; live, --pace, "
             "--explain: 1); the narrations are the same in float32, in bfloat16 up to rounding")
    speed.add_argument(
        "--compile", action="store_true",
        help="compile the visual memory and the language model (torch.compile)")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    command_line(lambda: run_inputs(args))


def run_and_exit() -> None:
    """`main`, and the end of the process.

    It ends at once. Python's own end can take seconds to free torch. And it crashes where a thread
    still waits for a camera: FFmpeg asks PyAV every tenth of a second whether to go on waiting, and
    PyAV needs the interpreter for the answer.
    """
    try:
        main()
    except SystemExit as end:
        if sys.stdout is not None:                  # it is closed: python ... >&-
            sys.stdout.flush()
        os._exit(end.code)
