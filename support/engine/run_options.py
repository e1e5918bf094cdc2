"""The options of a training that are not the paper's: those of the authors' code, of runs and of
the toy. (Those of baselines are in beyond/baselines/options.py.)

Each class is a group of `python train.py --help`, and a base of beyond/commands/train_command.py's
Options: one object, one command line.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from support.common.options import in_range, non_negative_int, positive_int, probability


def option(default, text: str, kind: Callable | tuple = str):
    """A field that is an option, with its help and its argparse type, or the values that it can
    have.

    One whose default is True is switched off: prune is --no-prune.
    """
    return field(default=default, metadata={"help": text, "kind": kind})


def flag_of(name: str, default) -> str:
    """How an option is written: val_limit -> --val-limit, prune -> --no-prune."""
    words = name.replace("_", "-")
    return f"--no-{words}" if default is True else f"--{words}"


@dataclass
class FurtherOptions:
    """Not in the paper, but in the authors' code; and --long, which is ours."""
    start: str = option("published",
        "first weights of the memory: as in the authors' code, or such that CLAM learns from few "
        "videos, too (support/engine/start.py; not the paper's); own videos: mimetic",
        ("published", "mimetic"),
    )
    connector_start: str = option("published",
        "first weights of the connector: as in the authors' code, or such that it standardises the "
        "features, and enlarges what tells the places of a picture apart",
        ("published", "mimetic"),
    )
    readout: str = option("frame",
        "the memory is read after the whole frame (the paper) or after its first token (the "
        "authors' code)",
        ("frame", "cls"),
    )
    memory_heads: int = option(8, "heads of the memory, if it has any", positive_int)
    lora_dropout: float = option(0.05, "dropout on LoRA's input", probability)
    memory_dropout: float = option(0.1, "dropout in CLAM's self-attention", probability)
    max_frames: int = option(1200, "longer videos are cut", positive_int)
    long: float = option(0.0,
        "fraction of the videos trained on as if late in a long stream",
        probability,
    )


@dataclass
class RunOptions:
    """How the training runs."""
    # not an option: the names of those that were given. With --init, only these replace the
    # settings of the checkpoint
    given: frozenset[str] = frozenset()
    # not an option: what is compared on --resume, beside options (run.py: made_of)
    made_of: dict = field(default_factory=dict)

    output: str = option("out/narrator", "folder of the checkpoint, the log and the loss curve")
    root: str | None = option(None, "folder of the data set; default data/NAME")
    limit: int | None = option(None, "use at most this many training videos", positive_int)
    val_limit: int = option(256,
        "videos for the validation loss after each epoch; 0: none",
        non_negative_int,
    )
    resume: bool = option(False, "continue an interrupted run in --output")
    save_every: int = option(50, "steps between saved states (see --resume)", positive_int)
    seed: int = option(0,
        "of first weights, order of the videos, dropout and --long",
        in_range(int, 0, 2 ** 32 - 1, "0 to 2^32 - 1"),
    )
    checkpointing: bool = option(False,
        "recompute activations in the backward pass: less memory, more time",
    )
    device: str = option("auto", "cpu | cuda | mps | auto (the toy: always the CPU)")
    dtype: str = option("auto",
        "of the frozen language model; auto: bfloat16 on CUDA",
        ("auto", "float32", "bfloat16"),
    )


@dataclass
class ToyOptions:
    """For the toy alone."""
    quick: bool = option(False,
        "a narrator of the toy in minutes: no stages of its own, few videos, few steps",
    )
    look: str | None = option(None,
        "start with LoRA and connector of this look.safetensors, which another training has "
        "written",
    )
    grid: int = option(3,
        "pooled tokens per side of a frame; 0: CLS only",
        in_range(int, 0, 100, "0 to 100"),
    )
    world: str = option("plain", "kind of the videos (toy/world.py)")
    idle: float | None = option(None,
        "share of the videos that have idle time; default the world's",
        probability,
    )
    freeze_memory: bool = option(False,
        "the memory keeps its first weights: what does its training add to them?",
    )
    freeze_lora: bool = option(False,
        "LoRA is not trained in the stage `recall`: what do memory and connector learn alone?",
    )
    recall: bool = option(True,
        "there is no stage `recall`: the memory learns from the paper's loss alone",
    )
    recall_steps: int = option(1200, "steps of the stage `recall`", positive_int)
