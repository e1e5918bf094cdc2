"""What the paper compares FlowNar with (Tables 1 to 5, 15): other memories, VideoLLM-MoD, and CLAM on
narrations. Imported, they are in the tables of narrator.py and support/engine/registry.py.
"""
import narrator
from beyond.baselines.memories import MEMORIES
from beyond.baselines.mod import RoutedConfig, RoutedNarrator, with_routers
from beyond.baselines.narration_memory import HistoryConfig, HistoryNarrator, with_history
from stream import Context
from support.engine.registry import NARRATORS

narrator.MEMORIES.update(MEMORIES)
NARRATORS[HistoryConfig] = HistoryNarrator          # Table 15
NARRATORS[RoutedConfig] = RoutedNarrator            # VideoLLM-MoD


def context_class(model: narrator.Narrator, Base: type[Context] = Context) -> type[Context]:
    """What a narrator carries through a stream: a Context of the kind `Base`."""
    if isinstance(model, HistoryNarrator):
        return with_history(Base)
    if isinstance(model, RoutedNarrator):
        return with_routers(Base)
    return Base
