"""Options of train.py by which a narrator is one of a baseline."""
from __future__ import annotations

from dataclasses import dataclass

from support.common.options import non_negative_int, probability
from support.engine.run_options import option


@dataclass
class BaselineOptions:
    """Of baselines."""
    mod_keep: float | None = option(None,
        "VideoLLM-MoD, with --memory none --no-prune: share of a frame's tokens kept",
        probability,
    )
    narration_memory: int = option(0,
        "Table 15: tokens of a second CLAM, on narrations, which are then not kept; 0: none",
        non_negative_int,
    )
