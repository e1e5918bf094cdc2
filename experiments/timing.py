"""A stream whose every frame and stage is timed; how flat its speed is.

`narrate` itself runs, with given narrations, which are fed word by word, as a model says them.
"""
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor

import narrator as nar
import stream
from baselines.narration_memory import HistoryContext, HistoryNarrator
from streams.fast import HistoryStream, Stream, open_stream
from streams.together import Failed, side_by_side
from support.common.devices import synchronise


@dataclass
class Work:
    """What every variant does: narrate frame 0 and then every `every`-th frame, with `words` given tokens each."""
    frames: int
    every: int = 8
    words: int = 12
    lookahead: int = 1

    def given(self, narrator: nar.Narrator) -> tuple[Iterator[Tensor], dict[int, list[int]]]:
        """Frame tokens [J, D], 64 random ones in turn, and the narrations: frame -> ids."""
        random = torch.Generator().manual_seed(0)
        pool = list(torch.randn(64, narrator.config.J, narrator.config.width, generator=random))
        ids = (narrator.layout.newline * self.words)[:self.words]
        return islice(cycle(pool), self.frames), {t: ids for t in [0, *range(self.every - 1, self.frames, self.every)]}


class Stages:
    """What times the stages of a Stream; `watch(stage)` is a context manager."""

    def __init__(self, narrator: nar.Narrator, watch: Callable, **how):
        super().__init__(narrator, **how)
        self.watch = watch

    def absorb(self) -> None:
        if self.waiting:
            with self.watch("memory"):
                super().absorb()

    def read_memory(self, ids: list[int] | None = None) -> None:
        self.absorb()
        with self.watch("memory"):
            super().read_memory(ids)

    def feed(self, tokens: nar.Tokens, x: Tensor | None = None) -> Tensor:
        with self.watch("text" if x is None else "frame"):
            return super().feed(tokens, x)

    def trigger(self, logits: Tensor) -> float:
        with self.watch("trigger"):
            return super().trigger(logits)


class Timed(Stages, Stream):
    """A Stream whose stages are timed."""


class TimedHistory(Stages, HistoryStream):
    """The same for narrators with a narration memory (Table 15)."""


def state_bytes(context: stream.Context) -> int:
    """Size of what the memories of a stream carry: their states, and the tokens read from them."""
    tensors = [context.state, context.memory]
    if isinstance(context, HistoryContext):
        tensors += [context.history_state, context.history]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Meter:
    """A stream that does its work, and what this has cost so far.

    rows        one for each frame: seconds (wall clock) and processor time, seconds of its narration if it has one,
                tokens in the cache, used and held bytes
    stages      seconds of each stage
    tokens      the most that the cache has held, with frames read ahead
    """

    def __init__(self, narrator: nar.Narrator, work: Work):
        frames, forced = work.given(narrator)
        timed = TimedHistory if isinstance(narrator, HistoryNarrator) else Timed
        self.context = timed(narrator, self.watch, lookahead=work.lookahead, guesses=0)
        self.decisions = stream.narrate(narrator, frames, forced=forced, context=self.context)
        self.rows = []
        self.stages = Counter()
        self.tokens = 0

    @contextmanager
    def watch(self, stage: str):
        began = time.perf_counter()
        yield
        synchronise(self.context.narrator.device)
        self.stages[stage] += time.perf_counter() - began
        self.tokens = max(self.tokens, len(self.context.cache.used) - len(self.context.cache.free))

    def advance(self, frames: int):
        """Stream so many frames more."""
        for _ in range(frames):
            text, processor, began = self.stages["text"], time.process_time(), time.perf_counter()
            decision = next(self.decisions)
            seconds, processor = time.perf_counter() - began, time.process_time() - processor
            cache = self.context.cache
            state = state_bytes(self.context) + sum(x.nbytes for x in self.context.waiting)
            self.rows.append({"seconds": seconds, "processor_s": processor,
                              "text_s": self.stages["text"] - text if decision.narration else None,
                              "cache_tokens": cache.text + cache.visual, "cache_bytes": cache.bytes(),
                              "used_bytes": cache.bytes() + state, "held_bytes": cache.held() + state})


def at_once(narrator: nar.Narrator, work: Work, streams: int) -> tuple[float, float]:
    """Frames a second of processor time: of one live stream, and of several that share their passes."""
    speeds = []
    for count in (1, streams):
        jobs = [partial(shared, narrator, replace(work, lookahead=1))] * count
        began = time.process_time()
        for _, item in side_by_side(jobs, count):
            if isinstance(item, Failed):
                raise item.error
        speeds.append(count * work.frames / (time.process_time() - began))
    return speeds[0], speeds[1]


def shared(narrator: nar.Narrator, work: Work, ask: Callable) -> Iterator[stream.Decision]:
    """A stream that asks for its passes (streams/together.py)."""
    frames, forced = work.given(narrator)
    context = open_stream(narrator, run=lambda part: ask(narrator.decoder, part), guesses=0)
    return stream.narrate(narrator, frames, forced=forced, context=context)


def total(rows: list[dict], name: str) -> float:
    return sum(row[name] for row in rows)


def flatness(narrator: nar.Narrator, work: Work, window: int) -> float:
    """Processor time of the work's last window of frames, divided by that of its second one (1: as fast as ever).

    Two streams take turns, each until its next narration, so that both meet the same disturbances; neither is always
    the first of a turn.
    """
    late, early, turn = Meter(narrator, work), Meter(narrator, work), min(work.every, window)
    late.advance(work.frames - window)
    early.advance(window)
    for n in range(window // turn):
        for meter in (early, late) if n % 2 else (late, early):
            meter.advance(turn)
    return total(late.rows[work.frames - window:], "processor_s") / total(early.rows[window:], "processor_s")
