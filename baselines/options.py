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

    def settings_of_baselines(self) -> dict:
        """Those that are switched on: a narrator without them has no such settings."""
        switched_on = {}
        if self.mod_keep is not None:
            switched_on["mod_keep"] = self.mod_keep
        if self.narration_memory:
            switched_on["narration_memory"] = self.narration_memory
        return switched_on
