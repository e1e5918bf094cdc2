"""Checks of a narrator's settings (narrator.py: Config)."""
from dataclasses import fields

from support.common.errors import BadData
from support.common.options import kinds_of, limits_of


def check_settings(config) -> None:
    """BadData if a setting has the wrong type, or is out of range.

    config      narrator.py's Config
    """
    kinds = kinds_of(type(config))
    for f in fields(config):
        value = getattr(config, f.name)
        kind = kinds[f.name][0]
        is_whole_float = kind is float and type(value) is int
        if type(value) not in kinds[f.name] and not is_whole_float:
            raise BadData(f"{f.name} of a narrator cannot be {value!r}")
        if kind in (int, float) and value is not None:
            low, high = limits_of(f, kind)
            if not low <= value <= high:                            # true of NaN
                raise BadData(f"{f.name} of a narrator must be from {low:,} to {high:,}, "
                              f"not {value!r}")
        choices = f.metadata["values"]
        if kind is str and choices and value not in choices:
            raise BadData(f"{f.name} of a narrator is one of {', '.join(choices)}, not {value!r} "
                          f"(`import beyond.baselines` adds memories)")


def check_together(config, memory: type) -> None:
    """BadData if settings contradict each other, or what the class of the memory asks of them. (What
    bounds the context: beyond/streams/bounds.py.)
    """
    width = config.width
    heads = config.memory_heads
    if memory.HAS_HEADS and width % (2 * heads):
        raise BadData(f"memory_heads: width {width} is not a multiple of twice {heads} heads")
    if config.readout == "cls" and not memory.READ_WITHIN_FRAMES:
        raise BadData(f"readout: memory {config.memory!r} is read after whole frames, "
                      f"not after the cls token")
    if config.theta_low > config.theta:
        raise BadData(f"theta_low = {config.theta_low}: is above theta, and soon after a "
                      f"narration another one is harder (§3.2); give both")
    if not config.prune:
        for name in ("last_k", "max_segment"):
            value = getattr(config, name)
            if value is not None:
                raise BadData(f"{name} = {value}: nothing is removed without pruning "
                              f"(VideoLLM-online)")
    if config.max_position is not None and (config.last_k is None or config.keep_newline):
        raise BadData("max_position needs last_k, and not keep_newline: else narrations or their "
                      "newlines stay, and no position becomes free")
