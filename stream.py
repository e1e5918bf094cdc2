"""Streaming narration (paper §3.2, 3.4, Alg. 1 and 2): frames in, time-stamped sentences out, in bounded memory.

    python stream.py toy/kitchen.mp4
    python stream.py VIDEO_OR_FEATURES --model DIR_OR_HUB_ID --last-k 10 --srt video.srt

After a narration, Dynamic Context Management removes the frames of the finished segment from the KV cache; the memory
tokens that CLAM reads out at that moment open the next segment in their place. Positions are never renumbered: a
counter gives every token the position that it had in training. FlowNar-C also keeps only the last k narrations.

Glossary (paper, here):
    Psi          the Decisions that have a narration
    C^vid, C^nar `cache`: keys and values of visual tokens, and of prompt and narrations
    S_t          `state` of the visual memory (clam.py)                     one fp32 tensor
    M_{t_{n-1}}  `memory`, read out when narration n - 1 was given          [1, M, D]
    l            `position`, the position counter
    n, b_new     `segment`, `new`: the next frame is the first of its segment
    p([SKIP])    `p_skip`, p([SKIP] | E_t, C^vid, C^nar) of Eq. 1

`narrate` is Algorithm 2 (App. B.3) with its line numbers; Algorithm 1 is the same without the position counter. Frames,
segments and positions are counted from 0 here, from 1 in the paper. The baseline VideoLLM-online (nothing pruned, no
memory) is the same loop with `prune` off. Does not include: batches of streams, cameras.
"""
import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from narrator import PROMPT, VISUAL, Layout, Narrator, Tokens, visible
from support.common import BadData, choose, command_line, one_line, positive_float
from support.features import encode_pictures, is_features, load_features
from support.options import config_changes, model_options, trigger_options
from support.subtitles import Writers, timestamp
from support.video import Video

TOY, TOY_SIZE = Path(__file__).parent / "toy" / "checkpoint", (96, 96)      # the bundled narrator, its videos' pixels
EMPTY = torch.iinfo(torch.long).max     # position of a slot that holds nothing: later than every query


class Cache:
    """C^vid and C^nar: the keys and values of all layers, in slots.

        slot        0       1       2       3       4       5       6       7       8 ...
        token       p       [       x       ]       A:      y0      free    free    free
        position    0       1       2       3       6       7       EMPTY   EMPTY   EMPTY

    A key carries the rotation of its own position, so slots may be in any order: a new token takes the first free one,
    and pruning sets a slot's position to EMPTY. The one comparison `positions <= position of the query` is then the
    mask; nothing is ever moved. The layers of transformers' models call `update` and `get_seq_length`.
    """

    def __init__(self, capacity: int = 256):
        self.layers: list[tuple[Tensor, Tensor]] = []                # keys, values [1, heads, slots, channels]
        self.positions = torch.full((capacity,), EMPTY)              # on the model's device
        self.kind, self.segment, self.number = torch.full((3, capacity), -1)  # on the CPU; kind -1: free

    @property
    def visual(self) -> int:
        """Length of C^vid."""
        return int((self.kind == VISUAL).sum())

    @property
    def text(self) -> int:
        """Length of C^nar, the prompt included."""
        return self.get_seq_length() - self.visual

    def insert(self, tokens: Tokens, positions: Tensor) -> Tensor:
        """Take slots for tokens at positions [L]; returns their mask over the slots in use, bool [L, slots]."""
        while len(free := (self.kind < 0).nonzero()[:, 0]) < len(tokens):
            self.grow()
        slots = free[:len(tokens)]
        self.kind[slots], self.segment[slots], self.number[slots] = (
            torch.tensor(y) for y in (tokens.kind, tokens.segment, tokens.number))
        self.slots, self.span = slots.to(positions.device), int((self.kind >= 0).nonzero()[-1]) + 1
        self.positions = self.positions.to(positions.device)
        self.positions[self.slots] = positions
        return self.positions[:self.span] <= positions[:, None]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: store the new keys and values, return all."""
        if layer == len(self.layers):
            self.layers.append(tuple(y.new_zeros(*y.shape[:2], len(self.kind), y.shape[3]) for y in (keys, values)))
        for buffer, new in zip(self.layers[layer], (keys, values)):
            buffer[:, :, self.slots] = new
        return tuple(buffer[:, :, :self.span] for buffer in self.layers[layer])

    def get_seq_length(self, layer: int = 0) -> int:
        """Tokens in the cache, both parts together."""
        return int((self.kind >= 0).sum())

    def grow(self) -> None:
        """Double the slots, layer by layer, so that only one layer is ever held twice."""
        more = len(self.kind)
        self.kind, self.segment, self.number = (
            F.pad(y, (0, more), value=-1) for y in (self.kind, self.segment, self.number))
        self.positions = F.pad(self.positions, (0, more), value=EMPTY)
        for i, layer in enumerate(self.layers):
            self.layers[i] = tuple(F.pad(y, (0, 0, 0, more)) for y in layer)

    def keep(self, seen: Tensor) -> int:
        """Free every slot that is not `seen`, bool [slots]; returns how many tokens were removed."""
        gone = (~seen & (self.kind >= 0)).nonzero()[:, 0]
        self.kind[gone] = -1
        self.positions[gone.to(self.positions.device)] = EMPTY
        return len(gone)

    def bytes(self) -> int:
        """Size of the keys and values in use, in all layers."""
        return sum(y[:, :, 0].nbytes * self.get_seq_length() for layer in self.layers for y in layer)


@dataclass
class Narration:
    n: int
    frame: int
    start: float                # seconds
    end: float
    text: str                   # one line
    p_skip: float | None        # None for the first, which is not decided
    tokens: list[int]           # without end of text


@dataclass
class Decision:
    """What was decided at one frame; counter and cache lengths are those after it."""
    frame: int
    p_skip: float | None
    theta: float | None         # the active threshold
    position: int
    text_tokens: int
    visual_tokens: int
    narration: Narration | None = None
    forced: bool = False        # narrates whatever p_skip is: the first frame, the last of a file, given narrations
    fed: Tokens | None = None   # the tokens fed with this frame, without the narration
    pruned: int = 0             # tokens removed after the narration

    def trace(self) -> dict:
        return {"frame": self.frame, "p_skip": self.p_skip, "theta": self.theta, "narrate": self.narration is not None,
                "position": self.position, "text_tokens": self.text_tokens, "visual_tokens": self.visual_tokens,
                "forced": self.forced}


class Context:
    """All that a stream carries from frame to frame, with the parts of Algorithm 2 that act on it."""

    def __init__(self, narrator: Narrator):
        self.narrator = narrator
        self.cache = Cache()                                               # C^vid, C^nar
        self.state = narrator.memory.initial_state().to(narrator.device)   # S_t
        self.readable = self.state                                         # the state that M_t is read from
        self.memory: Tensor | None = None                                  # M_{t_{n-1}}
        self.position = 0                                                  # l
        self.segment, self.new = 0, False                                  # n, b_new
        self.last_narrated = 0                                             # t_{n-1}
        self.logits: list[Tensor] | None = None                            # a list put here collects all logits

    def update_memory(self, x: Tensor):
        """Line 5, S_t: the memory absorbs a frame x [J, D]; published weights read M_t after its first (CLS) token."""
        memory = self.narrator.memory
        if self.narrator.config.readout == "cls":
            self.readable = memory.step(x[None, :1], self.state)
            self.state = memory.step(x[None, 1:], self.readable)
        else:
            self.readable = self.state = memory.step(x[None], self.state)

    def read_memory(self):
        """Lines 5 and 17: the memory tokens M_t, kept for the next segment. Those of other frames are not needed."""
        if self.narrator.layout.M:
            self.memory = self.narrator.memory.read(self.readable)

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> Tensor:
        """Lines 9-12, Fig. 7: one pass of the LLM over new tokens; returns the logits [V] of the last one."""
        e = self.narrator.embed(tokens, x, self.memory)                                         # line 9
        positions = torch.arange(self.position, self.position + len(tokens), device=e.device)   # line 10
        self.position += len(tokens)                                                            # line 11
        hidden = self.narrator.run(e, positions, self.cache.insert(tokens, positions), self.cache)   # line 12
        if self.logits is not None:
            self.logits.extend(self.narrator.logits(hidden))
        return self.narrator.logits(hidden[-1])

    def discard(self, now: int) -> int:
        """Line 18: remove what segment `now` may not see (FlowNar-C: narrations, too); returns how many tokens."""
        cache, config = self.cache, self.narrator.config
        return cache.keep(visible(cache.kind, cache.segment, cache.number, now, config.last_k, config.prune))


def threshold(frame: int, last_narrated: int, config, static: bool) -> float:
    """The active threshold (§3.2): theta_low soon after a narration, else theta."""
    soon = frame - last_narrated <= config.refractory * config.fps
    return config.theta_low if soon and not static else config.theta


def generate(context: Context, given: list[int] | None = None) -> list[int]:
    """The narration y_n, greedily (line 15); given ids are fed instead, in one pass."""
    layout, n = context.narrator.layout, context.segment
    if given is not None:
        context.feed(layout.closing(n) + layout.narration(n, given))
        return given
    ids, logits = [], context.feed(layout.closing(n))
    while (token := int(logits.argmax())) != layout.eot and len(ids) < context.narrator.config.max_new_tokens:
        ids.append(token)
        logits = context.feed(layout.narration(n, [token]))
    return ids


@torch.no_grad()
def narrate(narrator: Narrator, frames: Iterable[Tensor], static: bool = False,
            forced: dict[int, list[int]] | None = None, context: Context | None = None) -> Iterator[Decision]:
    """Algorithm 2: frame tokens x [J, D] in, one Decision a frame out, with the narration if there is one.

    It holds one frame at a time and never looks ahead. As published, frame 0 always narrates, and so does the last
    frame: if it has not, a second Decision of it follows. `forced` gives narrations (frame -> ids) instead of the
    model's own, the first at frame 0; `context` is a new Context, for callers that want to inspect it.
    """
    layout, config = narrator.layout, narrator.config
    c = Context(narrator) if context is None else context                             # lines 1-3
    if c.position or forced is not None and 0 not in forced:
        raise ValueError("a stream begins with a new Context and a narration of frame 0")
    p_skip = theta = fed = None
    for t, x in enumerate(chain(frames, [None])):                                     # line 4; None: no more frames
        ended = x is None
        if ended:
            t, fed = t - 1, Tokens()                                                  # the last frame, once more
            if t < 0 or c.last_narrated == t or forced is not None:
                return
        else:
            x = x.to(narrator.device, narrator.connector[0].weight.dtype)
            c.update_memory(x)                                                        # line 5
            if c.new:
                fed, c.new = layout.opening(c.segment), False                         # lines 6-8: [M_{t_{n-1}}; X_t]
            else:
                fed = layout.frame(c.segment) if t else layout.first()
            logits = c.feed(fed, x)                                                   # lines 9-12
            if t:
                p_skip = logits.softmax(-1)[layout.skip].item()                       # Eq. 1
                theta = threshold(t, c.last_narrated, config, static)
        narration, pruned = None, 0
        must = (t in forced) if forced is not None else (t == 0 or ended)
        if must or (forced is None and p_skip <= theta):                              # line 13
            start, c.last_narrated = (c.last_narrated + 1) / config.fps if t else 0.0, t   # line 14
            ids = generate(c, None if forced is None else forced[t])                  # line 15
            text = one_line(layout.decode(ids))                                       # line 16
            narration = Narration(c.segment, t, start, (t + 1) / config.fps, text, p_skip, ids)
            c.read_memory()                                                           # line 17
            pruned = c.discard(now=c.segment + 1)                                     # line 18
            c.segment, c.new = c.segment + 1, True                                    # line 19
        yield Decision(t, p_skip, theta, c.position, c.cache.text, c.cache.visual, narration, must, fed, pruned)


def explain(decision: Decision, layout: Layout, config, static: bool = False) -> str:
    """One frame in words: what was fed, p([SKIP]) and its threshold, what was pruned, the counter, the cache."""
    names = ["prompt" if kind == PROMPT else name for kind, name in zip(decision.fed.kind, layout.spell(decision.fed))]
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    fed = " ".join(name + (f" x {n}" if n > 1 else "") for name, n in runs) or "nothing more"
    line = f"frame {decision.frame}: fed {fed}"
    if decision.p_skip is None:
        line += "; the first frame always narrates"
    else:
        which = "theta" if static or decision.theta == config.theta else f"theta_low, within {config.refractory:g} s"
        sign = "<=" if decision.p_skip <= decision.theta else ">"
        line += f"; p([SKIP]) = {decision.p_skip:.4f} {sign} {decision.theta:g} ({which})"
        line += "; the last frame always narrates" if decision.forced else ""
    if decision.narration:
        line += f"; narration {decision.narration.n}, {decision.pruned} tokens removed"
    return line + f"; l = {decision.position}, cache {decision.text_tokens} text + {decision.visual_tokens} visual"


# ---------------------------------------------------------------------- python stream.py

def open_frames(source: str, narrator: Narrator, vision: str | None,
                dtype: torch.dtype) -> tuple[Iterator[Tensor], int | None, Video | None]:
    """Frame tokens [J, D] of a video or a feature file, their number if it is known, and the video if it is one."""
    config = narrator.config
    if is_features(source):
        x = load_features(source, tokens=config.J, width=config.width)
        return iter(x), len(x), None
    encoder = narrator.vision_encoder(vision, dtype)
    video = Video(source, config.fps, largest=2 * encoder.image_size)
    return encode_pictures(video, encoder), video.frames, video


def run_file(args: argparse.Namespace):
    device, dtype = choose(args.device, args.dtype)
    narrator = Narrator.load(args.model or str(TOY), args.llm, device, dtype, **config_changes(args))
    frames, total, video = open_frames(args.input, narrator, args.vision, dtype)
    if args.model is None and video is not None and video.size != TOY_SIZE:
        print("The bundled narrator knows only its miniature kitchen (toy/kitchen.mp4). For other videos, give --model "
              "a narrator that was trained for them, such as zeyun-zhong/flownar-1B-ego4d", file=sys.stderr)
    if args.compile:
        narrator.memory.compile()
        for layer in narrator.llm.model.layers:
            layer.mlp.compile(dynamic=True)
    with ExitStack() as stack:
        writers = Writers({name: getattr(args, name) for name in ("jsonl", "srt", "vtt", "trace")}, stack, args.input)
        context, began, count, peak = Context(narrator), time.perf_counter(), 0, 0
        progress = stack.enter_context(tqdm(total=total, unit="frame", desc="streaming", leave=False, mininterval=0.5))
        for decision in narrate(narrator, frames, args.static, context=context):
            writers.trace(decision.trace())
            count, peak = decision.frame + 1, max(peak, decision.text_tokens + decision.visual_tokens)
            progress.update(count - progress.n)
            progress.set_postfix(cache=f"{decision.text_tokens}+{decision.visual_tokens} tokens", refresh=False)
            lines = [explain(decision, narrator.layout, narrator.config, args.static)] if args.explain else []
            if decision.narration:
                writers.sentence(vars(decision.narration))
                lines.append(f"[{timestamp(decision.narration.end)}] {decision.narration.text}")
            if lines:
                with tqdm.external_write_mode(file=sys.stdout):
                    print("\n".join(lines), flush=True)
    seconds = time.perf_counter() - began
    if not count:
        raise BadData(f"{args.input} has no frames")
    cache = context.cache
    print(f"{count} frames, {context.segment} narrations, {count / seconds:.1f} frames/s; cache at most {peak} tokens, "
          f"now {cache.text} text + {cache.visual} visual = {cache.bytes() / 1e6:.2f} MB", file=sys.stderr)
    if video is not None:
        video.report()


def main():
    parser = argparse.ArgumentParser(description="Narrate a video as it plays.")
    parser.add_argument("input", help="video file, or frame features [T, J, D]: FILE.safetensors[:NAME] or FILE.pt")
    parser.add_argument("--fps", type=positive_float, help="frames per second (default: the checkpoint's, 2)")
    model_options(parser)
    trigger_options(parser)
    parser.add_argument("--keep-newline", action="store_true", default=None,
                        help="with --last-k: keep every newline, as the published code does (the cache then grows)")
    parser.add_argument("--compile", action="store_true", help="compile CLAM and the feed-forward layers")
    parser.add_argument("--explain", action="store_true", help="print what each frame fed, decided and pruned")
    for name in ("jsonl", "srt", "vtt"):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"also write {name.upper()}")
    parser.add_argument("--trace", metavar="FILE", help="also write one line per frame")
    args = parser.parse_args()
    command_line(lambda: run_file(args))


if __name__ == "__main__":
    main()
