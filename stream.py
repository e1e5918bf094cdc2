"""Streaming narration (paper §3.2, §3.4, Algorithms 1 and 2): frames in, time-stamped sentences
out. What is kept of past frames has a fixed size.

    python stream.py toy/kitchen.mp4          (inputs, outputs and options: commands/stream.py)

After a narration, Dynamic Context Management removes the frames of the finished segment from the KV
cache. The memory tokens that CLAM reads out at that moment open the next segment in their place.
Positions are never renumbered: a counter gives every token the position that it had in training.
FlowNar-C also keeps only the last k narrations: then all memory is bounded.

Glossary (paper: here)
    Psi            the Decisions that have a narration
    C^vid, C^nar   `cache`: keys and values of visual tokens, and of prompt and narrations
    S_t            `state` of the visual memory (clam.py)
    M_{t_{n-1}}    `memory`, read out when narration n - 1 was given            [1, M, D]
    l              `position`, the position counter
    n              `segment`
    b_new          `opening is not None`: the next frame is the first of its segment (line 2 sets
                   b_new to False: there, `opening` is the prompt, with the first frame inside)
    p([SKIP])      `p_skip`, the probability of Eq. 1

`narrate` is Algorithm 2 (App. B.3) with its line numbers; Algorithm 1 is the same without the
position counter. Frames, segments and positions are counted from 0 here, from 1 in the paper. The
baseline VideoLLM-online (nothing pruned, no memory) is the same loop with `prune` off.

Does not include: what makes a stream faster (streams/fast.py) or endless (streams/bounds.py). These
are subclasses of `Context`, and tests hold them to it.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from narrator import MEMORY, NARRATION, VISUAL, Config, Narrator, Tokens, visible
from support.common.text import one_line
from support.engine.slots import Slots


class Cache(Slots):
    """C^vid and C^nar: keys and values of all layers, with the kind, segment and number of each
    token.

        slot                 0     1     2     3     4     5     6     7     8     9     10
        frame 0 narrated     p     [     x     ]     u     \\n    A:    y0    -     -     -
          position           0     1     2     3     4     5     6     7
        its frame removed    p     -     -     -     u     \\n    A:    y0    -     -     -
        frame 1 fed          p     EOT   \\n    [     u     \\n    A:    y0    m     ]     [    ...
          position           0     8     9     10    4     5     6     7     11    12    13

    p: the prompt, x: a frame, u: the instruction, A: "Assistant:", y0: words of narration 0,
    m: memory tokens, -: free. A new token takes the first free slot. Pruning frees slots, and
    nothing is ever moved. A token that was read ahead (streams/fast.py) has kind -1 until its turn
    comes.
    """

    def __init__(self, device: torch.device | str = "cpu", capacity: int = 256):
        super().__init__(device, capacity)
        self.kind = np.full(capacity, -1)
        self.segment = np.full(capacity, -1)
        self.number = np.full(capacity, -1)

    @property
    def visual(self) -> int:
        """Length of C^vid."""
        return int((self.kind == VISUAL).sum())

    @property
    def text(self) -> int:
        """Length of C^nar, the prompt included."""
        return int((self.kind >= 0).sum()) - self.visual

    @property
    def kept(self) -> list[int]:
        """Numbers of the first and the last narration with tokens in C^nar; [] if there are none.
        """
        numbers = self.number[self.kind == NARRATION]
        return [int(numbers.min()), int(numbers.max())] if len(numbers) else []

    def insert(self, tokens: Tokens, slots: np.ndarray) -> None:
        """From now on the slots hold these tokens."""
        self.kind[slots] = tokens.kind
        self.segment[slots] = tokens.segment
        self.number[slots] = tokens.number

    def grow(self, more: int) -> None:
        """Add slots, at least so many."""
        super().grow(more)
        added = len(self.used) - len(self.kind)
        self.kind = np.pad(self.kind, (0, added), constant_values=-1)
        self.segment = np.pad(self.segment, (0, added), constant_values=-1)
        self.number = np.pad(self.number, (0, added), constant_values=-1)

    def keep(self, seen: np.ndarray) -> int:
        """Free every slot that is not `seen`, bool [slots]; returns how many tokens were removed.
        """
        gone = np.flatnonzero(self.used & ~seen)
        self.kind[gone] = -1
        self.release(gone)
        return len(gone)


@dataclass
class Narration:
    n: int
    frame: int
    start: float                    # seconds
    end: float                      # seconds
    text: str                       # one line
    p_skip: float | None            # None for narration 0, which is not decided
    tokens: list[int]               # without end of text


@dataclass
class Decision:
    """What was decided at one frame.

    The counter and the lengths of the cache are those after it.
    """
    frame: int
    p_skip: float | None
    theta: float | None             # the active threshold
    position: int
    text_tokens: int
    visual_tokens: int
    kept: list[int]         # Cache.kept
    narration: Narration | None
    forced: bool            # narrates whatever p_skip is: frame 0, the last frame, given narrations
    fed: Tokens             # what was fed with this frame, without the narration
    pruned: int             # how many tokens were removed after the narration


class Context:
    """What a stream carries from frame to frame, and the steps of Algorithm 2 that act on it.

    This is the plain form: one pass of the language model for a frame, one for a word, through the
    modules of transformers.
    """

    def __init__(self, narrator: Narrator):
        self.narrator = narrator
        self.layout = narrator.layout
        self.cache = Cache(narrator.device)                 # C^vid, C^nar
        self.state = narrator.memory.initial_state().to(narrator.device)  # S_t
        self.readable = self.state                          # the state that M_t is read from
        self.queries = narrator.memory.queries()            # Q: the same all the time
        self.memory: Tensor | None = None                   # M_{t_{n-1}}
        self.position = 0                                   # l
        self.segment = 0                                    # n
        self.opening: Tokens | None = self.layout.first()   # b_new; at first, the prompt
        self.frame = 0                                      # t of the present or next frame
        self.now = 0.0                                      # seconds at the latest frame's end
        self.last_narration_time = 0.0                      # seconds, of t_{n-1}
        self.p_skip: float | None = None                    # of the latest frame
        self.theta: float | None = None

    def seconds(self) -> float:
        """The time that the frame just taken stands for: its end."""
        return (self.frame + 1) / self.narrator.config.fps

    def take(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        """Line 4: the frame tokens X_t, one frame after the other, each at its time (`now`).

        ValueError unless each is [J, D].
        """
        shape = (self.narrator.config.J, self.narrator.config.width)
        for x in frames:
            if x.shape != shape:
                raise ValueError(f"expected frame tokens {list(shape)}, got {list(x.shape)}")
            self.now = self.seconds()
            yield x.to(self.narrator.device, self.narrator.dtype)

    def update_memory(self, x: Tensor) -> None:
        """Line 5, S_t: the memory absorbs frame tokens x [L, D].

        M_t is read where it is used, at the end of a segment (line 17). It is read after the whole
        frame; published weights read it after the frame's first token (CLS).
        """
        memory = self.narrator.memory
        # M_t has seen the tokens up to `end`; with "cls", the rest of the last frame comes after it
        end = len(x)
        if self.narrator.config.readout == "cls":
            end -= self.narrator.config.J - 1
        self.readable = memory.step(x[None, :end], self.state)
        self.state = self.readable
        if end < len(x):
            self.state = memory.step(x[None, end:], self.readable)

    def read_memory(self, ids: list[int] | None = None) -> None:
        """Line 17: the memory tokens M_t, for the next segment. ids, of the narration before it:
        for Table 15 alone.
        """
        if self.layout.M:
            self.memory = self.narrator.memory.read(self.readable, self.queries)

    def memory_embedding(self, tokens: Tokens) -> Tensor | None:
        """Line 7, M_{t_{n-1}}: the memory tokens' embeddings [1, M, D_lm], if `tokens` has them."""
        if MEMORY not in tokens.ids:
            return None
        return self.narrator.embed_visual(self.memory)

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> Tensor:
        """Lines 9-12, Fig. 7: new tokens through the language model; logits [V] of the last one."""
        narrator = self.narrator
        ids = torch.tensor(tokens.ids, device=narrator.device)
        e = narrator.embed(ids, x, self.memory_embedding(tokens))                   # line 9
        next_position = self.position + len(tokens)
        positions = torch.arange(self.position, next_position, device=narrator.device)  # line 10
        self.position = next_position                                               # line 11
        # Keys and values of the new tokens go into free slots, wherever these are. A token sees the
        # slots whose positions are up to its own; free ones are at EMPTY, after all positions.
        slots = self.cache.reserve(len(tokens))
        self.cache.insert(tokens, slots)
        mask = self.cache.place_and_mask(positions, torch.from_numpy(slots).to(narrator.device))
        hidden = narrator.run(e, positions, mask, self.cache)                       # line 12
        return narrator.logits(hidden[-1:])[0]

    def trigger(self, logits: Tensor) -> float:
        """Eq. 1: p([SKIP]), from the logits [V] after the frame's last token."""
        return logits.softmax(-1)[self.layout.skip].item()

    def likeliest(self, logits: Tensor) -> int:
        """Greedy decoding: the id of the likeliest next token, from logits [V]."""
        return int(logits.argmax())

    def discard(self, now: int) -> int:
        """Line 18: remove what a token of segment `now` does not see; returns how many tokens."""
        cache, config = self.cache, self.narrator.config
        seen = visible(cache.kind, cache.segment, cache.number, now, config.last_k, config.prune)
        return cache.keep(seen)


def threshold(elapsed: float, config: Config, static: bool) -> float:
    """The active threshold (§3.2), `elapsed` seconds after the last narration: theta_low at first,
    then theta.
    """
    rounding = 1e-6                                 # of times that are sums of frames [s]
    if static or elapsed > config.refractory + rounding:
        return config.theta
    return config.theta_low


def generate(c: Context, given: list[int] | None = None) -> list[int]:
    """Line 15: the narration y_n, greedily. Given ids are fed instead of the model's own."""
    logits = c.feed(c.layout.closing(c.segment))
    if given is not None:
        for token in given:
            c.feed(c.layout.narration(c.segment, [token]))
        return list(given)
    # The end of text is not fed here: it opens the next segment (`Layout.opening`).
    ids: list[int] = []
    while len(ids) < c.narrator.config.max_new_tokens:
        token = c.likeliest(logits)
        if token == c.layout.eot:
            break
        ids.append(token)
        logits = c.feed(c.layout.narration(c.segment, [token]))
    return ids


def end_segment(c: Context, t: int, given: list[int] | None = None) -> tuple[Narration, int]:
    """Lines 14-19, at frame t: the narration, and how many tokens were removed after it."""
    start = c.last_narration_time
    c.last_narration_time = c.now                                               # line 14
    ids = generate(c, given)                                                    # line 15
    text = one_line(c.layout.decode(ids))
    narration = Narration(c.segment, t, start, c.now, text, c.p_skip, ids)      # line 16
    c.read_memory(ids)                                                          # line 17
    pruned = c.discard(now=c.segment + 1)                                       # line 18
    c.segment += 1                                                              # line 19
    c.opening = c.layout.opening(c.segment)
    return narration, pruned


@torch.no_grad()
def narrate(narrator: Narrator, frames: Iterable[Tensor], static: bool = False,
            forced: dict[int, list[int] | None] | None = None,
            context: Context | None = None) -> Iterator[Decision]:
    """Algorithm 2: frame tokens x [J, D] in, one Decision a frame out, with the narration if there
    is one.

    As published, frame 0 always narrates, and so does the last frame (unless `forced`): if it has
    not, a second Decision of it follows.

    static      one threshold, theta
    forced      narrations (frame -> ids) that are fed instead of the model's own, the first at
                frame 0; where ids are None, the model writes
    context     how to stream (streams/), and from which frame on; default: a new plain Context
    """
    if forced is not None and 0 not in forced:
        raise ValueError("given narrations begin with one of frame 0")
    c = Context(narrator) if context is None else context               # lines 1-3
    for x in c.take(frames):                                            # line 4
        t = c.frame
        c.update_memory(x)                                              # line 5
        if c.opening is not None:                                       # line 6: b_new
            fed = c.opening                                             # line 7: [M_{t_{n-1}}; X_t]
            c.opening = None
        else:
            fed = c.layout.frame(c.segment)
        logits = c.feed(fed, x)                                         # lines 9-12
        if t > 0:                           # frame 0 stands in the prompt, and always narrates
            c.p_skip = c.trigger(logits)                                # Eq. 1
            c.theta = threshold(c.now - c.last_narration_time, narrator.config, static)
        # Given narrations replace the trigger: theirs are the frames that narrate.
        must = t == 0 if forced is None else t in forced
        given = None if forced is None else forced.get(t)
        narration = None
        pruned = 0
        if must or (forced is None and c.p_skip <= c.theta):            # line 13
            narration, pruned = end_segment(c, t, given)                # lines 14-19
        c.frame = t + 1
        yield decision(c, t, narration, must, fed, pruned)
    # As published, the last frame narrates whatever p([SKIP]) is, unless it just has.
    segment_is_open = c.opening is None
    if forced is None and segment_is_open:
        narration, pruned = end_segment(c, c.frame - 1)
        yield decision(c, c.frame - 1, narration, True, Tokens(), pruned)


def decision(c: Context, t: int, narration: Narration | None, forced: bool, fed: Tokens,
             pruned: int) -> Decision:
    return Decision(
        frame=t,
        p_skip=c.p_skip,
        theta=c.theta,
        position=c.position,
        text_tokens=c.cache.text,
        visual_tokens=c.cache.visual,
        kept=c.cache.kept,
        narration=narration,
        forced=forced,
        fed=fed,
        pruned=pruned,
    )


if __name__ == "__main__":
    from commands.stream import main
    main()
