"""What bounds a stream without end: restarts of segments, and positions that are turned back (not
in the paper, which trusts its trigger to end each segment).

Restarts. A segment that lasts too long is restarted without a sentence: its frames leave the cache,
the memory is read, and the segment opens again at its old position. The cache is then the same as
if those frames had only gone to the memory. The next sentence still covers everything since the
last one.

Size of the cache. Let `max_segment` seconds have N frames, the prompt P tokens, a narration at most
L tokens, and `Assistant:` A tokens. With the last k narrations kept, the cache never holds more than

    P + (k + 1) (L + A + 2)     text tokens: each narration has an end of text and a newline, and
                                one narration is being written
    M + 3 + (J + 1) N           visual tokens, and J + 1 more for each frame that is read ahead

A narration memory (Table 15) adds N_nar + 2 tokens, where N_nar is the number of its tokens. Three
guessed words (beyond/streams/ahead.py) can be one token more, for a moment.

Positions. The position counter only grows. When it has passed `max_position` at the end of a
narration, the kept narrations are moved to the positions right behind the prompt, as if the stream
had begun k narrations ago. Their distances to each other stay, and their distance to the prompt
becomes one that was trained. A key carries the rotation of its position. Rotations add, so a moved
key only needs the rotation of the difference.
"""
import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator

import torch
from torch import Tensor

from beyond.baselines import context_class
from beyond.streams.ahead import Ahead
from beyond.streams.rotations import rotate_keys, rotation_frequencies
from narrator import NARRATION, PROMPT, VISUAL, Narrator
from support.common.errors import BadData
from support.engine.family import most_positions, warn_of_positions
from support.common.text import without_secrets

# of live sources; the longest video in training has 19,107 tokens
LIVE_BOUNDS = {"last_k": 10, "max_segment": 30.0, "max_position": 16_384}


class Bounded(Ahead):
    """A Context that is bounded by `max_segment` and `max_position`, where these are not None.

    clock       returns the time (seconds) of the frame just taken, for live sources; None: the time
                follows from the frame's number
    """
    FURTHER_TENSORS = ()                # that a baseline's Context adds (suspend.py)

    def __init__(self, narrator: Narrator, clock: Callable[[], float] | None = None, **options):
        super().__init__(narrator, **options)
        config = narrator.config
        self.config = config
        self.clock = clock
        assert clock is None or self.lookahead == 1     # its time is that of the frame just taken
        self.restart_asked = False      # before the next frame, unless it opens a segment anyway
        self.restarts = 0               # how many there were
        self.rewound = 0                # how often positions were turned back
        self.start_time = 0.0           # seconds, of the first frame since a narration or restart
        # The counter where the visual tokens of the present segment begin, and where each of the
        # last k narrations begins
        self.segment_start = 0
        self.narration_starts: deque[int] = deque(maxlen=config.last_k or 0)
        self.frequencies = None         # of the rotations of keys
        if config.max_position is not None:
            self.frequencies = rotation_frequencies(narrator)

    # ------------------------------------------------------------------ restarts

    def restart(self) -> None:
        """Restart the present segment before the next frame, for example after a camera's outage."""
        self.restart_asked = True

    def take(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        for x in super().take(frames):
            if self.clock is not None:
                self.time = self.clock()
            if self.next_tokens is None and self.overdue():
                self.reopen()
            if self.next_tokens is not None:
                self.start_time = self.time
                self.restart_asked = False
                # The end of text and the newline of the last narration come before visual tokens.
                self.segment_start = self.position + self.next_tokens.kind.index(VISUAL)
            yield x

    def overdue(self) -> bool:
        """Whether the segment has lasted `max_segment` seconds, or a restart was asked for. Without
        pruning, nothing is ever restarted.
        """
        if not self.config.prune:
            return False
        if self.restart_asked:
            return True
        if self.config.max_segment is None:
            return False
        rounding = 1e-6
        return self.time - self.start_time >= self.config.max_segment - rounding

    def reopen(self) -> None:
        """Restart the segment: read the memory, drop the frames, and open the segment again."""
        self.restarts += 1
        self.read_memory()
        self.take_back()
        self.cache.keep(torch.tensor(self.cache.tokens.kind) != VISUAL)
        self.position = self.segment_start
        tokens = self.layout.opening(self.segment)
        # without the end of text and the newline of the last narration, which are there already
        self.next_tokens = tokens.select([kind == VISUAL for kind in tokens.kind])

    # ------------------------------------------------------------------ positions

    def discard(self, now: int) -> int:
        """Line 18. Then turn all positions after the prompt back, if the counter has passed
        `max_position`.
        """
        narration = [kind == NARRATION and number == now - 1
                     for kind, number in zip(self.cache.tokens.kind, self.cache.tokens.number)]
        self.narration_starts.append(self.position - sum(narration))
        pruned = super().discard(now)

        limit = self.config.max_position
        if limit is not None and self.position > limit:
            self.rewind()
        return pruned

    def rewind(self) -> None:
        """Move the kept narrations right behind the prompt. No visual token is left."""
        prompt = len(self.layout.first())
        # without kept narrations, count from where the last segment began
        oldest = self.narration_starts[0] if self.narration_starts else self.segment_start
        back = oldest - prompt
        if back == 0:
            return
        first = self.cache.tokens.kind.count(PROMPT)
        rotate_keys(self.cache, first, back, self.frequencies)
        starts = [start - back for start in self.narration_starts]
        self.narration_starts = deque(starts, self.narration_starts.maxlen)
        self.position -= back
        self.rewound += 1


def open_stream(narrator: Narrator, **options) -> Bounded:
    """A new stream, as the commands use it: it reads ahead, and is bounded where the settings say
    so. Options as for Bounded and Ahead.
    """
    return context_class(narrator, Bounded)(narrator, **options)


def tell_of_positions(narrator: Narrator, name: str, frames: int) -> None:
    """Say so if the positions of a recording grow beyond those for which its language model was
    made. Its sentences have positions, too, and are not counted here.
    """
    if narrator.config.max_position is None:
        tokens = frames * len(narrator.layout.frame(1))
        warn_of_positions(narrator.llm, tokens, without_secrets(name))


# ---------------------------------------------------------------------- live sources

def live_bounds(narrator: Narrator, given: Container[str] = ()) -> str:
    """Give a narrator's settings the bounds of a live source; returns a line that reports them.

    given       names of settings that the user has given, which stay
    """
    config = narrator.config
    if not config.prune:
        return ("nothing is removed from the context (VideoLLM-online): "
                "memory grows with every frame")
    # every newline that is kept is one token more, for ever
    config.keep_newline = False
    narrator.layout.keep_newline = False
    positions = min(LIVE_BOUNDS["max_position"], most_positions(narrator.llm))
    for name, value in (LIVE_BOUNDS | {"max_position": positions}).items():
        if name not in given and getattr(config, name) is None:
            setattr(config, name, value)
    if config.last_k is None:                                           # --last-k all
        config.max_position = None
        return (f"all narrations are kept: memory grows with each; "
                f"segments of {config.max_segment:g} s at most")
    if "max_position" not in given:
        try:
            rotation_frequencies(narrator)
        except BadData:             # rotations of another kind: positions grow without bound
            config.max_position = None
    return (f"the last {config.last_k} narrations are kept, segments of {config.max_segment:g} s "
            f"at most, positions up to {config.max_position or math.inf:g}")
