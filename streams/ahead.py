"""The same narrations with fewer passes of the language model (not in the paper).

    frames      K frames share a pass, on the guess that none of them ends a segment. If one does,
                what was read of the frames after it is taken back.
    words       A word and a few guessed words share a pass: words that once followed the last two
                words. Wrong guesses are taken back.

`Ahead` is a Context (stream.py) that does this below line 12 of Algorithm 2. All other lines are
those of stream.py, once for each frame and each word. With one frame and no guessed words it is the
plain form.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor

from narrator import FRAME, NARRATION, Narrator, Tokens
from stream import Context
from support.common.errors import BadData

GUESSED_WORDS = 3                   # at most


class Ahead(Context):
    """A Context that reads ahead.

    lookahead   frames in one pass; 1: no frame waits for the next
    guesses     how many words are guessed at most
    """

    def __init__(self, narrator: Narrator, lookahead: int = 1, guesses: int = GUESSED_WORDS):
        super().__init__(narrator)
        self.lookahead = lookahead
        self.guesses = guesses
        self.source: Iterator[Tensor] = iter(())
        self.waiting: deque[Tensor] = deque()           # frames from the source, before their turn
        # What is in the cache although its turn has not come: ids, and the logits after them
        self.guessed: deque[tuple[list[int], Tensor]] = deque()
        self.words: deque[int] = deque(maxlen=500)      # ids of the latest narrations

    def take(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        self.source = super().take(frames)
        while self.peek(1):
            yield self.waiting.popleft()

    def peek(self, count: int) -> list[Tensor]:
        """The next frames, at most `count`; they keep their turn."""
        missing = max(0, count - len(self.waiting))
        self.waiting += islice(self.source, missing)
        return list(islice(self.waiting, count))

    def run(self, tokens: Tokens, e: Tensor, positions: Tensor) -> Tensor:
        """Line 12: logits [V] after the tokens, from a pass that may have been made earlier."""
        if FRAME not in tokens.ids:
            self.words += [i for i, kind in zip(tokens.ids, tokens.kind) if kind == NARRATION]
        if self.guessed and self.guessed[0][0] == tokens.ids:
            _, logits = self.guessed.popleft()                      # the guess was right
            self.cache.tokens += tokens
        else:
            self.take_back()
            logits = self.read_ahead(tokens, e, positions)
        if not (logits.sum() + self.state.sum()).isfinite():
            raise BadData(f"frame {self.frame}: the model's numbers are not finite; "
                          f"try --dtype bfloat16 or float32 (if that does not help, its weights "
                          f"or the features of this frame are damaged)")
        return logits

    def read_ahead(self, tokens: Tokens, e: Tensor, positions: Tensor) -> Tensor:
        """One pass over the tokens and over the pieces that are guessed to follow them.

        After a frame the next frames follow, as if none of them ended the segment. After words,
        words follow.
        """
        narrator = self.narrator
        x = None
        if FRAME in tokens.ids:
            frames = self.peek(self.lookahead - 1)
            guesses = [self.layout.frame(self.segment).ids for _ in frames]
            if frames:
                x = torch.stack(frames)
        else:
            words = guess(list(self.words), self.guesses, end=self.layout.assistant[0])
            guesses = [[word] for word in words]
        if not guesses:
            return super().run(tokens, e, positions)

        guessed_ids = [i for piece in guesses for i in piece]
        guessed_e = narrator.embed(torch.tensor(guessed_ids, device=e.device), x)
        ids = tokens.ids + guessed_ids
        start = self.position - len(tokens)             # the counter already stands behind them
        all_positions = torch.arange(start, start + len(ids), device=e.device)
        mask = self.cache.mask(ids).to(e.device)
        hidden = narrator.run(torch.cat([e, guessed_e]), all_positions, mask, self.cache)
        lengths = torch.tensor([len(tokens), *map(len, guesses)])
        ends = lengths.cumsum(0) - 1                    # the last token of each piece
        logits, *further = narrator.logits(hidden[ends.to(e.device)])
        if not logits.isfinite().all():
            # A damaged frame spoils its whole pass; the frames before it are good alone.
            self.take_back()
            return super().run(tokens, e, positions)
        self.guessed = deque(zip(guesses, further))
        self.cache.tokens += tokens
        return logits

    def take_back(self) -> None:
        """Forget what was read ahead."""
        self.guessed.clear()
        self.cache.crop()

    def discard(self, now: int) -> int:
        self.take_back()
        return super().discard(now)


def guess(words: list[int], count: int, end: int) -> list[int]:
    """Guess the next words of a text, given the ids of all words so far.

    Finds the latest place where the last two words (else the last one) stood, and returns what
    followed there: at most `count` ids, up to the id `end`.
    """
    if count == 0:
        return []
    for length in (2, 1):
        latest = words[-length:]
        for i in range(len(words) - length - 1, -1, -1):
            if words[i:i + length] == latest:
                followed = words[i + length:i + length + count]
                if end in followed:
                    followed = followed[:followed.index(end)]
                return followed
    return []
