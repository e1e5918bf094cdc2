"""Does a memory keep apart what one place has shown, one thing after another? (not in the paper; the
toy alone)

    python -m experiments.interference --model toy/checkpoint

CLAM and RetNet add what they see to a state. What a place showed before is not taken away: it fades.
A memory word belongs to the last thing of a place. Here a narrator narrates long videos, and its
memory words are counted in groups: has their place shown one thing or several, how long has the
video run, and for how long was the thing seen? Where a place has shown several, the words of the last
but one are counted, too.
"""
import argparse
import json
from collections import defaultdict

from torch import nn

import data
import evaluate
import narrator as nar
import stream
from baselines.variants import load_narrator
from commands.evaluate import truth_of
from streams.bounds import open_stream
from support.common.errors import command_line
from support.common.figures import print_table
from support.common.options import DEFAULT_MODEL, Parser
from support.common.progress import progress
from support.engine.cpu import speed_up
from support.files.narrations import Sentence
from toy import world
from toy.files import rendered
from toy.words import share

VIDEOS = range(5_200_000, 5_200_020)           # seeds
SECONDS = 180                                  # of a video
EARLY = 60                                     # seconds of a video
BRIEF = 2                                      # seconds in which a place shows a thing
LOOKAHEAD = 4                                  # frames in one pass of the language model


def sightings(kitchen: world.Kitchen,
              narration: world.Annotation) -> dict[tuple[int, int], list[int]]:
    """{(type, colour): frames} of the things that the narration's place has shown up to then, in the
    order in which they were last seen. The narration names the last one.
    """
    words = narration.text.rstrip(".").split()
    place = next(n for n, name in enumerate(kitchen.world.places) if name in words)
    frames_of = {}
    for frame, labels in enumerate(kitchen.labels()[:narration.frame, place].tolist()):
        thing = (labels[world.TYPE], labels[world.COLOUR])
        if any(thing):
            frames_of.setdefault(thing, []).append(frame)
    return dict(sorted(frames_of.items(), key=lambda item: item[1][-1]))


def own_sentences(narrator: nar.Narrator, vision: nn.Module, sample: data.Sample) -> list[Sentence]:
    """The narrator's own narrations of a video."""
    context = open_stream(narrator, lookahead=LOOKAHEAD)
    sentences = []
    for decision in stream.narrate(narrator, sample.tokens(vision, LOOKAHEAD), context=context):
        if decision.narration:
            sentences.append(Sentence(decision.narration.end, decision.narration.text))
    return sentences


def count_words(kitchen: world.Kitchen, texts: list[str], counts: dict[str, list[bool]]) -> None:
    """Add to `counts` which words of a video's narrations are in the texts, one for each narration."""
    for narration, text in zip(kitchen.narrations, texts, strict=True):
        if not narration.memory_words:
            continue
        written = text.rstrip(".").split()
        right = [word in written for word in narration.memory_words]
        frames_of = sightings(kitchen, narration)
        *before, thing = frames_of
        number = "several" if before else "one"
        time = f"<= {EARLY} s" if narration.frame <= EARLY * world.FPS else "later"
        sight = f"seen <= {BRIEF} s" if len(frames_of[thing]) <= BRIEF * world.FPS else "seen longer"
        counts[f"{number}, {time}"] += right
        counts[f"{number}, {sight}"] += right
        if before:
            counts["the one before"] += [word in written for word in kitchen.world.words(*before[-1])
                                         if word not in narration.memory_words]


def run_interference(args: argparse.Namespace) -> None:
    narrator = load_narrator(args.model, device="cpu", sees=True)
    vision = narrator.vision_encoder()
    narrator.merge()
    speed_up(narrator)
    counts = defaultdict(list)
    for seed in progress(VIDEOS, args.model, unit="video", leave=False):
        kitchen = world.lasting(seed, SECONDS)
        sample = data.toy_sample(rendered(kitchen))
        sentences = own_sentences(narrator, vision, sample)
        _, pairs = evaluate.measure_video(truth_of(sample), sentences)
        count_words(kitchen, [text for _, text in pairs], counts)
    written = {group: share(counts[group]) for group in sorted(counts)}
    words = {group: len(counts[group]) for group in sorted(counts)}
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
