"""Streaming narration (paper §3.4, Alg. 1 and 2): frames in, time-stamped sentences out, in bounded memory.

    python stream.py toy/kitchen.mp4
    python stream.py VIDEO_OR_FEATURES --model DIR_OR_HUB_ID --last-k 10 --srt video.srt

After a narration, Dynamic Context Management removes the frames of the finished segment from the KV cache; the memory
tokens that CLAM reads out at that moment open the next segment in their place. Positions are never renumbered: a
counter gives every token the position that it had in training. FlowNar-C also keeps only the last k narrations.

Glossary:
    cache.text      C^nar: prompt and narrations                         tokens
    cache.visual    C^vid: memory and frames of the current segment      tokens
    state           S_t of the visual memory (clam.py)
    position        l, the position counter of Alg. 2
    p_skip          p([SKIP] | E_t, C^vid, C^nar) of Eq. 1

`narrate` is Algorithm 2 with its line numbers. The baseline VideoLLM-online (nothing pruned, no memory) is the same
loop with `prune` off. Does not include: batches of streams, cameras.
"""
import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from support.common import BadData, choose, command_line
from support.features import is_features, load_features
from narrator import VISUAL, Narrator, Tokens, VisionEncoder
from support.video import Video

TOY = Path(__file__).parent / "toy" / "checkpoint"


class Cache:
    """The two parts of the context, C^nar and C^vid, in one buffer per layer that grows to both sides.

    text (newest narration ... oldest narration, prompt) <- origin -> visual (current segment)

    Everything in it is visible, so attention gets one slice, never a copy, and to prune C^vid is to set its length to
    zero. The order of keys does not matter to attention: each carries the rotation of its own position.
    """

    def __init__(self, capacity: int = 256):
        self.capacity, self.origin = capacity, capacity // 2
        self.layers: list[tuple[Tensor, Tensor]] = []       # keys, values [1, heads, capacity, channels]
        self.positions = torch.zeros(capacity, dtype=torch.long)
        self.numbers: list[int] = []                        # of the narration that each text token belongs to, -1: prompt
        self.visual = 0

    @property
    def text(self) -> int:
        return len(self.numbers)

    def place(self, tokens: Tokens, positions: Tensor) -> Tensor:
        """Make room for tokens at positions [L]; returns their mask over text and visual part, bool [L, keys]."""
        slots = []
        for kind, number in zip(tokens.kind, tokens.number):
            if kind == VISUAL:
                slots.append(self.origin + self.visual)
                self.visual += 1
            else:
                slots.append(self.origin - self.text - 1)
                self.numbers.append(number)
        if min(slots) < 0 or max(slots) >= self.capacity:
            shift = self.grow()
            slots = [slot + shift for slot in slots]
        self.slots = torch.tensor(slots, device=positions.device)
        self.positions = self.positions.to(positions.device)
        self.positions[self.slots] = positions
        self.span = slice(self.origin - self.text, self.origin + self.visual)
        return self.positions[self.span] <= positions[:, None]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: store the new keys and values, return all."""
        if layer == len(self.layers):
            self.layers.append(tuple(y.new_zeros(*y.shape[:2], self.capacity, y.shape[3]) for y in (keys, values)))
        for buffer, new in zip(self.layers[layer], (keys, values)):
            buffer[:, :, self.slots] = new
        return tuple(buffer[:, :, self.span] for buffer in self.layers[layer])

    def get_seq_length(self, layer: int = 0) -> int:
        return self.text + self.visual

    def grow(self) -> int:
        """More room on both sides; returns by how much the slots have moved."""
        old, needed = self.capacity, 2 * max(self.text, self.visual)
        self.capacity = max(2 * old, needed + old)
        shift = self.capacity // 2 - self.origin
        self.origin += shift
        pad = (shift, self.capacity - old - shift)
        self.positions = torch.nn.functional.pad(self.positions, pad)
        self.layers = [tuple(torch.nn.functional.pad(y, (0, 0, *pad)) for y in layer) for layer in self.layers]
        return shift

    def drop_visual(self):
        self.visual = 0

    def drop_narrations(self, before: int):
        """Keep the prompt and the narrations from number `before` on, moved up to the prompt."""
        kept = [i for i, number in enumerate(self.numbers) if number < 0 or number >= before]
        if len(kept) == self.text:
            return
        old = self.origin - 1 - torch.tensor(kept, device=self.positions.device)
        new = self.origin - 1 - torch.arange(len(kept), device=self.positions.device)
        self.positions[new] = self.positions[old]
        for layer in self.layers:
            for buffer in layer:
                buffer[:, :, new] = buffer[:, :, old]
        self.numbers = [self.numbers[i] for i in kept]

    def bytes(self) -> int:
        """Of the keys and values in use (both parts, all layers)."""
        return sum(y[:, :, 0].nbytes * self.get_seq_length() for layer in self.layers for y in layer)


@dataclass
class Narration:
    n: int
    frame: int
    start: float                # seconds
    end: float
    text: str
    p_skip: float | None        # None: the first one is not decided
    tokens: list[int]           # without end of text


@dataclass
class Step:
    """What one frame did to the stream; cache lengths and counter are those after the frame."""
    frame: int
    p_skip: float | None
    theta: float | None
    position: int
    text_tokens: int
    visual_tokens: int
    narration: Narration | None = None

    def trace(self) -> dict:
        return {"frame": self.frame, "p_skip": self.p_skip, "theta": self.theta, "narrate": self.narration is not None,
                "position": self.position, "text_tokens": self.text_tokens, "visual_tokens": self.visual_tokens}


class State:
    """All that a stream carries from frame to frame."""

    def __init__(self, narrator: Narrator):
        self.narrator = narrator
        self.cache = Cache()                                      # C^vid, C^nar
        self.memory = narrator.memory.initial_state().to(narrator.device)  # S_t
        self.read = self.memory                                   # the state that M_{t_n} is read from
        self.position = 0                                         # l
        self.segment = 0                                          # n
        self.narrated = 0                                         # frame of the last narration
        self.logits: list[Tensor] | None = None                   # of all that is fed, if a list is put here

    @torch.no_grad()
    def feed(self, tokens: Tokens, x: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        """One pass of the LLM over new tokens; returns the logits [V] of the last one."""
        e = self.narrator.embed(tokens, x, memory)                               # Alg. 2, line 9
        positions = torch.arange(self.position, self.position + len(tokens), device=e.device)   # line 10
        self.position += len(tokens)                                             # line 11
        hidden = self.narrator.run(e, positions, self.cache.place(tokens, positions), self.cache)
        if self.logits is not None:
            self.logits.extend(self.narrator.logits(hidden))
        return self.narrator.logits(hidden[-1])

    @torch.no_grad()
    def remember(self, x: Tensor):
        """CLAM absorbs a frame x [J, D]; published weights read out after its first (CLS) token."""
        memory, cls = self.narrator.memory, self.narrator.config.readout == "cls"
        if cls:
            self.read = self.memory = memory.step(x[None, :1], self.memory)
        self.memory = memory.step(x[None, cls:], self.memory)
        if not cls:
            self.read = self.memory

    @torch.no_grad()
    def recall(self) -> Tensor | None:
        """The memory tokens M_{t_{n-1}} [1, M, D] that open a segment; None without a memory."""
        return self.narrator.memory.read(self.read) if self.narrator.layout.M else None


def threshold(frame: int, narrated: int, config, static: bool) -> float:
    """The active threshold (§3.2): theta_low so soon after a narration, else theta."""
    return config.theta_low if not static and frame - narrated <= config.refractory * config.fps else config.theta


def generate(state: State, forced: list[int] | None = None) -> list[int]:
    """The narration y_n, greedily (Alg. 2, line 15); forced ids are fed instead, in one pass."""
    layout, n = state.narrator.layout, state.segment
    if forced is not None:
        state.feed(layout.closing(n) + layout.narration(n, forced))
        return forced
    ids, logits = [], state.feed(layout.closing(n))
    while (token := int(logits.argmax())) != layout.eot and len(ids) < state.narrator.config.max_new_tokens:
        ids.append(token)
        logits = state.feed(layout.narration(n, [token]))
    return ids


@torch.no_grad()
def narrate(narrator: Narrator, frames: Iterable[Tensor], static: bool = False, forced: dict[int, list[int]] | None = None,
            state: State | None = None) -> Iterator[Step]:
    """Algorithm 2: frame tokens x [J, D] in, one Step a frame out; a Step with a narration when there is one.

    It holds one frame at a time and never looks ahead. Frame 0 always narrates; so does the last one: if it has not,
    a second Step of that frame follows. `forced` gives narrations (frame -> ids) instead of the model's own decisions.
    """
    layout, config = narrator.layout, narrator.config
    state = State(narrator) if state is None else state                          # lines 1-3
    step = None
    for t, x in enumerate(frames):                                               # line 4
        x = x.to(narrator.device, narrator.connector[0].weight.dtype)
        fresh = t == state.narrated + 1                                          # b_new
        memory = state.recall() if fresh else None                               # M_{t_{n-1}}, lines 5 and 17
        state.remember(x)                                                        # line 5
        if t == 0:
            tokens = layout.first()
        else:
            tokens = layout.opening(state.segment) if fresh else layout.frame(state.segment)   # lines 6-8
        logits = state.feed(tokens, x, memory)                                   # lines 9-12
        p_skip = theta = None
        if t:
            p_skip = logits.softmax(-1)[layout.sep[0]].item()                    # Eq. 1
            theta = threshold(t, state.narrated, config, static)
        met = t == 0 or (p_skip <= theta if forced is None else t in forced)     # line 13
        step = finish(state, t, p_skip, theta, met, forced)
        yield step
    if step is not None and step.narration is None and forced is None:           # the last frame of a file
        yield finish(state, step.frame, step.p_skip, step.theta, True, forced)


def finish(state: State, t: int, p_skip: float | None, theta: float | None, met: bool, forced: dict | None) -> Step:
    """Alg. 2, lines 13-19: narrate if the trigger condition is met, then manage the context."""
    config, layout, narration = state.narrator.config, state.narrator.layout, None
    if met:
        start = 0.0 if t == 0 else (state.narrated + 1) / config.fps
        ids = generate(state, None if forced is None else forced[t])             # lines 14-15
        narration = Narration(state.segment, t, start, (t + 1) / config.fps, layout.decode(ids), p_skip, ids)   # line 16
        state.segment, state.narrated = state.segment + 1, t                     # line 19
        if config.prune:
            state.cache.drop_visual()                                            # line 18
            if config.last_k:
                state.cache.drop_narrations(state.segment - config.last_k)       # FlowNar-C
    return Step(t, p_skip, theta, state.position, state.cache.text, state.cache.visual, narration)


# ---------------------------------------------------------------------- output

def clock(seconds: float, separator: str = ".", digits: int = 1) -> str:
    """74.5 -> 00:01:14.5"""
    ticks = round(seconds * 10 ** digits)
    whole, part = divmod(ticks, 10 ** digits)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{separator}{part:0{digits}}"


class Writers:
    """The files that the user asked for; every line is flushed, so they are valid whenever the stream stops."""

    def __init__(self, jsonl: str | None, srt: str | None, vtt: str | None, trace: str | None, stack: ExitStack):
        self.files = {}
        for name, path in (("jsonl", jsonl), ("srt", srt), ("vtt", vtt), ("trace", trace)):
            if path:
                self.files[name] = stack.enter_context(open(path, "w", encoding="utf-8"))
        self.put("vtt", "WEBVTT\n\n")
        self.last: Step | None = None

    def put(self, name: str, text: str):
        if name in self.files:
            self.files[name].write(text)
            self.files[name].flush()

    def write(self, step: Step):
        if self.last is not None and self.last.frame != step.frame:  # the last frame may come twice: its second counts
            self.put("trace", json.dumps(self.last.trace()) + "\n")
        self.last = step
        y = step.narration
        if y is None:
            return
        self.put("jsonl", json.dumps(vars(y)) + "\n")
        self.put("srt", f"{y.n + 1}\n{clock(y.start, ',', 3)} --> {clock(y.end, ',', 3)}\n{y.text}\n\n")
        self.put("vtt", f"{clock(y.start, '.', 3)} --> {clock(y.end, '.', 3)}\n{y.text}\n\n")

    def close(self):
        if self.last is not None:
            self.put("trace", json.dumps(self.last.trace()) + "\n")


# ---------------------------------------------------------------------- python stream.py

def features(source: str, narrator: Narrator, vision: str | None, fps: float, device: str, dtype: torch.dtype):
    """(iterator of frame tokens [J, D], number of frames or None, the video or None) for a video or features file."""
    config = narrator.config
    if is_features(source):
        x = load_features(source, tokens=config.J, width=config.width)
        return iter(x), len(x), None
    video = Video(source, fps)
    encoder = VisionEncoder(vision or config.vision, config.grid, device, dtype)
    if encoder.width != config.width:
        raise BadData(f"the vision model gives features of width {encoder.width}, the narrator needs {config.width}")
    return (encoder(torch.from_numpy(frame)[None])[0] for frame in video), video.frames, video


def run(args: argparse.Namespace):
    device, dtype = choose(args.device, args.dtype)
    changes = {name: getattr(args, name) for name in ("fps", "theta", "theta_low", "refractory", "last_k")
               if getattr(args, name) is not None}
    narrator = Narrator.load(args.model, args.llm, device, dtype, **changes)
    frames, total, video = features(args.input, narrator, args.vision, narrator.config.fps, device, dtype)
    if args.compile:
        narrator.memory.compile()
        for layer in narrator.llm.model.layers:
            layer.mlp.compile(dynamic=True)
    with ExitStack() as stack:
        writers = Writers(args.jsonl, args.srt, args.vtt, args.trace, stack)
        stack.callback(writers.close)
        state, began, count, peak = State(narrator), time.perf_counter(), 0, 0
        progress = stack.enter_context(tqdm(total=total, unit="frame", desc="streaming", leave=False, mininterval=0.5))
        for step in narrate(narrator, frames, args.static, state=state):
            writers.write(step)
            count, peak = step.frame + 1, max(peak, step.text_tokens + step.visual_tokens)
            progress.update(count - progress.n)
            progress.set_postfix(cache=f"{step.text_tokens}+{step.visual_tokens} tokens", refresh=False)
            if step.narration:
                with tqdm.external_write_mode(file=sys.stdout):
                    print(f"[{clock(step.narration.end)}] {step.narration.text}", flush=True)
    seconds = time.perf_counter() - began
    if not count:
        raise BadData(f"{args.input} has no frames")
    print(f"{count} frames, {state.segment} narrations, {count / seconds:.1f} frames/s; cache at most {peak} tokens, now "
          f"{state.cache.text} text + {state.cache.visual} visual = {state.cache.bytes() / 1e6:.2f} MB", file=sys.stderr)
    if video is not None:
        video.report()


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be greater than 0")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main():
    parser = argparse.ArgumentParser(description="Narrate a video as it plays.")
    parser.add_argument("input", help="video file, or frame features [T, J, D]: FILE.safetensors[:NAME] or FILE.pt")
    parser.add_argument("--model", default=str(TOY), help="checkpoint folder or hub id (default: the bundled toy narrator)")
    parser.add_argument("--llm", help="base language model: folder, hub id or .gguf (default: what the checkpoint names)")
    parser.add_argument("--vision", help="vision encoder: folder or hub id (default: what the checkpoint names)")
    parser.add_argument("--fps", type=positive, help="frames per second to look at (default: the checkpoint's, 2)")
    parser.add_argument("--theta", type=float, help="narrate when p([SKIP]) <= theta (default 0.8)")
    parser.add_argument("--theta-low", type=float, help="the same soon after a narration (default 0.5)")
    parser.add_argument("--refractory", type=float, help="how soon, in seconds (default 4)")
    parser.add_argument("--static", action="store_true", help="one threshold, theta, all the time")
    parser.add_argument("--last-k", type=count, help="FlowNar-C: keep only the last k narrations in the cache")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps (default: the best there is)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--compile", action="store_true", help="torch.compile CLAM and the feed-forwards (needs a C++ compiler)")
    for name in ("jsonl", "srt", "vtt", "trace"):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"also write {name.upper() if name != 'trace' else 'one line per frame'}")
    args = parser.parse_args()
    command_line(lambda: run(args))


if __name__ == "__main__":
    main()
