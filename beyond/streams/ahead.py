"""The same narrations with fewer passes of the language model (not in the paper).

    frames      K frames share a pass, on the guess that none of them ends a segment. If one does,
                what was read of the frames after it is taken back.
    words       A word and a few guessed words share a pass: words that once followed the last two
                words. Wrong guesses are taken back.

`Ahead` is a Context (stream.py) that does this in lines 9 to 12 of Algorithm 2. All other lines are
those of stream.py, once for each frame and each word. With one frame and no guessed words it is the
plain form (`stream.py --explain`).
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from narrator import FRAME, NARRATION, Narrator, Tokens
from stream import Cache, Context
from support.common.errors import BadData

GUESSED_WORDS = 3                   # at most


class GrowingCache(Cache):
    """A Cache whose keys and values lie in buffers with room for half as many again: a word does
    not copy everything.

    largest     the most tokens that a pass adds, after the first one
    """

    def __init__(self, largest: int):
        self.tokens = Tokens()
        self.largest = largest
        self.old = 0                    # tokens before the present pass
        self.capacity = 0               # tokens for which each buffer has room
        # of each layer: keys and values with their room [1, heads, room, c]
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def keys(self) -> dict[int, Tensor]:
        return self.views(0)

    @property
    def values(self) -> dict[int, Tensor]:
        return self.views(1)

    def views(self, which: int) -> dict[int, Tensor]:
        """Of each layer, the keys (0) or values (1) of the tokens, without what was read ahead."""
        left = len(self.tokens.ids)
        return {layer: buffers[which][:, :, :left] for layer, buffers in self.buffers.items()}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        new = self.old + keys.shape[2]
        if layer not in self.buffers:                                   # the first pass
            self.buffers[layer] = (self.with_room(keys), self.with_room(values))
        key_buffer, value_buffer = self.buffers[layer]
        key_buffer[:, :, self.old:new] = keys
        value_buffer[:, :, self.old:new] = values
        return key_buffer[:, :, :new], value_buffer[:, :, :new]

    def crop(self) -> None:
        """Before each pass: what comes after the tokens may be written over, and there is room.

        So a pass itself allocates nothing (torch.compile).
        """
        self.make_room(self.largest)

    def make_room(self, size: int) -> None:
        """For a pass of so many tokens."""
        self.old = len(self.tokens.ids)
        most = self.old + size
        if most <= self.capacity:
            return
        self.capacity = self.capacity_for(most)
        values = self.values
        for layer, keys in self.keys.items():
            self.buffers[layer] = (self.with_room(keys), self.with_room(values[layer]))

    def with_room(self, kept: Tensor) -> Tensor:
        """Keys or values [1, heads, n, c] at the beginning of a buffer."""
        tokens = kept.shape[2]
        if tokens > self.capacity:
            self.capacity = self.capacity_for(tokens)
        return F.pad(kept, (0, 0, 0, self.capacity - tokens))

    def capacity_for(self, tokens: int) -> int:
        return tokens * 3 // 2

    def select(self, index: Tensor) -> None:
        for buffers in self.buffers.values():
            for buffer in buffers:
                index = index.to(buffer.device)
                buffer[:, :, :len(index)] = buffer.index_select(2, index)


class Ahead(Context):
    """A Context that reads ahead.

    lookahead   frames in one pass; 1: no frame waits for the next
    guesses     how many words are guessed at most
    """

    def __init__(self, narrator: Narrator, lookahead: int = 1, guesses: int = GUESSED_WORDS):
        super().__init__(narrator)
        largest = len(self.layout.opening(1)) + lookahead * len(self.layout.frame(1)) + guesses
        self.cache = GrowingCache(largest)
        self.lookahead = lookahead
        self.guesses = guesses
        self.source: Iterator[Tensor] = iter(())
        self.waiting: deque[Tensor] = deque()           # frames from the source, before their turn
        # What is in the cache although its turn has not come: ids, and the logits after them
        self.guessed: deque[tuple[list[int], Tensor]] = deque()
        self.words: deque[int] = deque(maxlen=500)      # ids of the latest narrations

    def take(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        self.source = iter(frames)

        def one_after_the_other() -> Iterator[Tensor]:
            while self.peek(1):
                yield self.waiting.popleft()

        return super().take(one_after_the_other())

    def peek(self, count: int) -> list[Tensor]:
        """The next frames, at most `count`; they keep their turn."""
        missing = max(0, count - len(self.waiting))
        self.waiting += islice(self.source, missing)
        return list(islice(self.waiting, count))

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> Tensor:
        """Lines 9-12: logits [V] after the tokens, from a pass that may have been made earlier."""
        if FRAME not in tokens.ids:
            self.words += [i for i, kind in zip(tokens.ids, tokens.kind) if kind == NARRATION]
        if self.guessed and self.guessed[0][0] == tokens.ids:
            _, logits = self.guessed.popleft()                      # the guess was right
            self.position += len(tokens)
            self.cache.tokens += tokens
        else:
            self.take_back()
            logits = self.feed_with_guesses(tokens, x)
        if not math.isfinite(logits.sum() + self.state.sum()):
            raise BadData(f"at frame {self.frame}, or at one that was read ahead, the model's "
                          f"numbers are not finite; try --dtype bfloat16 or float32")
        return logits

    def feed_with_guesses(self, tokens: Tokens, x: Tensor | None) -> Tensor:
        """One pass over the tokens and over the pieces that are guessed to follow them.

        After a frame the next frames follow, as if none of them ended the segment. After words,
        words follow.
        """
        if x is not None:
            # frames that wait for their turn are where they came from: the processor, for features
            frames = [frame.to(x) for frame in self.peek(self.lookahead - 1)]
            guesses = [self.layout.frame(self.segment).ids for _ in frames]
            x = torch.stack([x, *frames])
        else:
            words = guess(list(self.words), self.guesses, end=self.layout.assistant[0])
            guesses = [[word] for word in words]
        if not guesses:
            return super().feed(tokens, x)

        # as Context.feed
        ids = tokens.ids + [i for piece in guesses for i in piece]
        e = self.narrator.embed(ids, x, self.memory)
        positions = torch.arange(self.position, self.position + len(ids), device=e.device)
        hidden = self.narrator.run(e, positions, cache=self.cache)
        # the last token of each piece
        lengths = torch.tensor([len(tokens), *map(len, guesses)])
        ends = lengths.cumsum(0) - 1
        logits, *further = self.narrator.logits(hidden[ends.to(e.device)])
        self.position += len(tokens)
        self.cache.tokens += tokens
        self.guessed = deque(zip(guesses, further))
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
    for length in (2, 1):
        latest = words[-length:]
        for i in range(len(words) - length - 1, -1, -1):
            if words[i:i + length] == latest:
                followed = words[i + length:i + length + count]
                if end in followed:
                    followed = followed[:followed.index(end)]
                return followed
    return []
