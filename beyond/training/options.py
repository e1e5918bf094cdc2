"""The options of a training that are not the paper's: those of the authors' code, of runs and of
the toy.

Each class is a group of `python train.py --help`, and a base of beyond/commands/train_command.py's
Options: one object, one command line.
"""
from dataclasses import dataclass, field

from support.common.options import FILES, LARGEST, setting


@dataclass
class FurtherOptions:
    """Not in the paper, but in the authors' code; and --long, which is ours."""
    start: str = setting("published",
        "first weights of the memory: as in the authors' code, or such that CLAM learns from few "
        "videos, too (support/engine/first_weights.py; not the paper's); own videos: mimetic",
        ("published", "mimetic"), needs="a new narrator, a memory with heads")
    connector_start: str = setting("published",
        "first weights of the connector: as in the authors' code, or such that it standardises the "
        "features, and enlarges what tells the places of a picture apart",
        ("published", "mimetic"), needs="a new narrator, a connector of its own")
    long: float = setting(0.0,
        "fraction of the videos trained on as if late in a long stream", (0, 1))


@dataclass
class RunOptions:
    """How the training runs."""
    # not an option: what must be the same with --resume, beside options (run.py)
    identity: dict = field(default_factory=dict)

    val_limit: int = setting(256,
        "videos for the validation loss after each epoch; 0: none",
        (0, LARGEST), needs=FILES, compared=False)
    resume: bool = setting(False, "continue an interrupted run in --output", compared=False)
    save_every: int = setting(50, "steps between saved states (see --resume)", compared=False)
    seed: int = setting(0,
        "of first weights, order of the videos, dropout and --long", (0, 2 ** 32 - 1))
    checkpointing: bool = setting(False,
        "recompute activations in the backward pass: less memory, more time",
        needs=FILES, compared=False)
    device: str = setting("auto", "cpu | cuda | mps | auto (the toy: always the CPU)",
        needs=FILES, compared=False)
    dtype: str = setting("auto",
        "of the frozen language model; auto: bfloat16 on CUDA",
        ("auto", "float32", "bfloat16"), needs=FILES, compared=False)


@dataclass
class ToyOptions:
    """For the toy alone."""
    quick: bool = setting(False,
        "a narrator of the toy in minutes: no stages of its own, few videos, few steps",
        needs="--data toy")
    look: str | None = setting(None,
        "start with LoRA and connector of this look.safetensors, which another training has "
        "written",
        needs="--data toy, a new narrator", compared=False)
    idle: float = setting(0.0,
        "share of the videos that have idle time", (0, 1), needs="--data toy")
    freeze_memory: bool = setting(False,
        "the memory keeps its first weights: what does its training add to them?",
        needs="--data toy, a new narrator, a memory that learns")
    freeze_lora: bool = setting(False,
        "LoRA is not trained in the stage `recall`: what do memory and connector learn alone?",
        needs="--data toy, a new narrator, the stage recall")
    recall: bool = setting(True,
        "there is no stage `recall`: the memory learns from the paper's loss alone",
        needs="--data toy, a new narrator")
    recall_steps: int = setting(1200, "steps of the stage `recall`",
        needs="--data toy, a new narrator, the stage recall")
