"""Suspend and resume (not in the paper): a stream is saved in one file, and continues from it.

    python stream.py kitchen.mp4 --jsonl kitchen.jsonl --state kitchen.state

Kill this command and repeat it: the stream continues as if it had never been stopped.

The file holds everything that a Context (stream.py) carries from frame to frame, and the length of
each output file. It is written between two frames, at a moment when nothing has been read ahead.
The passes after that moment are those of a stream that was not interrupted, bit for bit. Output
written after the last save is truncated and narrated again.

A live source cannot be seen again. Therefore it is also saved after each narration, its segment is
restarted, and its output files keep every whole line. No two processes share a file: it is locked
until the stream or its process ends (inputs.py).

A state that does not belong to this stream is refused. That is a state with another source, narrator,
language model or vision model, or with other settings that shape the cache. Each is known by its mark
(support/common/marks.py), of all its bytes. Device and dtype may differ. Thresholds, --max-segment,
--max-position, --static and --source-option may differ, too, and that is told.

The format is safetensors, with the numbers as JSON in the metadata; no pickle. A digest of
everything shows damage.
"""
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from narrator import Config, Tokens
from beyond.streams.bounds import Bounded
from beyond.streams.inputs import WRITTEN, Input
from beyond.streams.live import Camera, uptime
from beyond.streams.subtitles import Writers, hash_of_end, written_since
from support.common.disk import expecting, parse_json, write_tensors
from support.common.errors import BadData, first_line
from support.common.marks import (
    digest_of, digest_of_file, marks_of, refuse_if_changed, what_differs,
)
from support.common.progress import say
from support.common.text import counted
from support.files.sources import Source

FORMAT = 8
# seconds between two saves, roughly; a live source is also saved after each narration
EVERY = 60.0

# What a Context (stream.py), reading ahead and bounds carry from frame to frame, beside the cache. A
# baseline's Context names the tensors that it adds. Memory tokens are read anew.
TENSORS = ("state", "state_to_read")
NUMBERS = ("position", "segment", "frame", "time", "last_narration_time", "segment_start",
           "start_time", "restart_asked", "restarts", "rewound")
SHOWN = ("p_skip", "theta")             # of the latest frame; None before the first
LISTS = ("words", "narration_starts")


class State:
    """The state file of an input. Without a path, it does nothing.

    context         the stream, from `resume` on
    options         {name: value} of options that may be others when it is resumed, which is told
    whose           {name used in messages: value} of what must be the same when it is resumed
    writers         its output files, from the moment when they are open
    camera          the live source, from `live_frames` on
    saved_files     `Writers.written` at the moment of the save; None in a new stream
    live_clock      of a live source: the time of day at which its time was 0; None for a recording
    """

    def __init__(self, given: Input, options: dict):
        path = given.files.get("state")
        self.path = Path(path) if path else None
        self.given = given
        self.options = options
        self.context: Bounded | None = None
        self.writers: Writers | None = None
        self.camera: Camera | None = None
        self.saved_files = None
        self.live_clock = None
        self.save_time = time.monotonic()

    # ------------------------------------------------------------------ resume

    def resume(self, context: Bounded) -> bool:
        """Load the file, if it exists, into a new Context; returns whether anything is left to
        narrate.

        Raises BadData if the file is damaged or belongs to another stream. Nothing is written then.
        """
        self.context = context
        if self.path is None:
            return True
        self.whose = {
            "source": source_signature(self.given.source),
            "narrator": context.narrator.mark,
            **settings_of(context.config, compared=True),
        }
        if not self.path.exists():
            return True
        header, tensors = read_state(self.path)
        with expecting(self.path, "a state of this program"):
            refuse_if_changed(str(self.path), header["whose"], self.whose,
                              "give the same, or another --state")
            for changed in what_differs(header["free"], self.free()):
                say(f"{self.path}: was saved with {changed}; it goes on as it is here")
            if self.given.source.is_live:
                # its files keep what came after the save: no number comes twice
                newer = written_since(self.given, header["files"])
                header["stream"]["frame"] += newer.pop("trace")
                header["stream"]["segment"] += max(newer.values())
            else:
                check_files(self.path, self.given, header["files"])
            if header["done"]:
                say(f"{self.path}: {self.given.source} is narrated to its end; delete it to begin "
                    f"anew")
                return False
            unpack(context, header["stream"], tensors)
            self.saved_files = header["files"]
            self.live_clock = header["live"]
        say(f"{self.path}: goes on after {counted(context.frame, 'frame')}, "
            f"{counted(context.segment, 'narration')}")
        return True

    def live_frames(self, frames: Iterable[Tensor], camera: Camera) -> Iterator[Tensor]:
        """The frames of a camera, whose time is saved, too; a resumed one continues by the wall
        clock. The segment is restarted after an outage. Ctrl-C while it waits for a frame saves
        everything before that frame.
        """
        self.camera = camera
        if self.live_clock is not None:
            # the wall clock may have been set back; the time of the stream never decreases
            elapsed = max(time.time() - self.live_clock, self.context.time)
            camera.first = uptime() - elapsed + camera.period
        try:
            for x in frames:
                if camera.after_outage:
                    self.context.restart()
                yield x
        except KeyboardInterrupt:
            if self.writers is not None:
                self.save()
            raise

    # ------------------------------------------------------------------ save

    def free(self) -> dict:
        """What may be another when the stream is resumed."""
        return settings_of(self.context.config, compared=False) | self.options

    def save_if_due(self, narrated: bool) -> None:
        """Save the stream between two frames, if it is time and nothing has been read ahead.

        narrated    whether the frame before has a narration
        """
        after_live_narration = narrated and self.given.source.is_live
        long_ago = time.monotonic() - self.save_time >= EVERY
        if (after_live_narration or long_ago) and not self.context.guessed:
            self.save()

    def save(self, done: bool = False) -> None:
        """Write the file; done: the recording is narrated to its end."""
        if self.path is None:
            return
        if self.camera is not None:
            self.live_clock = self.camera.wall - self.camera.time
        header = {
            "whose": self.whose,
            "free": self.free(),
            "done": done,
            "live": self.live_clock,
            "files": self.writers.written(),
        }
        write_state(self.path, self.context, header)
        self.save_time = time.monotonic()


# ---------------------------------------------------------------------- the file

def write_state(path: str | Path, context: Bounded, header: dict) -> None:
    """Write a Context with nothing read ahead, and a header (for JSON), to a file."""
    numbers, tensors = pack(context)
    # safetensors refuses tensors that share memory
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    text = json.dumps(header | {"format": FORMAT, "stream": numbers})
    about = {"state": text, "digest": digest_of_state(text, tensors)}
    write_tensors(path, tensors, about)


def digest_of_state(text: str, tensors: dict[str, Tensor]) -> str:
    return digest_of(text + json.dumps(marks_of(sorted(tensors.items()))))


def read_state(path: str | Path) -> tuple[dict, dict[str, Tensor]]:
    """Read what `write_state` wrote: header, tensors. header["stream"]: the Context's numbers.

    Raises BadData if the file is damaged, is no state, or has another format.
    """
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            # copies, not views: the file is replaced by the next save
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
        if about["digest"] != digest_of_state(about["state"], tensors):
            raise ValueError("its digest differs")
        header = parse_json(about["state"])
        if header["format"] != FORMAT:
            raise ValueError(f"it has format {header['format']}, not {FORMAT}")
    except Exception as error:                  # a damaged file can raise nearly anything
        raise BadData(f"{path}: is damaged, or no state of this version ({first_line(error)}); "
                      f"delete it, or give another --state (a recording then begins anew, and its "
                      f"outputs with it; those of a live source go on)") from error
    return header, tensors


def pack(context: Bounded) -> tuple[dict, dict[str, Tensor]]:
    """The numbers (for JSON) and the tensors of a Context with nothing read ahead."""
    cache = context.cache
    numbers = {name: getattr(context, name) for name in NUMBERS + SHOWN}
    numbers |= {name: list(getattr(context, name)) for name in LISTS}
    numbers["opens"] = context.next_tokens is not None
    numbers["layers"] = len(cache.keys)
    numbers["tokens"] = asdict(cache.tokens)
    tensors = {name: getattr(context, name) for name in TENSORS + context.FURTHER_TENSORS}
    for layer in cache.keys:
        tensors[f"keys.{layer}"] = cache.keys[layer]
        tensors[f"values.{layer}"] = cache.values[layer]
    return numbers, tensors


def unpack(context: Bounded, numbers: dict, tensors: dict[str, Tensor]) -> None:
    """Load what `pack` gave into a new Context. What is no such thing is a TypeError or ValueError."""
    llm = context.narrator.llm
    for name in NUMBERS:
        kind = type(getattr(context, name))
        setattr(context, name, kind(numbers[name]))
    for name in SHOWN:
        setattr(context, name, numbers[name])
    for name in LISTS:
        getattr(context, name).extend(map(int, numbers[name]))
    is_right = all(0 <= word < llm.config.vocab_size for word in context.words)
    for name in TENSORS + context.FURTHER_TENSORS:
        begun = getattr(context, name)
        is_right &= tensors[name].shape == begun.shape
        setattr(context, name, tensors[name].to(begun))
    for layer in range(numbers["layers"]):
        keys = tensors[f"keys.{layer}"].to(llm.device, llm.dtype)
        values = tensors[f"values.{layer}"].to(llm.device, llm.dtype)
        is_right &= keys.shape == values.shape and keys.shape[1] == llm.config.num_key_value_heads
        context.cache.update(keys, values, layer)
    tokens = Tokens(**numbers["tokens"])
    torch.tensor(list(asdict(tokens).values()), dtype=torch.int64)      # as many of each, all whole
    if not is_right or len(tokens) == 0:
        raise ValueError("its words, tokens or tensors are not of this narrator")
    context.cache.tokens = tokens

    context.next_tokens = None
    if numbers["opens"]:
        # a segment is fed its memory tokens when it opens, and the state is still that of line 17
        context.next_tokens = context.layout.opening(context.segment)
        context.read_memory()


# ---------------------------------------------------------------------- whose state it is

def settings_of(config: Config, compared: bool) -> dict:
    """Those that must be the same when a stream is resumed; or thresholds and bounds, which may
    change.
    """
    return {f.name: getattr(config, f.name) for f in fields(config)
            if f.metadata["compared"] == compared and f.name not in config.MODEL_NAMES}


def source_signature(source: Source) -> str:
    """The digest of a file, because it may be moved. FILE.safetensors:NAME: and :NAME.

    Of any other source, its name without what may be secret, and a digest of what is behind the
    password, which tells two cameras of one recorder apart.
    """
    if source.kind in ("video", "features") and source.path.is_file():
        return digest_of_file(source.path) + (f":{source.tensor}" if source.tensor else "")
    behind_user = source.given.rpartition("@")[2]               # a password may be changed
    return f"{source} {digest_of(behind_user)[:12]}"


def check_files(path: Path, given: Input, saved: dict) -> None:
    """BadData if the output files of a recording are not those with which a state continues: each
    must be at least as long as at the save, with the same end there. What comes after will be cut.

    saved       what `Writers.written` returned
    """
    files = {form: file for form, file in given.files.items() if form in WRITTEN}
    if files.keys() != saved.keys():
        listed = " ".join(f"--{form}" for form in saved) or "no output files"
        raise BadData(f"{path}: was saved with {listed}; give the same, or another --state")
    for form, file in files.items():
        size, end = saved[form]
        if hash_of_end(file, size) != end:
            raise BadData(f"{file}: is missing, or not the file that it was, and {path} goes on with "
                          f"it; put it back, or give another --state")
