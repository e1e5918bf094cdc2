"""Streaming narration (paper §3.2, §3.4, Algorithms 1 and 2): frames in, time-stamped sentences
out. What is kept of past frames has a fixed size.

    python stream.py toy/kitchen.mp4          (inputs, outputs and options: commands/stream.py)

After a narration, Dynamic Context Management removes the frames of the finished segment from the KV
cache. The memory tokens that CLAM reads out at that moment open the next segment in their place.
Positions are never renumbered: a counter gives every token the position that it had in training.
FlowNar-C also keeps only the last k narrations: then all memory is bounded, as long as segments end
(streams/bounds.py restarts those that do not).

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

Every command that streams runs this loop. Subclasses of `Context` make it faster (streams/ahead.py:
several frames, or words, in one pass of the language model) and endless (streams/bounds.py).
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from narrator import MEMORY, VISUAL, Config, Narrator, Tokens, visible
from support.common.text import one_line


class Cache:
    """C^vid and C^nar: keys and values of all layers, and the tokens that they belong to, in the
    order in which they were fed.

                                tokens                                  positions
        frame 0 narrated        p  [ x ]  u  A: y0                      0  1 2 3  4  5 6
        its frame removed       p         u  A: y0                      0         4  5 6
        frame 1 fed             p         u  A: y0  $ n  [ m ] [ x      0         4  5 6  7 8  9 ...

    p: the prompt, x: a frame, u: the instruction, A: "Assistant:", y0: words of narration 0,
    $: end of text, n: newline, m: memory tokens. A key was rotated by its position when it was fed,
    so keys can move together without changing what a query sees.
    """

    def __init__(self):
        self.tokens = Tokens()
        # of each layer: keys and values [1, heads, room, c], of which the first `length` are used
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.length: dict[int, int] = {}

    @property
    def visual(self) -> int:
        """Length of C^vid."""
        return self.tokens.kind.count(VISUAL)

    @property
    def text(self) -> int:
        """Length of C^nar, the prompt included."""
        return len(self.tokens) - self.visual

    def bytes(self) -> int:
        """Size of the keys and values in use [bytes], in all layers."""
        size = 0
        for layer, length in self.length.items():
            for buffer in (self.keys[layer], self.values[layer]):
                size += buffer[:, :, :length].nbytes
        return size

    def get_seq_length(self, layer: int = 0) -> int:
        """Called by transformers: how many tokens a layer holds."""
        return self.length.get(layer, 0)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Called by each attention layer of transformers: append the keys and values
        [1, heads, N, c] of new tokens; returns those of all tokens.
        """
        old = self.length.get(layer, 0)
        new = old + keys.shape[2]
        has_room = layer in self.keys and new <= self.keys[layer].shape[2]
        for buffers, added in ((self.keys, keys), (self.values, values)):
            if not has_room:
                # Room for half as many again: a word does not copy everything.
                room = max(64, new * 3 // 2)
                larger = added.new_empty(*added.shape[:2], room, added.shape[3])
                if old:
                    larger[:, :, :old] = buffers[layer][:, :, :old]
                buffers[layer] = larger
            buffers[layer][:, :, old:new] = added
        self.length[layer] = new
        all_keys = self.keys[layer][:, :, :new]
        all_values = self.values[layer][:, :, :new]
        return all_keys, all_values

    def mask(self, ids: list[int]) -> Tensor:
        """What each of N new tokens sees: all that is there, and what is fed up to itself,
        bool [N, old + N]. (Only their number counts here. VideoLLM-MoD's cache asks which of them
        are frames.)
        """
        new = len(ids)
        old = len(self.tokens)
        everything = torch.ones(new, old + new, dtype=torch.bool)
        return everything.tril(old)                 # row i: columns 0 .. old + i

    def crop(self) -> None:
        """Remove keys and values that come after those of the tokens: what was read ahead."""
        for layer in self.length:
            self.length[layer] = len(self.tokens)

    def keep(self, seen: Tensor) -> int:
        """Remove every token that is not `seen`, bool [tokens]; returns how many were removed."""
        if seen.all():
            return 0
        index = seen.nonzero()[:, 0]
        left = len(index)
        for layer, keys in self.keys.items():
            values = self.values[layer]
            index = index.to(keys.device)
            keys[:, :, :left] = keys[:, :, index]
            values[:, :, :left] = values[:, :, index]
            self.length[layer] = left
        removed = len(self.tokens) - left
        self.tokens = self.tokens.select(seen.tolist())
        return removed


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
    narration: Narration | None
    fed: Tokens                     # what was fed with this frame, without the narration
    pruned: int                     # how many tokens were removed after the narration

    @property
    def forced(self) -> bool:
        """Whether it narrates although p([SKIP]) does not say so: frame 0, or the last frame."""
        if self.narration is None:
            return False
        return self.p_skip is None or self.p_skip > self.theta


class Context:
    """What a stream carries from frame to frame, and the steps of Algorithm 2 that act on it."""

    def __init__(self, narrator: Narrator):                             # lines 1-3
        self.narrator = narrator
        self.layout = narrator.layout
        self.cache = Cache()                                # C^vid, C^nar
        self.state = narrator.memory.initial_state().to(narrator.device)    # S_t
        self.queries = narrator.memory.queries()            # Q: the same all the time
        self.memory: Tensor | None = None                   # M_{t_{n-1}}
        self.position = 0                                   # l
        self.segment = 0                                    # n
        self.opening: Tokens | None = self.layout.first()   # b_new; at first, the prompt
        self.frame = 0                                      # t of the present or next frame
        self.time = 0.0                                     # seconds at the latest frame's end
        self.last_narration_time = 0.0                      # seconds, of t_{n-1}
        self.p_skip: float | None = None                    # of the latest frame
        self.theta: float | None = None                     # its threshold
        # the latest frame and the state before it: published weights read M_t in the middle of it
        self.latest: Tensor | None = None
        self.state_before = self.state

    def seconds(self) -> float:
        """The time that the frame just taken stands for: its end."""
        return (self.frame + 1) / self.narrator.config.fps

    def take(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        """Line 4: the frame tokens X_t, one frame after the other.

        ValueError unless each is [J, D].
        """
        shape = (self.narrator.config.J, self.narrator.config.width)
        for x in frames:
            if x.shape != shape:
                raise ValueError(f"expected frame tokens {list(shape)}, got {list(x.shape)}")
            yield x.to(self.narrator.device, self.narrator.dtype)

    def update_memory(self, x: Tensor) -> None:
        """Line 5, Eq. 2: S_t, from S_{t-1} and frame tokens x [J, D]. M_t is read at line 17."""
        self.latest = x
        self.state_before = self.state
        self.state = self.narrator.memory.step(x[None], self.state)

    def read_memory(self) -> None:
        """Line 17: the memory tokens M_t = Q S_t, for the next segment."""
        if not self.layout.M:
            return
        memory = self.narrator.memory
        state = self.state
        if self.narrator.config.readout == "cls":
            # Published weights were trained with M_t read after the frame's first token.
            state = memory.step(self.latest[None, :1], self.state_before)
        self.memory = memory.read(state, self.queries)

    def memory_tokens(self, tokens: Tokens) -> Tensor | None:
        """Line 7: the memory tokens M_{t_{n-1}} [1, M, D], if `tokens` has their places."""
        if MEMORY not in tokens.ids:
            return None
        return self.memory

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> Tensor:
        """Lines 9-12, Fig. 7: new tokens through the language model; logits [V] of the last one."""
        ids = torch.tensor(tokens.ids, device=self.narrator.device)
        e = self.narrator.embed(ids, x, self.memory_tokens(tokens))                 # line 9
        next_position = self.position + len(tokens)
        positions = torch.arange(self.position, next_position, device=e.device)     # line 10
        self.position = next_position                                               # line 11
        return self.run(tokens, e, positions)                                       # line 12

    def run(self, tokens: Tokens, e: Tensor, positions: Tensor) -> Tensor:
        """Line 12: one pass over embeddings e [N, D_lm], whose keys and values go into the cache."""
        mask = self.cache.mask(tokens.ids).to(e.device)
        hidden = self.narrator.run(e, positions, mask, self.cache)
        self.cache.tokens += tokens
        return self.narrator.logits(hidden[-1:])[0]

    def trigger(self, logits: Tensor) -> float:
        """Eq. 1: p([SKIP]), from the logits [V] after the frame's last token."""
        return logits.softmax(-1)[self.layout.skip].item()

    def discard(self, now: int) -> int:
        """Line 18: remove what a token of segment `now` does not see; returns how many tokens."""
        config = self.narrator.config
        kind, segment, number = self.cache.tokens.for_rule()
        seen = visible(kind, segment, number, now, config.last_k, config.prune)
        return self.cache.keep(seen)


def threshold(elapsed: float, config: Config, static: bool) -> float:
    """The active threshold (§3.2), `elapsed` seconds after the last narration: theta_low at first,
    then theta.
    """
    rounding = 1e-6                     # seconds; times are sums of frames
    if static or elapsed > config.refractory + rounding:
        return config.theta
    return config.theta_low


def generate(c: Context, given: list[int] | None = None) -> list[int]:
    """Line 15: the narration y_n, greedily. Given ids are fed instead of the model's own."""
    # "]" closes the frames, "Assistant:" opens the narration
    logits = c.feed(c.layout.closing(c.segment))
    if given is not None:
        for token in given:
            c.feed(c.layout.narration(c.segment, [token]))
        return list(given)
    ids: list[int] = []
    while len(ids) < c.narrator.config.max_new_tokens:
        token = int(logits.argmax())
        if token == c.layout.eot:       # not fed here: it opens the next segment (`Layout.opening`)
            break
        ids.append(token)
        logits = c.feed(c.layout.narration(c.segment, [token]))
    return ids


def end_segment(c: Context, t: int, given: list[int] | None = None) -> tuple[Narration, int]:
    """Lines 14-19, at frame t: the narration, and how many tokens were removed after it."""
    start = c.last_narration_time
    c.last_narration_time = c.time                                              # line 14
    ids = generate(c, given)                                                    # line 15
    text = one_line(c.layout.decode(ids))
    narration = Narration(c.segment, t, start, c.time, text, c.p_skip, ids)     # line 16
    c.read_memory()                                                             # line 17
    pruned = c.discard(now=c.segment + 1)                                       # line 18
    c.segment += 1                                                              # line 19
    c.opening = c.layout.opening(c.segment)
    return narration, pruned


@torch.no_grad()
def narrate(narrator: Narrator, frames: Iterable[Tensor], static: bool = False,
            given: dict[int, list[int] | None] | None = None,
            context: Context | None = None) -> Iterator[Decision]:
    """Algorithm 2: frame tokens x [J, D] in, one Decision a frame out, with the narration if there
    is one.

    As published, frame 0 always narrates, and so does the last frame: if it has not, a second
    Decision of it follows.

    static      one threshold, theta
    given       narrations (frame -> ids) that are fed instead of the model's own, the first at
                frame 0; where ids are None, the model writes. Their frames replace the trigger's
    context     how to stream (streams/), and from which frame on; default: a new plain Context
    """
    if given is not None and 0 not in given:
        raise ValueError("given narrations begin with one of frame 0")
    c = Context(narrator) if context is None else context               # lines 1-3
    for x in c.take(frames):                                            # line 4
        t = c.frame
        c.time = c.seconds()
        c.update_memory(x)                                              # line 5
        if c.opening is not None:                                       # line 6: b_new
            # [M_{t_{n-1}}; X_t], whose places `feed` fills; at t = 0, the prompt
            tokens = c.opening                                          # line 7
            c.opening = None                                            # line 7: b_new
        else:
            tokens = c.layout.frame(c.segment)
        logits = c.feed(tokens, x)                                      # lines 9-12
        if t > 0:                           # frame 0 stands in the prompt, and always narrates
            c.p_skip = c.trigger(logits)                                # Eq. 1
            elapsed = c.time - c.last_narration_time
            c.theta = threshold(elapsed, narrator.config, static)

        if given is None:
            ends = t == 0 or c.p_skip <= c.theta                        # line 13
            words = None                    # the model's own
        else:
            ends = t in given
            words = given.get(t)
        narration = None
        pruned = 0
        if ends:
            narration, pruned = end_segment(c, t, words)                # lines 14-19
        c.frame = t + 1                     # frame t is done: from here on, the stream can be saved
        yield decision(c, t, tokens, narration, pruned)

    # As published, the last frame narrates whatever p([SKIP]) is, unless it just has.
    # `opening` is there after each narration, and before the first frame.
    last_frame_is_silent = c.opening is None
    if given is None and last_frame_is_silent:
        t = c.frame - 1
        narration, pruned = end_segment(c, t)
        yield decision(c, t, Tokens(), narration, pruned)


def decision(c: Context, t: int, fed: Tokens, narration: Narration | None,
             pruned: int) -> Decision:
    return Decision(
        frame=t,
        p_skip=c.p_skip,
        theta=c.theta,
        position=c.position,
        text_tokens=c.cache.text,
        visual_tokens=c.cache.visual,
        narration=narration,
        fed=fed,
        pruned=pruned,
    )


if __name__ == "__main__":
    from commands.stream import run_and_exit
    run_and_exit()
