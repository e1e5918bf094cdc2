"""Settings of a narrator that the paper does not name, and the checks of all its settings.

`MoreSettings` is the base of narrator.py's Config: one object, one narrator.json. "Published"
means: of the authors' code, not in the paper.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args, get_type_hints

from support.common.errors import BadData

READOUTS = ("frame", "cls")


@dataclass
class MoreSettings:
    # of the published code
    memory_heads: int = 8                       # h
    memory_dropout: float = 0.1                 # of the memory's self-attention
    lora_dropout: float = 0.05
    keep_newline: bool = False                  # keep the newlines of narrations that are removed
    # ours
    memory_target: bool = True                  # learn a start of each memory token; published: no,
                                                # train.py: with --start statistics
    max_segment: float | None = None            # [s] until a segment is restarted; None: never
    max_position: int | None = None             # beyond it, positions are turned back; None: never

    MODEL_NAMES = ("llm", "vision")             # the settings that are names of models


# the smallest and the largest value of each number
RANGES = {
    "memory_tokens": (1, 1e9),
    "memory_heads": (1, 1e9),
    "width": (1, 1e9),
    "max_new_tokens": (1, 1e9),
    "lora_rank": (1, 1e9),
    "lora_alpha": (1, 1e9),
    "max_position": (1, 1e9),
    "grid": (0, 100),
    "theta": (0, 1),
    "theta_low": (0, 1),
    "memory_dropout": (0, 1),
    "lora_dropout": (0, 1),
    "fps": (1e-6, 1e6),
    "max_segment": (1e-6, 1e6),
    "refractory": (0, 1e9),
    "last_k": (0, 1e9),
}


def check_settings(config, memories: Mapping[str, type]) -> None:
    """BadData if a setting has the wrong type, is out of range, or contradicts another one.

    config      narrator.py's Config
    memories    the classes of all memories, by name
    """
    check_types(config)
    check_choice(config, "memory", memories)
    check_choice(config, "readout", READOUTS)
    for name, (low, high) in RANGES.items():
        check_range(config, name, low, high)
    check_memory(config, memories[config.memory])
    check_context(config)


def check_choice(config, name: str, names: Iterable[str]) -> None:
    value = getattr(config, name)
    if value not in names:
        raise BadData(f"{name} of a narrator is one of {', '.join(names)}, not {value!r}")


def check_range(config, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    if value is not None and not low <= value <= high:
        raise BadData(f"{name} of a narrator must be from {low:g} to {high:g}, not {value!r}")


def check_types(config) -> None:
    """BadData if the value of a field is not of its type."""
    for name, allowed in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if allowed is float or float in get_args(allowed):
            allowed = allowed | int                                 # a whole number will do
        if isinstance(value, bool):
            fits = allowed is bool                                  # Python's bool is an int, too
        else:
            fits = isinstance(value, allowed)
        if not fits:
            raise BadData(f"{name} of a narrator cannot be {value!r}")


def check_memory(config, memory: type) -> None:
    width = config.width
    heads = config.memory_heads
    if memory.HAS_HEADS and width % (2 * heads):
        raise BadData(f"memory_heads: width {width} is not a multiple of twice {heads} heads")
    if config.readout == "cls" and not memory.HAS_HEADS:
        raise BadData(f"readout: memory {config.memory!r} is read after whole frames, "
                      f"not after the cls token")


def check_context(config) -> None:
    """Check what is kept in the context, and what bounds it (streams/bounds.py)."""
    if config.last_k is not None and not config.prune:
        raise BadData(f"last_k = {config.last_k}: where nothing is pruned (VideoLLM-online), "
                      f"all narrations are kept")
    if config.max_segment is not None and not config.prune:
        raise BadData("max_segment: where nothing is pruned (VideoLLM-online), "
                      "no segment can be restarted")
    if config.max_position is not None and config.last_k is None:
        raise BadData("max_position needs last_k: where all narrations are kept, "
                      "no position becomes free")
    if config.max_position is not None and config.keep_newline:
        raise BadData("max_position: with --keep-newline, no position becomes free; "
                      "leave out one of them")
