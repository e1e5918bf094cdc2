"""Memory words by the time since their thing was seen (not in the paper; the toy alone).

    python -m experiments.ages --model toy/checkpoint

The test videos are kitchens with idle time of 10 s to 5 minutes. Some sentences name a thing that is
not in sight, and that no sentence has named: only a memory, or a cache of all frames, can give its
words. The narrator writes these sentences; all others are given, and so are the ends of segments.
So what is counted is memory alone: the share of the words that are right, by the seconds from the
last frame that showed the thing to the end of the segment.
"""
import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

import stream
from baselines.variants import load_narrator
from evaluate import average
from experiments.paper import AGES_OF_WORDS
from narrator import Narrator
from streams.fast import open_stream
from support.common.errors import command_line
from support.common.figures import print_table
from support.common.options import DEFAULT_MODEL, Parser
from support.common.progress import progress
from toy import stages, world

SEEDS = range(6_400_000, 6_400_024)            # of the test videos
WORLD = world.World(idle=1.0, stretches={(10, 300): 1.0})          # seconds, log-uniform
SEGMENTS_OF_VIDEO = 16                         # with two stretches of idle time


@torch.no_grad()
def written_words(narrator: Narrator, x: Tensor,
                  kitchen: world.Kitchen) -> list[tuple[float, bool]]:
    """Frame tokens x [T, J, D] of a video -> (seconds since its thing was seen, is it written?) of
    each memory word.
    """
    needs_memory = {}
    forced = {}
    for narration in kitchen.narrations:
        if narration.memory_words:
            needs_memory[narration.frame] = narration
            forced[narration.frame] = None                     # the narrator writes
        else:
            forced[narration.frame] = narrator.layout.encode(" " + narration.text)

    found = []
    for step in stream.narrate(narrator, x, forced=forced, context=open_stream(narrator)):
        if step.narration and step.frame in needs_memory:
            true = needs_memory[step.frame]
            seconds = (true.frame - true.seen) / world.FPS
            written = step.narration.text.rstrip(".").split()
            found += [(seconds, word in written) for word in true.memory_words]
    return found


def by_age(words: list[tuple[float, bool]]) -> dict[str, dict]:
    """{"<= 5 s": {"right": share of the words that are written, "words": their number}}; groups
    without words are left out.
    """
    groups = {}
    youngest = 0
    for oldest in AGES_OF_WORDS:
        group = [right for seconds, right in words if youngest < seconds <= oldest]
        if group:
            groups[f"<= {oldest} s"] = {"right": average(group), "words": len(group)}
        youngest = oldest
    return groups


def run_ages(args: argparse.Namespace) -> None:
    narrator = load_narrator(args.model, device="cpu").merge()
    kitchens = [(seed, world.Kitchen(seed, SEGMENTS_OF_VIDEO, WORLD)) for seed in SEEDS]
    features = Path(args.features) if args.features else None
    videos = stages.scenes(narrator.vision_encoder(), narrator.layout, kitchens, features)
    words = []
    for video, (_, kitchen) in zip(progress(videos, "narrating", len(videos), "video"), kitchens):
        words += written_words(narrator, video.x, kitchen)
    found = {"right": average([right for _, right in words]), "by_age": by_age(words)}
    lines = {"all": found["right"]}
    for label, group in found["by_age"].items():
        lines[f"{label} ({group['words']} words)"] = group["right"]
    print_table([("memory words", lines)])
    if args.json:
        print(json.dumps(found))


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
