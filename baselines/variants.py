"""The narrator that settings describe: the paper's, or that of a baseline."""
from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import nn

from baselines.lionfs import LionConfig, LionNarrator
from baselines.mod import RoutedConfig, RoutedContext, RoutedNarrator
from baselines.narration_memory import HistoryConfig, HistoryContext, HistoryNarrator
from narrator import Config, Narrator
from stream import Context
from support.common.errors import BadData
from support.common.options import non_negative_int, probability
from support.engine import checkpoint
from support.engine.run_options import option


# The setting that makes a narrator one of a baseline, its value in all other narrators, and the
# class of all settings. The first one that is set counts.
BASELINES = (
    ("narration_memory", 0, HistoryConfig),             # Table 15
    ("width_second", 0, LionConfig),                    # LION-FS, which may have routers, too
    ("mod_keep", None, RoutedConfig),                   # VideoLLM-MoD
)
NARRATORS = {
    Config: Narrator,
    HistoryConfig: HistoryNarrator,
    LionConfig: LionNarrator,
    RoutedConfig: RoutedNarrator,
}
SETTINGS = {field.name for config_class in (Config, HistoryConfig, LionConfig)
            for field in fields(config_class)}


@dataclass
class BaselineOptions:
    """Of baselines."""
    # options of train.py
    mod_keep: float | None = option(None,
        "VideoLLM-MoD, with --memory none --no-prune: share of a frame's tokens kept",
        probability,
    )
    width_second: int = option(0,
        "LION-FS: width of a second encoder's features, which follow the first one's in each "
        "frame token; 0: none",
        non_negative_int,
    )
    narration_memory: int = option(0,
        "Table 15: tokens of a second CLAM, on narrations, which are then not kept; 0: none",
        non_negative_int,
    )


def make_config(**settings) -> Config:
    """The settings of a narrator, by name: the paper's, or those of the baseline that they name.

    Settings of baselines that are switched off are left out. BadData if a setting is unknown or
    wrong, or if two baselines are switched on.
    """
    switched_on = [(name, config_class) for name, off, config_class in BASELINES
                   if settings.get(name, off) != off]
    config_class = switched_on[0][1] if switched_on else Config
    names = {field.name for field in fields(config_class)}
    for name, _ in switched_on:
        if name not in names:
            raise BadData(f"{switched_on[0][0]} and {name} are of two baselines; "
                          f"leave out one of them")
    unknown = settings.keys() - SETTINGS
    if unknown:
        raise BadData(f"unknown settings of a narrator: {', '.join(sorted(unknown))}")
    return config_class(**{name: value for name, value in settings.items() if name in names})


def new_narrator(llm: nn.Module, tokenizer, config: Config) -> Narrator:
    """A narrator with random weights on a language model."""
    return NARRATORS[type(config)](llm, tokenizer, config)


def context_class(narrator: Narrator) -> type[Context]:
    """What a narrator carries through a stream."""
    if isinstance(narrator, HistoryNarrator):
        return HistoryContext
    if isinstance(narrator, RoutedNarrator) and narrator.routing is not None:
        return RoutedContext
    return Context


def load_narrator(source: str, llm: str | None = None, device: str = "cpu",
                  dtype: torch.dtype | None = torch.float32, sees: bool = False,
                  **changes) -> Narrator:
    """A trained narrator from a folder or hub id; `llm` and any setting can be replaced.

    A folder without narrator.json is a published checkpoint: its settings are inferred from its
    tensors where that is possible, and are the published defaults otherwise. BadData if anything is
    missing, damaged or unexpected.

    dtype       of the language model; None: what is faster on a processor
    sees        it will look at pictures: both of its models are found before one is loaded
    """
    files = checkpoint.read_checkpoint(source)
    config = checkpoint.read_config(files, make_config, llm, changes)
    if sees:
        for kind in config.MODEL_NAMES:
            checkpoint.model_folder(getattr(config, kind), kind)
    if dtype is None:
        dtype = checkpoint.faster_dtype(config.llm)
    return checkpoint.build_narrator(NARRATORS[type(config)], files, config, device, dtype)
