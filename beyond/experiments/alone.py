"""What CLAM lacks: memories alone, without a language model (not in the paper).

    python -m beyond.experiments.alone small
    python -m beyond.experiments.alone kitchens --arms clam tied writing delta --seeds 0 1 2

Each place shows a thing or two, one after the other, and is then hidden. A linear map of its memory
token says what it showed last. Printed is the share that is right in test videos: of places that
have shown one thing, and of those where another thing took its place; one in `things` is a guess.
"""
import json
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beyond.baselines.memories import MEMORIES, Projected
from clam import CLAM
from narrator import VisionEncoder
from support.common.errors import command_line
from support.common.options import Parser
from support.common.progress import progress
from support.common.version import commit
from support.engine.first_weights import start_memory
from support.files.features import encode_pictures
from toy import world
from toy.paint import TYPES

FRAMES = 48
BATCH = 16
TEST = 512                      # videos, the same for all
EACH = 32                       # tokens of each place with each thing


class MeanOfTied(CLAM):
    """The control: keys times a constant, the mean of 1 - G of each channel over all tokens."""

    def project(self, x: Tensor) -> Projected:
        k, v, log_gate = super().project(x)
        return -torch.expm1(log_gate).mean((0, 1)) * k, v, log_gate


ARMS = {"mean": MeanOfTied} | {name: kind for name, kind in MEMORIES.items() if kind.HAS_HEADS}


def tokens_of_small_world() -> Tensor:
    """Tokens [J, 1 + things, EACH, D]: orthogonal vectors for places and things, and noise."""
    place, thing = nn.init.orthogonal_(torch.empty(16, 32), 3.4).split([7, 9])
    return place[:, None, None] + thing[:, None] + 0.17 * torch.randn(7, 9, EACH, 32)


def tokens_of_kitchens() -> Tensor:
    """Tokens [J, 1 + types of things, EACH, D] of the toy's frames, as its encoder sees them."""
    vision = VisionEncoder("toy/checkpoint/vision", 3)
    x, labels = [], []
    for kitchen in progress([*world.kitchens("train", 100)], "encoding", unit="video"):
        x += encode_pictures(map(kitchen.render, range(len(kitchen))), vision, 64)
        labels.append(torch.from_numpy(kitchen.labels()[..., world.TYPE]))      # [T, 9]
    x = torch.stack(x)                                                  # [all frames, J, D]
    labels = torch.cat(labels)
    kinds = range(1 + len(TYPES))
    tokens = [some_of(x[:, 0]) for _ in kinds]                          # CLS: it shows no thing
    for place in range(len(world.PLACES)):
        of_place = x[:, 1 + place]
        tokens += [some_of(of_place[labels[:, place] == kind]) for kind in kinds]
    return torch.stack(tokens).unflatten(0, (-1, len(kinds)))


def some_of(tokens: Tensor) -> Tensor:
    """EACH of them, drawn with replacement."""
    return tokens[torch.randint(len(tokens), (EACH,))]


# of each: its tokens, heads, rate, steps
WORLDS = {
    "small": (tokens_of_small_world, 4, 0.003, 800),
    "kitchens": (tokens_of_kitchens, 8, 7e-4, 1200),
}


def draw(tokens: Tensor, videos: int) -> tuple[Tensor, Tensor, Tensor]:
    """Videos x [B, T, J, D], the thing that each place shows last [B, J], from 1 on, and whether it
    took the place of another one [B, J]. Token 0 never shows a thing."""
    J = len(tokens)
    things = tokens.shape[1] - 1

    def numbers(least: int, most: int) -> Tensor:
        return torch.randint(least, most + 1, (videos, 1, J))

    last = numbers(1, things)
    first = (last + numbers(0, things - 2)) % things + 1                # another thing
    end = FRAMES - numbers(8, 16)                                       # hidden from then on
    change = end - numbers(1, 16)
    begin = change - numbers(0, 1) * numbers(1, 16)                     # half: nothing was before
    frame = torch.arange(FRAMES)[:, None]
    is_shown = (begin <= frame) & (frame < end) & (torch.arange(J) > 0)
    shown = torch.where(frame < change, first, last) * is_shown         # [B, T, J]
    which = torch.randint(EACH, shown.shape)
    return tokens[torch.arange(J), shown, which], last[:, 0], (begin < change)[:, 0]


def train_alone(name: str, arm: str, seed: int) -> dict[str, float]:
    """Train a memory and a linear map. Returns the shares of the test's answers that are right."""
    make_tokens, heads, rate, steps = WORLDS[name]
    torch.manual_seed(0)
    tokens = make_tokens()
    test = draw(tokens, TEST)
    torch.manual_seed(1 + seed)
    J, classes, _, width = tokens.shape
    memory = ARMS[arm](width, J, heads=heads, dropout=0.0)
    start_memory(memory, draw(tokens, 32)[0].flatten(0, 1))
    to_thing = nn.Linear(width, classes)
    learned = [*memory.parameters(), *to_thing.parameters()]
    optimizer = torch.optim.AdamW(learned, weight_decay=0.0)

    def scores(x: Tensor) -> Tensor:                                    # [B, J - 1, 1 + things]
        state = memory.step(x.flatten(1, 2), memory.initial_state(len(x)))
        return to_thing(memory.read(state))[:, 1:]

    for step in progress(range(1, steps + 1), f"{arm}, seed {seed}", unit="step"):
        # a warm-up of 50 steps; in the last fifth the rate falls
        optimizer.param_groups[0]["lr"] = rate * min(1, step / 50, 5 * (1 - step / steps))
        x, thing, _ = draw(tokens, BATCH)
        loss = F.cross_entropy(scores(x).mT, thing[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()

    x, thing, is_another = test
    with torch.no_grad():
        is_right = (scores(x).argmax(-1) == thing[:, 1:]).float()
    is_another = is_another[:, 1:]
    return {"one": round(is_right[~is_another].mean().item(), 4),
            "another": round(is_right[is_another].mean().item(), 4)}


def main() -> None:
    parser = Parser(prog="python -m beyond.experiments.alone", description="memories alone")
    parser.add_argument("world", choices=WORLDS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["clam", "mean", "tied"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    args = parser.parse_args()
    for arm, seed in product(args.arms, args.seeds):
        row = {"world": args.world, "arm": arm, "seed": seed, "commit": commit()}
        print(json.dumps(row | train_alone(args.world, arm, seed)), flush=True)


if __name__ == "__main__":
    command_line(main)
