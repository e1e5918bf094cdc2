"""python evaluate.py: its options, what is kept of an evaluation, and what is printed."""
import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import data
import evaluate
import narrator as nar
from beyond.baselines import context_class
from beyond.commands.data_command import samples_of
from beyond.streams.bounds import open_stream, tell_of_positions
from support.common import java
from support.common.devices import device_and_dtype, is_first
from support.common.disk import check_apart, check_writable, file_name, write_json
from support.common.errors import command_line
from support.common.figures import print_table
from support.common.marks import (
    digest_of, digest_of_features, digest_of_program, digest_of_samples,
)
from support.common.options import (
    DEFAULT_MODEL, Parser, data_options, dataset_folder, json_option, model_options,
    needs_of, non_negative_int, positive_int, refuse_without_effect, settings_given, trigger_has,
    trigger_options,
)
from support.common.processes import KnownToAll, check_equal, process_group
from support.common.progress import say, say_as_one
from support.engine.checkpoint import open_checkpoint
from support.engine.cpu import speed_up
from support.files.features import encoder_mark
from support.files.narrations import paired, read_predictions, read_truth
from support.files.own_videos import check_not_narrations
from support.files.predictions import PARTS, Predictions
from support.files.sentences import NarratedVideo, Notes, Sentence

KEPT = Path("out/evaluations")          # where the predictions of a data set are kept

# of each video: what is true of it, what is written of it, and that for JSON
Truths = dict[str, NarratedVideo]
Narrated = dict[str, list[Sentence]]
RowsByVideo = dict[str, list[dict]]
# measures of all of some videos together, and of each
Measured = tuple[dict, dict[str, dict]]


# ---------------------------------------------------------------------- scores


def run_score(args: argparse.Namespace):
    check_apart([args.pred, args.gt], [args.per_video])
    check_not_narrations(args.per_video)
    check_writable(args.per_video)
    notes_of_truth = Notes()
    notes_of_predictions = Notes()
    truths = read_truth(Path(args.gt), notes_of_truth)
    add_words_of_toy(truths, Path(args.gt))
    predictions = read_predictions(Path(args.pred), notes_of_predictions)
    for given, notes in ((args.gt, notes_of_truth), (args.pred, notes_of_predictions)):
        if str(notes):
            say(f"{given}: {notes}")
    truths, predictions = paired(truths, predictions, args.gt, args.pred, args.partial)
    tell_of_other_times(truths, predictions)
    print_measures(args, *measures_of(truths, predictions), groups={})


def tell_of_other_times(truths: Truths, predictions: Narrated) -> None:
    """Say how many videos have predictions, but none from their beginning to their last true
    narration.
    """
    elsewhere = []
    for name, truth in truths.items():
        true_times = [sentence.time for sentences in truth.annotators for sentence in sentences]
        times = [sentence.time for sentence in predictions[name]]
        if not (true_times and times):
            continue
        if min(times) > max(true_times) or max(times) < truth.origin:
            elsewhere.append(name)
    if elsewhere:
        say(f"{len(elsewhere)} of {len(truths)} videos have no prediction within the time of their true "
            f"narrations ({elsewhere[0]}): are all times in seconds, and from the same beginning?")


def add_words_of_toy(truths: Truths, path: Path) -> None:
    """Where the truth is a toy video's .json, its sentences know their memory words."""
    files = path.glob("*.json") if path.is_dir() else [path]
    for file in files:
        if file.stem not in truths or file.suffix != ".json":
            continue
        if '"memory"' in file.read_text(encoding="utf-8"):
            from toy.words import true_sentences
            truths[file.stem].annotators = [true_sentences(file)]


def measures_of(truths: Truths, predictions: Narrated) -> Measured:
    """All measures, and the toy's own of its sentences."""
    with_meteor = java.java_problem() is None
    result, each, pairs = evaluate.evaluate(truths, predictions, with_meteor)
    all_pairs = sum(pairs.values(), [])
    if any(getattr(sentence, "memory_words", ()) for sentence, _ in all_pairs):
        from toy.words import recall_of_words
        result |= recall_of_words(all_pairs)
        for name, matched in pairs.items():
            each[name] |= recall_of_words(matched)
    return result, each


def print_sentences(truth: NarratedVideo, predicted: list[Sentence]) -> None:
    """Those that are true and those that were written, in order of time."""
    rows = [(sentence.time, "written", sentence.text) for sentence in predicted]
    for annotator in truth.annotators:
        rows += [(sentence.time, "true", sentence.text) for sentence in annotator]
    print(truth.name)
    for time, whose, text in sorted(rows):
        print(f"{time:8.1f} s  {whose:7}  {text}")


def print_measures(args: argparse.Namespace, result: dict, each: dict[str, dict],
                   groups: dict[str, dict]) -> None:
    """Print the table of an evaluation, and write what was asked for.

    result, each    the measures of all videos together, and of each
    groups          of videos of one length (--by-duration): their measures
    """
    print_table([("all", result), *groups.items()])
    if result.get("without_truth"):
        say(f"left out: {result['without_truth']} videos without a true narration")
    problem = java.java_problem()
    if "meteor" in result and problem:
        say(f"METEOR is not computed: {problem}")
    if groups:
        result = result | {"by_duration": groups}
    if args.json:
        print(json.dumps(result))
    if args.per_video:
        write_json(args.per_video, each)


# ---------------------------------------------------------------------- narrator and data set


def narrator_and_samples(args: argparse.Namespace, streaming: bool = False,
                         ) -> tuple[nar.Narrator, nar.VisionEncoder | None, list[data.Sample]]:
    """A narrator with the settings of the command line, its vision encoder for the toy (which has
    pictures; the other data sets have features), and the samples of the data set.

    The data set comes first: what is missing there is refused before a model is loaded.
    """
    is_toy = args.data == "toy"
    refuse_without_effect(vars(args), needs_of(nar.Config), trigger_has(args) | {"pictures": is_toy})
    samples = samples_of(args, split_of(args), streaming)
    device, dtype = device_and_dtype(args.device, args.dtype)
    checkpoint = open_checkpoint(args.model, **settings_given(args, nar.Config))
    narrator = checkpoint.narrator(device, dtype)
    vision = narrator.vision_encoder(narrator.llm.dtype) if is_toy else None
    samples = list(samples)
    header = data.header_of_all(samples)
    if header:                                  # that there is none was told
        narrator.config.vision_mark = encoder_mark(header, narrator.config)
    data.check_sample(samples[0], narrator.config)          # the others when it is their turn
    return narrator, vision, samples


def split_of(args: argparse.Namespace) -> str:
    if args.split:
        return args.split
    return "test" if args.data == "toy" else "val"


# ---------------------------------------------------------------------- of each video


def evaluate_each(
    args: argparse.Namespace,
    settings: dict,
    samples: list[data.Sample],
    make: Callable[[data.Sample], list[dict]],
    measure: Callable[[RowsByVideo], Measured],
) -> None:
    """Make rows of each video, and print the measures of all. BadData at the end if some could not
    be made.

    settings    all that rows depend on, but for the videos
    make        a video -> its rows, for JSON
    measure     rows by video -> their measures

    Rows of data sets are kept in any case, those of the toy if --output says where.
    """
    check_equal(settings | {
        "the videos": digest_of_samples(samples),
        "the features": digest_of_features(samples),
    })
    kept = None
    folder = args.output
    if folder is None and args.data != "toy":
        of_settings = digest_of(json.dumps(settings, sort_keys=True))[:8]
        data_set = file_name(Path(args.data).name)
        folder = KEPT / f"{data_set}-{split_of(args)}-{args.command}-{of_settings}"
    if folder is not None:
        kept = Predictions(folder, settings, renew=args.output is None)
        say_as_one(f"what is made of each video is kept in {folder}; the same command goes on from "
                   f"there")

    def make_once(sample: data.Sample) -> list[dict]:
        if kept is None:
            return make(sample)
        return kept.keep(sample.name, digest_of_samples([sample], frames=True),
                         lambda: make(sample))

    rows, failed = evaluate.of_each(samples, make_once, args.command)
    if is_first() and rows:
        for sample in samples[:args.show]:
            if sample.name in rows:
                print_sentences(sample, evaluate.to_predictions(rows[sample.name]))
        result, each = measure(rows)
        groups = {}
        if args.by_duration:
            minutes = {sample.name: sample.duration / 60 for sample in samples if sample.name in each}
            for label, names in evaluate.by_duration(minutes):
                groups[label], _ = measure({name: rows[name] for name in names})
        print_measures(args, result, each, groups)
    if failed:
        first, problem = next(iter(failed.items()))
        raise KnownToAll(f"{len(failed)} of {len(samples)} videos could not be evaluated (named "
                         f"above), the figures are of the others: {first} ({problem})")


def settings_of_rows(args: argparse.Namespace, narrator: nar.Narrator) -> dict:
    """What the rows of both protocols depend on, wherever videos and models lie."""
    settings = {name: value for name, value in asdict(narrator.config).items()
                if name not in narrator.config.MODEL_NAMES}
    return settings | {
        "split": split_of(args),
        "world": args.world or "plain",
        "dtype": str(narrator.llm.dtype),
        "weights": narrator.mark,
        "the program, of hash": digest_of_program(),
    }


def check_outputs(args: argparse.Namespace) -> None:
    """BadData if they cannot be written, or would destroy what is read: before anything is loaded."""
    root = dataset_folder(args.data, args.root)
    models = [args.model, getattr(args, "llm", None), getattr(args, "vision", None)]
    kept = [Path(args.output) / name for name in PARTS] if args.output else []
    check_apart([*models, *kept, root, root / "annotations", root / "features"],
                [args.per_video, args.output])
    check_not_narrations(args.per_video)
    check_writable(args.per_video, Path(args.output) / "settings.json" if args.output else None)


# ---------------------------------------------------------------------- self-conditioned (§4.1)


@process_group()
def run_stream(args: argparse.Namespace):
    """Self-conditioned: every narration depends on the model's own narrations before it.

    Under torchrun each process narrates a part of the videos, and the first one prints the scores
    of all.
    """
    check_outputs(args)
    narrator, vision, samples = narrator_and_samples(args, streaming=True)
    longest = max(samples, key=lambda sample: sample.num_frames)
    tell_of_positions(narrator, longest.name, longest.num_frames)
    open_stream(narrator)                           # refuses what cannot be
    settings = settings_of_rows(args, narrator)
    settings["static"] = args.static
    narrator = narrator.merge()
    speed_up(narrator)
    truths = {sample.name: sample for sample in samples}

    def narrate(sample: data.Sample) -> list[dict]:
        data.check_sample(sample, narrator.config)
        context = open_stream(narrator, lookahead=args.lookahead)
        return evaluate.self_conditioned(narrator, sample, vision, args.static, context,
                                         args.lookahead)

    def measure(rows: RowsByVideo) -> Measured:
        predictions = {name: evaluate.to_predictions(rows[name]) for name in rows}
        return measures_of({name: truths[name] for name in rows}, predictions)

    evaluate_each(args, settings, samples, narrate, measure)


# ---------------------------------------------------------------------- teacher forcing (§4.1)


@process_group()
def run_teacher(args: argparse.Namespace):
    """PPL, TimeDiff (s), Fluency, LM-Correctness: means over samples. Shared under torchrun."""
    check_outputs(args)
    narrator, vision, samples = narrator_and_samples(args)
    samples = data.shorten(samples, args.max_frames)
    settings = settings_of_rows(args, narrator)
    settings["max_frames"] = args.max_frames
    speed_up(narrator)

    def score(sample: data.Sample) -> list[dict]:
        data.check_sample(sample, narrator.config)
        narrations = evaluate.true_narrations(narrator, sample)
        x = torch.stack(list(sample.tokens(vision)))                    # [T, J, D]
        cache = context_class(narrator)(narrator).cache
        segments = evaluate.score_segments(narrator, x, narrations, cache=cache)
        return [evaluate.summary(segments, sample.fps) | how_memory_differs(narrator, x, narrations)]

    evaluate_each(args, settings, samples, score, means_of)


def means_of(rows: RowsByVideo) -> Measured:
    """The number of videos and the mean of each measure, and the measures of each video."""
    each = {name: row for name, (row,) in rows.items()}
    means = {"videos": len(each)}
    for measure in next(iter(each.values())):
        means[measure] = evaluate.average([row[measure] for row in each.values()])
    return means, each


@torch.no_grad()
def how_memory_differs(narrator: nar.Narrator, x: Tensor,
                       narrations: nar.Narrations) -> dict[str, float | None]:
    """Of the memory's read-outs of a video x [T, J, D], the shares of their mean square that differ
    between the M tokens of a read-out, and between read-outs; None without at least two read-outs.
    Near 0, the language model sees no past, whatever there was.
    """
    if not narrator.memory.M:
        return {}
    if len(narrations) < 3:
        return {"tokens_differ": None, "read_outs_differ": None}
    memory = narrator.read_outs(x, narrations)
    if not isinstance(memory, Tensor):          # of two memories, the visual one's
        _, memory = memory
    memory = memory[0].float()                                          # [N, M, D]
    size = memory.square().mean()
    return {
        "tokens_differ": (memory.var(1, correction=0).mean() / size).item(),
        "read_outs_differ": (memory.var(0, correction=0).mean() / size).item(),
    }


# ---------------------------------------------------------------------- the command line


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
    trigger_options(group, nar.Config)
    group.add_argument("--lookahead", type=positive_int, default=4, metavar="K",
                       help="frames in one pass of the language model; the narrations are the same "
                            "in float32, in bfloat16 up to rounding (default %(default)s)")
    streams.add_argument("--show", type=non_negative_int, default=0, metavar="N",
                         help="print the sentences of N videos, true and written")
    streams.set_defaults(run=run_stream)

    teacher = commands.add_parser("teacher", help="teacher-forced protocol: PPL, TimeDiff, Fluency, "
                                                  "LM-Correctness")
    group = teacher.add_argument_group("teacher forcing")
    group.add_argument("--max-frames", type=positive_int, default=1200,
                       help="cut samples to at most this many frames (default 1200, as in the "
                            "authors' code)")
    teacher.set_defaults(run=run_teacher, show=0)

    for command in (score, streams, teacher):
        json_option(command)
        command.add_argument("--per-video", metavar="FILE.json",
                             help="write each video's results as JSON")
    for command in (streams, teacher):
        command.add_argument("--output", metavar="DIR",
                             help=f"keep what is made of each video in this folder; finished videos "
                                  f"are skipped (default: a folder in {KEPT}; toy: nothing is kept)")
        command.add_argument("--by-duration", action="store_true",
                             help="also by the length of the videos: up to 2, 4, 8 minutes, and "
                                  "longer")
        group = command.add_argument_group("data set")
        data_options(group)
        model_options(command.add_argument_group("narrator"), nar.Config,
                          default=DEFAULT_MODEL)
    args = parser.parse_args()
    command_line(lambda: args.run(args))
