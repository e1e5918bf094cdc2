"""python evaluate.py: both protocols over a data set, and scores of files."""
import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import data
import evaluate
import narrator as nar
import stream
from baselines import variants
from streams.fast import open_stream
from streams.together import Failed, side_by_side
from support.common.devices import device_and_dtype, rank, vision_dtype
from support.common.disk import check_writable, write_json
from support.common.errors import BadData, command_line
from support.common.figures import print_table
from support.common.options import (
    DATASETS, DEFAULT_MODEL, Parser, config_changes, data_options, dataset_folder, lookahead_option,
    model_options, positive_int, probability, trigger_options,
)
from support.common.progress import progress
from support.engine.vision import check_vision
from support.files import own_videos
from support.files.features import pairs
from support.files.narrations import (
    Sentence, Truth, paired, read_predictions, read_truth, to_sentences,
)
from support.files.predictions import Predictions, digest
from support.files.tracks import Notes, time_of


# ---------------------------------------------------------------------- evaluate.py score


def run_score(args: argparse.Namespace):
    truths, predictions = paired(read_truth(Path(args.gt)), read_predictions(Path(args.pred)), args.gt, args.pred,
                                 args.partial)
    print_scores(truths, predictions, {}, args)


def print_scores(truths: dict[str, Truth], predictions: dict[str, list[Sentence]], minutes: dict[str, float], args):
    """The table of a self-conditioned evaluation: all videos and, with --by-duration, groups of
    them.
    """
    if args.ptb and (problem := evaluate.java_problem()):
        raise BadData(f"--ptb {problem}")
    result, each = evaluate.evaluate(truths, predictions, args.ptb)
    rows = [("all", result)]
    if getattr(args, "by_duration", False):
        for label, names in evaluate.by_duration({name: minutes[name] for name in each}):
            rows.append((label, evaluate.evaluate({name: truths[name] for name in names}, predictions, args.ptb)[0]))
        result = result | {"by_duration": dict(rows[1:])}
    print_table(rows)
    if result["without_truth"]:
        print(f"left out: {result['without_truth']} of {len(truths)} videos, no true narration", file=sys.stderr)
    if result["meteor"] is None:
        print(f"METEOR is not computed: {evaluate.java_problem()}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))
    if args.per_video:
        write_json(args.per_video, each)


# ---------------------------------------------------------------------- evaluate.py stream (§4.1, self-conditioned)


def narrator_of(args: argparse.Namespace, model: str) -> nar.Narrator:
    """A narrator with the settings of the command line.

    What it narrates, and with what, is looked for before.
    """
    if getattr(args, "data", None):
        check_data(args)
        if args.data == "toy":
            check_vision(model, args.vision, nar.Config.vision)
    return variants.load_narrator(model, args.llm, *device_and_dtype(args.device, args.dtype), **config_changes(args))


def check_data(args: argparse.Namespace) -> None:
    """BadData if the data set is not there.

    Of the toy, nothing is rendered yet; what can be long is not read twice.
    """
    root = dataset_folder(args.data, args.root)
    if args.data == "toy" or not root.is_dir():
        data.load_dataset(args.data, args.root, split_of(args), args.limit, variant=args.world)
    elif args.data not in DATASETS:
        own_videos.read_folder(root, split_of(args), args.limit, Notes())


def load_vision(args: argparse.Namespace, narrator: nar.Narrator) -> nar.VisionEncoder | None:
    """The narrator's vision encoder, where there are pictures to encode: in the toy."""
    return narrator.vision_encoder(args.vision, vision_dtype(args)) if args.data == "toy" else None


def split_of(args: argparse.Namespace) -> str:
    return args.split or ("test" if args.data == "toy" else "val")


def samples(args: argparse.Namespace, narrator: nar.Narrator, streaming: bool = False) -> Iterator[data.Sample]:
    shape, two = (narrator.config.J, narrator.config.width), narrator.config.width_second
    for y in data.load_dataset(args.data, args.root, split_of(args), args.limit, streaming,
                               getattr(args, "max_frames", None), shape, args.world):
        if y.fps != narrator.config.fps:
            raise BadData(f"{y.name}: has {y.fps:g} frames a second, the narrator needs {narrator.config.fps:g}")
        yield replace(y, source=lambda source=y.source: pairs(source())) if two and y.source else y


def truth_of(sample: data.Sample) -> Truth:
    streamed = sample.num_frames / sample.fps
    if sample.tracks is not None:
        tracks = [[Sentence(time, text) for time, text in track] for track in sample.tracks]
        return Truth(tracks, sample.origin, streamed)
    return Truth([[Sentence(sample.offset + time_of(frame, sample.fps), text, tuple(memory))
                   for (frame, text), memory in zip(sample.narrations, sample.memory_words)]], sample.origin, streamed)


def known_of(sample: data.Sample):
    """A SHA-256 that goes on: so far of the times and the ground truth of a sample."""
    known = (sample.num_frames, sample.fps, sample.offset, sample.origin, sample.narrations, sample.tracks)
    return sha256(repr(known).encode())


def watched(sample: data.Sample, mark) -> data.Sample:
    """The same sample; each frame that is read from it is added to the SHA-256 `mark`."""
    def pictures():
        for picture in sample.frames():
            mark.update(np.ascontiguousarray(picture))
            yield picture

    def read(start: int, stop: int) -> Tensor:
        x = sample.read(start, stop)
        mark.update(x.numpy())
        return x

    return replace(sample, source=sample.source and pictures, read=sample.read and read)


def fingerprint(sample: data.Sample) -> str:
    """SHA-256 of what distinguishes videos of one name: times, ground truth and all frames, in
    their order.
    """
    mark = known_of(sample)
    for _ in watched(sample, mark).tokens(lambda pictures: pictures):
        pass
    return mark.hexdigest()


def stream_settings(args: argparse.Namespace, narrator: nar.Narrator, vision: nar.VisionEncoder | None) -> dict:
    """All that the predictions of a video depend on."""
    root = None if args.data == "toy" and not args.root else dataset_folder(args.data, args.root)
    return asdict(narrator.config) | {
        "data": args.data, "root": root and str(root.resolve()), "split": split_of(args), "world": args.world,
        "static": args.static, "dtype": str(next(narrator.llm.parameters()).dtype), "weights": digest(narrator),
        "vision_weights": vision and digest(vision)}


def narrated(sample: data.Sample, narrator: nar.Narrator, vision: nar.VisionEncoder | None, args: argparse.Namespace,
             folder: Predictions | None, ask: Callable) -> Iterator[tuple[str, list[dict]]]:
    """The model's own narrations of a sample, in seconds of the video; those that are kept are not
    made again, if they are of these frames. The frames of a video that is narrated are hashed as
    they are read.
    """
    if folder and folder.mark_of(sample.name).exists() and folder.finished(sample.name, fingerprint(sample)):
        lines = folder.load_rows(sample.name)
    else:
        mark = known_of(sample)
        context = open_stream(narrator, lookahead=args.lookahead, run=lambda part: ask(narrator.decoder, part))
        x = watched(sample, mark).tokens(lambda pictures: ask(vision.encode_batches, pictures), args.lookahead)
        decisions = stream.narrate(narrator, x, args.static, context=context)
        lines = [vars(y.narration) for y in decisions if y.narration]
        lines = [y | {"start": y["start"] + sample.offset, "end": y["end"] + sample.offset} for y in lines]
        if folder:
            folder.save_rows(sample.name, lines, mark.hexdigest())
    yield sample.name, lines


def run_stream(args: argparse.Namespace):
    """Every narration depends on the model's own narrations before it. --batch videos at a time."""
    me, world = rank()
    if world > 1:
        if not args.output:
            raise BadData("several processes need --output, a folder where they put their predictions")
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=7))
    narrator = narrator_of(args, args.model)
    vision, folder = load_vision(args, narrator), Predictions(args.output) if args.output else None
    every, lines = list(samples(args, narrator, streaming=True)), {}
    if folder and me == 0:
        folder.keep_settings(stream_settings(args, narrator, vision))
    if world > 1:
        torch.distributed.barrier()
    mine, narrator = every[me::world], narrator.merge()
    jobs = (partial(narrated, sample, narrator, vision, args, folder) for sample in mine)
    for _, item in progress(side_by_side(jobs, args.batch), "streaming", len(mine), "video"):
        if isinstance(item, Failed):
            raise item.error
        lines |= [item]
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        if me:
            return
    lines |= {sample.name: folder.load_rows(sample.name) for sample in every if sample.name not in lines}
    predictions = {name: to_sentences(rows, name) for name, rows in lines.items()}
    print_scores({sample.name: truth_of(sample) for sample in every}, predictions,
                 {sample.name: sample.duration / 60 for sample in every}, args)


def true_narrations(narrator: nar.Narrator, sample: data.Sample) -> list[tuple[int, list[int]]]:
    """(frame, ids) of a sample, the first at frame 0."""
    if not sample.narrations or sample.narrations[0][0] != 0:
        raise BadData(f"{sample.name}: teacher forcing needs a narration at the first frame; annotate one")
    return [(frame, narrator.layout.encode(" " + text)) for frame, text in sample.narrations]


def run_teacher(args: argparse.Namespace):
    """PPL, TimeDiff (s), Fluency, LM-Correctness: means over samples."""
    narrator = narrator_of(args, args.model)
    if narrator.config.max_segment is not None:
        print("teacher: true segments are not restarted, so max_segment has no effect",
              file=sys.stderr)
    vision, each, minutes = load_vision(args, narrator), {}, {}
    for sample in progress(samples(args, narrator), "teacher", unit="video"):
        narrations = true_narrations(narrator, sample)
        x = torch.stack(list(sample.tokens(vision)))
        each[sample.name] = evaluate.summary(evaluate.score_segments(narrator, x, narrations, args.reply_theta), sample.fps)
        minutes[sample.name] = sample.duration / 60
    mean = lambda names: {"videos": len(names)} | {
        key: float(np.mean([each[name][key] for name in names])) for key in next(iter(each.values()))}
    rows = [("all", mean(list(each)))]
    if args.by_duration:
        rows += [(label, mean(names)) for label, names in evaluate.by_duration(minutes)]
    print_table(rows)
    if args.json:
        print(json.dumps(rows[0][1] | ({"by_duration": dict(rows[1:])} if args.by_duration else {})))
    if args.per_video:
        write_json(args.per_video, each)


# ---------------------------------------------------------------------- the command line


def main():
    parser = Parser(description="Evaluate a narrator.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        one.set_defaults(run=run)
        return one

    score = command("score", run_score, "score predictions against ground truth, both from files")
    score.add_argument("--pred", required=True,
                       help='JSON {video: [{"time", "text"}]}, JSONL of stream.py, or a folder of such files')
    score.add_argument("--gt", required=True,
                       help="JSON {video: [...]}, with several annotators {video: [[...], ...]}, or the toy's .json")
    score.add_argument("--partial", action="store_true", help="score only the videos that have predictions")
    streams = command("stream", run_stream, "self-conditioned protocol over a split of a data set")
    streams.add_argument("--output", help="keep the predictions in this folder; finished videos are skipped")
    teacher = command("teacher", run_teacher,
                      "teacher-forced protocol: PPL, TimeDiff, Fluency, LM-Correctness "
                      "(max_segment has no effect)")
    teacher.add_argument("--reply-theta", type=probability, default=0.0,
                         help="also end a segment where p([SKIP]) is below this (default 0, as published)")
    teacher.add_argument("--max-frames", type=positive_int, default=1200,
                         help="cut samples to at most this many frames (default 1200, as published)")
    trigger_options(streams)
    lookahead_option(streams)
    streams.add_argument("--batch", type=positive_int, default=1, metavar="B",
                         help="videos that are narrated at once and share the passes of the models "
                              "(default 1); the narrations are those of each alone in float32, in "
                              "bfloat16 up to rounding")
    for one in (streams, teacher):
        data_options(one)
        model_options(one, default=DEFAULT_MODEL)
        one.add_argument("--by-duration", action="store_true",
                         help="also by the length of the videos: up to 2, 4, 8 minutes, and longer")
    for one in (score, streams):
        one.add_argument("--ptb", action="store_true",
                         help="split sentences by the Penn Treebank tokeniser (needs Java, pycocoevalcap)")
    for one in (score, streams, teacher):
        one.add_argument("--per-video", metavar="FILE", help="write each video's results as JSON")
        one.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()

    def run():
        output = getattr(args, "output", None)
        check_writable(args.per_video, output and Path(output) / "settings.json")
        args.run(args)

    command_line(run)
