"""Streaming narration (paper §3.2, 3.4, Alg. 1 and 2): frames in, time-stamped sentences out, in bounded memory.

    python stream.py toy/kitchen.mp4
    python stream.py VIDEO_OR_FEATURES --model DIR_OR_HUB_ID --last-k 10 --srt video.srt
    python stream.py camera --model DIR_OR_HUB_ID                    # or rtsp://..., http://..., - (support/sources.py)

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
memory) is the same loop with `prune` off. Not in the paper: what bounds a stream without end (support/bounds.py).
"""
import argparse
import atexit
import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from narrator import MEMORY, NARRATION, VISUAL, Config, Narrator, Tokens, VisionEncoder, visible
from support.bounds import PART, Bounds, live_bounds
from support.camera import open_pictures, paced
from support.checks import check_stream, check_vision
from support.common import (BadData, choose, command_line, one_line, positive_float, positive_int,
                            progress, say_once)
from support.decode import Part, Slots, Upcoming, guess
from support.explain import LEGEND, explain
from support.features import is_features, open_frames
from support.options import (Parser, config_changes, input_options, lookahead_option, model_options,
                             trigger_options)
from support.serve import Page, Pages, page_options
from support.sources import all_live, masked
from support.speech import Speaker, speech_options
from support.subtitles import Writers, outputs, timestamp
from support.suspend import State, save_on_ctrl_c
from support.together import Ask, Failed, side_by_side

TOY, TOY_SIZE = Path(__file__).parent / "toy" / "checkpoint", (96, 96)      # the bundled narrator, its videos' pixels
GUESSED = 3                             # words, at most, that go along with a word because they followed it before


class Cache(Slots):
    """C^vid and C^nar: the keys and values of all layers, in slots, with the kind, segment and number of each token.

        slot        0       1       2       3       4       5       6       7       8 ...
        token       p       [       x       ]       A:      y0      free    free    free
        position    0       1       2       3       6       7       EMPTY   EMPTY   EMPTY

    Pruning frees slots, and nothing is ever moved (support/decode.py). A slot in use without a kind holds a token of a
    frame that was read ahead.
    """

    def __init__(self, device: torch.device | str = "cpu", capacity: int = 256):
        super().__init__(device, capacity)
        self.kind, self.segment, self.number = np.full((3, capacity), -1)

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
        """Numbers of the first and the last narration with tokens in C^nar; [] if there are none."""
        numbers = self.number[self.kind == NARRATION]
        return [int(numbers.min()), int(numbers.max())] if len(numbers) else []

    def insert(self, tokens: Tokens, slots: np.ndarray) -> None:
        """From now on the slots hold these tokens."""
        self.kind[slots], self.segment[slots], self.number[slots] = tokens.kind, tokens.segment, tokens.number

    def grow(self, more: int) -> None:
        super().grow(more)
        self.kind, self.segment, self.number = (
            np.pad(y, (0, len(self.used) - len(y)), constant_values=-1) for y in (self.kind, self.segment, self.number))

    def keep(self, seen: np.ndarray) -> int:
        """Free every slot that is not `seen`, bool [slots]; returns how many tokens were removed."""
        gone = np.flatnonzero(self.used & ~seen)
        self.kind[gone] = -1
        self.release(gone)
        return len(gone)


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
    restart: bool = False       # the segment was restarted before the frame
    kept: list[int] | None = None       # Cache.kept

    def trace(self) -> dict:
        return {"frame": self.frame, "p_skip": self.p_skip, "theta": self.theta, "narrate": self.narration is not None,
                "position": self.position, "text_tokens": self.text_tokens, "visual_tokens": self.visual_tokens,
                "forced": self.forced, "kept": self.kept} | (
                    {"restart": True} if self.restart else {})


class Context:
    """All that a stream carries from frame to frame, with the parts of Algorithm 2 that act on it.

    run     passes of the language model, for streams that share them (default: the narrator's own)
    watch   a context manager for each stage of the loop: memory, frame, trigger, text; for measurements
    """

    def __init__(self, narrator: Narrator, run: Callable | None = None, watch: Callable = lambda stage: nullcontext()):
        self.narrator, self.watch = narrator, watch
        self.run = run or (lambda part: narrator.decoder([part])[0])
        self.cache = Cache(narrator.device)                                # C^vid, C^nar
        self.state = narrator.memory.initial_state().to(narrator.device)   # S_t
        self.readable = self.state                                         # the state that M_t is read from
        self.waiting: list[Tensor] = []                                    # frames that it has not absorbed yet
        self.read = narrator.memory.reader()
        self.memory: Tensor | None = None                                  # M_{t_{n-1}}
        self.history_state = narrator.narration_memory.initial_state().to(narrator.device)
        self.read_history = narrator.narration_memory.reader()
        self.history: Tensor | None = None                                 # what is read from it (Table 15)
        self.position = 0                                                  # l
        self.segment, self.new = 0, False                                  # n, b_new
        self.last_narrated, self.told = 0, 0.0                             # t_{n-1}, and in seconds
        self.frame, self.decided = 0, (None, None, 0.0)                    # t to come; p_skip, theta, seconds before
        self.bounds = Bounds(narrator, self.run)                           # of a segment, and of l
        self.upcoming: Upcoming | None = None                              # frames to come
        self.ahead: deque[tuple[list[int], np.ndarray, Tensor]] = deque()  # read before their turn: ids, slots, logits
        self.said: deque[int] = deque(maxlen=500)                          # ids of the latest narrations
        self.guessed = 0                                                   # how many words are guessed from these
        self.logits: list[Tensor] | None = None                            # a list put here collects all logits

    def update_memory(self, x: Tensor):
        """Line 5, S_t: the memory absorbs a frame x [J, D]. Nothing reads S_t before a segment ends, so frames wait,
        at most 8, and are absorbed together."""
        self.waiting.append(x)
        if len(self.waiting) == 8:
            self.absorb()

    def absorb(self):
        """S_t after all frames; published weights read M_t after the first (CLS) token of the last one."""
        if self.waiting:
            with self.watch("memory"):
                memory, x = self.narrator.memory, torch.cat(self.waiting)[None]                       # [1, T J, D]
                later = self.narrator.config.J - 1 if self.narrator.config.readout == "cls" else 0
                self.state = self.readable = memory.step(x[:, :x.shape[1] - later], self.state)
                if later:
                    self.state = memory.step(x[:, -later:], self.readable)
                self.check(self.state)
                self.waiting = []

    def read_memory(self, said: list[int] | None = None):
        """Lines 5 and 17: the memory tokens M_t, kept for the next segment, and those of what has been said so far."""
        self.absorb()
        with self.watch("memory"):
            if self.narrator.layout.M:
                self.memory = self.read(self.readable)
            if self.narrator.layout.N and said is not None:
                said, _ = self.narrator.spoken([(self.segment, said)])
                self.history_state = self.narrator.narration_memory.step(said, self.history_state)
                self.history = self.read_history(self.history_state)

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> Tensor:
        """Lines 9-12, Fig. 7: new tokens through the language model; returns the logits [V] of the last one.

        With a frame x, the frames after it go along in the same pass, as if none of them ended the segment; with words,
        those that are guessed to follow. They are there when their turn comes, and removed when something else comes.
        """
        with self.watch("text" if x is None else "frame"):
            if self.ahead and self.ahead[0][0] != tokens.ids:
                self.forget()
            if x is None:
                self.said.extend(i for i, kind in zip(tokens.ids, tokens.kind) if kind == NARRATION)
            if not self.ahead:
                self.read_ahead(tokens, [] if x is None else [x, *self.upcoming.see(self.upcoming.K - 1)])
            _, slots, logits = self.ahead.popleft()
            self.check(logits)
            self.cache.insert(tokens, slots)
            self.position += len(tokens)                                                        # line 11
            return logits

    def read_ahead(self, tokens: Tokens, frames: list[Tensor]):
        """One pass over tokens, with the first of the frames, and over all further frames or the words guessed."""
        narrator, layout = self.narrator, self.narrator.layout
        guessed = [] if frames else guess(list(self.said), self.guessed, layout.assistant[0])
        pieces = [tokens.ids] + [layout.frame(self.segment).ids for _ in frames[1:]] + [[word] for word in guessed]
        ids = list(chain(*pieces))
        slots = self.cache.take(len(ids))
        plan = torch.tensor([ids, range(self.position, self.position + len(ids)), slots.tolist()])   # line 10
        last = slice(len(tokens) - 1, None, len(pieces[-1]))
        memory = narrator.embed_memory(self.memory, self.history) if min(tokens.ids) <= MEMORY else None
        logits = self.run(Part(plan.to(narrator.device), torch.stack(frames) if frames else None,    # lines 9, 12
                               memory, self.cache, last if self.logits is None else slice(None)))
        if self.logits is not None:
            self.logits.extend(logits)
            logits = logits[last]
        self.ahead.extend(zip(pieces, np.split(slots, np.cumsum([len(piece) for piece in pieces[:-1]])), logits))

    def check(self, numbers: Tensor) -> None:
        """BadData, before anything is decided or saved, if a number is NaN or infinite."""
        if not isfinite(numbers.sum().item()):          # a sum with NaN or infinity is not finite
            raise BadData(f"frame {self.frame}: the model's numbers are not finite; try --dtype "
                          f"bfloat16 or float32 (if that does not help, its weights or the "
                          f"features of this frame are damaged)")

    def forget(self):
        """Remove from the cache what was read ahead."""
        self.ahead.clear()
        self.cache.keep(self.cache.kind >= 0)

    def p_skip(self, logits: Tensor) -> float:
        """Eq. 1: the probability of [SKIP], from logits [V]."""
        with self.watch("trigger"):
            return logits.softmax(-1)[self.narrator.layout.skip].item()

    def discard(self, now: int) -> int:
        """Line 18: remove what segment `now` may not see (FlowNar-C: narrations, too); returns how many tokens."""
        cache, config = self.cache, self.narrator.config
        if self.ahead:
            self.forget()
        return cache.keep(visible(cache.kind, cache.segment, cache.number, now, config.last_k, config.prune))

    def restart(self):
        """Ask for a restart of the present segment before the next frame, as after an outage of a camera."""
        self.bounds.asked = True

    def reopen(self, t: int, now: float) -> bool:
        """Restart the segment before frame t at `now` seconds, if it is time (support/bounds.py): the memory alone has
        then seen its frames, and the counter is where these began."""
        if due := self.bounds.overdue(t, now, self.new or not t):
            self.read_memory()
            self.discard(now=self.segment + PART)
            self.position = self.bounds.mark
        return due


def threshold(frame: float, last_narrated: float, config, static: bool) -> float:
    """The active threshold (§3.2): theta_low soon after a narration, else theta."""
    soon = frame - last_narrated <= config.refractory * config.fps + 1e-6
    return config.theta_low if soon and not static else config.theta


def generate(context: Context, given: list[int] | None = None) -> list[int]:
    """The narration y_n, greedily (line 15); given ids are fed instead of the model's own."""
    layout, n = context.narrator.layout, context.segment
    ids, logits = [], context.feed(layout.closing(n))
    for i in range(context.narrator.config.max_new_tokens if given is None else len(given)):
        token = int(logits.argmax()) if given is None else given[i]
        if given is None and token == layout.eot:
            break
        ids.append(token)
        logits = context.feed(layout.narration(n, [token]))
    return ids


@torch.no_grad()
def narrate(narrator: Narrator, frames: Iterable[Tensor], static: bool = False,
            forced: dict[int, list[int]] | None = None, context: Context | None = None,
            lookahead: int = 1, clock: Callable[[], float] | None = None) -> Iterator[Decision]:
    """Algorithm 2: frame tokens x [J, D] in, one Decision a frame out, with the narration if there is one.

    As published, frame 0 always narrates, and so does the last frame: if it has not, a second Decision of it follows.
    `forced` gives narrations (frame -> ids) instead of the model's own, the first at frame 0; `context` is a new one,
    or one that goes on with frame `context.frame` (support/suspend.py). With lookahead K, one pass of the model
    reads K frames; with 1, it never looks ahead. `clock`: seconds of the frame just taken; default (t + 1) / fps.
    """
    layout, config = narrator.layout, narrator.config
    c = Context(narrator) if context is None else context                             # lines 1-3
    if c.upcoming is not None or forced is not None and 0 not in forced:
        raise ValueError("a stream begins with a new Context and a narration of frame 0")
    p_skip, theta, now = c.decided
    c.upcoming = Upcoming(frames, (config.J, config.width), narrator.connector[0].weight, lookahead, clock)
    c.guessed = 0 if forced else GUESSED
    for t, x in enumerate(chain(c.upcoming, [None]), c.frame):                        # line 4; None: no more frames
        ended, again = x is None, False
        if ended:
            t, fed = t - 1, Tokens()                                                  # the last frame, once more
            if t < 0 or c.last_narrated == t or forced is not None:
                return
        else:
            now = (t + 1) / config.fps if clock is None else c.upcoming.time
            again = c.reopen(t, now)
            c.update_memory(x)                                                        # line 5
            if c.new:
                fed, c.new = layout.opening(c.segment), False                         # lines 6-8: [M_{t_{n-1}}; X_t]
                c.bounds.mark = c.position + fed.kind.index(VISUAL)
            else:
                fed = (layout.reopening if again else layout.frame)(c.segment) if t else layout.first()
            logits = c.feed(fed, x)                                                   # lines 9-12
            if t:
                p_skip = c.p_skip(logits)                                             # Eq. 1
                theta = threshold(now * config.fps, c.told * config.fps, config, static)
        narration, pruned = None, 0
        must = (t in forced) if forced is not None else (t == 0 or ended)
        if must or (forced is None and p_skip <= theta):                              # line 13
            start, c.told, c.last_narrated = c.told, now, t                           # line 14
            ids = generate(c, None if forced is None else forced[t])                  # line 15
            text = one_line(layout.decode(ids))                                       # line 16
            narration = Narration(c.segment, t, start, now, text, p_skip, ids)
            c.read_memory(ids)                                                        # line 17
            pruned = c.discard(now=c.segment + 1)                                     # line 18
            c.position = c.bounds.turn_back(c.cache, c.position)
            c.segment, c.new = c.segment + 1, True                                    # line 19
        c.frame, c.decided = t + 1, (p_skip, theta, now)
        yield Decision(t, p_skip, theta, c.position, c.cache.text, c.cache.visual, narration, must, fed, pruned, again,
                       c.cache.kept)


# ---------------------------------------------------------------------- python stream.py

class Input:
    """One input of the command line: where its narrations go, and what came of it."""

    def __init__(self, source: str, name: str, files: dict[str, str | None], live: bool):
        self.source, self.name, self.files, self.live = source, name, files, live
        self.context, self.video, self.total, self.count, self.peak = None, None, None, 0, 0
        self.page, self.state = Page(source, wanted=False), State(files.pop("state", None), self)

    def decisions(self, narrator: Narrator, encoder: VisionEncoder | None, args: argparse.Namespace,
                  ask: Ask) -> Iterator[tuple[Decision, dict | None]]:
        """Narrate it, and write the files: each Decision, with the row of its narration in the JSONL if it has one."""
        with self.state:
            yield from self.narrated(narrator, encoder, args, ask)

    def narrated(self, narrator: Narrator, encoder: VisionEncoder | None, args: argparse.Namespace,
                 ask: Ask) -> Iterator[tuple[Decision, dict | None]]:
        """See `decisions`, which locks the state."""
        self.context = Context(narrator, lambda part: ask(narrator.decoder, part))
        lookahead = 1 if self.live or args.pace else args.lookahead
        if not self.state.resume(narrator, encoder and partial(ask, encoder.several), args.static):
            return
        frames, self.total, self.video = open_frames(
            self.source, narrator.config, lambda pictures: ask(encoder.several, self.page.see(pictures)), lookahead,
            encoder and 2 * encoder.image_size, partial(open_pictures, args=args, wait=ask.wait), self.state.skip)
        unknown = self.video is None or self.video.size is None and not self.live      # features; a pipe
        if args.model is None and not unknown and self.video.size != TOY_SIZE:
            say_once("The bundled narrator knows only its miniature kitchen (toy/kitchen.mp4). For other videos, "
                     "give --model a narrator trained for them, such as zeyun-zhong/flownar-1B-ego4d")
        if args.pace:
            frames = paced(frames, args.pace * narrator.config.fps, ask.wait)
        with ExitStack() as stack:
            source, clock = "" if self.live else self.source, None
            writers = Writers(self.files, stack, source, self.state.files, self.live)
            if self.live:
                frames = self.video.unbroken(self.state.frames(frames), self.context.restart)
                clock = lambda: self.video.time
                stack.callback(self.report, time.perf_counter())               # it ends with Ctrl-C, or an error
            stack.callback(getattr(self.video, "close", lambda: None))
            stack.enter_context(self.page)
            for decision in narrate(narrator, frames, args.static, None, self.context, lookahead, clock):
                row = decision.narration and vars(decision.narration)
                row = self.video.told(row) if row and self.live else row
                trace = decision.trace() | ({"time": self.video.time} if self.live else {})
                writers.trace(trace)
                if row:
                    writers.sentence(row)
                self.page.tell(trace, row)
                self.count = decision.frame + 1
                self.peak = max(self.peak, decision.text_tokens + decision.visual_tokens)
                self.state.keep(writers, row is not None)
                yield decision, row
                if self.state.stopped:
                    return
            self.state.end(writers)
        if not self.count:
            raise BadData(f"{masked(self.source)} has no frames")

    def report(self, began: float):
        if not self.count:
            return
        cache, name = self.context.cache, f"{self.name}: " if self.name else ""
        rate = (self.count - self.state.began) / (time.perf_counter() - began)
        tqdm.write(f"{name}{self.count} frames, {self.context.segment} narrations{self.context.bounds.report()}, "
                   f"{rate:.1f} frames/s; cache at most {self.peak} tokens, now "
                   f"{cache.text} text + {cache.visual} visual = {cache.bytes() / 1e6:.2f} MB", file=sys.stderr)
        if self.video is not None:
            self.video.report()


def run_files(args: argparse.Namespace):
    live = all_live(args.input, args.live)
    videos = not all(map(is_features, args.input))
    check_stream(args, live)
    (device, dtype), runs = choose(args.device, args.dtype), [Input(*one, live) for one in outputs(args)]
    pages = Pages(args, runs)
    if videos:
        check_vision(args.model or str(TOY), args.vision, Config.vision)
    narrator = Narrator.load(args.model or str(TOY), args.llm, device, dtype, **config_changes(args)).merge()
    encoder = narrator.vision_encoder(args.vision, dtype) if videos else None
    if live:
        print(f"live: newest pictures first; {live_bounds(narrator, config_changes(args))}", file=sys.stderr)
    if narrator.plain:
        print(f"{narrator.config.llm} {narrator.plain}: it takes the plain path, which is slower", file=sys.stderr)
    if args.compile:
        narrator.memory.compile()
        narrator.decoder.compile()
    jobs, began = [partial(run.decisions, narrator, encoder, args) for run in runs], time.perf_counter()
    width = len(runs) if live else min(args.batch, len(runs))                  # no camera waits for another one's end
    with save_on_ctrl_c(runs), closing(side_by_side(jobs, width)) as items:
        failed = show(items, runs, narrator, args)
    for run in runs:
        if run not in failed and not live:
            run.report(began)
    if failed:
        raise BadData(f"{len(failed)} of {len(runs)} inputs could not be narrated to their end")
    pages.wait()


def show(items: Iterator, runs: list[Input], narrator: Narrator, args: argparse.Namespace) -> list[Input]:
    """Print what comes of all inputs: (number of the input, its Decision and row, or Failed); returns what failed."""
    failed, delay = [], 0 if runs[0].live else 0.5
    if args.explain:
        print(LEGEND, flush=True)
    counting = progress(None, "streaming", unit="frame", leave=False, mininterval=0.5, delay=delay)
    with counting as bar, Speaker(args) as speaker:
        for number, item in items:
            run, lines = runs[number], []
            name = run.name and run.name + " "
            if isinstance(item, Failed):
                if len(runs) == 1 or not isinstance(item.error, BadData | OSError):
                    raise item.error
                failed.append(run)
                tqdm.write(f"{run.name}: {item.error}", sys.stderr)
            else:
                decision, row = item
                endless = any(run.count and run.total is None for run in runs)
                bar.total = None if endless else sum(run.total or 0 for run in runs)
                bar.update(sum(run.count for run in runs) - bar.n)
                state = {"cache": f"{decision.text_tokens}+{decision.visual_tokens} tokens"}
                if run.live and run.video.latencies:
                    state["late"] = f"{run.video.latencies[-1]:.1f} s"
                bar.set_postfix(state, refresh=False)
                if args.explain:
                    lines.append(name + explain(decision, narrator.layout, narrator.config, args.static))
                if row and (args.repeats or "repeat" not in row):
                    lines.append(f"[{name}{timestamp(row['end'])}] {row['text']}")
                    speaker.say(row["text"])
            if lines:
                with tqdm.external_write_mode(file=sys.stdout):
                    print("\n".join(lines), flush=True)
    return failed


def main():
    parser = Parser(description="Narrate a video as it plays.")
    input_options(parser)
    parser.add_argument("--batch", type=positive_int, default=16, metavar="B",
                        help="inputs that are narrated at once and share the passes of the models "
                             "(default 16); the narrations are those of each alone in float32, in "
                             "bfloat16 up to rounding")
    parser.add_argument("--fps", type=positive_float, help="frames per second (default: the checkpoint's, 2)")
    model_options(parser)
    trigger_options(parser)
    parser.add_argument("--keep-newline", action="store_true", default=None,
                        help="with --last-k: keep every newline, as the published code does (the cache then grows)")
    lookahead_option(parser)
    parser.add_argument("--compile", action="store_true", help="compile CLAM and, for one input, the model's passes")
    parser.add_argument("--explain", action="store_true", help="print what each frame fed, decided and pruned")
    for name in ("jsonl", "srt", "vtt"):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"also write {name.upper()}")
    parser.add_argument("--trace", metavar="FILE", help="also write one line per frame")
    parser.add_argument("--state", metavar="FILE", help="save all that a stream carries; go on if FILE is there")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace output files that stream.py has not written, and narrations beside the video "
                             "under its name (a.srt beside a.mp4), which train.py --data takes for your own")
    page_options(parser)
    speech_options(parser)
    args = parser.parse_args()
    command_line(lambda: run_files(args))


if __name__ == "__main__":
    atexit.register(gc.freeze)                                                 # or Ctrl-C takes seconds to free torch
    main()
