"""python evaluate.py: both protocols over a data set, and scores of files."""
import argparse
import json
from dataclasses import asdict
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import data
import evaluate
import narrator as nar
import stream
from baselines import context_class
from commands.compare import run_compare
from commands.scores import print_scores
from streams.bounds import open_stream
from support.common.devices import device_and_dtype, rank
from support.common.disk import check_distinct, check_writable, write_json
from support.common.errors import BadData, command_line
from support.common.figures import print_table
from support.common.options import (
    DEFAULT_MODEL, Parser, config_changes, data_options, model_options, positive_int, probability,
    trigger_options,
)
from support.common.progress import progress
from support.engine.cpu import speed_up
from support.files.narrations import (
    Sentence, Truth, check_unit, paired, read_predictions, read_truth, to_sentences,
)
from support.files.predictions import Predictions, digest
from support.files.tracks import time_of


# ---------------------------------------------------------------------- scores of files


def run_score(args: argparse.Namespace):
    for given in (args.pred, args.gt):
        check_distinct(given, args.per_video or "")
    check_writable(args.per_video)
    truths = read_truth(Path(args.gt))
    predictions = read_predictions(Path(args.pred))
    truths, predictions = paired(truths, predictions, args.gt, args.pred, args.partial)
    check_unit(truths, predictions)
    print_scores(truths, predictions, {}, args)


# ---------------------------------------------------------------------- narrator and data set


def narrator_and_samples(args: argparse.Namespace, model: str, streaming: bool = False,
                         ) -> tuple[nar.Narrator, nar.VisionEncoder | None, list[data.Sample]]:
    """A narrator with the settings of the command line, its vision encoder for the toy (which has
    pictures; the other data sets have features), and the samples of the data set.

    The data set comes first: what is missing there is refused before a model is loaded.
    """
    dataset = data.load_dataset(args.data, args.root, split_of(args), args.limit, streaming,
                                args.world)
    device, dtype = device_and_dtype(args.device, args.dtype)
    narrator = nar.load(model, args.llm, device, dtype, sees=args.data == "toy",
                                      **config_changes(args))
    vision = None
    if args.data == "toy":
        vision = narrator.vision_encoder(narrator.llm.dtype)
    samples = list(dataset)
    for sample in samples:
        data.check_sample(sample, narrator.config)
    return narrator, vision, samples


def split_of(args: argparse.Namespace) -> str:
    if args.split:
        return args.split
    return "test" if args.data == "toy" else "val"


# ---------------------------------------------------------------------- self-conditioned (§4.1)


def truth_of(sample: data.Sample) -> Truth:
    streamed = sample.num_frames / sample.fps
    if sample.tracks is not None:
        tracks = [[Sentence(time, text) for time, text in track] for track in sample.tracks]
        return Truth(tracks, sample.origin, streamed)
    sentences = []
    for (frame, text), memory_words in zip(sample.narrations, sample.memory_words):
        time = sample.offset + time_of(frame, sample.fps)
        sentences.append(Sentence(time, text, tuple(memory_words)))
    return Truth([sentences], sample.origin, streamed)


def fingerprint(sample: data.Sample) -> str:
    """SHA-256 of times, ground truth and all frames in their order. It tells videos of the same
    name apart.
    """
    truth = (sample.num_frames, sample.fps, sample.offset, sample.origin, sample.narrations,
             sample.tracks)
    sha = sha256(repr(truth).encode())
    for frame in sample.frames() if sample.source else sample.tokens():
        sha.update(np.ascontiguousarray(frame))
    return sha.hexdigest()


def stream_settings(args: argparse.Namespace, narrator: nar.Narrator,
                    vision: nar.VisionEncoder | None) -> dict:
    """All that predictions depend on, but for the videos: wherever they lie, each has a fingerprint.
    """
    return asdict(narrator.config) | {
        "split": split_of(args),
        "world": args.world,
        "static": args.static,
        "dtype": str(next(narrator.llm.parameters()).dtype),
        "weights": digest(narrator),
        "vision_weights": digest(vision) if vision else None,
    }


def own_narrations(sample: data.Sample, narrator: nar.Narrator, vision: nar.VisionEncoder | None,
                   lookahead: int, static: bool = False) -> list[dict]:
    """The model's own narrations of a sample, times in seconds of the video."""
    context = open_stream(narrator, lookahead=lookahead)
    rows = []
    for decision in stream.narrate(narrator, sample.tokens(vision, lookahead), static,
                                   context=context):
        if decision.narration:
            row = dict(vars(decision.narration))
            row["start"] += sample.offset
            row["end"] += sample.offset
            rows.append(row)
    return rows


def narrated(sample: data.Sample, narrator: nar.Narrator, vision: nar.VisionEncoder | None,
             args: argparse.Namespace, folder: Predictions | None) -> list[dict]:
    """`own_narrations`. With a folder, they are kept: a finished video is not narrated again, if the
    kept narrations are of the same frames.
    """
    mark = fingerprint(sample) if folder else ""
    if folder and folder.finished(sample.name, mark):
        return folder.load_rows(sample.name)
    rows = own_narrations(sample, narrator, vision, args.lookahead, args.static)
    if folder:
        folder.save_rows(sample.name, rows, mark)
    return rows


def run_stream(args: argparse.Namespace):
    """Self-conditioned: every narration depends on the model's own narrations before it.

    Under torchrun each process narrates a part of the videos, and the first one prints the scores
    of all.
    """
    settings = Path(args.output) / "settings.json" if args.output else None
    check_writable(args.per_video, settings)
    process, processes = rank()
    if processes > 1:
        if not args.output:
            raise BadData("several processes need --output, "
                          "a folder where they put their predictions")
        # a process may wait for days until the others have narrated their videos
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=7))
    narrator, vision, samples = narrator_and_samples(args, args.model, streaming=True)
    folder = Predictions(args.output) if args.output else None
    if folder and process == 0:
        folder.keep_settings(stream_settings(args, narrator, vision))
    if processes > 1:
        torch.distributed.barrier()            # the folder is there, for these settings

    narrator = narrator.merge()
    speed_up(narrator)
    rows_of = {}                               # video -> rows
    for sample in progress(samples[process::processes], "streaming", unit="video"):
        rows_of[sample.name] = narrated(sample, narrator, vision, args, folder)
    if processes > 1:
        torch.distributed.barrier()            # all predictions are in the folder
        torch.distributed.destroy_process_group()
        if process != 0:
            return

    truths = {}
    predictions = {}
    minutes = {}
    for sample in samples:
        if sample.name not in rows_of:         # another process has narrated it
            rows_of[sample.name] = folder.load_rows(sample.name)
        truths[sample.name] = truth_of(sample)
        predictions[sample.name] = to_sentences(rows_of[sample.name], sample.name)
        minutes[sample.name] = sample.duration / 60
    print_scores(truths, predictions, minutes, args)


# ---------------------------------------------------------------------- teacher forcing (§4.1)


def true_narrations(narrator: nar.Narrator, sample: data.Sample) -> nar.Narrations:
    """(frame, ids) of a sample's narrations. Raises BadData if the first is not at frame 0."""
    if not sample.narrations or sample.narrations[0][0] != 0:
        raise BadData(f"{sample.name}: teacher forcing needs a narration at the first frame; "
                      f"annotate one")
    return [(frame, narrator.layout.encode(" " + text)) for frame, text in sample.narrations]


def run_teacher(args: argparse.Namespace):
    """PPL, TimeDiff (s), Fluency, LM-Correctness: means over samples."""
    check_writable(args.per_video)
    narrator, vision, samples = narrator_and_samples(args, args.model)
    speed_up(narrator)
    each = {}                                  # sample -> its measures
    minutes = {}
    differing = []                             # of each sample: see shares_that_differ
    for sample in progress(samples, "teacher", unit="video"):
        sample = data.shorten(sample, args.max_frames)
        narrations = true_narrations(narrator, sample)
        x = torch.stack(list(sample.tokens(vision)))           # [T, J, D]
        cache = context_class(narrator)(narrator).cache
        scores = evaluate.score_segments(narrator, x, narrations, args.reply_theta, cache)
        each[sample.name] = evaluate.summary(scores, sample.fps)
        minutes[sample.name] = sample.duration / 60
        if narrator.memory.M and len(narrations) > 2:          # at least two read-outs
            differing.append(how_memory_differs(narrator, x, narrations))

    result = means_of(list(each.values()))
    rows = [("all", result)]
    if args.by_duration:
        for label, names in evaluate.by_duration(minutes):
            rows.append((label, means_of([each[name] for name in names])))
        result = result | {"by_duration": dict(rows[1:])}
    print_table(rows)
    if differing:
        tokens_differ, read_outs_differ = np.mean(differing, axis=0).tolist()
        print(f"memory tokens: {tokens_differ:.2g} of their mean square differs between the "
              f"{narrator.memory.M} tokens of a read-out, {read_outs_differ:.2g} between read-outs "
              f"(docs/training.md)")
        result |= {"tokens_differ": tokens_differ, "read_outs_differ": read_outs_differ}
    if args.json:
        print(json.dumps(result))
    if args.per_video:
        write_json(args.per_video, each)


@torch.no_grad()
def how_memory_differs(narrator: nar.Narrator, x: Tensor,
                       narrations: nar.Narrations) -> tuple[float, float]:
    """See `shares_that_differ`; of the read-outs of a video x [T, J, D]."""
    return shares_that_differ(narrator.read_outs(x, narrations)[0].float())


def shares_that_differ(memory: Tensor) -> tuple[float, float]:
    """Read-outs [N, M, D] -> the shares of their mean square that differ between the M tokens of a
    read-out, and between read-outs. Near 0, the language model sees no past, whatever there was.
    """
    size = memory.square().mean()
    of_tokens = memory - memory.mean(1, keepdim=True)
    of_read_outs = memory - memory.mean(0)
    return (of_tokens.square().mean() / size).item(), (of_read_outs.square().mean() / size).item()


def means_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """The number of videos, and the mean of each measure."""
    means = {"videos": len(rows)}
    for measure in rows[0]:
        means[measure] = evaluate.average([row[measure] for row in rows])
    return means


# ---------------------------------------------------------------------- the command line


def json_file(text: str) -> str:
    """An argparse type: a video, mistaken for the name of an output, is safe."""
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"must be the name of a .json file, not {text!r}")
    return text


def main():
    parser = Parser(description="Evaluate a narrator.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    score = commands.add_parser("score", help="score predictions against the truth, both files")
    score.add_argument("--pred", required=True,
                       help='JSON {video: [{"time", "text"}]}, JSONL of stream.py, .srt, .vtt or '
                            '.csv, or a folder of such files')
    score.add_argument("--gt", required=True,
                       help="the same, with several annotators {video: [[...], ...]}, or the "
                            "toy's .json")
    score.add_argument("--partial", action="store_true",
                       help="score only the videos that have predictions")
    score.set_defaults(run=run_score)

    streams = commands.add_parser("stream", help="self-conditioned protocol over a data set")
    group = streams.add_argument_group("narration")
    trigger_options(group)
    group.add_argument("--lookahead", type=positive_int, default=4, metavar="K",
                       help="frames in one pass of the language model; the narrations are the same "
                            "in float32, in bfloat16 up to rounding (default %(default)s)")
    group.add_argument("--output", metavar="DIR",
                       help="keep the predictions in this folder; finished videos are skipped")
    streams.set_defaults(run=run_stream)

    teacher = commands.add_parser("teacher", help="teacher-forced protocol: PPL, TimeDiff, Fluency, "
                                                  "LM-Correctness")
    group = teacher.add_argument_group("teacher forcing")
    group.add_argument("--reply-theta", type=probability, default=0.0,
                       help="also end a segment where p([SKIP]) is below this "
                            "(default 0, as published)")
    group.add_argument("--max-frames", type=positive_int, default=1200,
                       help="cut samples to at most this many frames (default 1200, as published)")
    teacher.set_defaults(run=run_teacher)

    compare = commands.add_parser("compare", help="two evaluations of the same videos side by side, "
                                                  "with intervals of the differences")
    for name in ("first", "second"):
        compare.add_argument(name, metavar=f"{name.upper()}.json",
                             help="what evaluate.py has written with --per-video")
    compare.set_defaults(run=run_compare)

    for command in (score, streams, teacher, compare):
        command.add_argument("--json", action="store_true", help="one JSON object as the last line")
    for command in (score, streams, teacher):
        command.add_argument("--per-video", metavar="FILE.json", type=json_file,
                             help="write each video's results as JSON (see compare)")
    for command in (streams, teacher):
        command.add_argument("--by-duration", action="store_true",
                             help="also by the length of the videos: up to 2, 4, 8 minutes, and "
                                  "longer")
        data_options(command.add_argument_group("data set"))
        model_options(command.add_argument_group("narrator"), default=DEFAULT_MODEL)
    args = parser.parse_args()
    command_line(lambda: args.run(args))
