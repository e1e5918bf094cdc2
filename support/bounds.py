"""What bounds a stream without end (not in the paper, which trusts its trigger): restarts, positions turned back.

A segment that never ends is *restarted*, silently: its frames are removed, the memory is read out, and it opens once
more, where it had begun. Nothing that stood there is left, so this is the stream in which the memory alone saw those
frames; the next sentence still covers everything since the last one. With N frames in `max_segment` seconds, a prompt
of P tokens, k narrations of at most L and A for `Assistant:`, the cache then never holds more than

    P + (k + 1) (L + A + 2)     of text: each narration has its end and newline; one is being written
    M + 3 + (J + 1) N           visual tokens; with frames that are read ahead, J + 1 more for each

(a narration memory has N + 2 more, too). The counter, which only grows, is turned back when it has passed
`max_position` at the end of a narration: the narrations that are kept go to where the first one stood, as if the stream
had begun k narrations ago. Distances among them stay, and the one to the prompt becomes one that was trained. A key
carries the rotation of its position; rotations add, so the difference is all that is turned.
"""
from __future__ import annotations

from collections.abc import Callable, Container
from math import ceil

import numpy as np
import torch
from torch import Tensor

from support.common import BadData
from support.decode import STATIC, Part, Slots, rope_type

PART = 2 ** 32             # segment n is called n + PART after a restart, n + 2 PART after the second, ...
LIVE_BOUNDS = {"last_k": 10, "max_segment": 30.0, "max_position": 16_384}  # the longest videos in training: 18,300


def check_bounds(config) -> None:
    """BadData if settings (narrator.py: Config) contradict their bounds."""
    if config.max_segment is not None and not config.prune:
        raise BadData("max_segment: where nothing is pruned (VideoLLM-online), no segment can be restarted")
    if config.max_position is not None and config.last_k is None:
        raise BadData("max_position needs last_k: where all narrations are kept, no position becomes free")
    if config.max_position is not None and config.keep_newline:
        raise BadData("max_position: with --keep-newline, no position becomes free; leave out one of them")


def most_tokens(narrator, words: int | None = None, ahead: int = 0) -> int:
    """The formula above: what the cache can hold at most, with narrations of so many words (default: as many as the
    model may say), and frames that are read `ahead`. With max_segment and last_k."""
    config, layout = narrator.config, narrator.layout
    blocks = len(layout.open + layout.close)
    prompt = len(layout.first()) - layout.J - blocks
    said = (words or config.max_new_tokens) + len(layout.assistant + layout.newline) + 1
    text = prompt + (config.last_k + 1) * said
    frames = ceil(config.max_segment * config.fps - 1e-6) + ahead
    memory = sum(tokens + blocks for tokens in (layout.M, layout.N) if tokens)
    return text + memory + blocks - 1 + (layout.J + 1) * frames


# ---------------------------------------------------------------------- restarts

def count_positions(visual: list[bool], segment: list[int]) -> Tensor:
    """What the counter l of Algorithm 2 gives to the tokens of a sequence [L], from which of them are visual, and the
    segments in which they are fed: after a restart it goes back to where the segment's first visual token was."""
    l, begins, positions = 0, {}, []
    for seen, n in zip(visual, segment):
        if seen and n not in begins:
            l = begins[n] = begins.get(n - PART, l)
        positions.append(l)
        l += 1
    return torch.tensor(positions)


class Bounds:
    """Of one stream: tells when its segment has to be restarted, and turns its positions back.

    asked       a restart before the next frame is wanted (stream.py: `Context.restart`); no effect where this frame
                opens a segment anyway, or where nothing is pruned
    count       restarts so far; turned: how often positions were turned back
    mark        the counter where the frames of the present segment begin
    """

    def __init__(self, narrator, run: Callable[[Part], Tensor]):
        config, self.first = narrator.config, len(narrator.layout.first())
        self.longest, self.largest, self.fps, self.prune = (
            config.max_segment, config.max_position, config.fps, config.prune)
        self.began, self.since = 0, 0.0                             # the first frame since the last restart, its time
        self.asked, self.mark = False, self.first
        self.count = self.turned = 0
        self.frequencies = None if self.largest is None else turning(narrator, run)

    def overdue(self, t: int, now: float, new: bool) -> bool:
        """Is there a restart before frame t, taken at `now` seconds? After `max_segment` seconds, or as many frames as
        these should have. `new`: the frame opens a segment anyway."""
        lasts = max((t - self.began) / self.fps, now - self.since) + 1e-6
        restart = self.prune and not new and (self.asked or self.longest is not None and lasts >= self.longest)
        if new or restart:
            self.began, self.since, self.asked = t, now, False
        self.count += restart
        return restart

    def turn_back(self, cache: Slots, position: int) -> int:
        """After a narration, when no visual token is left: the counter, with all after the prompt turned back if it has
        passed `max_position`."""
        if self.largest is None or position <= self.largest:
            return position
        at = cache.positions.cpu().numpy()
        slots = np.flatnonzero(cache.used & (at >= self.first))
        back = int(at[slots].min() if len(slots) else self.mark) - self.first
        if back:
            turn_keys(cache, slots, back, self.frequencies)
            self.turned += 1
        return position - back

    def report(self) -> str:
        """For the last line of a command."""
        return f", {self.count} restarts" if self.count else ""


# ---------------------------------------------------------------------- positions

def turn_keys(cache: Slots, slots: np.ndarray, back: int, frequencies: Tensor) -> None:
    """The tokens in these slots go `back` by so many positions (< 0: forth): R(p - back) k = R(-back) R(p) k.

    frequencies [c/2], or fewer where only the first channels turn, in fp64, as the angles are.
    """
    into, half = torch.from_numpy(slots).to(cache.positions.device), len(frequencies)
    cos, sin = (y.float().to(into.device) for y in ((back * frequencies).cos(), (back * frequencies).sin()))
    for keys in cache.keys:
        k = keys[into].float()
        a, b = k[..., :half].clone(), k[..., half:2 * half].clone()
        k[..., :half], k[..., half:2 * half] = a * cos + b * sin, b * cos - a * sin
        keys[into] = k.to(keys.dtype)
    cache.positions[into] -= back


def turning(narrator, run: Callable[[Part], Tensor]) -> Tensor:
    """The frequencies with which a language model's keys are turned, proved with a few tokens through `run`, in all of
    its layers. BadData if its rotations depend on the length of the context, or are of another kind."""
    kind, rotary = rope_type(narrator.llm.model), getattr(narrator.llm.model, "rotary_emb", None)
    refused = BadData(f"max_position: the positions of {narrator.config.llm} cannot be turned back (its rotations are "
                      f"{kind!r}); leave max_position out, or use a Llama-like language model")
    if kind not in STATIC or getattr(rotary, "inv_freq", None) is None:
        raise refused
    frequencies, (near, far) = rotary.inv_freq.cpu().double(), [Slots(narrator.device, 64) for _ in range(2)]
    ids = narrator.layout.prompt[:8]
    for slots, begin in ((near, 0), (far, 1000)):
        into = slots.take(len(ids))
        plan = torch.tensor([ids, range(begin, begin + len(ids)), into.tolist()]).to(narrator.device)
        run(Part(plan, None, None, slots, slice(-1, None)))
    turn_keys(far, into, 1000, frequencies)
    for one, other in zip(near.keys, far.keys):
        error = (one.float() - other.float()).norm() / one.float().norm()
        if not error <= (1e-3 if one.dtype == torch.float32 else 5e-2):
            raise refused
    return frequencies


# ---------------------------------------------------------------------- live sources

def live_bounds(narrator, given: Container[str] = ()) -> str:
    """Give a narrator's settings the bounds of a live source, those aside that were `given` by the user -> one line
    that says so. BadData if the user wants every newline kept."""
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
            turning(narrator, lambda part: narrator.decoder([part])[0])
        except BadData:                                        # another kind of rotations: positions grow
            config.max_position = None
    return (f"the last {config.last_k} narrations are kept, segments of {config.max_segment or float('inf'):g} s at "
            f"most, positions up to {config.max_position or float('inf'):g}")
