"""Which part of the statistics start CLAM needs (not in the paper; the toy alone).

    python -m experiments.starts
    python -m experiments.starts --seed 1 --only "without keys" "without gates"

Each number is the loss at the end of the stage `recall`, in which CLAM and the language model learn
to list what each place showed last. That stage is trained anew for each start, and nothing else.
Its loss says early whether the memory is used: without a memory it stays near 0.4. The starts:

    statistics  as all narrators of the tables (support/engine/start.py)
    published   as the published code
    without     one part as the published code, all others from statistics:
      keys      W_k: from which token slot a frame token comes
      values    W_v, W_o: what changes within a slot
      queries   Z, W_q: for which slot a memory token asks
      gates     W_gate: keep nearly all
      sizes     norms, output gate, self-attention, feed-forward: memory tokens are as frame tokens
      targets   a learned target for each memory token. Without them Z is chosen such that memory
                tokens still ask for their slots
    gates alone from statistics, all else as the published code

What was trained before is not trained again: logs are kept in --output.
"""
import argparse
from functools import partial
from pathlib import Path

import torch

import narrator as nar
from baselines import variants
from commands.train import options_from
from experiments.paper import LLM, LOOK, VISION
from experiments.runs import losses_of
from support.common.disk import read_jsonl
from support.common.errors import command_line
from support.common.figures import print_table
from support.common.options import Parser, non_negative_int
from support.common.progress import say
from support.engine import checkpoint
from toy import stages, world
from train import Recipe, begin, fit, new_config

# Parts of the memory: the first words of their parameters' names
KEYS = {"w_k"}
VALUES = {"w_v", "w_o"}
QUERIES = {"z", "w_q"}
GATES = {"w_gate"}
SIZES = {"self_attn", "norm_a", "w_output_gate", "norm_o", "norm_y", "norm_m", "mlp"}
TARGETS = {"target"}                           # as published: there are none

# What starts as in the published code where all else starts from statistics
PUBLISHED = {
    "statistics": set(),
    "published": KEYS | VALUES | QUERIES | GATES | SIZES | TARGETS,
    "without keys": KEYS,
    "without values": VALUES,
    "without queries": QUERIES,
    "without gates": GATES,
    "without sizes": SIZES,
    "without targets": TARGETS,
    "gates alone": KEYS | VALUES | QUERIES | SIZES | TARGETS,
}
STAGE = "recall"


def unstarted(start: str, options: Recipe) -> nar.Narrator:
    """A new narrator of the tables. Its memory has the published first weights."""
    settings = new_config(options, LLM, VISION, 1 + options.grid ** 2, stages.WIDTH)
    settings.memory_target = not TARGETS <= PUBLISHED[start]
    return variants.new_narrator(*checkpoint.load_llm(LLM), settings)


def set_start(narrator: nar.Narrator, start: str, options: Recipe,
              videos: list[stages.Scene]) -> None:
    """Set the first weights of the memory; all others are those of the stage `look`."""
    published = {name: p.detach().clone() for name, p in narrator.memory.named_parameters()}
    begin(narrator, options, videos)
    with torch.no_grad():
        for name, p in narrator.memory.named_parameters():
            part, _, _ = name.partition(".")
            if part in PUBLISHED[start]:
                p.copy_(published[name])
    stages.take_over(narrator, Path(LOOK))


def train_recall(start: str, seed: int, output: Path) -> Path:
    """Train the stage `recall`, unless that is done -> the folder of its log."""
    folder = output / f"{start.replace(' ', '-')}-{seed}"
    steps = stages.STEPS[STAGE]
    log = folder / f"{STAGE}-log.jsonl"
    if log.exists() and len(read_jsonl(log)) == steps:
        return folder

    say(f"{start}, seed {seed}")
    options = options_from(data="toy", seed=seed, last_k="all", warmup=0.05, output=str(folder),
                           resume=folder.exists())
    torch.manual_seed(seed)
    narrator = unstarted(start, options)
    variant = world.find_world("plain", idle=0.5)
    kitchens = list(world.kitchens("train", options.limit, world=variant))
    videos = stages.scenes(narrator.vision_encoder(), narrator.layout, kitchens,
                           output / "features.safetensors")
    set_start(narrator, start, options, videos)
    stages.inventories(partial(fit, options=options), STAGE, narrator, videos, steps, options.lr,
                       seed)
    return folder


def run_starts(args: argparse.Namespace) -> None:
    losses = {}
    for start in args.only or PUBLISHED:
        folder = train_recall(start, args.seed, Path(args.output))
        losses[start] = losses_of(folder)[STAGE]
    print_table([("loss", losses)])


def main():
    parser = Parser(prog="python -m experiments.starts",
                    description="Which part of the statistics start CLAM needs.")
    parser.add_argument("--only", nargs="+", metavar="START", choices=list(PUBLISHED),
                        help="these starts alone: " + ", ".join(PUBLISHED))
    parser.add_argument("--seed", type=non_negative_int, default=0, help="default 0")
    parser.add_argument("--output", default="out/starts", help="default out/starts")
    args = parser.parse_args()
    command_line(lambda: run_starts(args))


if __name__ == "__main__":
    main()
