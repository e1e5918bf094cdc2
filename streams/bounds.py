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

A narration memory (Table 15) adds N_nar + 2 tokens, where N_nar is the number of its tokens.

Positions. The position counter only grows. When it has passed `max_position` at the end of a
narration, the kept narrations are moved to the positions right behind the prompt, as if the stream
had begun k narrations ago. Their distances to each other stay, and their distance to the prompt
becomes one that was trained. A key carries the rotation of its position. Rotations add, so a moved
key only needs the rotation of the difference.
"""
from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from math import ceil

import numpy as np
import torch
from torch import Tensor

from narrator import NARRATION, VISUAL, Narrator, Tokens
from stream import Context
from support.common.errors import BadData
from support.engine.passes import STATIC, PassInput, rope_type
from support.engine.slots import Slots

# of live sources; the longest videos in training reach position 18,300
LIVE_BOUNDS = {"last_k": 10, "max_segment": 30.0, "max_position": 16_384}


def most_tokens(narrator, words: int | None = None, ahead: int = 0) -> int:
    """The formula above: how many tokens the cache can hold at most.

    words       tokens of a narration; default: as many as the model may say
    ahead       frames that are read ahead

    The settings `max_segment` and `last_k` must not be None.
    """
    config = narrator.config
    layout = narrator.layout
    brackets = len(layout.open + layout.close)
    prompt = len(layout.first()) - layout.J - brackets
    narration = (words or config.max_new_tokens) + len(layout.assistant + layout.newline) + 1
    text = prompt + (config.last_k + 1) * narration
    # max_segment may be a rounded multiple of 1 / fps
    frames = ceil(config.max_segment * config.fps - 1e-6) + ahead
    memory = len(layout.memory_and_frame(1)) - layout.J - len(layout.open)     # with its brackets
    return text + memory + brackets - 1 + (layout.J + 1) * frames


def decoder_pass(narrator) -> Callable[[PassInput], Tensor]:
    """The function that runs one pass of the language model for one stream: input -> logits."""
    def run(pass_input: PassInput) -> Tensor:
        return narrator.decoder([pass_input])[0]
    return run


# ---------------------------------------------------------------------- restarts

class Bounds:
    """Decides for one stream when its segment is restarted, and turns its positions back.

    first_length    the number of tokens that are fed with frame 0: kept narrations begin there
    segment_start   the counter where the frames of the present segment begin
    start_frame     the first frame since the last narration or restart
    start_time      the time of that frame (seconds)
    restart_asked   a restart before the next frame is wanted. It has no effect where that frame
                    opens a segment anyway, or where nothing is pruned
    restarts        how many restarts there were
    rewound         how often positions were turned back
    frequencies     of the rotations of keys; None if positions are never turned back
    """

    def __init__(self, narrator, run: Callable[[PassInput], Tensor]):
        config = narrator.config
        self.config = config
        self.first_length = len(narrator.layout.first())
        self.segment_start = self.first_length
        self.start_frame = 0
        self.start_time = 0.0
        self.restart_asked = False
        self.restarts = 0
        self.rewound = 0
        self.frequencies = None
        if config.max_position is not None:
            self.frequencies = rotation_frequencies(narrator, run)

    def overdue(self, t: int, now: float, new: bool) -> bool:
        """Whether the segment must be restarted before frame t, taken at `now` seconds.

        It must if it has lasted `max_segment` seconds, by the clock or by its number of frames, or
        if a restart was asked for. If so, the restart is counted.

        new     whether frame t opens a segment anyway
        """
        config = self.config
        restart = False
        if config.prune and not new:
            restart = self.restart_asked
            if config.max_segment is not None:
                by_frames = (t - self.start_frame) / config.fps
                by_clock = now - self.start_time
                if max(by_frames, by_clock) + 1e-6 >= config.max_segment:
                    restart = True
        if new or restart:
            self.start_frame = t
            self.start_time = now
            self.restart_asked = False
        if restart:
            self.restarts += 1
        return restart

    def rewind(self, cache: Slots, position: int) -> int:
        """Turn all positions after the prompt back, if the counter has passed `max_position`.

        Returns the counter. Called after a narration, when no visual token is left.
        """
        if self.config.max_position is None or position <= self.config.max_position:
            return position
        positions = cache.positions.cpu().numpy()
        slots = np.flatnonzero(cache.used & (positions >= self.first_length))
        # without kept narrations, count from where the last segment began
        oldest = positions[slots].min() if len(slots) > 0 else self.segment_start
        back = int(oldest) - self.first_length
        if back != 0:
            rotate_keys(cache, slots, back, self.frequencies)
            self.rewound += 1
        return position - back

    def report(self) -> str:
        """The number of restarts, for the last line of a command."""
        if self.restarts == 0:
            return ""
        return f", {self.restarts} restarts"


class Bounded(Context):
    """A Context that is bounded by `max_segment` and `max_position`, where these are not None."""

    def __init__(self, narrator: Narrator, **options):
        super().__init__(narrator, **options)
        # `run` is an attribute of Fast (streams/fast.py)
        run = getattr(self, "run", None) or decoder_pass(narrator)
        self.bounds = Bounds(narrator, run)

    def restart(self) -> None:
        """Restart the present segment before the next frame, for example after a camera's outage."""
        self.bounds.restart_asked = True

    def take(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        for x in super().take(frames):
            if self.bounds.overdue(self.frame, self.now, new=self.opening is not None):
                self.reopen()
            yield x

    def reopen(self) -> None:
        """Restart the segment: read the memory, drop the frames, and open the segment again."""
        self.read_memory()
        self.cache.keep(self.cache.kind != VISUAL)
        self.position = self.bounds.segment_start
        self.opening = self.layout.memory_and_frame(self.segment)

    def feed(self, tokens: Tokens, x: Tensor | None = None):
        if x is not None and tokens.kind[0] == NARRATION:
            # A new segment. The end of text and the newline of the last narration come first
            self.bounds.segment_start = self.position + tokens.kind.index(VISUAL)
        return super().feed(tokens, x)

    def discard(self, now: int) -> int:
        pruned = super().discard(now)
        self.position = self.bounds.rewind(self.cache, self.position)
        return pruned


# ---------------------------------------------------------------------- positions

def rotate_keys(cache: Slots, slots: np.ndarray, back: int, frequencies: Tensor) -> None:
    """Move the tokens in these slots back by `back` positions (< 0: forward).

    With R(p) the rotation for position p: R(p - back) k = R(-back) R(p) k.

    frequencies     [c/2], or fewer where only the first channels rotate; fp64, because rounding
                    errors grow with the angle
    """
    slots = torch.from_numpy(slots).to(cache.positions.device)
    half = len(frequencies)
    cos = (back * frequencies).cos().float().to(slots.device)           # [c/2]
    sin = (back * frequencies).sin().float().to(slots.device)
    for keys in cache.keys:
        k = keys[slots].float()                                         # [n, G, c]
        # channel i and channel i + c/2 are the two coordinates that rotate together
        a = k[..., :half].clone()                                       # [n, G, c/2]
        b = k[..., half:2 * half].clone()
        k[..., :half] = a * cos + b * sin
        k[..., half:2 * half] = b * cos - a * sin
        keys[slots] = k.to(keys.dtype)
    cache.positions[slots] -= back


def rotation_frequencies(narrator, run: Callable[[PassInput], Tensor]) -> Tensor:
    """The frequencies with which a language model rotates its keys [c/2], fp64.

    They are tested in all layers: a few tokens go through `run` once at position 0 and once at
    position 1000. The keys of the second pass, rotated back, must be those of the first pass.
    Raises BadData if the rotations depend on the length of the context, or are of another kind.
    """
    kind = rope_type(narrator.llm.model)
    rotary = getattr(narrator.llm.model, "rotary_emb", None)
    refusal = BadData(f"max_position: the positions of {narrator.config.llm} cannot be turned "
                      f"back (its rotations are {kind!r}); leave max_position out, or use a "
                      f"Llama-like language model")
    if kind not in STATIC or getattr(rotary, "inv_freq", None) is None:
        raise refusal
    frequencies = rotary.inv_freq.cpu().double()
    ids = narrator.layout.prompt[:8]
    near = Slots(narrator.device, 64)
    far = Slots(narrator.device, 64)
    for cache, start in ((near, 0), (far, 1000)):
        slots = cache.reserve(len(ids))                            # the same in both
        positions = range(start, start + len(ids))
        plan = torch.tensor([ids, positions, slots.tolist()]).to(narrator.device)
        run(PassInput(plan, None, None, cache, slice(-1, None)))
    rotate_keys(far, slots, 1000, frequencies)
    for keys, rotated in zip(near.keys, far.keys):
        error = (keys.float() - rotated.float()).norm() / keys.float().norm()
        tolerance = 1e-3 if narrator.llm.dtype == torch.float32 else 5e-2
        if not error <= tolerance:                              # NaN is refused, too
            raise refusal
    return frequencies


# ---------------------------------------------------------------------- live sources

def live_bounds(narrator, given: Container[str] = ()) -> str:
    """Give a narrator's settings the bounds of a live source; returns a line that reports them.

    given       names of settings that the user has given, which stay

    Raises BadData if the user wants every newline kept.
    """
    config = narrator.config
    if not config.prune:
        return ("nothing is removed from the context (VideoLLM-online): "
                "memory grows with every frame")
    if config.keep_newline and "keep_newline" in given:
        raise BadData("--keep-newline keeps a token of every narration for ever; "
                      "leave it out for a live source")
    config.keep_newline = False
    narrator.layout.keep_newline = False
    for name, value in LIVE_BOUNDS.items():
        if name not in given and getattr(config, name) is None:
            setattr(config, name, value)
    if config.last_k is None:
        config.max_position = None
        return (f"all narrations are kept: memory grows with each; "
                f"segments of {config.max_segment:g} s at most")
    if config.max_position is not None and "max_position" not in given:
        try:
            rotation_frequencies(narrator, decoder_pass(narrator))
        except BadData:             # rotations of another kind: positions grow without bound
            config.max_position = None
    max_segment = config.max_segment or float("inf")
    max_position = config.max_position or float("inf")
    return (f"the last {config.last_k} narrations are kept, segments of {max_segment:g} s at most, "
            f"positions up to {max_position:g}")
