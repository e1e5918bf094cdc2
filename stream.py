"""Streaming narration (paper §3.2, §3.4, Algorithms 1 and 2): frames in, time-stamped sentences
out. What is kept of past frames has a fixed size.

    python stream.py toy/kitchen.mp4      (inputs, outputs and options: beyond/commands/stream_command.py)

After a narration, Dynamic Context Management removes the frames of the finished segment from the KV
cache. The memory tokens that CLAM reads out at that moment open the next segment in their place.
Positions are never renumbered: a counter gives every token the position that it had in training.
FlowNar-C also keeps only the last k narrations: then all memory is bounded, as long as segments end
(beyond/streams/bounds.py restarts those that do not).

Glossary (paper: here)
    Psi            the Decisions that have a narration
    C^vid, C^nar   `cache`: keys and values of visual tokens, and of prompt and narrations
    S_t            `state` of the visual memory (clam.py)
    M_{t_{n-1}}    `memory`, read out when narration n - 1 was given            [1, M, D]
    l              `position`, the position counter
    n              `segment`
    b_new          `next_tokens` is not None: the next frame is the first of its segment, and these
                   are the tokens that it is fed with (for frame 0, the prompt)
    p([SKIP])      `p_skip`, the probability of Eq. 1

`narrate` is Algorithm 2 (App. B.3) with its line numbers; Algorithm 1 is the same without the
position counter. Frames, segments and positions are counted from 0 here, from 1 in the paper. The
baseline VideoLLM-online (nothing pruned, no memory) is the same loop with `prune` off.

Every command that streams runs this loop. Subclasses of `Context` make it faster
(beyond/streams/ahead.py: several frames, or words, in one pass of the language model) and endless
(beyond/streams/bounds.py).
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrator import VISUAL, Config, Narrator, Tokens, visible
from support.common.errors import BadData
from support.common.text import one_line
from support.engine.attention import KeysAndValues


@dataclass
class Cache(KeysAndValues):
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
    tokens: Tokens = field(default_factory=Tokens)

    def lengths(self) -> tuple[int, int]:
        """Tokens of C^nar, the prompt included, and of C^vid."""
        visual = self.tokens.kind.count(VISUAL)
        return len(self.tokens.kind) - visual, visual

    def bytes(self) -> int:
        """Size of the keys and values in all layers [bytes]."""
        tensors = [*self.keys.values(), *self.values.values()]
        return sum(tensor.nbytes for tensor in tensors)

    def crop(self) -> None:
        """Remove keys and values that come after those of the tokens."""
        left = len(self.tokens.ids)
        for layer in self.keys:
            self.keys[layer] = self.keys[layer][:, :, :left]
            self.values[layer] = self.values[layer][:, :, :left]

    def keep(self, seen: Tensor) -> int:
        """Remove every token that is not `seen`, bool [tokens]; returns how many were removed."""
        removed = (~seen).sum().item()
        if removed:
            self.tokens = self.tokens.select(seen.tolist())
            self.select(seen.nonzero()[:, 0])
        return removed

    def select(self, index: Tensor) -> None:
        """Only the keys and values at `index`, in their order."""
        for layer, keys in self.keys.items():
            index = index.to(keys.device)
            self.keys[layer] = keys.index_select(2, index)
            self.values[layer] = self.values[layer].index_select(2, index)


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
    fed: Tokens                     # what was fed with this frame, without the narration
    narration: Narration | None
    pruned: int                     # how many tokens were removed after the narration
    position: int
    text_tokens: int
    visual_tokens: int

    @property
    def forced(self) -> bool:
        """Whether it narrates although p([SKIP]) does not say so: frame 0, or the last frame."""
        if self.narration is None:
            return False
        return self.p_skip is None or self.p_skip > self.theta

    @property
    def most_tokens(self) -> int:
        """The largest length of the cache at this frame: before line 18."""
        return self.text_tokens + self.visual_tokens + self.pruned


class Context:
    """What a stream carries from frame to frame, and the steps of Algorithm 2 that act on it."""

    def __init__(self, narrator: Narrator):                             # lines 1-3
        self.narrator = narrator
        self.layout = narrator.layout
        self.cache = Cache()                                # C^vid, C^nar
        self.state = narrator.memory.initial_state().to(narrator.llm.device)    # S_t
        self.state_to_read = self.state                     # of which M_t is read
        self.queries = narrator.memory.queries()            # Q: the same all the time
        self.memory: Tensor | None = None                   # M_{t_{n-1}}
        self.position = 0                                   # l
        self.segment = 0                                    # n
        self.next_tokens: Tokens | None = self.layout.first()   # b_new; at first, the prompt
        self.frame = 0                                      # t of the present or next frame
        self.time = 0.0                                     # seconds at the latest frame's end
        self.last_narration_time = 0.0                      # seconds, of t_{n-1}
        self.p_skip: float | None = None                    # of the latest frame
        self.theta: float | None = None                     # its threshold

    def take(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        """Line 4: the frame tokens X_t [J, D], one frame after the other, and the time of each."""
        for x in frames:
            assert x.shape == (self.layout.J, self.narrator.config.width), "frame tokens are [J, D]"
            if not x.isfinite().all():
                raise BadData(f"frame {self.frame}: its tokens are not finite")
            self.time = (self.frame + 1) / self.narrator.config.fps
            yield x.to(self.narrator.connector[0].weight)   # of its device and dtype

    def update_memory(self, x: Tensor) -> None:
        """Line 5, Eq. 2: S_t, from S_{t-1} and frame tokens x [J, D]. M_t is read at line 17."""
        memory = self.narrator.memory
        before = self.state
        self.state = memory.step(x[None], before)
        self.state_to_read = self.state
        if self.narrator.config.readout == "cls":
            # The authors' models were trained with M_t read after the frame's first token.
            self.state_to_read = memory.step(x[None, :1], before)

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> Tensor:
        """Lines 9-12, Fig. 7: new tokens through the language model; logits [V] of the last one."""
        e = self.narrator.embed(tokens.ids, x, self.memory)                     # line 9
        new = len(e)
        next_position = self.position + new
        positions = torch.arange(self.position, next_position, device=e.device)     # line 10
        self.position = next_position                                           # line 11
        hidden = self.narrator.run(e, positions, cache=self.cache)              # line 12
        self.cache.tokens += tokens
        return self.narrator.logits(hidden[-1:])[0]

    def trigger(self, logits: Tensor) -> float:
        """Eq. 1: p([SKIP]), from the logits [V] after the frame's last token; [SKIP] is ","."""
        return logits.softmax(-1)[self.layout.skip].item()

    def read_memory(self) -> None:
        """Line 17: the memory tokens M_t = Q S_t, for the next segment."""
        self.memory = self.narrator.memory.read(self.state_to_read, self.queries)

    def discard(self, now: int) -> int:
        """Line 18: remove what a token of segment `now` does not see; returns how many tokens."""
        config = self.narrator.config
        return self.cache.keep(visible(self.cache.tokens, now, config.last_k, config.prune))


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
        return given
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
    c.read_memory()                         # line 17: M_t is read before the frames leave
    pruned = c.discard(now=c.segment + 1)                                       # line 18
    c.segment += 1                                                              # line 19
    c.next_tokens = c.layout.opening(c.segment)                                 # line 19: b_new
    return narration, pruned


@torch.no_grad()
def narrate(
    narrator: Narrator,
    frames: Iterable[Tensor],
    static: bool = False,
    given: dict[int, list[int] | None] | None = None,
    context: Context | None = None,
) -> Iterator[Decision]:
    """Algorithm 2: frame tokens x [J, D] in, one Decision a frame out, with the narration if there
    is one.

    As in the authors' code, frame 0 always narrates, and so does the last frame: if it has not, a
    second Decision of it follows.

    static      one threshold, theta
    given       narrations (frame -> ids) that are fed instead of the model's own, the first at
                frame 0; where ids are None, the model writes. Their frames replace the trigger's
    context     how to stream (beyond/streams/), and from which frame on; default: a new plain Context
    """
    assert given is None or 0 in given, "given narrations begin with one of frame 0"
    c = Context(narrator) if context is None else context               # lines 1-3
    for x in c.take(frames):                                            # line 4
        t = c.frame
        c.update_memory(x)                                              # line 5
        if c.next_tokens is not None:                                   # line 6: b_new
            # [M_{t_{n-1}}; X_t], whose places `feed` fills; at t = 0, the prompt
            tokens = c.next_tokens                                      # line 7
            c.next_tokens = None                                        # line 7: b_new
        else:
            tokens = c.layout.frame(c.segment)                          # [SKIP], and X_t
        logits = c.feed(tokens, x)                                      # lines 9-12
        if t > 0:                           # frame 0 stands in the prompt, and always narrates
            c.p_skip = c.trigger(logits)                                # Eq. 1
            elapsed = c.time - c.last_narration_time
            c.theta = threshold(elapsed, narrator.config, static)

        ends = t == 0 or c.p_skip <= c.theta                            # line 13
        words = None                        # the model's own
        if given is not None:
            ends = t in given
            words = given.get(t)
        narration = None
        pruned = 0
        if ends:
            narration, pruned = end_segment(c, t, words)                # lines 14-19
        c.frame = t + 1                     # frame t is done: from here on, the stream can be saved
        yield Decision(t, c.p_skip, c.theta, tokens, narration, pruned,
                       c.position, *c.cache.lengths())

    assert given is None or max(given) < c.frame, "each narration that is given has its frame"
    # As in the authors' code, the last frame narrates whatever p([SKIP]) is, unless it just has.
    # `next_tokens` is there after each narration, and before the first frame.
    if given is None and c.next_tokens is None:
        t = c.frame - 1
        narration, pruned = end_segment(c, t)
        yield Decision(t, c.p_skip, c.theta, Tokens(), narration, pruned,
                       c.position, *c.cache.lengths())


if __name__ == "__main__":
    from beyond.commands.stream_command import run_and_exit
    run_and_exit()
