"""Which learning rate and warm-up suit each memory of Table 5? (the toy alone)

    python -m experiments.rates                 make what is missing, and show it
    python -m experiments.rates --show          only show it

Rate and warm-up are chosen alike for all memories: stage `recall` alone is trained for 600 steps
with each of six pairs, and the one with the least loss on 60 validation videos is taken. No test
video is used.
"""
import argparse
import random
import tempfile
from collections.abc import Sequence
from itertools import product

import torch

import narrator as nar
from commands.train_command import options_from
from experiments.paper import LLM, LOOK, VISION
from experiments.runs import (
    RESULTS, ROOT, add_line, find_result, fingerprint_of_base, fingerprint_of_worlds,
    present_commit,
)
from support.common.errors import command_line
from support.common.options import Parser
from support.common.progress import progress
from toy import stages, world
from toy.from_scratch import before_last_stage

FILE = RESULTS / "rates.jsonl"
# and their memory tokens: states of 2,048 numbers (K-Means, MovieChat: 2,064)
MEMORIES = {"recent": 16, "kmeans": 16, "moviechat": 16, "tokenmlp": 16,
            "retnet": 10, "clam": 10}
RATES = (3.5e-4, 7e-4, 1.4e-3)
WARMUPS = (0.05, 0.2)
STEPS = 600
VIDEOS = 800
VAL_VIDEOS = 60
DRAWS = 4                                      # of each validation video


@torch.no_grad()
def validation_loss(narrator: nar.Narrator, videos: list[stages.Scene]) -> float:
    """The mean loss of a token of stage `recall`: for each video the same lists every time."""
    narrator.eval()
    total = 0.0
    learned = 0
    for number, video in enumerate(videos):
        for draw in range(DRAWS):
            chance = random.Random(f"{number} {draw}")
            loss, count = stages.loss_of_lists(narrator, "recall", video, chance)
            total += loss.item()
            learned += count
    return total / learned


def loss_of(memory: str, rate: float, warmup: float) -> float:
    """Train stage `recall` -> its loss on the validation videos."""
    with tempfile.TemporaryDirectory() as folder:
        options = options_from(
            data="toy", output=folder, memory=memory, memory_tokens=MEMORIES[memory], last_k="all",
            idle=0.5, lr=rate, warmup=warmup, recall_steps=STEPS, vision=str(ROOT / VISION),
            llm=str(ROOT / LLM), look=str(ROOT / LOOK),
        )
        torch.manual_seed(options.seed)
        variant = world.find_world(options.world, options.idle)
        kitchens = world.kitchens("train", VIDEOS, world=variant)
        narrator, _ = before_last_stage(options, variant, kitchens)
    kitchens = world.kitchens("val", VAL_VIDEOS, world=variant)
    held_out = stages.scenes(narrator.vision_encoder(), narrator.layout, kitchens)
    return validation_loss(narrator, held_out)


# ------------------------------------------------------------------------------- results

def identity_of_pair(memory: str, rate: float, warmup: float) -> dict:
    return {"memory": memory, "rate": rate, "warmup": warmup, "steps": STEPS,
            "worlds": fingerprint_of_worlds(), "base": fingerprint_of_base()}


def kept_loss(memory: str, rate: float, warmup: float) -> float | None:
    """None if there is no result of today's world and base."""
    kept = find_result(FILE, identity_of_pair(memory, rate, warmup))
    return None if kept is None else kept["val_loss"]


def train_missing(memories: Sequence[str]) -> None:
    for pair in progress(list(product(memories, RATES, WARMUPS)), "rates", unit="training"):
        if kept_loss(*pair) is None:
            add_line(FILE, identity_of_pair(*pair) | {
                "commit": present_commit(), "val_loss": round(loss_of(*pair), 4)})


def chosen(memory: str) -> tuple[float, float] | None:
    """Rate and warm-up with the least loss; None unless all are there."""
    losses = {pair: kept_loss(memory, *pair) for pair in product(RATES, WARMUPS)}
    if None in losses.values():
        return None
    return min(losses, key=losses.get)


def table_of_rates(memories: Sequence[str] = tuple(MEMORIES)) -> str:
    """A row for each memory, a column for each pair; the chosen one is bold."""
    pairs = list(product(RATES, WARMUPS))
    header = " | ".join(f"{rate:g}, {warmup:.0%}" for rate, warmup in pairs)
    lines = [f"| learning rate, warm-up | {header} |", "| --- " * (1 + len(pairs)) + "|"]
    for memory in memories:
        cells = [memory]
        for pair in pairs:
            loss = kept_loss(memory, *pair)
            cell = "-" if loss is None else f"{loss:.3f}"
            cells.append(f"**{cell}**" if pair == chosen(memory) else cell)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------- the command

def run_rates(args: argparse.Namespace) -> None:
    if not args.show:
        train_missing(args.memories)
    print(table_of_rates(args.memories))


def main():
    parser = Parser(prog="python -m experiments.rates",
                    description="Which learning rate and warm-up suit each memory?")
    parser.add_argument("--show", action="store_true", help="show what is there; train nothing")
    parser.add_argument("--memories", nargs="+", choices=list(MEMORIES), metavar="NAME",
                        default=list(MEMORIES), help=f"default: {' '.join(MEMORIES)}")
    args = parser.parse_args()
    command_line(lambda: run_rates(args))


if __name__ == "__main__":
    main()
