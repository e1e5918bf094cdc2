"""The scores of narrations that `evaluate.py score` and `evaluate.py stream` print: the paper's
measures, and beside them each video, the pace (Fig. 9) and the toy's words."""
import argparse
import json
import sys

import numpy as np

import evaluate
from support.common.disk import write_json
from support.common.figures import print_table
from support.files.narrations import Sentence, Truth
from toy.words import recall_of_words


def print_scores(truths: dict[str, Truth], predictions: dict[str, list[Sentence]],
                 minutes: dict[str, float], args: argparse.Namespace):
    """Print the table of a self-conditioned evaluation: all videos and, with --by-duration, groups
    of them.

    minutes: the length of each video; needed for --by-duration.
    """
    result, each = all_measures(truths, predictions)
    rows = [("all", result)]
    if getattr(args, "by_duration", False):    # the command `score` has no such option
        for label, names in evaluate.by_duration({name: minutes[name] for name in each}):
            of_group, _ = all_measures({name: truths[name] for name in names}, predictions)
            rows.append((label, of_group))
        result = result | {"by_duration": dict(rows[1:])}
    print_table(rows)
    if result["without_truth"]:
        print(f"left out: {result['without_truth']} of {len(truths)} videos, no true narration",
              file=sys.stderr)
    if result["meteor"] is None:
        print(f"METEOR is not computed: {evaluate.java_problem()}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))
    if args.per_video:
        write_json(args.per_video, each)


def all_measures(truths: dict[str, Truth],
                 predictions: dict[str, list[Sentence]]) -> tuple[dict, dict[str, dict]]:
    """The paper's measures, the pace (Fig. 9), and the toy's own where the truth says which words
    need memory: of all videos together, and of each video.
    """
    result, alignment, pairs, captions = evaluate.evaluate(truths, predictions)
    each = {}                                  # video -> its measures
    paces = []
    begin = 0                                  # of the video's pairs among those of all videos
    for name, measures in alignment.items():
        end = begin + len(pairs[name])
        paces.append(measure_pace(truths[name], predictions[name]))
        each[name] = measures | paces[-1] | {"narrations": len(pairs[name])}
        for score, values in captions.items():
            each[name][score] = evaluate.average(values[begin:end])
        begin = end

    for quantity in paces[0]:
        known = [pace[quantity] for pace in paces if pace[quantity] is not None]
        result[quantity] = evaluate.average(known)
    all_pairs = sum(pairs.values(), [])
    if any(sentence.memory_words for sentence, _ in all_pairs):
        result |= recall_of_words(all_pairs)
        for name, matched in pairs.items():
            each[name] |= recall_of_words(matched)
    return result, each


def measure_pace(truth: Truth, predicted: list[Sentence]) -> dict[str, float | None]:
    """Narrations a minute, and the mean length of segments in seconds (Fig. 9), of one video.

    If the length of the video is not known (`score`), it is the span of the true narrations. The
    true number is the mean over annotators.
    """
    true_segments = evaluate.true_segments(truth)
    times = [sentence.time for sentence in predicted]
    segments = evaluate.segments(times, truth.start)
    minutes = (truth.seconds or true_segments.max() - truth.start) / 60
    annotators = sum(1 for annotator in truth.annotators if annotator)
    pace = {
        "narrations_per_minute": None,
        "segment_s": evaluate.average(np.diff(segments)),
        "true_narrations_per_minute": None,
        "true_segment_s": evaluate.average(np.diff(true_segments)),
    }
    if minutes > 0:
        pace["narrations_per_minute"] = len(segments) / minutes
        pace["true_narrations_per_minute"] = len(true_segments) / annotators / minutes
    return pace
