"""python train.py: options of a training, and where it begins."""
import argparse
import random
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import shorten

import torch

import stream
from baselines import variants
from narrator import Narrator
from support.common.devices import rank
from support.common.disk import check_writable
from support.common.errors import BadData, command_line
from support.common.options import Parser
from support.common.progress import say
from support.engine import checkpoint
from support.engine.training import unfinished
from support.files import own_videos
from toy import stages
from toy.train import train_toy
from train import Example, Options, mean_loss, train_annotated

ONLY_TOY = {"world", "idle", "grid", "llm_width", "no_recall", "look", "quick"}
NOT_TOY = {"root", "dtype", "max_frames", "val_limit"}
# what only a new narrator has, or learns in the toy before the paper's training
ONLY_NEW = {"start", "look", "no_recall", "llm_width"}


def parse() -> Options:
    """Options from the command line. Each field of Options is an option; --data toy has its own
    defaults.
    """
    parser = Parser(description="Train a narrator.", argument_default=argparse.SUPPRESS)
    for f in fields(Options):
        flag = option_of(f.name)
        text = f"{f.metadata['help']}; default {f.default}"
        if f.name in stages.DEFAULTS:
            text += f" (toy: {stages.DEFAULTS[f.name]})"
        kind = f.metadata["kind"]
        if f.default is False:
            parser.add_argument(flag, help=text, action="store_true")
        elif isinstance(kind, tuple):
            parser.add_argument(flag, help=text, choices=kind)
        else:
            parser.add_argument(flag, help=text, type=kind, metavar=f.name.upper())
    options = Options(**vars(parser.parse_args()))

    toy = options.data == "toy"
    for name in sorted(options.given):
        if toy and name in NOT_TOY:
            parser.error(f"{option_of(name)}: the toy renders its videos and trains in float32")
        if not toy and name in ONLY_TOY:
            parser.error(f"{option_of(name)}: only for the toy")
        if "init" in options.given and name in ONLY_NEW:
            parser.error(f"{option_of(name)} is for a new narrator; --init brings one")
    if options.llm and "llm_width" in options.given:
        parser.error("--llm-width is of a language model that is trained; --llm brings one, and "
                     "so does --quick")
    if options.memory == "none" and "memory_tokens" in options.given:
        parser.error("--memory none has no --memory-tokens")
    if toy and options.device not in ("auto", "cpu"):
        parser.error(f"--device {options.device}: the toy trains on the CPU")
    return options


def option_of(name: str) -> str:
    """The option of a field: val_limit -> --val-limit"""
    return "--" + name.replace("_", "-")


def train(options: Options):
    """Check the output folder, and train."""
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    output = Path(options.output)
    adapter = output / checkpoint.ADAPTER
    check_writable(adapter)
    if not options.resume:
        state = unfinished(output)
        if state:
            raise BadData(f"{state} is of an interrupted training; "
                          f"give --resume to go on, or delete it")
    goes_on = options.resume and any(output.glob("*-state.safetensors"))
    if adapter.exists() and not goes_on and not options.overwrite:
        raise BadData(f"{options.output} holds a finished narrator; "
                      f"choose another --output, or give --overwrite to train it anew")
    if options.data == "toy":
        _, processes = rank()
        if processes > 1:
            raise BadData("the toy trains in one process: start it without torchrun")
        train_toy(options)
    else:
        train_annotated(options, choose_length, narrate_one)
    minutes = (time.perf_counter() - began) / 60
    print(f"done in {minutes:.1f} minutes: {options.output}; next: {next_command(options)}",
          file=sys.stderr)


def choose_length(narrator: Narrator, examples: Sequence[Example], options: Options):
    """Set epochs and learning rate for own videos, unless they are given."""
    first = [examples[i] for i in range(min(8, len(examples)))]
    loss = mean_loss(narrator, first)
    width = narrator.llm.config.hidden_size
    chosen = own_videos.length_of_training(loss, len(examples), options.batch, width)
    for name in chosen.keys() - options.given:
        setattr(options, name, chosen[name])
    if rank()[0] == 0:
        say(f"loss before training: {loss:.2f}; {options.epochs:.3g} epochs, peak learning rate "
            f"{options.lr:.2g}")


@torch.no_grad()
def narrate_one(narrator: Narrator, videos: Sequence[Example], step: int):
    """Print a random narration of the videos: as the narrator writes it where all before it are
    given, and the true one.
    """
    chance = random.Random(step)
    video = videos[chance.randrange(len(videos))]
    number = chance.randrange(len(video.narrations))
    frame, true = video.narrations[number]
    given = dict(video.narrations[:number]) | {frame: None}     # None: the narrator writes it
    context = variants.context_class(narrator)(narrator)
    narrator.eval()
    *_, last = stream.narrate(narrator, video.x[:frame + 1], given=given, context=context)
    narrator.train()
    written = shorten(last.narration.text, 100, placeholder=" ...")
    say(f"after {step} steps: {written!r}, where the truth is {narrator.layout.decode(true)!r}")


def next_command(options: Options) -> str:
    """What measures a narrator that has been trained."""
    words = ["python", "evaluate.py", "stream", "--data", options.data]
    if options.root:
        words += ["--root", options.root]
    if options.data == "toy" and options.world != "plain":
        words += ["--world", options.world]
    return shlex.join([*words, "--model", options.output])


def main():
    command_line(lambda: train(parse()))
