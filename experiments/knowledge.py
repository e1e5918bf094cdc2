"""What a memory knows: a linear probe of its memory tokens says what each place showed last (not
in the paper; the toy alone).

    python -m experiments.knowledge --model toy/checkpoint
    python -m experiments.knowledge --save toy/checkpoint/probe.safetensors

No language model takes part, and the probe is never used to narrate. It is trained on the memory
tokens after every few frames of the training videos, eight of them in a row. It is tested on other
videos, at places that show nothing now: behind closed doors, where something was taken away, in the
dark. For each of them it names type and colour of the thing that was seen there last, how sure it
is, and how long ago that was.

The test videos are kitchens with idle time of 1 to 20 minutes: things are asked for from a second
to 20 minutes after they were seen. Things that a sentence has named count as well, though no later
sentence needs them. A place that stays hidden is asked for again and again; every sighting of a
thing has the same weight.
"""
import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from narrator import load
from support.common.disk import check_writable
from support.common.errors import BadData, command_line
from support.common.figures import print_table
from support.common.options import DEFAULT_MODEL, Parser, json_option
from support.common.progress import progress
from toy import stages, world
from toy.probe import Probe, most_likely, save_probe

# upper ends of the groups by the seconds since a thing was seen
AGES = (5, 10, 20, 40, 80, 160, 320, 640, 1280)
EVERY = 4                                      # frames between two moments
TRAINING_IDLE = 0.5                            # share of the training videos with idle time
IN_A_ROW = 8                                   # training videos that make a long one
TEST_SEEDS = range(6_300_001, 6_300_016, 2)
LONG_IDLE = world.World(idle=1.0, stretches={(60, 1200): 1.0})     # 1 to 20 minutes, log-uniform
SEGMENTS = 16                                  # of a test video: two stretches of idle time


@dataclass
class Moments:
    """What memory tokens hold at N moments, and what they should tell."""
    tokens: Tensor                             # [N, M * D]
    things: Tensor                             # type and colour, last seen at each place [N, 9, 2]
    ages: Tensor                               # seconds since then [N, 9]
    hidden: Tensor                             # the places that are asked for: bool [N, 9]
    sightings: Tensor                          # which sighting they tell of: a number [N, 9]


# ------------------------------------------------------------------------------- moments

def in_a_row(videos: list[stages.Scene]) -> list[stages.Scene]:
    """Long videos, each made of several."""
    long_videos = []
    for first in range(0, len(videos), IN_A_ROW):
        part = videos[first:first + IN_A_ROW]
        x = torch.cat([video.x for video in part])
        labels = torch.cat([video.labels for video in part])
        long_videos.append(stages.Scene(x, [], labels))
    return long_videos


def tokens_of(memory: nn.Module, video: stages.Scene) -> Tensor:
    """The memory tokens after every few frames of a video [N, M * D]."""
    frames, J, _ = video.x.shape
    read_at = torch.arange(EVERY, frames + 1, EVERY) * J
    tokens, _ = memory(rearrange(video.x, "t j d -> 1 (t j) d"), read_at[None])
    return rearrange(tokens[0], "n m d -> n (m d)")


@torch.no_grad()
def moments_of(memory: nn.Module, videos: list[stages.Scene]) -> Moments:
    """The memory tokens after every few frames of each video."""
    parts = []
    sightings_before = 0
    for video in progress(videos, "memory", len(videos), "video"):
        frames = torch.arange(EVERY - 1, len(video.x), EVERY)
        seen_at = stages.last_sight(video.labels)[frames]                      # [N, 9]
        shown = video.labels[frames, :, 0] > 0                                 # [N, 9]
        parts.append(Moments(
            tokens=tokens_of(memory, video),
            things=stages.last_seen(video.labels)[frames],
            ages=(frames[:, None] - seen_at) / world.FPS,
            hidden=~shown & (seen_at >= 0),
            # no two of a place, a frame and a video have the same number
            sightings=sightings_before + seen_at * 9 + torch.arange(9),
        ))
        sightings_before += len(video.x) * 9
    together = {f.name: torch.cat([getattr(part, f.name) for part in parts])
                for f in fields(Moments)}
    return Moments(**together)


# ------------------------------------------------------------------------------- the probe

def train_probe(moments: Moments, weight_decay: float = 1e-3, steps: int = 100) -> Probe:
    """The probe with the least loss on these moments, by L-BFGS. It starts at zero: no seed."""
    probe = Probe(moments.tokens.shape[1])
    probe.mean.copy_(moments.tokens.mean(0))
    probe.deviation.copy_(moments.tokens.std(0) + 1e-6)
    hidden = moments.hidden
    things = moments.things[hidden]                                            # [H, 2]
    ages = moments.ages[hidden].log2()                                         # [H]
    optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=steps, history_size=10,
                                  line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        types, colours, log_ages = probe(moments.tokens)
        loss = F.cross_entropy(types[hidden], things[:, 0])
        loss = loss + F.cross_entropy(colours[hidden], things[:, 1])
        loss = loss + 0.1 * F.mse_loss(log_ages[hidden], ages)
        loss = loss + weight_decay * probe.linear.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return probe.requires_grad_(False)


def score(probe: Probe, moments: Moments) -> dict[str, dict]:
    """How much of what is hidden the memory knows, by the seconds since the thing was seen:
    {"<= 5 s": shares}, and so on. Groups without things are left out.

    right_once  share of the places whose type and colour are both right, with an equal weight for
                each sighting, however long the place is hidden
    sightings   their number
    """
    types, colours, _ = probe(moments.tokens)
    hidden = moments.hidden
    named, _ = most_likely(types[hidden], colours[hidden])
    right = (named == moments.things[hidden]).all(-1).float()                  # [H]
    ages = moments.ages[hidden]                                                # [H]
    sightings = moments.sightings[hidden]                                      # [H]

    scores = {}
    youngest = 0
    for oldest in AGES:
        group = (ages > youngest) & (ages <= oldest)
        youngest = oldest
        if group.any():
            _, sighting = sightings[group].unique(return_inverse=True)
            asked = sighting.bincount()                    # how often, of each sighting
            named_rightly = sighting.bincount(right[group])
            scores[f"<= {oldest} s"] = {"right_once": (named_rightly / asked).mean().item(),
                                        "sightings": len(asked)}
    return scores


# ------------------------------------------------------------------------------- the command

def run_knowledge(args: argparse.Namespace) -> None:
    check_writable(args.save)
    narrator = load(args.model, device="cpu")
    if not narrator.layout.M:
        raise BadData(f"{args.model}: has no memory that could be read out")
    encoder = narrator.vision_encoder()
    trained_world = world.find_world("plain", TRAINING_IDLE)
    training_videos = stages.scenes(encoder, narrator.layout,
                                    world.kitchens("train", world=trained_world))
    probe = train_probe(moments_of(narrator.memory, in_a_row(training_videos)))
    if args.save:
        save_probe(probe, args.model, Path(args.save))

    kitchens = [world.Kitchen(seed, SEGMENTS, LONG_IDLE) for seed in TEST_SEEDS]
    videos = stages.scenes(encoder, narrator.layout, kitchens)
    by_age = score(probe, moments_of(narrator.memory, videos))
    print_table(list(by_age.items()))
    if args.json:
        print(json.dumps({"by_age": by_age}))


def main():
    parser = Parser(prog="python -m experiments.knowledge",
                    description="What a memory knows, by a linear probe.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a narrator of the toy")
    parser.add_argument("--save", metavar="FILE",
                        help="keep the probe; stream.py --explain reads that of the file "
                             "MODEL/probe.safetensors")
    json_option(parser)
    args = parser.parse_args()
    command_line(lambda: run_knowledge(args))


if __name__ == "__main__":
    main()
