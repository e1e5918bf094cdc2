"""What lets CLAM learn from random weights? (not in the paper; the toy alone)

    python -m experiments.starts                make what is missing, and show it
    python -m experiments.starts --show         only show it

From the published first weights, CLAM's memory tokens hardly depend on what it has seen, and become
the same for all videos within a few steps. Three causes are taken away, alone and together:

    constant    The self-attention over Z starts from zero, so its values are its bias alone: one
                vector for all memory tokens, which a LayerNorm then enlarges 316 times. Here this
                bias, that of the projection after it, and the LayerNorm are not trained.
    mean        The features have a common mean. Here it is subtracted before keys, values and
                gates.
    gates       Gates of 1/2 keep nothing for longer than a frame. Here they start near 1.

CLAM and a linear probe of its memory tokens are trained together by labels: what did each place
show last? No language model takes part. Then a probe is trained anew, to the end, for the memory as
it is; and one for each memory as it starts. The measure is the share of hidden things (type and
colour) that this probe reads rightly on other videos: one of 36 can be guessed. "tokens differ",
"read-outs differ": shares of the mean square of the trained memory's tokens (commands/evaluate.py:
`shares_that_differ`), over all test videos together.

What a language model learns from the same starts is in the tables "first-weights" and "T5" of
experiments/paper.json; whether a narrator without a memory forgets or loses the thread is in table
"thread", beside CLAM's Table 6. They are shown, too; experiments/tables.py makes their results.
"""
import argparse
import random
from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import narrator as nar
from clam import CLAM
from commands.evaluate import shares_that_differ
from commands.train_command import TOY
from experiments.knowledge import EVERY, Moments, moments_of, tokens_of, train_probe
from experiments.paper import LLM, VISION
from experiments.runs import (
    RESULTS, ROOT, add_line, find_result, fingerprint_of_base, fingerprint_of_worlds,
    present_commit,
)
from experiments.show import markdown
from support.engine.start import start_memory
from support.common.errors import command_line
from support.common.options import Parser, non_negative_int
from support.common.progress import progress
from support.engine.checkpoint import load_tokenizer
from toy import stages, world
from toy.probe import Probe, most_likely
from train import schedule

FILE = RESULTS / "starts.jsonl"
ARMS = (                                       # the rows of the table
    "published",
    "published, gates",
    "published, mean",
    "published, mean, gates",
    "published, constant",
    "published, constant, gates",
    "published, constant, mean",
    "published, constant, mean, gates",
    "mimetic",
)
SEEDS = (0, 1)
VIDEOS = 300                                   # to train with
TEST_VIDEOS = 60
STEPS = 300
BATCH = 4
RATE = 2e-3
WARMUP = 0.1
# of the self-attention over Z: what makes its output the same for all memory tokens
CONSTANT = ("self_attn.in_proj_bias", "self_attn.out_proj.bias", "norm_a.weight", "norm_a.bias")


class CentredCLAM(CLAM):
    """CLAM on features from which a fixed vector [D] is subtracted."""

    def __init__(self, mean: Tensor, *sizes: int, **options):
        super().__init__(*sizes, **options)
        self.register_buffer("mean", mean)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().project(x - self.mean)


# ------------------------------------------------------------------------------- an arm

def start(arm: str, x: Tensor, seed: int) -> CLAM:
    """CLAM as an arm starts, for frames x [T, J, D]; what the arm does not train is frozen."""
    torch.manual_seed(seed)
    cures = arm.split(", ")
    sizes = (x.shape[-1], TOY["memory_tokens"], TOY["memory_heads"])
    mean = x.mean((0, 1)) if "mean" in cures else torch.zeros(x.shape[-1])
    clam = CentredCLAM(mean, *sizes, target=arm == "mimetic", dropout=0.0)
    if arm == "mimetic":
        start_memory(clam, x)
    if "gates" in cures:
        with torch.no_grad():
            clam.start_gates()
    if "constant" in cures:
        for name in CONSTANT:
            clam.get_parameter(name).requires_grad_(False)
    return clam


def train_by_labels(clam: CLAM, videos: list[stages.Scene], seed: int):
    """Train CLAM, together with a linear probe of its memory tokens."""
    with torch.no_grad():
        tokens = torch.cat([tokens_of(clam, video) for video in videos[:50]])
    probe = Probe(tokens.shape[1])
    probe.mean.copy_(tokens.mean(0))
    probe.deviation.copy_(tokens.std(0) + 1e-6)
    parameters = [p for p in (*clam.parameters(), *probe.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    chance = random.Random(seed)
    for step in progress(range(STEPS), "labels", STEPS, "step"):
        for group in optimizer.param_groups:
            group["lr"] = RATE * schedule(step, STEPS, WARMUP)
        loss = 0
        for video in chance.choices(videos, k=BATCH):
            tokens = tokens_of(clam, video)
            types, colours, _ = probe(tokens)
            things = stages.last_seen(video.labels)[EVERY - 1::EVERY]          # [N, 9, 2]
            has_shown = things[..., 0] > 0
            loss = loss + F.cross_entropy(types[has_shown], things[has_shown][:, 0])
            loss = loss + F.cross_entropy(colours[has_shown], things[has_shown][:, 1])
        optimizer.zero_grad()
        (loss / BATCH).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def share_right(probe: Probe, moments: Moments) -> float:
    """Of all that is hidden, the share whose type and colour are read rightly."""
    types, colours, _ = probe(moments.tokens)
    named, _ = most_likely(types, colours)
    right = (named == moments.things).all(-1)
    return right[moments.hidden].float().mean().item()


# ------------------------------------------------------------------------------- results

def identity_of_arm(arm: str, seed: int, trained: bool) -> dict:
    return {"arm": arm, "seed": seed, "trained": trained, "steps": STEPS,
            "worlds": fingerprint_of_worlds(), "base": fingerprint_of_base()}


def result_of_arm(arm: str, seed: int, trained: bool) -> dict | None:
    """What is kept of an arm; None if there is nothing of today's world and encoder."""
    return find_result(FILE, identity_of_arm(arm, seed, trained))


def encoded_videos(split: str, count: int) -> list[stages.Scene]:
    """Videos of the toy, half of them with idle time."""
    encoder = nar.VisionEncoder(str(ROOT / VISION))
    layout = nar.Layout(load_tokenizer(str(ROOT / LLM)), J=10, M=0)
    kitchens = world.kitchens(split, count, world=world.find_world("plain", 0.5))
    return stages.scenes(encoder, layout, kitchens)


def make_missing(seeds: Sequence[int]) -> None:
    wanted = product(ARMS, seeds, (False, True))
    missing = [key for key in wanted if result_of_arm(*key) is None]
    if not missing:
        return
    videos = encoded_videos("train", VIDEOS)
    test_videos = encoded_videos("test", TEST_VIDEOS)
    x = torch.cat([video.x[:128] for video in videos[:64]])
    for arm, seed, trained in missing:
        clam = start(arm, x, seed)
        if trained:
            train_by_labels(clam, videos, seed)
        probe = train_probe(moments_of(clam, videos))
        moments = moments_of(clam, test_videos)
        memory = rearrange(moments.tokens, "n (m d) -> n m d", m=clam.M)
        tokens_differ, read_outs_differ = shares_that_differ(memory)
        add_line(FILE, identity_of_arm(arm, seed, trained) | {
            "commit": present_commit(),
            "hidden_right": round(share_right(probe, moments), 4),
            "tokens_differ": tokens_differ,
            "read_outs_differ": read_outs_differ,
        })


def table_of_starts(seeds: Sequence[int] = SEEDS) -> str:
    """The results as a table: a row for each arm, its seeds side by side."""
    numbers = ", ".join(str(seed) for seed in seeds)
    lines = [f"| start (seeds {numbers}) | right, as it starts | right, trained by labels "
             "| tokens differ | read-outs differ |",
             "| --- | --- | --- | --- | --- |"]
    for arm in ARMS:
        before = [result_of_arm(arm, seed, False) for seed in seeds]
        after = [result_of_arm(arm, seed, True) for seed in seeds]
        cells = [arm, numbers_of(before, "hidden_right"), numbers_of(after, "hidden_right"),
                 numbers_of(after, "tokens_differ"), numbers_of(after, "read_outs_differ")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def numbers_of(results: list[dict | None], measure: str) -> str:
    """The numbers of a measure, one for each result that is there."""
    numbers = [f"{kept[measure]:.2g}" for kept in results if kept is not None]
    return ", ".join(numbers) or "-"


# ------------------------------------------------------------------------------- the command

def run_starts(args: argparse.Namespace) -> None:
    if not args.show:
        make_missing(args.seeds)
    tables = [table_of_starts(args.seeds)]
    for name in ("first-weights", "T5", "T6", "thread"):
        tables.append(markdown(name))
    print("\n\n".join(tables))


def main():
    parser = Parser(prog="python -m experiments.starts",
                    description="What lets CLAM learn from random weights?")
    parser.add_argument("--show", action="store_true", help="show what is there; train nothing")
    parser.add_argument("--seeds", nargs="+", type=non_negative_int, metavar="N",
                        default=list(SEEDS), help="default: 0 and 1")
    args = parser.parse_args()
    command_line(lambda: run_starts(args))


if __name__ == "__main__":
    main()
