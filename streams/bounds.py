"""What bounds a stream without end (not in the paper, which trusts its trigger): restarts,
positions turned back.

A segment that never ends is *restarted*, silently: its frames are removed, the memory is read out,
and it opens once more, where it had begun. Nothing that stood there is left, so this is the stream
in which the memory alone saw those frames; the next sentence still covers everything since the last
one. With N frames in `max_segment` seconds, a prompt of P tokens, k narrations of at most L and A
for `Assistant:`, the cache then never holds more than

    P + (k + 1) (L + A + 2)     of text: each narration has its end and newline; one is being
                                written
    M + 3 + (J + 1) N           visual tokens; with frames that are read ahead, J + 1 more for each

(a narration memory has N + 2 more, too). The counter, which only grows, is turned back when it has
passed `max_position` at the end of a narration: the narrations that are kept go to where the first
one stood, as if the stream had begun k narrations ago. Distances among them stay, and the one to
the prompt becomes one that was trained. A key carries the rotation of its position; rotations add,
so the difference is all that is turned.
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

LIVE_BOUNDS = {"last_k": 10, "max_segment": 30.0, "max_position": 16_384}  # the longest videos in training: 18,300


def most_tokens(narrator, words: int | None = None, ahead: int = 0) -> int:
    """The formula above: what the cache can hold at most, with narrations of so many words
    (default: as many as the model may say), and frames that are read `ahead`. With max_segment and
    last_k.
    """
    config, layout = narrator.config, narrator.layout
    blocks = len(layout.open + layout.close)
    prompt = len(layout.first()) - layout.J - blocks
    said = (words or config.max_new_tokens) + len(layout.assistant + layout.newline) + 1
    text = prompt + (config.last_k + 1) * said
    frames = ceil(config.max_segment * config.fps - 1e-6) + ahead
    memory = len(layout.reopening(1)) - layout.J - len(layout.open)     # memory tokens with their brackets
    return text + memory + blocks - 1 + (layout.J + 1) * frames


# ---------------------------------------------------------------------- restarts

class Bounds:
    """Of one stream: tells when its segment has to be restarted, and turns its positions back.

    restart_asked   a restart before the next frame is wanted. No effect where this frame opens a
                    segment anyway, or where nothing is pruned
    restarts        how many there were so far
    rewound         how often positions were turned back
    segment_start   the counter where the frames of the present segment begin
    """

    def __init__(self, narrator, run: Callable[[PassInput], Tensor]):
        config = narrator.config
        self.config = config
        self.first = len(narrator.layout.first())
        self.segment_start = self.first
        self.start_frame = 0                        # the first frame since the last narration or restart
        self.start_time = 0.0                       # its time in seconds
        self.restart_asked = False
        self.restarts = 0
        self.rewound = 0
        self.frequencies = None
        if config.max_position is not None:
            self.frequencies = rotation_frequencies(narrator, run)

    def overdue(self, t: int, now: float, new: bool) -> bool:
        """Whether the segment must be restarted before frame t, taken at `now` seconds.

        It must if it has lasted `max_segment` seconds, by the clock or by its number of frames.
        `new`: frame t opens a segment anyway.
        """
        config = self.config
        restart = False
        if config.prune and not new:
            lasts = max((t - self.start_frame) / config.fps, now - self.start_time) + 1e-6
            too_long = config.max_segment is not None and lasts >= config.max_segment
            restart = self.restart_asked or too_long
        if new or restart:
            self.start_frame = t
            self.start_time = now
            self.restart_asked = False
        if restart:
            self.restarts += 1
        return restart

    def rewind(self, cache: Slots, position: int) -> int:
        """Turn all positions after the prompt back, if the counter has passed `max_position` -> the
        counter.

        Called after a narration, when no visual token is left.
        """
        if self.config.max_position is None or position <= self.config.max_position:
            return position
        positions = cache.positions.cpu().numpy()
        slots = np.flatnonzero(cache.used & (positions >= self.first))
        oldest = positions[slots].min() if len(slots) else self.segment_start
        back = int(oldest) - self.first
        if back:
            rotate_keys(cache, slots, back, self.frequencies)
            self.rewound += 1
        return position - back

    def report(self) -> str:
        """For the last line of a command."""
        return f", {self.restarts} restarts" if self.restarts else ""


class Bounded(Context):
    """A Context whose segments are restarted and whose positions are turned back, where the
    settings say so.
    """

    def __init__(self, narrator: Narrator, **how):
        super().__init__(narrator, **how)
        run = getattr(self, "run", None) or (lambda part: narrator.decoder([part])[0])
        self.bounds = Bounds(narrator, run)

    def restart(self) -> None:
        """Ask for a restart of the present segment before the next frame, as after an outage of a
        camera.
        """
        self.bounds.restart_asked = True

    def take(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        for x in super().take(frames):
            if self.bounds.overdue(self.frame, self.now, new=self.opening is not None):
                self.reopen()
            yield x

    def reopen(self) -> None:
        """Restart the segment: drop its frames, read the memory, and open the segment again where
        it began.
        """
        self.read_memory()
        self.cache.keep(self.cache.kind != VISUAL)
        self.position = self.bounds.segment_start
        self.opening = self.layout.reopening(self.segment)

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> Tensor:
        if x is not None and tokens.kind[0] == NARRATION:       # a new segment: its frames follow EOT and newline
            self.bounds.segment_start = self.position + tokens.kind.index(VISUAL)
        return super().feed(tokens, x)

    def discard(self, now: int) -> int:
        pruned = super().discard(now)
        self.position = self.bounds.rewind(self.cache, self.position)
        return pruned


# ---------------------------------------------------------------------- positions

def rotate_keys(cache: Slots, slots: np.ndarray, back: int, frequencies: Tensor) -> None:
    """Move the tokens in these slots `back` by so many positions (< 0: forth): R(p - back) k =
    R(-back) R(p) k.

    frequencies [c/2], or fewer where only the first channels turn, in fp64, as the angles are.
    """
    into = torch.from_numpy(slots).to(cache.positions.device)
    half = len(frequencies)
    cos = (back * frequencies).cos().float().to(into.device)
    sin = (back * frequencies).sin().float().to(into.device)
    for keys in cache.keys:
        k = keys[into].float()
        a = k[..., :half].clone()
        b = k[..., half:2 * half].clone()
        k[..., :half] = a * cos + b * sin
        k[..., half:2 * half] = b * cos - a * sin
        keys[into] = k.to(keys.dtype)
    cache.positions[into] -= back


def rotation_frequencies(narrator, run: Callable[[PassInput], Tensor]) -> Tensor:
    """The frequencies with which a language model rotates its keys [c/2], fp64.

    Proved in all of its layers: a few tokens go through `run` at two places, and the keys of one
    place, rotated, must be those of the other. BadData if the rotations depend on the length of the
    context, or are of another kind.
    """
    kind = rope_type(narrator.llm.model)
    rotary = getattr(narrator.llm.model, "rotary_emb", None)
    refused = BadData(f"max_position: the positions of {narrator.config.llm} cannot be turned back (its rotations are "
                      f"{kind!r}); leave max_position out, or use a Llama-like language model")
    if kind not in STATIC or getattr(rotary, "inv_freq", None) is None:
        raise refused
    frequencies = rotary.inv_freq.cpu().double()
    ids = narrator.layout.prompt[:8]
    near, far = Slots(narrator.device, 64), Slots(narrator.device, 64)
    for cache, start in ((near, 0), (far, 1000)):
        slots = cache.take(len(ids))
        plan = torch.tensor([ids, range(start, start + len(ids)), slots.tolist()]).to(narrator.device)
        run(PassInput(plan, None, None, cache, slice(-1, None)))
    rotate_keys(far, slots, 1000, frequencies)
    for keys, rotated in zip(near.keys, far.keys):
        error = (keys.float() - rotated.float()).norm() / keys.float().norm()
        if not error <= (1e-3 if narrator.llm.dtype == torch.float32 else 5e-2):
            raise refused
    return frequencies


# ---------------------------------------------------------------------- live sources

def live_bounds(narrator, given: Container[str] = ()) -> str:
    """Give a narrator's settings the bounds of a live source, those aside that were `given` by the
    user -> one line that says so. BadData if the user wants every newline kept.
    """
    config = narrator.config
    if not config.prune:
        return "nothing is removed from the context (VideoLLM-online): memory grows with every frame"
    if config.keep_newline and "keep_newline" in given:
        raise BadData("--keep-newline keeps a token of every narration for ever; leave it out for a live source")
    config.keep_newline = narrator.layout.keep_newline = False
    for name, value in LIVE_BOUNDS.items():
        if name not in given and getattr(config, name) is None:
            setattr(config, name, value)
    if config.last_k is None:
        config.max_position = None
        return f"all narrations are kept: memory grows with each; segments of {config.max_segment:g} s at most"
    if config.max_position is not None and "max_position" not in given:
        try:
            rotation_frequencies(narrator, lambda part: narrator.decoder([part])[0])
        except BadData:                                        # another kind of rotations: positions grow
            config.max_position = None
    return (f"the last {config.last_k} narrations are kept, segments of {config.max_segment or float('inf'):g} s at "
            f"most, positions up to {config.max_position or float('inf'):g}")
