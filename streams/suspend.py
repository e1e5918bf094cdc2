"""Suspend and resume (not in the paper): a stream as one file, from which it goes on as if it had never been stopped.

    python stream.py kitchen.mp4 --jsonl kitchen.jsonl --state kitchen.state     # kill it, and give the same line again

The file holds all that a Context (stream.py) carries from frame to frame: keys and values of the slots in use, the
memories' states, numbers; and how long the output files were. It is written between two frames, when nothing has been
read ahead: the passes to come are then those of a stream that was not interrupted, bit for bit. Whatever came after
that moment is cut off the output files, and narrated again. A live source cannot be seen again: it is saved after each
narration, too, its segment is restarted, and its output files keep every whole line. Ctrl-C saves a recording first.
No two processes share a file: it is locked until the stream, or its process, ends (`take_lock`).

What would go on in nonsense is refused: another source, tokenizer, connector or memory, other settings that shape the
cache; other thresholds and bounds are said. Language model and vision model prove themselves, on the prompt and on a
test picture: no large file is hashed, and device and dtype may differ. safetensors with numbers as JSON; no pickle.
"""
from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from streams.sources import is_pipe_or_url
from streams.subtitles import timestamp
from support.common.addresses import without_secrets
from support.common.disk import check_distinct, check_writable, write_tensors
from support.common.errors import BadData
from support.engine.passes import PassInput
from support.engine.slots import Slots
from support.files.predictions import digest

FORMAT = 2                             # format 1 can be read, too
EVERY = 60.0                           # seconds, about, between two savings; of a live source at most
# settings of a narrator that change nothing in what is saved; models and their LoRA prove themselves
MAY_DIFFER = "theta", "theta_low", "refractory", "max_new_tokens", "max_segment", "max_position"   # `tell_changes`
FREE = {"llm", "vision", "vision_second", "lora_rank", "lora_alpha", "lora_dropout", "memory_dropout", *MAY_DIFFER}
TENSORS = ("state", "readable", "memory", "history_state", "history")    # of a Context; some can be None, or missing
NUMBERS = ("position", "segment", "frame", "now", "last_narration_time", "p_skip", "theta")
BOUNDS = ("start_frame", "start_time", "restart_asked", "segment_start", "restarts", "rewound")
OLD_BOUNDS = ("began", "since", "asked", "mark", "count", "turned")             # their names in format 1
TOKENS = "kind", "segment", "number"                                            # of each slot of a Cache


class State:
    """The state file of one input (`run`, stream.py: Input). Without a path it does nothing.

    files       of the outputs, what Writers.written said at that moment; None in a new stream
    began       frames that had been narrated before; `skip`: those of a recording, which need not be encoded
    live        of a live source: the time of day at which its time was 0, and the last sentence reported
    stopping    the stream shall end as soon as it can be saved (`save_on_ctrl_c`); stopped: it has been saved for that

    As a context manager, it gives its lock back at the end.
    """

    def __init__(self, path: str | None, run):
        self.path, self.run, self.files, self.writers = path, run, None, None
        self.began, self.skip, self.live, self.saved = 0, 0, None, time.monotonic()
        self.stopping = self.stopped = False
        self.lock: BinaryIO | None = None

    def __enter__(self) -> State:
        return self

    def __exit__(self, *_) -> None:
        if self.lock is not None:
            release_lock(self.lock)
            self.lock = None

    def resume(self, narrator, encode: Callable[[Tensor], Tensor] | None, static: bool = False) -> bool:
        """Load the file, if it is there, into the new Context of the input -> whether there is anything left to do.

        encode: the vision model, if there is one, pictures uint8 [B, H, W, 3] -> frame tokens; static: as in `narrate`.
        BadData, before anything is changed, if the file is damaged, of another stream, or used by another process.
        """
        if not self.path:
            return True
        if self.stopping:                                      # before its turn came
            self.stopped = True
            return False
        run, path = self.run, Path(self.path)
        check_distinct(path, "" if run.live else run.source, *filter(None, run.files.values()))
        check_writable(path)
        self.lock = take_lock(path)
        self.settings = {name: getattr(narrator.config, name) for name in MAY_DIFFER} | {"static": static}
        self.whose, found = identity(narrator, run.source, run.live), path.exists()
        if found:
            about, tensors = read_state(path)
            refuse_another_stream(path, about.get("whose", {}), self.whose)
            if about["done"]:
                print(f"{path}: {without_secrets(run.source)} is narrated to its end; delete it to begin anew", file=sys.stderr)
                return False
        self.dtype, self.proof = str(narrator.llm.dtype), model_answers(narrator, run.context, encode)
        if found:
            self.load(path, about, tensors)
        return True

    def load(self, path: Path, about: dict, tensors: dict[str, Tensor]) -> None:
        """See `resume`."""
        run = self.run
        try:
            check_model_answers(path, tensors, self.proof, 1e-3 if about["dtype"] == self.dtype == "torch.float32" else 5e-2)
            check_files(path, run.files, about["files"]["bytes"], run.live)
            unpack(run.context, about["stream"], tensors)
            run.peak, self.files, self.live = about["peak"], about["files"], about["live"]
        except BadData:
            raise
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise damaged(path, error) from error
        self.began = run.count = run.context.frame
        if run.live:
            run.context.restart()                              # the view is no longer the same
        else:
            self.skip = self.began
        tqdm.write(f"{path}: goes on after {run.count} frames, {run.context.segment} narrations", sys.stderr)
        tell_changes(path, about.get("settings", {}), self.settings)

    def frames(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        """Those of a live source, whose time goes on by the wall clock. If the wait for one is interrupted, all that
        came before it is saved."""
        if self.live is not None:
            (began, reported), video = self.live, self.run.video
            elapsed = max(time.time() - began, self.run.context.now)
            video.first, video.reported = time.monotonic() - elapsed + 1 / video.fps, reported
        try:
            yield from frames
        except GeneratorExit:                                  # perhaps in the middle of a frame
            raise
        except BaseException:
            if self.path and self.writers is not None:
                self.save()
            raise

    def keep(self, writers, narrated: bool) -> None:
        """Between two frames: save the stream if it is time to, and if nothing has been read ahead."""
        self.writers = writers
        due = narrated and self.run.live or time.monotonic() - self.saved >= EVERY or self.stopping
        if self.path and due and not self.run.context.ahead:
            self.save()
            if self.stopping:
                self.stopped = True
                tqdm.write(f"{self.path}: saved; the same command goes on after {self.run.count} frames, at "
                           f"{timestamp(self.run.context.now)}", sys.stderr)

    def end(self, writers) -> None:
        """After the last frame."""
        self.writers = writers
        writers.finish()
        if self.path and self.run.context.frame:
            self.save(done=not self.run.live)

    def save(self, done: bool = False) -> None:
        """Write the file."""
        run = self.run
        if run.live and run.video.wall:
            self.live = datetime.fromisoformat(run.video.wall).timestamp() - run.video.time, run.video.reported
        about = {"whose": self.whose, "dtype": self.dtype, "done": done, "peak": run.peak, "live": self.live,
                 "files": self.writers.written(), "settings": self.settings}
        write_state(self.path, run.context, about, self.proof)
        self.saved = time.monotonic()


def write_state(path: str | Path, context, about: dict, more: dict[str, Tensor]) -> None:
    """A Context, with nothing read ahead, as a file, with what else there is to say `about` it, and `more` tensors."""
    stream, tensors = pack(context)
    tensors = {name: y.detach().cpu().clone() for name, y in (tensors | more).items()}      # none shares memory
    write_tensors(path, tensors, {"state": json.dumps(about | {"format": FORMAT, "stream": stream})})


def read_state(path: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """What `write_state` wrote -> about (its `stream`: the numbers of the Context), tensors. BadData if the file is
    damaged, another file, or one of another version."""
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["state"])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}    # no views of the file
        form = about["format"]
        if form == 1:
            about["stream"] = from_format_1(about["stream"])
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise damaged(path, error) from error
    if form not in (1, FORMAT):
        raise BadData(f"{path}: has format {form}, not {FORMAT}; go on with the version that wrote it, or delete it")
    return about, tensors


def damaged(path: str | Path, error: Exception) -> BadData:
    return BadData(f"{path}: is damaged, or no state of a stream ({type(error).__name__}); delete it, or give another "
                   f"--state (a recording then begins anew, and its outputs with it; those of a live source go on)")


# ---------------------------------------------------------------------- one process, and how it ends

def take_lock(path: Path) -> BinaryIO:
    """The open file .NAME.lock beside a file: locked for this process until `release_lock`, or until the process ends,
    in whatever way. BadData if another process has it."""
    name = path.with_name(f".{path.name}.lock")
    while True:
        try:
            name.parent.mkdir(parents=True, exist_ok=True)
            file = open(name, "ab")
        except OSError as error:
            raise BadData(f"{name}: cannot be written ({error.strerror}); choose another --state") from error
        try:
            if os.name == "nt":
                import msvcrt
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise BadData(f"{path}: is in use by another stream.py; end that one first, or give another "
                          f"--state") from error
        except OSError as error:                               # some network file systems have no locks
            print(f"{path}: cannot be locked here ({error.strerror}); see to it that no other process uses it",
                  file=sys.stderr)
            return file
        with suppress(OSError):                                # whoever had it may have removed it just now
            if os.path.samestat(os.fstat(file.fileno()), os.stat(name)):
                return file
        file.close()


def release_lock(file: BinaryIO) -> None:
    """Remove the file of `take_lock` while it is still locked, so that nobody holds a lock of a file that is gone;
    Windows removes only what is closed, and what nobody else has opened."""
    if os.name == "nt":
        file.close()
    with suppress(OSError):
        os.unlink(file.name)
    file.close()


@contextmanager
def save_on_ctrl_c(runs: list) -> Iterator[None]:
    """Within it, Ctrl-C (or SIGTERM) ends recordings that have a state as soon as they can be saved: after the frames
    that have been read ahead. Then it is raised; a second one is raised at once. Other inputs are left as they are: a
    live source is always saved, and one that comes through a pipe could keep Ctrl-C waiting."""
    patient = all(run.state.path and not run.live and not is_pipe_or_url(run.source) for run in runs)
    if not patient or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_) -> None:
        for run in runs:
            run.state.stopping = True
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if any(run.state.stopped for run in runs):
        raise KeyboardInterrupt


# ---------------------------------------------------------------------- what a stream carries

def pack(context) -> tuple[dict, dict[str, Tensor]]:
    """A Context, with nothing read ahead -> its numbers, for JSON, and its tensors."""
    cache = context.cache
    numbers = {name: getattr(context, name) for name in NUMBERS}
    numbers["opens"] = context.opening is not None
    numbers["narrated"] = list(context.narrated)
    numbers["bounds"] = {name: getattr(context.bounds, name) for name in BOUNDS}
    tensors = {}
    for name in TENSORS:
        tensor = getattr(context, name, None)
        if tensor is not None:
            tensors[name] = tensor
    for name in TOKENS:
        tensors[f"cache.{name}"] = torch.from_numpy(getattr(cache, name)[cache.used])
    if context.waiting:
        tensors["waiting"] = torch.stack(context.waiting)
    for name, slots in all_slots(cache).items():
        used = torch.from_numpy(np.flatnonzero(slots.used))
        numbers[name] = len(slots.used)
        tensors[f"{name}.slots"] = used
        for key, buffer in buffers(name, slots).items():
            tensors[key] = buffer[used.to(slots.positions.device)]
    if cache.routed is not None:
        tensors["fewer.of"] = torch.from_numpy(cache.routed.slot_of)
    return numbers, tensors


def from_format_1(numbers: dict) -> dict:
    """The numbers of a state of format 1, as those of today's."""
    p_skip, theta, now = numbers["decided"]
    bounds = {name: numbers["bounds"][old] for name, old in zip(BOUNDS, OLD_BOUNDS)}
    return numbers | {"now": now, "last_narration_time": numbers["told"], "p_skip": p_skip, "theta": theta,
                      "opens": numbers["new"] or numbers["frame"] == 0, "narrated": numbers["said"], "bounds": bounds}


def unpack(context, numbers: dict, tensors: dict[str, Tensor]) -> None:
    """The same into a new Context, whose buffers are there already (`model_answers`): each token into the slot that it had."""
    cache = context.cache
    device = cache.positions.device
    for name in NUMBERS:
        setattr(context, name, numbers[name])
    for name in BOUNDS:
        setattr(context.bounds, name, numbers["bounds"][name])
    for name in TENSORS:
        if hasattr(context, name):
            setattr(context, name, tensors[name].to(device) if name in tensors else None)
    context.opening = None
    if numbers["opens"]:
        layout = context.layout
        context.opening = layout.opening(context.segment) if context.frame > 0 else layout.first()
    context.narrated.extend(numbers["narrated"])
    context.waiting = [*tensors["waiting"].to(device)] if "waiting" in tensors else []
    for name, slots in all_slots(cache).items():
        slots.grow(numbers[name] - len(slots.used))
        used = tensors[f"{name}.slots"]
        slots.used[used.numpy()] = True
        slots.release(np.zeros(0, int))                        # none: only counts those that are free
        for key, buffer in buffers(name, slots).items():
            buffer[used.to(device)] = tensors[key].to(buffer)
    for name in TOKENS:
        getattr(cache, name)[cache.used] = tensors[f"cache.{name}"].numpy()
    if cache.routed is not None:
        cache.routed.slot_of = tensors["fewer.of"].numpy()


def all_slots(cache: Slots) -> dict[str, Slots]:
    """Those of all layers, and those of layers with routers, if there are any (baselines/mod.py).

    The name of the latter is part of the file's format.
    """
    if cache.routed is None:
        return {"cache": cache}
    return {"cache": cache, "fewer": cache.routed}


def buffers(name: str, slots: Slots) -> dict[str, Tensor]:
    """What has an entry for each slot: positions, and the keys and values of each layer."""
    tensors = {f"{name}.positions": slots.positions}
    for kind, layers in (("keys", slots.keys), ("values", slots.values)):
        for i, buffer in enumerate(layers):
            tensors[f"{name}.{kind}.{i}"] = buffer
    return tensors


# ---------------------------------------------------------------------- whose state it is

def identity(narrator, source: str, live: bool) -> dict:
    """What must be the same in both commands, by the names that messages give it; but see `model_answers`."""
    modules = {name: module for name, module in narrator.named_children() if name != "llm"}
    routers = [layer.router for layer in narrator.llm.model.layers if hasattr(layer, "router")]
    modules["routers"] = torch.nn.ModuleList(routers)
    weights = {f"weights of its {name}": digest(module)[:12] for name, module in modules.items()}
    vocabulary = json.dumps(narrator.layout.tokenizer.get_vocab(), sort_keys=True)
    settings = {name: value for name, value in asdict(narrator.config).items() if name not in FREE}
    return {"source": mark_of(source, live), "tokenizer": sha256(vocabulary.encode()).hexdigest()[:12], **settings,
            **weights}


def mark_of(source: str, live: bool) -> str:
    """Of a file its size and a digest of its first and last MB, for it may move; of any other source, its name."""
    path, kind, name = re.fullmatch(r"(.+?(\.safetensors|$))(.*)", source, re.DOTALL | re.IGNORECASE).groups()
    if live or is_pipe_or_url(source) or not os.path.isfile(path):
        return without_secrets(source)
    with open(path, "rb") as file:
        marks, size = sha256(file.read(2 ** 20)), file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 2 ** 20))
        marks.update(file.read())
    return f"{size} bytes, {marks.hexdigest()[:12]}{name}"


def refuse_another_stream(path: Path, there: dict, here: dict) -> None:
    """BadData if a state is not of this stream."""
    for name, value in here.items():
        if there.get(name) != value:
            raise BadData(f"{path}: was saved with another {name} ({there.get(name)}; here {value}); give the same, or "
                          f"another --state")


def tell_changes(path: Path, there: dict, here: dict) -> None:
    """Say which thresholds and bounds differ from those of a state; earlier versions did not save them."""
    changes = [f"{name} = {value} (was {there[name]})" for name, value in here.items()
               if name in there and there[name] != value]
    if changes:
        tqdm.write(f"{path}: goes on with {', '.join(changes)}", sys.stderr)


@torch.no_grad()
def model_answers(narrator, context, encode: Callable[[Tensor], Tensor] | None) -> dict[str, Tensor]:
    """What the models answer to a test: the logits [V] after the prompt, the tokens [J, D] of a picture. The cache of
    the new Context then has buffers, and nothing in them."""
    cache, ids = context.cache, narrator.layout.prompt
    into = cache.take(len(ids))
    plan = torch.tensor([ids, range(len(ids)), into.tolist()]).to(narrator.device)
    proof = {"proof.language": context.run(PassInput(plan, None, None, cache, slice(-1, None)))[0]}
    cache.keep(np.zeros(len(cache.used), bool))
    if encode is not None:
        channels = 6 if narrator.config.width_second else 3    # features.py: pairs
        picture = torch.arange(48 * 64 * channels).remainder(251).to(torch.uint8).view(1, 48, 64, channels)
        proof["proof.vision"] = encode(picture)[0]
    return proof


def check_model_answers(path: Path, there: dict[str, Tensor], here: dict[str, Tensor], tolerance: float) -> None:
    """BadData if a model does not answer as the one of the state did, to a relative `tolerance`."""
    for name, answer in here.items():
        mine, other = (y.float().cpu() - y.float().mean().cpu() for y in (answer, there[name]))
        if mine.shape != other.shape or not (mine - other).norm() <= tolerance * other.norm():
            which = "language model, or with another LoRA" if name == "proof.language" else "vision model"
            raise BadData(f"{path}: was saved with another {which}; give the same, or another --state")


def check_files(path: Path, files: dict[str, str | None], sizes: dict[str, int], live: bool) -> None:
    """BadData if the outputs are not those that a state goes on with, each at least as long as it was. Those of a live
    source are appended to, whatever is in them: somebody may have put an old one away."""
    files = {name: file for name, file in files.items() if file}
    if files.keys() != sizes.keys():
        listed = " ".join(f"--{name}" for name in sizes) or "no output files"
        raise BadData(f"{path}: was saved with {listed}; give the same, or another --state")
    for name, file in files.items() if not live else ():
        if not os.path.exists(file) or os.path.getsize(file) < sizes[name]:
            there = "shorter than it was" if os.path.exists(file) else "missing"
            raise BadData(f"{file}: is {there}, and {path} goes on with it; put it back, or give another --state")
