"""The paper's loss alone (§3.5), on many kitchens: does a memory learn to remember?

    python -m beyond.experiments.curve kitchens                 their features, once for all trainings
    python -m beyond.experiments.curve train --memory tied      64,000 videos; a narrator now and then

Without stage `recall`, and so without labels that the paper has not. All trainings begin with what
stage `look` of the tables has learned, and get the same videos in the same order. Half of the
videos have idle time.
"""
import argparse
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

import narrator as nar
from beyond.commands.train_command import options_from
from beyond.training.run import Run, identity_of_training
from support.common.disk import write_tensors
from support.common.errors import command_line
from support.common.options import Parser
from support.common.progress import progress
from toy import world
from toy.stages import before_narrating, new_toy, scenes
from train import Example, in_order, train

KITCHENS = 8_000
SHARD = 100                                    # kitchens of a file
SAVED = {1_000, 2_000, 4_000, 8_000, 12_000, 16_000, 24_000, 32_000, 48_000}        # videos trained on
LOOK = "beyond/experiments/base/look.safetensors"


def all_kitchens() -> list[world.Kitchen]:
    return list(world.kitchens("train", KITCHENS, world.World(idle=0.5)))


def write_features(folder: Path) -> None:
    options = options_from(data="toy")
    encoder = nar.VisionEncoder(options.narrator["vision"], nar.Config.grid)
    kitchens = all_kitchens()
    for begin in progress(range(0, KITCHENS, SHARD), "kitchens"):
        file = folder / f"{begin}.safetensors"
        if not file.exists():
            videos = scenes(encoder, NoText(), kitchens[begin:begin + SHARD])
            write_tensors(file, {str(begin + i): video.x.half() for i, video in enumerate(videos)})


class NoText:
    def encode_narrations(self, narrations):
        return narrations


def read(folder: Path, number: int, kitchen: world.Kitchen, layout: nar.Layout) -> Example:
    with safe_open(folder / f"{number // SHARD * SHARD}.safetensors", "pt") as file:
        x = file.get_tensor(str(number)).float()
    said = [(narration.frame, narration.text) for narration in kitchen.narrations]
    return Example(x, layout.encode_narrations(said))


def train_one(args: argparse.Namespace) -> None:
    output = Path(args.output or f"out/curve/{args.memory}-{args.seed}")
    options = options_from(
        data="toy", memory=args.memory, seed=args.seed, last_k=None, look=LOOK, recall=False,
        warmup=0.05, output=str(output), resume=True, save_every=250, long=0.0)
    torch.manual_seed(options.seed)
    kitchens = all_kitchens()
    narrator, _ = new_toy(options, kitchens[:100])             # its first weights
    options.identity = identity_of_training(narrator, options)
    before_narrating(options, narrator, [])
    reads = [partial(read, Path(args.kitchens), number, kitchen, narrator.layout)
             for number, kitchen in enumerate(kitchens)]
    of_step = in_order(reads, options.batch, options.seed)

    def videos_of(step: int):
        if step * options.batch in SAVED:
            narrator.save(output / f"at-{step * options.batch}")
        return of_step(step)

    with Run("narrator", options) as run:
        train(narrator, videos_of, args.videos // options.batch, options, run)
    narrator.save(output / f"at-{args.videos}")


def main() -> None:
    parser = Parser(prog="python -m beyond.experiments.curve", description="The paper's loss alone.")
    parser.add_argument("what", choices=["kitchens", "train"])
    parser.add_argument("--memory", default="clam")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--videos", type=int, default=64_000)
    parser.add_argument("--kitchens", default="out/kitchens")
    parser.add_argument("--output")
    args = parser.parse_args()
    if args.what == "kitchens":
        command_line(lambda: write_features(Path(args.kitchens)))
    else:
        command_line(lambda: train_one(args))


if __name__ == "__main__":
    main()
