"""What does the delta rule have that CLAM has not? Its parts, one after the other (not in the
paper).

    python -m experiments.ablation          trains what has no result yet, and shows the table

CLAM adds what comes in, and its gates fade what is held. The delta rule has keys of norm 1 and a
write strength, and it erases what a key held before. Here are the memories alone in a small world,
without a language model and without videos. A frame has a token for each place: the place, what it
shows, and noise. Each place shows one thing or two in a row, and is then hidden. After the last
frame the memory is asked what each place showed last.

A training takes half a minute on one core. Results are lines of results/ablation.jsonl, each with
its commit; without that file, all are made anew.
"""
from itertools import product
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines.memories import DeltaNet, WritingCLAM
from clam import CLAM
from experiments.paper import Claim
from experiments.runs import RESULTS, add_line, lines_of, present_commit
from experiments.show import as_markdown, cell, say_claim
from support.common.errors import command_line
from support.common.intervals import compare_means
from support.common.options import Parser
from support.common.progress import progress
from support.engine.start import start_memory

FILE = RESULTS / "ablation.jsonl"
SEEDS = (0, 1, 2)
BATCH = 16                      # fresh videos for every step
TEST = 256                      # videos, the same for all
RATE = 0.003                    # from step 50 on; it falls in the last fifth


# ------------------------------------------------------------------------------- the tasks

WIDTH = 32                      # D
HEADS = 4                       # of D / 2h = 4 key channels each
THINGS = 8                      # that a place may show; so 1 in 8 can be guessed
LONGEST_GAP = 16                # frames for which a place is hidden at the end
NOISE = 0.17                    # standard deviation
# Orthogonal parts of tokens, whose numbers are then about 1
SIZE = 0.6 * WIDTH ** 0.5
BASIS = nn.init.orthogonal_(
    torch.empty(WIDTH, WIDTH), SIZE, generator=torch.Generator().manual_seed(5))
# what a place shows: that it is hidden, or that something is visible, and what
SHOWS = torch.cat([BASIS[:1], BASIS[1] + BASIS[2:2 + THINGS]])
PLACES = BASIS[2 + THINGS:]


# for how many frames each place shows its first thing, and its last; how many places; steps
TASKS = {
    "overwriting": ((1, 8), (1, 8), 4, 800),
    "long, then brief": ((9, 16), (1, 3), 4, 800),
    "the same, 2,400 steps": ((9, 16), (1, 3), 4, 2400),
    "one thing, 8 places": ((0, 0), (1, 16), 8, 800),
}


def draw_videos(
    task: str,
    videos: int,
    generator: torch.Generator,
    shortest_gap: int = 8,
) -> tuple[Tensor, Tensor]:
    """Tokens x [B, T, P, D], and what each place showed last [B, P], from 1 to THINGS. At the end a
    place is hidden, for LONGEST_GAP frames at most."""
    first, last, places, _ = TASKS[task]

    def draw(least: int, most: int) -> Tensor:
        return torch.randint(least, most + 1, (videos, 1, places), generator=generator)

    thing = draw(1, THINGS)
    thing_before = (thing + draw(0, THINGS - 2)) % THINGS + 1           # another one
    frames = first[1] + last[1] + LONGEST_GAP
    end = frames - draw(shortest_gap, LONGEST_GAP)
    change = end - draw(*last)
    begin = change - draw(*first)
    frame = torch.arange(frames)[:, None]                               # [T, 1]
    is_shown = (begin <= frame) & (frame < end)                         # [B, T, P]
    shown = torch.where(frame < change, thing_before, thing) * is_shown
    x = PLACES[:places] + SHOWS[shown]
    return x + NOISE * torch.randn(x.shape, generator=generator), thing[:, 0]


# ------------------------------------------------------------------------------- the arms

# of each: the memory, and a layer that is held open, so that a write strength is 1, or all gates
ARMS = {
    "CLAM": (CLAM, None),
    "+ keys of norm 1": (WritingCLAM, "w_beta"),
    "+ write strength": (WritingCLAM, None),
    "- fading": (WritingCLAM, "w_gate.1"),
    "+ erasing: the delta rule": (DeltaNet, None),
}


def new_memory(arm: str, frames: Tensor) -> CLAM:
    """A memory with first weights made from frames x [T, P, D], and a token for each place."""
    kind, held_open = ARMS[arm]
    memory = kind(WIDTH, frames.shape[1], heads=HEADS, dropout=0.0)
    start_memory(memory, frames)
    if held_open:
        layer = memory.get_submodule(held_open)
        nn.init.zeros_(layer.weight).requires_grad_(False)
        nn.init.constant_(layer.bias, 30).requires_grad_(False)         # sigmoid(30) is 1
    return memory


# ------------------------------------------------------------------------------- one training

def train_arm(seed: int, task: str, arm: str) -> list[float]:
    """Train a memory, and a linear map from each of its tokens to the thing its place showed last.

    Returns the share of the places of each test video that are right.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    x, _ = draw_videos(task, 32, generator)
    memory = new_memory(arm, x.flatten(0, 1))
    to_thing = nn.Linear(WIDTH, 1 + THINGS)
    learned = [*memory.parameters(), *to_thing.parameters()]
    optimizer = torch.optim.AdamW(learned, weight_decay=0.0)

    def scores(x: Tensor) -> Tensor:                                    # [B, 1 + THINGS, P]
        state = memory.step(x.flatten(1, 2), memory.initial_state(len(x)))
        return to_thing(memory.read(state)).mT

    *_, steps = TASKS[task]
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = RATE * min(1, step / 50, 5 * (1 - step / steps))
        # half of the trained places have been hidden for less long: those are learned first
        x, thing = draw_videos(task, BATCH, generator, shortest_gap=1)
        loss = F.cross_entropy(scores(x), thing)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()

    x, thing = draw_videos(task, TEST, torch.Generator().manual_seed(0))
    with torch.no_grad():
        is_right = scores(x).argmax(1) == thing
    return is_right.float().mean(1).tolist()


# ------------------------------------------------------------------------------- all trainings

def train_missing() -> None:
    done = [(line["seed"], line["task"], line["arm"]) for line in lines_of(FILE)]
    for seed, task, arm in progress([*product(SEEDS, TASKS, ARMS)], unit="training"):
        if (seed, task, arm) not in done:
            commit = present_commit()
            shares = train_arm(seed, task, arm)
            add_line(FILE, {"seed": seed, "task": task, "arm": arm, "videos": shares,
                            "commit": commit})


def shares_of_seeds(arm: str, task: str) -> list[dict[int, float]]:
    """Of each training that is there: {test video: the share of its places that are right}."""
    return [dict(enumerate(line["videos"])) for line in lines_of(FILE)
            if (line["arm"], line["task"]) == (arm, task)]


def table_of_ablation() -> str:
    """The shares of right answers, and below them what each arm is above CLAM."""
    rows = []
    for arm in ARMS:
        row = [arm]
        for task in TASKS:
            row.append(cell([fmean(shares.values()) for shares in shares_of_seeds(arm, task)]))
        rows.append(row)
    lines = [as_markdown(["right (not in the paper)", *TASKS], rows), ""]
    for arm, task in product(ARMS, TASKS):
        interval = compare_means(shares_of_seeds(arm, task), shares_of_seeds("CLAM", task))
        if interval and arm != "CLAM":
            lines.append(say_claim(Claim(arm, "CLAM", task), interval))
    return "\n".join(lines)


def run_ablation() -> None:
    train_missing()
    print(table_of_ablation())


def main():
    parser = Parser(prog="python -m experiments.ablation",
                    description="What does the delta rule have that CLAM has not?")
    parser.parse_args()
    command_line(run_ablation)


if __name__ == "__main__":
    main()
