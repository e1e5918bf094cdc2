"""Checks of a narrator's settings (narrator.py: Config)."""
from __future__ import annotations

from collections.abc import Mapping
from typing import get_args, get_type_hints

from support.common.errors import BadData

LEAST = 1e-6
LARGEST = 1e8
# The smallest and the largest value of a number, where these are not LEAST and LARGEST.
RANGES = {
    "grid": (0, 100),
    "last_k": (0, LARGEST),
    "refractory": (0, LARGEST),
    "theta": (0, 1),
    "theta_low": (0, 1),
    "memory_dropout": (0, 1),
    "lora_dropout": (0, 1),
    "mod_keep": (LEAST, 1),                     # of beyond/baselines/mod.py
}


def check_settings(config, memories: Mapping[str, type]) -> None:
    """BadData if a setting has the wrong type, is out of range, or contradicts another one.

    config      narrator.py's Config
    memories    the classes of all memories, by name
    """
    choices = {"memory": memories, "readout": ("frame", "cls")}
    for name, allowed in get_type_hints(type(config)).items():
        value = getattr(config, name)
        kinds = get_args(allowed) or (allowed,)
        if float in kinds:
            kinds += (int,)                                         # a whole number will do
        if type(value) not in kinds:
            raise BadData(f"{name} of a narrator cannot be {value!r}")
        if name in choices and value not in choices[name]:
            raise BadData(f"{name} of a narrator is one of {', '.join(choices[name])}, "
                          f"not {value!r}")
        if type(value) in (int, float):
            least = LEAST if float in kinds else 1
            low, high = RANGES.get(name, (least, LARGEST))
            if not low <= value <= high:                            # true of NaN
                raise BadData(f"{name} of a narrator must be from {low:g} to {high:g}, "
                              f"not {value!r}")
    check_memory(config, memories[config.memory])
    check_context(config)


def check_memory(config, memory: type) -> None:
    width = config.width
    heads = config.memory_heads
    if memory.HAS_HEADS and width % (2 * heads):
        raise BadData(f"memory_heads: width {width} is not a multiple of twice {heads} heads")
    if config.readout == "cls" and not memory.HAS_HEADS:
        raise BadData(f"readout: memory {config.memory!r} is read after whole frames, "
                      f"not after the cls token")


def check_context(config) -> None:
    """Check what is kept in the context, and what bounds it (beyond/streams/bounds.py)."""
    if not config.prune:
        for name in ("last_k", "max_segment"):
            value = getattr(config, name)
            if value is not None:
                raise BadData(f"{name} = {value}: nothing is removed without pruning "
                              f"(VideoLLM-online)")
    if config.max_position is not None and (config.last_k is None or config.keep_newline):
        raise BadData("max_position needs last_k, and not keep_newline: else narrations or their "
                      "newlines stay, and no position becomes free")
