"""Times every frame and every stage of a stream, and measures whether its speed stays the same.

`narrate` itself runs. Its narrations are given, and fed word by word, as a model writes them.
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
from streams.fast import HistoryStream, NextToken, Stream, open_stream
from streams.together import Failed, side_by_side
from support.common.devices import synchronise


@dataclass
class Work:
    """What every variant does: narrate frame 0, and then the last one of every `every` frames."""
    frames: int
    every: int = 8
    words: int = 12         # tokens of each narration
    lookahead: int = 1

    def given(self, narrator: nar.Narrator) -> tuple[Iterator[Tensor], dict[int, list[int]]]:
        """Frame tokens [J, D], 64 random ones again and again, and narrations {frame: ids}."""
        config = narrator.config
        random = torch.Generator().manual_seed(0)
        pool = torch.randn(64, config.J, config.width, generator=random)
        frames = islice(cycle(list(pool)), self.frames)
        ids = (narrator.layout.newline * self.words)[:self.words]
        narrated = [0, *range(self.every - 1, self.frames, self.every)]
        return frames, {t: ids for t in narrated}


class Stages:
    """Times the stages of a Stream. `watch(stage)` is a context manager."""

    def __init__(self, narrator: nar.Narrator, watch: Callable, **options):
        super().__init__(narrator, **options)
        self.watch = watch

    def absorb(self) -> None:
        if self.unabsorbed:
            with self.watch("memory"):
                super().absorb()

    def read_memory(self, ids: list[int] | None = None) -> None:
        self.absorb()               # before, so that its time is counted once
        with self.watch("memory"):
            super().read_memory(ids)

    def feed(self, tokens: nar.Tokens, x: Tensor | None = None) -> NextToken:
        with self.watch("text" if x is None else "frame"):
            return super().feed(tokens, x)


class Timed(Stages, Stream):
    """A Stream whose stages are timed."""


class TimedHistory(Stages, HistoryStream):
    """The same for narrators with a narration memory (Table 15)."""


def state_bytes(context: stream.Context) -> int:
    """Bytes of a stream's memories: their states, and the tokens read from them."""
    tensors = [context.state, context.memory]
    if isinstance(context, HistoryContext):
        tensors += [context.history_state, context.history]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Meter:
    """A stream that does its work, and measures what the work costs.

    rows        for each frame: seconds (wall clock) and processor time; seconds of its narration,
                or None; tokens in the cache; used and held bytes
    stages      seconds of each stage so far
    tokens      the most that the cache has held, with frames that were read ahead
    """

    def __init__(self, narrator: nar.Narrator, work: Work):
        frames, narrations = work.given(narrator)
        timed = TimedHistory if isinstance(narrator, HistoryNarrator) else Timed
        self.context = timed(narrator, self.watch, lookahead=work.lookahead, guesses=0)
        self.decisions = stream.narrate(narrator, frames, given=narrations, context=self.context)
        self.rows = []
        self.stages = Counter()
        self.tokens = 0

    @contextmanager
    def watch(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        # a GPU works on after the call has returned
        synchronise(self.context.narrator.device)
        self.stages[stage] += time.perf_counter() - began
        cache = self.context.cache
        self.tokens = max(self.tokens, len(cache.used) - len(cache.free))

    def advance(self, frames: int) -> None:
        """Stream so many more frames."""
        for _ in range(frames):
            text_before = self.stages["text"]
            processor_before = time.process_time()
            began = time.perf_counter()
            decision = next(self.decisions)
            seconds = time.perf_counter() - began
            processor_seconds = time.process_time() - processor_before
            text_seconds = None
            if decision.narration is not None:
                text_seconds = self.stages["text"] - text_before
            cache = self.context.cache
            state = state_bytes(self.context) + sum(x.nbytes for x in self.context.unabsorbed)
            self.rows.append({
                "seconds": seconds,
                "processor_s": processor_seconds,
                "text_s": text_seconds,
                "cache_tokens": cache.text + cache.visual,
                "cache_bytes": cache.bytes(),
                "used_bytes": cache.bytes() + state,
                "held_bytes": cache.held() + state,
            })


def at_once(narrator: nar.Narrator, work: Work, streams: int) -> tuple[float, float]:
    """Frames a second of processor time: of one live stream, and of several with shared passes."""
    work = replace(work, lookahead=1)
    speeds = []
    for count in (1, streams):
        jobs = [partial(shared, narrator, work)] * count
        began = time.process_time()
        for _, item in side_by_side(jobs, count):
            if isinstance(item, Failed):
                raise item.error
        speeds.append(count * work.frames / (time.process_time() - began))
    return speeds[0], speeds[1]


def shared(narrator: nar.Narrator, work: Work, ask: Callable) -> Iterator[stream.Decision]:
    """A stream that asks for its passes (streams/together.py)."""
    def run(pass_input):
        return ask(narrator.decoder, pass_input)

    frames, narrations = work.given(narrator)
    context = open_stream(narrator, run=run, guesses=0)
    return stream.narrate(narrator, frames, given=narrations, context=context)


def total(rows: list[dict], name: str) -> float:
    return sum(row[name] for row in rows)


def flatness(narrator: nar.Narrator, work: Work, window: int) -> float:
    """Processor time of the last `window` frames, divided by that of the second `window` frames.

    1: as fast as ever. Two streams take turns, each until its next narration, so that both meet the
    same disturbances. They alternate in being the first of a turn.
    """
    late = Meter(narrator, work)
    early = Meter(narrator, work)
    turn = min(work.every, window)              # frames
    late.advance(work.frames - window)
    early.advance(window)                       # warms up
    for n in range(window // turn):
        meters = (late, early) if n % 2 == 0 else (early, late)
        for meter in meters:
            meter.advance(turn)
    late_seconds = total(late.rows[work.frames - window:], "processor_s")
    early_seconds = total(early.rows[window:], "processor_s")
    return late_seconds / early_seconds
