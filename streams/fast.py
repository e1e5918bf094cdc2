"""The same narrations with fewer passes of the language model (not in the paper).

    frames      K frames share a pass, on the guess that none of them ends a segment. If one does,
                the frames after it are taken back.
    words       A word and a few guessed words share a pass: words that once followed the last two
                words. Wrong guesses are taken back.
    memory      S_t is only needed when a segment ends. Until then up to 8 frames are collected, and
                absorbed in one step.
    streams     Several streams share their passes: `run` is then a request to streams/together.py.

`Fast` is a Context (stream.py) that does this. `Stream` is what the commands use.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baselines.narration_memory import HistoryContext, HistoryNarrator
from narrator import NARRATION, Narrator, Tokens
from stream import Cache, Context, narrate
from streams.bounds import Bounded, decoder_pass
from support.common.errors import BadData
from support.engine.passes import PassInput

GUESSED_WORDS = 3                   # at most
ABSORBED_FRAMES = 8                 # at most


class FrameBuffer:
    """The frames of a stream in their order, some of which can be looked at before their turn.

    clock       returns the time (seconds) of the frame just taken from the source, or None
    time        the time of the frame whose turn it is
    """

    def __init__(self, frames: Iterable[Tensor], narrator: Narrator,
                 clock: Callable[[], float] | None = None):
        self.frames = iter(frames)
        self.shape = (narrator.config.J, narrator.config.width)
        self.device = narrator.device
        self.dtype = narrator.dtype
        self.clock = clock
        self.waiting: deque[tuple[Tensor, float | None]] = deque()
        self.time: float | None = None

    def __iter__(self) -> Iterator[Tensor]:
        while self.peek(1):
            x, self.time = self.waiting.popleft()
            yield x

    def peek(self, count: int) -> list[Tensor]:
        """The next frames, at most `count`; they keep their turn.

        Raises ValueError unless each is [J, D].
        """
        missing = max(0, count - len(self.waiting))
        for x in islice(self.frames, missing):
            if x.shape != self.shape:
                raise ValueError(f"expected frame tokens {list(self.shape)}, got {list(x.shape)}")
            time = None if self.clock is None else self.clock()
            self.waiting.append((x.to(self.device, self.dtype), time))
        return [x for x, _ in islice(self.waiting, count)]


def guess(history: list[int], count: int, end: int) -> list[int]:
    """Guess the next words of a text, given the ids of all texts so far.

    Finds the latest place where the last two ids (else the last one) occurred, and returns at most
    `count` ids that followed there, up to the id `end`.
    """
    if count == 0:
        return []
    for length in (2, 1):
        latest = history[-length:]
        for i in range(len(history) - length - 1, -1, -1):
            if history[i:i + length] == latest:
                followed = history[i + length:i + length + count]
                if end in followed:
                    followed = followed[:followed.index(end)]
                return followed
    return []


class NextToken(NamedTuple):
    """What a pass says after a piece of tokens."""
    p_skip: float
    likeliest: int                  # id of the next token


class Fast(Context):
    """A Context that reads ahead.

    lookahead   K, frames in one pass; 1: no frame waits for the next
    run         one pass of the language model (support/engine/passes.py); default: the narrator's
                decoder
    clock       returns the time (seconds) of the frame just taken, for live sources; None: the time
                follows from the frame's number
    guesses     how many words are guessed at most; 0 where narrations are given
    """

    def __init__(self, narrator: Narrator, lookahead: int = 1,
                 run: Callable[[PassInput], Tensor] | None = None,
                 clock: Callable[[], float] | None = None, guesses: int = GUESSED_WORDS):
        super().__init__(narrator)
        self.lookahead = lookahead
        self.run = run or decoder_pass(narrator)
        self.clock = clock
        self.guesses = guesses
        self.upcoming: FrameBuffer | None = None        # frames to come
        self.unabsorbed: list[Tensor] = []              # frames that the memory has not seen yet
        # what was read ahead: ids, slots, and what follows
        self.ahead: deque[tuple[list[int], np.ndarray, NextToken]] = deque()
        self.narrated: deque[int] = deque(maxlen=500)   # ids of the latest narrations

    def seconds(self) -> float:
        if self.clock is None:
            return super().seconds()
        return self.upcoming.time

    def take(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        if self.upcoming is not None:
            raise ValueError("a Context is for one stream")
        self.upcoming = FrameBuffer(frames, self.narrator, self.clock)
        return super().take(self.upcoming)

    # ------------------------------------------------------------------ memory

    def update_memory(self, x: Tensor) -> None:
        self.unabsorbed.append(x)
        if len(self.unabsorbed) == ABSORBED_FRAMES:
            self.absorb()

    def absorb(self) -> None:
        """Bring S_t up to the present frame."""
        if self.unabsorbed:
            super().update_memory(torch.cat(self.unabsorbed))
            self.check(self.state)
            self.unabsorbed = []

    def read_memory(self, ids: list[int] | None = None) -> None:
        self.absorb()
        super().read_memory(ids)

    # ------------------------------------------------------------------ language model

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> NextToken:
        """Lines 9-12 of Algorithm 2, in a pass that may have been made earlier.

        Gives `trigger` and `likeliest` a NextToken instead of logits: nothing else needs these.
        """
        if self.ahead:
            expected_ids = self.ahead[0][0]
            if expected_ids != tokens.ids:              # the guess was wrong
                self.forget()
        if x is None:
            for token, kind in zip(tokens.ids, tokens.kind):
                if kind == NARRATION:
                    self.narrated.append(token)
        if not self.ahead:
            frames = []
            if x is not None:
                frames = [x, *self.upcoming.peek(self.lookahead - 1)]
            self.read_ahead(tokens, frames)
        _, slots, following = self.ahead.popleft()
        self.cache.insert(tokens, slots)
        self.position += len(tokens)
        return following

    def trigger(self, token: NextToken) -> float:
        return token.p_skip

    def likeliest(self, token: NextToken) -> int:
        return token.likeliest

    def read_ahead(self, tokens: Tokens, frames: list[Tensor]) -> None:
        """One pass over `tokens`, with the first of the frames, and over the guesses that follow.

        After a frame the next frames follow, as if the segment did not end. After words, words
        follow.
        """
        pieces = [tokens.ids]                           # then one piece for each guess
        if frames:
            pieces += [self.layout.frame(self.segment).ids for _ in frames[1:]]
        else:
            words = guess(list(self.narrated), self.guesses, self.layout.assistant[0])
            pieces += [[word] for word in words]
        ids = [token for piece in pieces for token in piece]
        positions = range(self.position, self.position + len(ids))
        slots = self.cache.reserve(len(ids))
        plan = torch.tensor([ids, positions, slots.tolist()]).to(self.narrator.device)
        x = torch.stack(frames) if frames else None     # [K, J, D]
        memory = self.memory_embedding(tokens)
        # logits are needed after the last token of each piece; all guesses have the same length
        last_tokens = slice(len(tokens) - 1, None, len(pieces[-1]))
        logits = self.run(PassInput(plan, x, memory, self.cache, last_tokens))
        boundaries = np.cumsum([len(piece) for piece in pieces[:-1]])
        self.ahead += zip(pieces, np.split(slots, boundaries), self.next_tokens(logits))

    def next_tokens(self, logits: Tensor) -> list[NextToken]:
        """Logits [pieces, V] -> what follows each piece. The device is waited for only once."""
        p_skips = logits.softmax(-1)[:, self.layout.skip]
        likeliest = logits.argmax(-1).to(logits.dtype)          # fp32 holds all ids below 2 ** 24
        numbers = torch.stack([p_skips, likeliest, logits.sum(-1)], dim=1)
        numbers = numbers.cpu()                                                 # [pieces, 3]
        self.check(numbers)
        return [NextToken(p_skip, int(token)) for p_skip, token, _ in numbers.tolist()]

    def discard(self, now: int) -> int:
        if self.ahead:
            self.forget()
        return super().discard(now)

    def check(self, numbers: Tensor) -> None:
        """BadData, before anything is decided or saved, if a number is NaN or infinite."""
        if not numbers.sum().isfinite():
            raise BadData(f"frame {self.frame}: the model's numbers are not finite; "
                          f"try --dtype bfloat16 or float32 (if that does not help, its weights "
                          f"or the features of this frame are damaged)")

    def forget(self) -> None:
        """Take back what was read ahead."""
        self.ahead.clear()
        self.cache.keep(self.cache.kind >= 0)


class Stream(Bounded, Fast):
    """The Context of the commands: it reads ahead, and is bounded where the settings say so."""

    def reopen(self) -> None:
        if self.ahead:
            self.forget()
        super().reopen()


class HistoryStream(HistoryContext, Stream):
    """The same for narrators with a narration memory (Table 15)."""


def open_stream(narrator: Narrator, **options) -> Stream:
    """A new Stream for a narrator; options as for Fast."""
    if isinstance(narrator, HistoryNarrator):
        return HistoryStream(narrator, **options)
    return Stream(narrator, **options)


def try_passes(context: Stream) -> None:
    """Narrate a few empty frames before a stream begins, and forget them: on CUDA, its passes are
    captured then, and not at its first sentence."""
    narrator = context.narrator
    trial = open_stream(narrator, lookahead=context.lookahead, run=context.run,
                        guesses=context.guesses)
    trial.cache = context.cache
    count = 3 * context.lookahead
    x = torch.zeros(count + 1, narrator.config.J, narrator.config.width)
    for _ in narrate(narrator, x, forced={0: None, count // 2: None, count: None}, context=trial):
        pass
    empty(context.cache)


def empty(cache: Cache) -> None:
    """Free all slots; the buffers stay, and what was captured over them."""
    cache.keep(np.zeros(len(cache.used), bool))
