"""Settings of a narrator that the paper does not name, and the checks of all its settings.

`MoreSettings` is the base of narrator.py's Config: one object, one narrator.json. "Published"
means: of the authors' code, not in the paper.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args, get_type_hints

from support.common.errors import BadData

READOUTS = ("frame", "cls")
MOD_LAYERS = ("interleaved", "all", "deep")     # layers with routers (baselines/mod.py: LAYERS)


@dataclass
class MoreSettings:
    # of the published code
    memory_heads: int = 8                       # h
    memory_dropout: float = 0.1                 # of the memory's self-attention
    lora_dropout: float = 0.05
    readout: str = "frame"                      # what M_t is read after; published: "cls"
    keep_newline: bool = False                  # keep the newlines of narrations that are removed
    max_new_tokens: int = 100                   # of a narration that does not end by itself
    # ours
    memory_target: bool = True                  # learn a start of each memory token; published: no,
                                                # train.py: with --start statistics
    max_segment: float | None = None            # [s] until a segment is restarted; None: never
    max_position: int | None = None             # beyond it, positions are turned back; None: never
    # of baselines
    mod_keep: float | int | None = None         # VideoLLM-MoD: share of a frame that a router keeps
    mod_layers: str = "interleaved"             # VideoLLM-MoD: one of MOD_LAYERS
    width_second: int = 0                       # LION-FS: of D, those of a second encoder
    vision_second: str | None = None            # LION-FS: its hub id or folder; None: from disk
    narration_memory: int = 0                   # Table 15: N, tokens of a CLAM on narrations

    @property
    def of_baseline(self) -> bool:
        """Whether a narrator with these settings is of a class in baselines/."""
        return self.mod_keep is not None or self.width_second > 0 or self.narration_memory > 0


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
    "mod_keep": (1e-6, 1),
    "refractory": (0, 1e9),
    "last_k": (0, 1e9),
    "narration_memory": (0, 1e9),
    "width_second": (0, 1e9),
}


def check_settings(config, memories: Mapping[str, type]) -> None:
    """BadData if a setting has the wrong type, is out of range, or contradicts another one.

    config      narrator.py's Config
    memories    the classes of all memories, by name
    """
    check_types(config)
    choices = {"memory": memories, "readout": READOUTS, "mod_layers": MOD_LAYERS}
    for name, names in choices.items():
        value = getattr(config, name)
        if value not in names:
            raise BadData(f"{name} of a narrator is one of {', '.join(names)}, not {value!r}")
    for name, (low, high) in RANGES.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise BadData(f"{name} of a narrator must be from {low:g} to {high:g}, not {value!r}")
    check_memory(config, memories[config.memory])
    check_context(config)
    check_baselines(config)


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


def check_baselines(config) -> None:
    if config.narration_memory and config.last_k != 0:
        raise BadData(f"last_k = {config.last_k}: narration_memory stands for past narrations, "
                      f"so it must be 0")
    if config.mod_keep is not None and (config.prune or config.memory != "none"):
        raise BadData("mod_keep: VideoLLM-MoD has no memory and prunes nothing "
                      "(--memory none --no-prune)")
    if config.width_second >= config.width:
        raise BadData(f"width_second: {config.width_second} of {config.width} features "
                      f"leave none to the first encoder")
    if config.width_second and config.narration_memory:
        raise BadData("width_second and narration_memory are of two baselines; "
                      "leave out one of them")
