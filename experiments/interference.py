"""Does a memory keep apart the things that one place has shown? (not in the paper; the toy alone)

    python -m experiments.interference --model toy/checkpoint

CLAM and RetNet add what they see to a state. What a place showed before is not taken away: it fades.
A memory word belongs to the thing that a place showed last. Here a narrator narrates long videos, and
its memory words are counted in groups: has their place shown one thing or several, how long has the
video run, and for how long was the thing seen? Where a place has shown several things, the words of
the last but one are counted, too.
"""
import argparse
import json
from collections import defaultdict
from dataclasses import replace

import data
import evaluate
from narrator import load
from commands.evaluate import own_narrations, truth_of
from support.common.errors import command_line
from support.common.figures import print_table
from support.common.options import DEFAULT_MODEL, Parser
from support.common.progress import progress
from support.engine.cpu import speed_up
from support.files.narrations import Sentence, to_sentences
from toy import world
from toy.files import rendered
from toy.words import recall_of_words

VIDEOS = range(5_200_000, 5_200_020)           # seeds
SECONDS = 180                                  # of a video
EARLY = 60                                     # seconds of a video
BRIEF = 2                                      # seconds in which a place shows a thing
LOOKAHEAD = 4                                  # frames in one pass of the language model

Pair = tuple[Sentence, str]                    # a true sentence and the text that was written


def things_of_place(kitchen: world.Kitchen,
                    narration: world.Annotation) -> dict[tuple[int, int], int]:
    """{(type, colour): number of frames} of the things that the narration's place has shown up to
    then, in the order in which they were last seen. The narration names the last one.
    """
    words = narration.text.rstrip(".").split()
    place = next(n for n, name in enumerate(kitchen.world.places) if name in words)
    frames_of = {}
    for labels in kitchen.labels()[:narration.frame, place].tolist():
        thing = (labels[world.TYPE], labels[world.COLOUR])
        if any(thing):
            frames_of[thing] = frames_of.pop(thing, 0) + 1     # the one seen last comes last
    return frames_of


def group_pairs(kitchen: world.Kitchen, pairs: list[Pair], groups: dict[str, list[Pair]]) -> None:
    """Add a video's pairs that have memory words to their groups.

    pairs: one for each narration of the kitchen
    """
    for narration, pair in zip(kitchen.narrations, pairs, strict=True):
        if not narration.memory_words:
            continue
        frames_of = things_of_place(kitchen, narration)
        *things_before, thing = frames_of
        number = "several" if things_before else "one"
        if narration.frame <= EARLY * world.FPS:
            groups[f"{number}, <= {EARLY} s"].append(pair)
        else:
            groups[f"{number}, later"].append(pair)
        if frames_of[thing] <= BRIEF * world.FPS:
            groups[f"{number}, seen <= {BRIEF} s"].append(pair)
        else:
            groups[f"{number}, seen longer"].append(pair)

        if things_before:
            # the same, as if the words of the thing before were asked for
            words = [word for word in kitchen.world.words(*things_before[-1])
                     if word not in narration.memory_words]
            sentence, text = pair
            groups["the one before"].append((replace(sentence, memory_words=tuple(words)), text))


def run_interference(args: argparse.Namespace) -> None:
    narrator = load(args.model, device="cpu", sees=True)
    vision = narrator.vision_encoder()
    narrator.merge()
    speed_up(narrator)
    groups = defaultdict(list)
    for seed in progress(VIDEOS, args.model, unit="video", leave=False):
        kitchen = world.lasting(seed, SECONDS)
        sample = data.toy_sample(rendered(kitchen))
        rows = own_narrations(sample, narrator, vision, LOOKAHEAD)
        predicted = to_sentences(rows, sample.name)
        _, pairs = evaluate.measure_video(truth_of(sample), predicted)
        group_pairs(kitchen, pairs, groups)

    written = {}
    words = {}
    for group in sorted(groups):
        written[group] = recall_of_words(groups[group])["memory_words"]
        words[group] = sum(len(sentence.memory_words) for sentence, _ in groups[group])
    print_table([("share written", written), ("of words", words)])
    if args.json:
        print(json.dumps({"written": written, "words": words}))


def main():
    parser = Parser(prog="python -m experiments.interference",
                    description="Does a memory keep apart what one place has shown?")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a narrator of the toy")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    command_line(lambda: run_interference(args))


if __name__ == "__main__":
    main()
