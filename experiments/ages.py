"""Memory words by the time since their thing was seen (not in the paper; the toy alone).

    python -m experiments.ages --model toy/checkpoint

The test videos are kitchens with idle time of 10 s to 5 minutes. Some sentences name a thing that
is not in sight, and that no sentence has named: only a memory, or a cache of all frames, can give
its words. The narrator writes these sentences; all others are given, and so are the ends of
segments. So what is counted is memory alone: the share of the words that are right, by the seconds
from the last frame that showed the thing to the end of the segment.

The memory is read where a segment begins (Alg. 2, line 7). In a segment with idle time, a sentence
rests on tokens that were read before it. So words are counted as well by the seconds from the last
sight of the thing to that reading: at most SOON ("soon"), or more ("late"). "kept" are the words of
"soon" whose thing was seen more than SOON before the sentence: what the reading has kept.
"""
import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import stream
from baselines.variants import load_narrator
from evaluate import average
from narrator import Narrator
from streams.bounds import open_stream
from support.common.errors import command_line
from support.common.figures import print_table
from support.common.options import DEFAULT_MODEL, Parser
from support.common.progress import progress
from toy import stages, world

# upper ends of the groups by the seconds since a thing was seen
AGES_OF_WORDS = (5, 10, 20, 40, 80, 160, 320)
SEEDS = range(6_400_000, 6_400_024)            # of the test videos
WORLD = world.World(idle=1.0, stretches={(10, 300): 1.0})          # seconds, log-uniform
SEGMENTS_OF_VIDEO = 16                         # with two stretches of idle time
SOON = 20                                      # seconds


class Word(NamedTuple):
    """A memory word that the narrator should have written."""
    age: float                                 # seconds since its thing was seen
    held: float                                # seconds from then to the reading of the memory
    written: bool


@torch.no_grad()
def narrated_words(narrator: Narrator, x: Tensor, kitchen: world.Kitchen) -> list[Word]:
    """The memory words of a video with frame tokens x [T, J, D]."""
    true_at = {narration.frame: narration for narration in kitchen.narrations}
    forced = {}
    for frame, true in true_at.items():
        # None: the narrator writes
        forced[frame] = None if true.memory_words else narrator.layout.encode(" " + true.text)

    words = []
    read_at = 0                                                # where this segment began
    for step in stream.narrate(narrator, x, given=forced, context=open_stream(narrator)):
        if not step.narration:
            continue
        true = true_at[step.frame]
        written = step.narration.text.rstrip(".").split()
        for word in true.memory_words:
            age = (true.frame - true.seen) / world.FPS
            held = (read_at - true.seen) / world.FPS
            words.append(Word(age, held, word in written))
        read_at = step.frame
    return words


def share_right(words: list[Word]) -> dict:
    """How many of the words are written.

    right       their share, None without any words
    words       number of the words
    read_soon   number of those for which the memory was read soon
    """
    return {"right": average([word.written for word in words]), "words": len(words),
            "read_soon": sum(word.held <= SOON for word in words)}


def by_age(words: list[Word]) -> dict[str, dict]:
    """{"<= 5 s": `share_right`}; groups without words are left out."""
    groups = {}
    youngest = 0
    for oldest in AGES_OF_WORDS:
        group = [word for word in words if youngest < word.age <= oldest]
        if group:
            groups[f"<= {oldest} s"] = share_right(group)
        youngest = oldest
    return groups


def run_ages(args: argparse.Namespace) -> None:
    narrator = load_narrator(args.model, device="cpu").merge()
    kitchens = [(seed, world.Kitchen(seed, SEGMENTS_OF_VIDEO, WORLD)) for seed in SEEDS]
    features = Path(args.features) if args.features else None
    videos = stages.scenes(narrator.vision_encoder(), narrator.layout, kitchens, features)
    words = []
    for video, (_, kitchen) in zip(progress(videos, "narrating", len(videos), "video"), kitchens):
        words += narrated_words(narrator, video.x, kitchen)
    soon = [word for word in words if word.held <= SOON]
    groups = {
        "all": words,
        "soon": soon,
        "kept": [word for word in soon if word.age > SOON],
        "late": [word for word in words if word.held > SOON],
    }
    shares = {name: share_right(group) for name, group in groups.items()}
    ages = by_age(words)
    print_table(list((shares | ages).items()))
    if args.json:
        print(json.dumps(shares | {"by_age": ages}))


def main():
    parser = Parser(prog="python -m experiments.ages",
                    description="Memory words by the time since their thing was seen.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a narrator of the toy")
    parser.add_argument("--features", help="file that keeps the frame tokens for the next narrator")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    command_line(lambda: run_ages(args))


if __name__ == "__main__":
    main()
