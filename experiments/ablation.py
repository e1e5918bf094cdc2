"""What does the delta rule have that CLAM has not? Its parts, one after the other (not in the
paper).

    python -m experiments.ablation              trains what has no result yet, and shows the table
    python -m experiments.ablation --show       shows the results that are there

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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines.memories import DeltaNet, WritingCLAM
from clam import CLAM
from experiments.paper import Claim
from experiments.runs import RESULTS, add_line, lines_of, present_commit
from experiments.show import as_markdown, cell, say_claim
from support.common.errors import BadData, command_line
from support.common.intervals import compare_means
from support.common.options import Parser
from support.common.progress import progress
from support.engine.start import start_memory

FILE = RESULTS / "ablation.jsonl"
SEEDS = (0, 1, 2)
STEPS = 800
BATCH = 16                      # fresh videos for every step
TEST = 256                      # videos, the same for all
RATE = 0.003                    # from step 50 on; it falls in the last fifth


# ------------------------------------------------------------------------------- the tasks

WIDTH = 32                      # D
HEADS = 4                       # of D / 2h = 4 key channels each
THINGS = 8                      # that a place may show; so 1 in 8 can be guessed
NOISE = 0.17                    # standard deviation
# Orthogonal parts of tokens, whose numbers are then about 1
SIZE = 0.6 * WIDTH ** 0.5
BASIS = nn.init.orthogonal_(
    torch.empty(WIDTH, WIDTH), SIZE, generator=torch.Generator().manual_seed(5))
HIDDEN, VISIBLE = BASIS[:2]
SHOWS = torch.cat([HIDDEN[None], VISIBLE + BASIS[2:2 + THINGS]])        # 0: the place is hidden
PLACES = BASIS[2 + THINGS:]


class Task(NamedTuple):
    """For how many frames each place shows its first thing, then its last, and is then hidden: each
    drawn from the least to the most."""
    first: tuple[int, int]
    last: tuple[int, int]
    gap: tuple[int, int] = (8, 16)
    places: int = 4


TASKS = {
    "overwriting": Task((1, 8), (1, 8)),
    "long, then brief": Task((9, 16), (1, 3)),
    "one thing, 8 places": Task((0, 0), (1, 16), places=8),
}


def draw_videos(task: Task, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens x [B, T, P, D], and what each place showed last [B, P], from 1 to THINGS."""
    def draw(least: int, most: int) -> Tensor:
        size = (count, 1, task.places)
        return torch.randint(least, most + 1, size, generator=generator)

    last = draw(1, THINGS)
    first = (last + draw(0, THINGS - 2)) % THINGS + 1                   # another thing
    frames = task.first[1] + task.last[1] + task.gap[1]
    end = frames - draw(*task.gap)
    change = end - draw(*task.last)
    begin = change - draw(*task.first)
    frame = torch.arange(frames)[:, None]                               # [T, 1]
    is_shown = (begin <= frame) & (frame < end)                         # [B, T, P]
    shown = torch.where(frame < change, first, last) * is_shown
    x = PLACES[:task.places] + SHOWS[shown]
    return x + NOISE * torch.randn(x.shape, generator=generator), last[:, 0]


# ------------------------------------------------------------------------------- the arms

# of each: the memory, and a layer that is held open, so that a write strength is 1, or all gates
ARMS = {
    "CLAM": (CLAM, None),
    "+ keys of norm 1": (WritingCLAM, "w_beta"),
    "+ write strength": (WritingCLAM, None),
    "- fading": (WritingCLAM, "w_gate.1"),
    "+ erasing: the delta rule": (DeltaNet, None),
}
COMPARED = [("+ write strength", "CLAM"), ("+ write strength", "+ keys of norm 1"),
            ("+ erasing: the delta rule", "+ write strength"),
            ("+ erasing: the delta rule", "- fading")]


def new_memory(arm: str, frames: Tensor, tokens: int, heads: int = HEADS) -> CLAM:
    """A memory with first weights made from frames x [T, J, D]."""
    kind, held_open = ARMS[arm]
    memory = kind(frames.shape[2], tokens, heads=heads, dropout=0.0)
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
    x, _ = draw_videos(TASKS[task], 32, generator)
    memory = new_memory(arm, x.flatten(0, 1), tokens=x.shape[2])
    to_thing = nn.Linear(WIDTH, 1 + THINGS)
    learned = [*memory.parameters(), *to_thing.parameters()]
    optimizer = torch.optim.AdamW(learned, weight_decay=0.0)

    def scores(x: Tensor) -> Tensor:                                    # [B, 1 + THINGS, P]
        state = memory.step(x.flatten(1, 2), memory.initial_state(len(x)))
        return to_thing(memory.read(state)).mT

    # half of the trained places have been hidden for less long: those are learned first
    trained = TASKS[task]._replace(gap=(1, 16))
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = RATE * min(1, step / 50, 5 * (1 - step / STEPS))
        x, last = draw_videos(trained, BATCH, generator)
        loss = F.cross_entropy(scores(x), last)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()

    x, last = draw_videos(TASKS[task], TEST, torch.Generator().manual_seed(0))
    with torch.no_grad():
        is_right = scores(x).argmax(1) == last
    return is_right.float().mean(1).tolist()


# ------------------------------------------------------------------------------- all trainings

def results() -> dict[tuple[int, str, str], dict[int, float]]:
    """{(seed, task, arm): {test video: the share of its places that are right}}"""
    return {(line["seed"], line["task"], line["arm"]): dict(enumerate(line["videos"]))
            for line in lines_of(FILE)}


def train_missing() -> None:
    commit = present_commit()
    if commit.endswith("+"):
        raise BadData("files have changed since the last commit: a result names its commit")
    for training in progress([*product(SEEDS, TASKS, ARMS)], unit="training"):
        if training not in results():
            line = dict(zip(("seed", "task", "arm"), training))
            add_line(FILE, line | {"videos": train_arm(*training), "commit": commit})


def table_of_ablation() -> str:
    """The shares of right answers, and below them differences."""
    found = results()
    shares = {}
    for arm, task in product(ARMS, TASKS):
        of_seeds = [found.get((seed, task, arm)) for seed in SEEDS]
        shares[arm, task] = [videos for videos in of_seeds if videos]
    rows = []
    for arm in ARMS:
        means = [[fmean(videos.values()) for videos in shares[arm, task]] for task in TASKS]
        rows.append([arm, *map(cell, means)])
    lines = [as_markdown(["right (not in the paper)", *TASKS], rows), ""]
    for (first, second), task in product(COMPARED, TASKS):
        interval = compare_means(shares[first, task], shares[second, task])
        if interval:
            lines.append(say_claim(Claim(first, second, task), interval))
    return "\n".join(lines)


def run_ablation(show: bool) -> None:
    if not show:
        train_missing()
    print(table_of_ablation())


def main():
    parser = Parser(prog="python -m experiments.ablation",
                    description="What does the delta rule have that CLAM has not?")
    parser.add_argument("--show", action="store_true", help="show what is there; train nothing")
    args = parser.parse_args()
    command_line(lambda: run_ablation(args.show))


if __name__ == "__main__":
    main()
