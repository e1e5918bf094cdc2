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


# ---------------------------------------------------------------------- command line


def parse() -> Options:
    """Command line from the fields of Options; --data toy brings its own defaults."""
    parser = Parser(description="Train a narrator.", argument_default=argparse.SUPPRESS)
    for f in fields(Options):
        kind, toy = f.metadata["kind"], f" (toy: {stages.DEFAULTS[f.name]})" if f.name in stages.DEFAULTS else ""
        how = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": f.name.upper()}
        parser.add_argument("--" + f.name.replace("_", "-"), help=f"{f.metadata['help']}; default {f.default}{toy}",
                            **{"action": "store_true"} if f.default is False else how)
    options = Options(**vars(parser.parse_args()))
    if options.given >= {"start", "init"}:
        parser.error("--start is for new weights; --init brings its own")
    toy = options.data == "toy"
    for name in sorted(options.given & ({"root", "dtype", "max_frames", "val_limit"} if toy else
                                        {"world", "idle", "grid", "llm_width", "no_remember", "look"})):
        parser.error(f"--{name.replace('_', '-')}: the toy renders its videos and trains in float32" if toy else
                     f"--{name.replace('_', '-')}: only for the toy")
    if toy and options.device not in ("auto", "cpu"):
        parser.error(f"--device {options.device}: the toy trains on the CPU")
    return options


def train(options: Options):
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    check_writable(Path(options.output) / checkpoint.ADAPTER)
    if not options.resume and (state := unfinished(Path(options.output))):
        raise BadData(f"{state} is of an interrupted training; give --resume to go on, or delete it")
    if not (options.resume or options.overwrite) and (Path(options.output) / checkpoint.ADAPTER).exists():
        raise BadData(f"{options.output} holds a finished narrator; choose another --output, or give --overwrite to "
                      f"train it anew")
    if options.data == "toy":
        if rank()[1] > 1:
            raise BadData("the toy trains in one process: start it without torchrun")
        train_toy(options)
    else:
        train_annotated(options)
    print(f"done in {(time.perf_counter() - began) / 60:.1f} minutes: {options.output}", file=sys.stderr)


def main():
    command_line(lambda: train(parse()))
