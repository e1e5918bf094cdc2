"""What else a stream can do with its cache, for comparison (`python evaluate.py stream --cache`).

Compacted   after a narration the tokens that are left stand at positions 0, 1, 2, ..., and the
            counter goes on behind them. Kept keys carry the rotation of the position at which they
            were fed: `rotate` turns them to the new one. Without that it is the naive inference of
            App. B.3, where new tokens come at positions that kept ones have already.
Windowed    VideoLLM-online with a sliding window, as StreamingVLM (Xu et al., 2025, arXiv
            2510.09608): the prompt, the latest sentences, the latest frames, and no memory. Keys
            are rotated to their places in the window, so that positions stay as in training.
"""
from __future__ import annotations

import torch
from torch import Tensor

from beyond.baselines import context_class
from beyond.baselines.rotations import rotate_keys, rotation_frequencies
from narrator import FRAME, VISUAL, Narrator, Tokens, visible
from stream import Context
from support.common.errors import BadData
from support.common.options import LARGEST, in_range


class Compacted(Context):
    """A Context whose positions are compacted whenever tokens leave.

    Raises BadData if the narrator's cache is one of VideoLLM-MoD, or cannot be rotated.
    """

    def __init__(self, narrator: Narrator, rotate: bool):
        super().__init__(narrator)
        if "mod_keep" in vars(narrator.config):
            raise BadData("--cache: layers of VideoLLM-MoD hold different tokens, whose positions "
                          "cannot be compacted")
        self.frequencies = rotation_frequencies(narrator) if rotate else None
        self.positions = torch.arange(0)        # of the tokens in the cache

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> Tensor:
        new = torch.arange(self.position, self.position + len(tokens))
        logits = super().feed(tokens, x)
        self.positions = torch.cat([self.positions, new])
        return logits

    def discard(self, now: int) -> int:
        config = self.narrator.config
        return self.keep(visible(self.cache.tokens, now, config.last_k, config.prune))

    def keep(self, seen: Tensor) -> int:
        """Remove tokens that are not `seen`, bool [tokens]; returns how many were removed."""
        removed = self.cache.keep(seen)
        if removed:
            self.position = len(self.cache.tokens)
            self.positions = self.positions[seen]
            if self.frequencies is not None:
                places = torch.arange(self.position)
                rotate_keys(self.cache, 0, self.positions - places, self.frequencies)
                self.positions = places
        return removed


class Windowed(Compacted):
    """A Context that holds at most `window` tokens: the oldest frames leave before new tokens come.

    Raises BadData if the narrator is not VideoLLM-online, or if no frame fits.
    """
    NARRATIONS = 10                             # the latest that are kept, as FlowNar-C's

    def __init__(self, narrator: Narrator, window: int):
        if narrator.config.prune:
            raise BadData(f"--cache {window}: a window is for a narrator that keeps every frame "
                          f"(train.py --memory none --no-prune)")
        super().__init__(narrator, rotate=True)
        self.window = window

    def discard(self, now: int) -> int:
        """Sentences before the latest leave; frames stay."""
        tokens = self.cache.tokens
        is_recent = visible(tokens, now, self.NARRATIONS)
        return self.keep(is_recent | (torch.tensor(tokens.kind) == VISUAL))

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> Tensor:
        over = len(self.cache.tokens) + len(tokens) - self.window
        if over > 0:
            self.drop_frames(over)
        return super().feed(tokens, x)

    def drop_frames(self, tokens: int) -> None:
        """Remove the oldest frames, at least so many tokens."""
        is_visual = torch.tensor(self.cache.tokens.kind) == VISUAL
        of_frame = torch.tensor(self.cache.tokens.ids) == FRAME
        # the number of the frame to which each visual token belongs, or after which it comes
        frame = (of_frame.cumsum(0) - of_frame.long()) // self.layout.J
        for oldest in frame[is_visual].unique():
            leaves = is_visual & (frame <= oldest)
            if leaves.sum() >= tokens:
                self.keep(~leaves)
                return
        raise BadData(f"--cache {self.window}: prompt and sentences leave no room for a frame")


# ---------------------------------------------------------------------- the option --cache


def kind_of_cache(text: str) -> str:
    """An argparse type: see `compared_stream`."""
    if text in ("plain", "compacted", "rotated"):
        return text
    says = "plain, compacted, rotated, or a number of tokens"
    return str(in_range(int, 1, LARGEST, says)(text))


def compared_stream(narrator: Narrator, kind: str) -> Context:
    """A stream whose cache is compacted, compacted and rotated, or a window of so many tokens.
    BadData if the narrator cannot have that one.
    """
    if kind in ("compacted", "rotated"):
        return context_class(narrator, Compacted)(narrator, rotate=kind == "rotated")
    return Windowed(narrator, int(kind))
