"""The narrator that settings describe: the paper's, or that of a baseline."""
from __future__ import annotations

import torch
from torch import nn

from baselines.lionfs import LionNarrator
from baselines.mod import RoutedContext, RoutedNarrator
from baselines.narration_memory import HistoryContext, HistoryNarrator
from narrator import Config, Narrator
from stream import Context
from support.engine import checkpoint


def narrator_class(config: Config) -> type[Narrator]:
    if config.narration_memory:
        return HistoryNarrator                                  # Table 15
    if config.width_second:
        return LionNarrator                                     # LION-FS
    if config.mod_keep is not None:
        return RoutedNarrator                                   # VideoLLM-MoD
    return Narrator


def new_narrator(llm: nn.Module, tokenizer, config: Config) -> Narrator:
    """A narrator with random weights on a language model."""
    return narrator_class(config)(llm, tokenizer, config)


def context_class(narrator: Narrator) -> type[Context]:
    """What a narrator carries through a stream."""
    if isinstance(narrator, HistoryNarrator):
        return HistoryContext
    if isinstance(narrator, RoutedNarrator) and narrator.routing is not None:
        return RoutedContext
    return Context


def load_narrator(source: str, llm: str | None = None, device: str = "cpu",
                  dtype: torch.dtype | None = torch.float32, **changes) -> Narrator:
    """As `Narrator.load`, for all kinds of narrators. dtype None: what is faster on a processor."""
    files = checkpoint.read_checkpoint(source)
    config = checkpoint.read_config(files, Config, llm, changes)
    if dtype is None:
        dtype = checkpoint.faster_dtype(config.llm)
    return checkpoint.build_narrator(narrator_class(config), files, config, device, dtype)
