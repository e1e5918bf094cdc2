"""Does a memory keep apart what one place has shown, one thing after another? (not in the paper; the
toy alone)

    python -m experiments.interference --model toy/checkpoint

CLAM and RetNet add what they see to a state. What a place showed before is not taken away: it fades.
A memory word belongs to the last thing of a place. Here a narrator narrates long videos, and its
memory words are counted in groups: has their place shown one thing or several, and how long has the
video run? Where several, the words of the last but one are counted, too.
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
EARLY = 60                                     # seconds
LOOKAHEAD = 4                                  # frames in one pass of the language model


def things_shown(kitchen: world.Kitchen, narration: world.Annotation) -> list[tuple[int, int]]:
    """The things, as (type, colour), that the narration's place has shown up to then, in the order
    in which they were last seen. The narration names the last one.
    """
    words = narration.text.rstrip(".").split()
    place = next(n for n, name in enumerate(kitchen.world.places) if name in words)
    seen_at = {}
    for frame, labels in enumerate(kitchen.labels()[:narration.frame, place].tolist()):
        thing = (labels[world.TYPE], labels[world.COLOUR])
        if any(thing):
            seen_at[thing] = frame
    return sorted(seen_at, key=seen_at.get)


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
        things = things_shown(kitchen, narration)
        number = "one" if len(things) == 1 else "several"
        time = f"<= {EARLY} s" if narration.frame <= EARLY * world.FPS else "later"
        counts[f"{number}, {time}"] += [word in written for word in narration.memory_words]
        if len(things) > 1:
            before = kitchen.world.words(*things[-2])
            counts["the one before"] += [word in written for word in before
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
    shares = {group: {"written": share(counts[group]), "words": len(counts[group])}
              for group in sorted(counts)}
    print_table(list(shares.items()))
    if args.json:
        print(json.dumps(shares))


def main():
    parser = Parser(prog="python -m experiments.interference",
                    description="Does a memory keep apart what one place has shown?")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a narrator of the toy")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    command_line(lambda: run_interference(args))


if __name__ == "__main__":
    main()
