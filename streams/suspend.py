"""Suspend and resume (not in the paper): a stream is saved in one file, and continues from it.

    python stream.py kitchen.mp4 --jsonl kitchen.jsonl --state kitchen.state

Kill this command and repeat it: the stream continues as if it had never been stopped.

The file holds everything that a Context (stream.py) carries from frame to frame: the keys and
values of the slots in use, the states of the memories, and numbers. It also holds the length of
each output file. It is written between two frames, at a moment when nothing has been read ahead.
The passes after that moment are those of a stream that was not interrupted, bit for bit. Output
written after the last save is truncated and narrated again.

A live source cannot be seen again. Therefore it is also saved after each narration, its segment is
restarted, and its output files keep every whole line. Ctrl-C saves a recording before it ends. No
two processes share a file: it is locked until the stream or its process ends (`take_lock`).

A state that does not belong to this stream is refused. That is a state with another source,
tokenizer, connector or memory, or with other settings that shape the cache. Other thresholds and
bounds are allowed and reported. The language model and the vision model are tested by their answers
to the prompt and to a test picture. So no large file is hashed, and device and dtype may differ.

The format is safetensors, with the numbers as JSON in the metadata; no pickle.
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

from streams.fast import empty
from streams.sources import is_pipe_or_url
from streams.subtitles import hash_of_end, timestamp
from support.common.disk import check_distinct, check_writable, write_tensors
from support.common.errors import BadData
from support.common.text import without_secrets
from support.engine.passes import PassInput
from support.engine.slots import Slots
from support.files.predictions import digest

FORMAT = 2                             # format 1 can be read, too
# seconds between two saves, roughly; a live source is also saved after each narration
EVERY = 60.0
DIGEST_BYTES = 2 ** 20                 # at each end of a source file

# Settings of a narrator that may change between save and resume. A change is reported.
MAY_DIFFER = (
    "theta", "theta_low", "refractory", "max_new_tokens", "max_segment", "max_position",
)
# Settings that are not compared. The models and their LoRA are compared by their answers.
FREE = {
    "llm", "vision", "vision_second", "lora_rank", "lora_alpha", "lora_dropout", "memory_dropout",
    *MAY_DIFFER,
}

# Attributes that are saved: of a Context (tensors that can be None or missing, and numbers),
TENSORS = ("state", "readable", "memory", "history_state", "history")
NUMBERS = ("position", "segment", "frame", "now", "last_narration_time", "p_skip", "theta")
# of its Bounds (and their names in format 1),
BOUNDS = ("start_frame", "start_time", "restart_asked", "segment_start", "restarts", "rewound")
OLD_BOUNDS = ("began", "since", "asked", "mark", "count", "turned")
# and of its Cache, for each slot in use
TOKENS = ("kind", "segment", "number")


class State:
    """The state file of an input, its owner (commands/stream.py: Input).

    Without a path, it does nothing.

    saved_files     `Writers.written` at the moment of the save; None in a new stream
    first_frame     the number of frames that had been narrated before
    skip            the number of frames of a recording that need not be encoded again
    live_clock      of a live source: (the time of day at which its time was 0, the sentence
                    reported last); None for a recording
    stopping        the stream shall end as soon as it can be saved (`save_on_ctrl_c`)
    stopped         the stream has been saved because of `stopping`

    As a context manager, it releases its lock at the end.
    """

    def __init__(self, path: str | None, owner):
        self.path = path
        self.owner = owner
        self.writers = None
        self.saved_files = None
        self.first_frame = 0
        self.skip = 0
        self.live_clock = None
        self.save_time = time.monotonic()
        self.stopping = False
        self.stopped = False
        self.lock: BinaryIO | None = None

    def __enter__(self) -> State:
        return self

    def __exit__(self, *_) -> None:
        if self.lock is not None:
            release_lock(self.lock)
            self.lock = None

    def resume(self, narrator, encode: Callable[[Tensor], Tensor] | None,
               static: bool = False) -> bool:
        """Load the file, if it exists, into the new Context of the input.

        Returns whether there is anything left to narrate.

        encode      the vision model, or None: pictures uint8 [B, H, W, 3] -> frame tokens
        static      as in `narrate`

        Raises BadData, before anything is changed, if the file is damaged, belongs to another
        stream, or is used by another process.
        """
        if not self.path:
            return True
        if self.stopping:                      # Ctrl-C came before this input had its turn
            self.stopped = True
            return False
        owner = self.owner
        path = Path(self.path)
        outputs = [file for file in owner.files.values() if file]
        check_distinct(path, "" if owner.live else owner.source, *outputs)
        check_writable(path)
        self.lock = take_lock(path)

        self.settings = {name: getattr(narrator.config, name) for name in MAY_DIFFER}
        self.settings["static"] = static
        self.identity = identity(narrator, owner.source, owner.live)
        exists = path.exists()
        if exists:
            header, tensors = read_state(path)
            refuse_another_stream(path, header.get("whose", {}), self.identity)
            if header["done"]:
                print(f"{path}: {without_secrets(owner.source)} is narrated to its end; "
                      f"delete it to begin anew", file=sys.stderr)
                return False

        self.dtype = str(narrator.llm.dtype)
        self.answers = model_answers(narrator, owner.context, encode)
        if exists:
            self.load(path, header, tensors)
        return True

    def load(self, path: Path, header: dict, tensors: dict[str, Tensor]) -> None:
        """See `resume`."""
        owner = self.owner
        try:
            exact = header["dtype"] == self.dtype == "torch.float32"
            check_model_answers(path, tensors, self.answers, tolerance=1e-3 if exact else 5e-2)
            check_files(path, owner.files, header["files"], owner.live)
            unpack(owner.context, header["stream"], tensors)
            owner.peak = header["peak"]
            self.saved_files = header["files"]
            self.live_clock = header["live"]
        except BadData:
            raise
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise damaged(path, error) from error
        owner.count = owner.context.frame
        self.first_frame = owner.count
        if owner.live:
            owner.context.restart()            # the camera may show something else by now
        else:
            self.skip = owner.count
        tqdm.write(f"{path}: goes on after {owner.count} frames, {owner.context.segment} narrations",
                   sys.stderr)
        tell_changes(path, header.get("settings", {}), self.settings)

    def live_frames(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        """The frames of a live source, whose time continues by the wall clock.

        If the wait for a frame is interrupted, everything before that frame is saved.
        """
        if self.live_clock is not None:
            wall_start, reported = self.live_clock
            video = self.owner.video
            # the wall clock may have been set back; the time of the stream never decreases
            elapsed = max(time.time() - wall_start, self.owner.context.now)
            video.first = time.monotonic() - elapsed + 1 / video.fps
            video.reported = reported
        try:
            yield from frames
        except GeneratorExit:
            raise                              # not saved: a frame may be half done
        except BaseException:
            if self.path and self.writers is not None:
                self.save()
            raise

    def save_if_due(self, writers, narrated: bool) -> None:
        """Save the stream between two frames, if it is time and nothing has been read ahead.

        narrated    whether the frame before has a narration
        """
        self.writers = writers
        after_live_narration = narrated and self.owner.live
        long_ago = time.monotonic() - self.save_time >= EVERY
        due = after_live_narration or long_ago or self.stopping
        if not self.path or not due or self.owner.context.ahead:
            return
        self.save()
        if self.stopping:
            self.stopped = True
            tqdm.write(f"{self.path}: saved; the same command goes on after "
                       f"{self.owner.count} frames, at {timestamp(self.owner.context.now)}",
                       sys.stderr)

    def end(self, writers) -> None:
        """Finish the output files and save the stream, after the last frame."""
        self.writers = writers
        writers.finish()
        if self.path and self.owner.context.frame > 0:
            # a live source never is done: the next command appends to its files
            self.save(done=not self.owner.live)

    def save(self, done: bool = False) -> None:
        """Write the file; done: the recording is narrated to its end."""
        owner = self.owner
        if owner.live and owner.video.wall:
            wall_start = datetime.fromisoformat(owner.video.wall).timestamp() - owner.video.time
            self.live_clock = wall_start, owner.video.reported
        header = {
            "whose": self.identity,
            "dtype": self.dtype,
            "done": done,
            "peak": owner.peak,
            "live": self.live_clock,
            "files": self.writers.written(),
            "settings": self.settings,
        }
        write_state(self.path, owner.context, header, self.answers)
        self.save_time = time.monotonic()


def write_state(path: str | Path, context, header: dict, extra: dict[str, Tensor]) -> None:
    """Write a Context with nothing read ahead, a header (for JSON), and extra tensors to a file."""
    numbers, tensors = pack(context)
    tensors |= extra
    # safetensors refuses tensors that share memory
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    header = header | {"format": FORMAT, "stream": numbers}
    write_tensors(path, copies, {"state": json.dumps(header)})


def read_state(path: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """Read what `write_state` wrote: header, tensors. header["stream"]: the Context's numbers.

    Raises BadData if the file is damaged, is no state, or has an unknown format.
    """
    try:
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["state"])
            # copies, not views: the file is replaced by the next save
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        version = header["format"]
        if version == 1:
            header["stream"] = from_format_1(header["stream"])
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise damaged(path, error) from error
    if version not in (1, FORMAT):
        raise BadData(f"{path}: has format {version}, not {FORMAT}; "
                      f"go on with the version that wrote it, or delete it")
    return header, tensors


def damaged(path: str | Path, error: Exception) -> BadData:
    return BadData(f"{path}: is damaged, or no state of a stream ({type(error).__name__}); "
                   f"delete it, or give another --state (a recording then begins anew, and its "
                   f"outputs with it; those of a live source go on)")


# ---------------------------------------------------------------------- one process, and how it ends

def take_lock(path: Path) -> BinaryIO:
    """Create and lock .NAME.lock beside a file; returns the open lock file.

    The lock lasts until `release_lock`, or until the process ends, in whatever way. Raises BadData
    if another process has it.
    """
    lock_path = path.with_name(f".{path.name}.lock")
    while True:
        try:
            lock_path.parent.mkdir(parents=True, exist_ok=True)
            file = open(lock_path, "ab")
        except OSError as error:
            raise BadData(f"{lock_path}: cannot be written ({error.strerror}); "
                          f"choose another --state") from error
        try:
            if os.name == "nt":
                import msvcrt
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise BadData(f"{path}: is in use by another stream.py; "
                          f"end that one first, or give another --state") from error
        except OSError as error:               # some network file systems have no locks
            print(f"{path}: cannot be locked here ({error.strerror}); "
                  f"see to it that no other process uses it", file=sys.stderr)
            return file
        # The process that had the lock may have removed the file after we opened it. Then ours is
        # the lock of a file that is gone, and we try again.
        with suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock_path)):
                return file
        file.close()


def release_lock(file: BinaryIO) -> None:
    """Remove and close the file of `take_lock`.

    It is removed while it is locked, so that nobody can lock a file that is gone. Windows removes
    only files that are closed, and that no other process has opened.
    """
    if os.name == "nt":
        file.close()
    with suppress(OSError):
        os.unlink(file.name)
    file.close()


@contextmanager
def save_on_ctrl_c(runs: list) -> Iterator[None]:
    """Within it, Ctrl-C or SIGTERM ends recordings that have a state as soon as they can be saved.

    That is after the frames that have been read ahead. Then KeyboardInterrupt is raised. A second
    Ctrl-C is raised at once. It has no effect if an input has no state, is live (and so is saved
    anyway), or comes through a pipe, which could delay Ctrl-C for ever.
    """
    can_wait = all(
        run.state.path and not run.live and not is_pipe_or_url(run.source) for run in runs
    )
    # Python allows signal handlers in the main thread only
    if not can_wait or threading.current_thread() is not threading.main_thread():
        yield
        return

    def restore_handlers() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def stop(*_) -> None:
        for run in runs:
            run.state.stopping = True
        restore_handlers()

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        restore_handlers()
    if any(run.state.stopped for run in runs):
        raise KeyboardInterrupt


# ---------------------------------------------------------------------- what a stream carries

def pack(context) -> tuple[dict, dict[str, Tensor]]:
    """The numbers (for JSON) and the tensors of a Context with nothing read ahead."""
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
        of_each_slot = getattr(cache, name)
        tensors[f"cache.{name}"] = torch.from_numpy(of_each_slot[cache.used])
    if context.unabsorbed:
        tensors["waiting"] = torch.stack(context.unabsorbed)
    for name, slots in all_slots(cache).items():
        used = torch.from_numpy(np.flatnonzero(slots.used))
        numbers[name] = len(slots.used)
        tensors[f"{name}.slots"] = used
        for key, buffer in buffers(name, slots).items():
            tensors[key] = buffer[used.to(slots.positions.device)]
    if cache.routed is not None:
        tensors["fewer.of"] = torch.from_numpy(cache.routed.slot_of)
    return numbers, tensors


def from_format_1(old: dict) -> dict:
    """The numbers of a state of format 1, converted to format 2."""
    p_skip, theta, now = old["decided"]
    numbers = dict(old)
    numbers["now"] = now
    numbers["last_narration_time"] = old["told"]
    numbers["p_skip"] = p_skip
    numbers["theta"] = theta
    numbers["opens"] = old["new"] or old["frame"] == 0
    numbers["narrated"] = old["said"]
    numbers["bounds"] = {name: old["bounds"][key] for name, key in zip(BOUNDS, OLD_BOUNDS)}
    return numbers


def unpack(context, numbers: dict, tensors: dict[str, Tensor]) -> None:
    """Load what `pack` gave into a new Context: each token goes into the slot that it had.

    The Context's buffers must exist already (`model_answers`).
    """
    cache = context.cache
    device = cache.positions.device
    for name in NUMBERS:
        setattr(context, name, numbers[name])
    for name in BOUNDS:
        setattr(context.bounds, name, numbers["bounds"][name])
    for name in TENSORS:
        if hasattr(context, name):
            tensor = tensors.get(name)
            setattr(context, name, None if tensor is None else tensor.to(device))
    context.opening = None
    if numbers["opens"]:
        layout = context.layout
        if context.frame > 0:
            context.opening = layout.opening(context.segment)
        else:
            context.opening = layout.first()
    context.narrated.extend(numbers["narrated"])
    context.unabsorbed = []
    if "waiting" in tensors:
        context.unabsorbed = list(tensors["waiting"].to(device))

    for name, slots in all_slots(cache).items():
        # on CUDA, a first test (commands/stream.py: try_passes) may have added more slots already
        slots.grow(max(0, numbers[name] - len(slots.used)))
        used = tensors[f"{name}.slots"]
        slots.used[used.numpy()] = True
        slots.recount()
        for key, buffer in buffers(name, slots).items():
            buffer[used.to(device)] = tensors[key].to(buffer)
    for name in TOKENS:
        of_each_slot = getattr(cache, name)
        of_each_slot[cache.used] = tensors[f"cache.{name}"].numpy()
    if cache.routed is not None:
        cache.routed.slot_of = tensors["fewer.of"].numpy()


def all_slots(cache: Slots) -> dict[str, Slots]:
    """The slots of all layers, and those of layers with routers (baselines/mod.py), if any.

    The names are part of the file's format.
    """
    if cache.routed is None:
        return {"cache": cache}
    return {"cache": cache, "fewer": cache.routed}


def buffers(name: str, slots: Slots) -> dict[str, Tensor]:
    """The tensors with an entry for each slot: positions, and keys and values of each layer."""
    tensors = {f"{name}.positions": slots.positions}
    for kind, layers in (("keys", slots.keys), ("values", slots.values)):
        for layer, buffer in enumerate(layers):
            tensors[f"{name}.{kind}.{layer}"] = buffer
    return tensors


# ---------------------------------------------------------------------- whose state it is

def identity(narrator, source: str, live: bool) -> dict:
    """What must be the same when a stream is resumed: {name used in messages: value}.

    The language model and the vision model are not in it; see `model_answers`.
    """
    vocabulary = json.dumps(narrator.layout.tokenizer.get_vocab(), sort_keys=True)
    same = {
        "source": source_signature(source, live),
        "tokenizer": sha256(vocabulary.encode()).hexdigest()[:12],
    }
    for name, value in asdict(narrator.config).items():
        if name not in FREE:
            same[name] = value
    modules = {name: module for name, module in narrator.named_children() if name != "llm"}
    routers = [layer.router for layer in narrator.llm.model.layers if hasattr(layer, "router")]
    modules["routers"] = torch.nn.ModuleList(routers)
    for name, module in modules.items():
        same[f"weights of its {name}"] = digest(module)[:12]
    return same


def source_signature(source: str, live: bool) -> str:
    """The size of a file and a digest of its first and last MB, because the file may be moved.

    Of any other source, its name. FILE.safetensors:NAME: the signature of the file, and :NAME.
    """
    parts = re.fullmatch(r"(.+?(\.safetensors|$))(.*)", source, re.DOTALL | re.IGNORECASE)
    path, _, name = parts.groups()
    if live or is_pipe_or_url(source) or not os.path.isfile(path):
        return without_secrets(source)
    with open(path, "rb") as file:
        hashed = sha256(file.read(DIGEST_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - DIGEST_BYTES))
        hashed.update(file.read())
    return f"{size} bytes, {hashed.hexdigest()[:12]}{name}"


def refuse_another_stream(path: Path, saved: dict, present: dict) -> None:
    """BadData if a state does not belong to this stream; both as from `identity`."""
    for name, value in present.items():
        if saved.get(name) != value:
            raise BadData(f"{path}: was saved with another {name} ({saved.get(name)}; "
                          f"here {value}); give the same, or another --state")


def tell_changes(path: Path, saved: dict, present: dict) -> None:
    """Report thresholds and bounds that differ from those of a state."""
    changes = []
    for name, value in present.items():
        # earlier versions did not save all of them
        if name in saved and saved[name] != value:
            changes.append(f"{name} = {value} (was {saved[name]})")
    if changes:
        tqdm.write(f"{path}: goes on with {', '.join(changes)}", sys.stderr)


@torch.no_grad()
def model_answers(narrator, context,
                  encode: Callable[[Tensor], Tensor] | None) -> dict[str, Tensor]:
    """The models' answers to a test.

    These are the logits [V] after the prompt, and the tokens [J, D] of a test picture. Afterwards
    the cache of the new Context has buffers, with nothing in them.
    """
    cache = context.cache
    ids = narrator.layout.prompt
    slots = cache.reserve(len(ids))
    plan = torch.tensor([ids, range(len(ids)), slots.tolist()]).to(narrator.device)
    last = slice(-1, None)
    answers = {"proof.language": context.run(PassInput(plan, None, None, cache, last))[0]}
    empty(cache)
    if encode is not None:
        # with two encoders, a picture is a pair, one for each (support/files/features.py)
        channels = 6 if narrator.config.width_second else 3
        pixels = torch.arange(48 * 64 * channels).remainder(251).to(torch.uint8)
        answers["proof.vision"] = encode(pixels.view(1, 48, 64, channels))[0]
    return answers


def check_model_answers(path: Path, saved: dict[str, Tensor], present: dict[str, Tensor],
                        tolerance: float) -> None:
    """BadData if a model's answer differs from the saved one by more than a relative tolerance."""
    for name, answer in present.items():
        now = answer.float()
        before = saved[name].float()
        # a constant added to all logits changes no probability
        now = now.cpu() - now.mean().cpu()
        before = before.cpu() - before.mean().cpu()
        if now.shape != before.shape or not (now - before).norm() <= tolerance * before.norm():
            if name == "proof.language":
                which = "language model, or with another LoRA"
            else:
                which = "vision model"
            raise BadData(f"{path}: was saved with another {which}; "
                          f"give the same, or another --state")


def check_files(path: Path, files: dict[str, str | None], saved: dict, live: bool) -> None:
    """BadData if the output files are not those with which a state continues.

    Each file of a recording must be at least as long as at the save, with the same end there: what
    comes after it will be cut off. Files of a live source may be shorter or missing, because an old
    one may have been moved away.

    saved       what `Writers.written` returned
    """
    sizes = saved["bytes"]
    ends = saved.get("ends", {})               # older states have none
    files = {form: file for form, file in files.items() if file}
    if files.keys() != sizes.keys():
        listed = " ".join(f"--{form}" for form in sizes) or "no output files"
        raise BadData(f"{path}: was saved with {listed}; give the same, or another --state")
    if live:
        return
    for form, file in files.items():
        if not os.path.exists(file):
            problem = "missing"
        elif os.path.getsize(file) < sizes[form]:
            problem = "shorter than it was"
        elif ends.get(form) not in (None, hash_of_end(file, sizes[form])):
            problem = "not the file that it was"
        else:
            continue
        raise BadData(f"{file}: is {problem}, and {path} goes on with it; "
                      f"put it back, or give another --state")
