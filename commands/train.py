"""python train.py: options of a training, and where it begins."""
import argparse
import sys
import time
from dataclasses import fields
from pathlib import Path

import torch

from support.common.devices import rank
from support.common.disk import check_writable
from support.common.errors import BadData, command_line
from support.common.options import Parser
from support.engine import checkpoint
from support.engine.training import unfinished
from toy import stages
from toy.train import train_toy
from train import Options, train_annotated

ONLY_TOY = {"world", "idle", "grid", "llm_width", "no_recall", "look"}
NOT_TOY = {"root", "dtype", "max_frames", "val_limit"}


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

    if "start" in options.given and "init" in options.given:
        parser.error("--start is for new weights; --init brings its own")
    toy = options.data == "toy"
    for name in sorted(options.given):
        if toy and name in NOT_TOY:
            parser.error(f"{option_of(name)}: the toy renders its videos and trains in float32")
        if not toy and name in ONLY_TOY:
            parser.error(f"{option_of(name)}: only for the toy")
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
        if adapter.exists() and not options.overwrite:
            raise BadData(f"{options.output} holds a finished narrator; "
                          f"choose another --output, or give --overwrite to train it anew")
    if options.data == "toy":
        _, processes = rank()
        if processes > 1:
            raise BadData("the toy trains in one process: start it without torchrun")
        train_toy(options)
    else:
        train_annotated(options)
    minutes = (time.perf_counter() - began) / 60
    print(f"done in {minutes:.1f} minutes: {options.output}; next: {next_command(options)}",
          file=sys.stderr)


def next_command(options: Options) -> str:
    """What measures a narrator that has been trained."""
    words = ["python", "evaluate.py", "stream", "--data", options.data]
    if options.root:
        words += ["--root", options.root]
    if options.data == "toy" and options.world != "plain":
        words += ["--world", options.world]
    return " ".join([*words, "--model", options.output])


def main():
    command_line(lambda: train(parse()))
