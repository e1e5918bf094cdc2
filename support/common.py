"""What all files share: errors that the user can fix, files that appear whole, figures, devices.

No section of the paper, and nothing about videos or models.
"""
from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import re
import signal
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm


class BadData(ValueError):
    """A problem that the user can fix; the message is one line that says what to do."""


class NotDownloaded(BadData):
    """A data set is not there; the message says in a few lines what to fetch and where to put it."""


def command_line(main: Callable[[], None]) -> None:
    """Runs a command line and exits: 0 done, 1 bad input (one line on stderr), 130 Ctrl-C; argparse exits with 2.

    SIGTERM, by which schedulers end a job, is as Ctrl-C. A closed pipe (`| head`) ends quietly, with a shell's 141.
    A character that stdout cannot encode, as in a file name, is printed as "?"; Python sees to that on stderr.
    """
    SAID_ONCE.clear()
    if hasattr(sys.stdout, "reconfigure"):                                     # not if a test has put another one there
        sys.stdout.reconfigure(errors="replace")
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        main()
        sys.stdout.flush()
        code = 0
    except BrokenPipeError:
        drop_stdout()
        code = 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except NotDownloaded as error:                                             # the one message of several lines
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except (BadData, OSError) as error:
        message = str(error) or type(error).__name__
        if is_full(error) and error.filename is None:                          # all other files have been named
            drop_stdout()
            message = "standard output: cannot be written, the disk is full"
        elif isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        print("error:", " ".join(message.split()), file=sys.stderr)
        code = 1
    except (RuntimeError, MemoryError) as error:                               # torch has several messages for it
        if isinstance(error, RuntimeError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        print(f"error: out of memory ({first_line(error)[:200]}); use a smaller model or --dtype bfloat16",
              file=sys.stderr)
        code = 1
    sys.exit(code)


SAID_ONCE: set[str] = set()


def say_once(text: str) -> None:
    """A line on stderr, the first time that it is said in a command."""
    if text not in SAID_ONCE:
        SAID_ONCE.add(text)
        tqdm.write(text, file=sys.stderr)


def drop_stdout() -> None:
    """What is still to be written to a broken or full stdout is dropped, or Python's last flush complains."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:                                                            # it is no file, so nothing is left in it
        pass


def first_line(error: Exception) -> str:
    """The first line of another library's error, to quote in our own."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---------------------------------------------------------------------- files

def is_full(error: Exception) -> bool:
    """Does it say that a disk is full, or the user's share of it?"""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Within it, `path` is written to; a full disk is a BadData that names it."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise BadData(f"{path}: cannot be written, the disk is full; make room, and repeat the command") from error


DAY = 24 * 3600.0                      # seconds after which a temporary file of an unknown process is left over
PART = re.compile(r"\..+\.(?:([0-9a-f]{8})-(\d+)-)?[0-9a-f]{8}\.part")


def new_part(path: Path) -> Path:
    """A new temporary file beside `path`, .NAME.MACHINE-PROCESS-RANDOM.part; those that killed processes have left in
    this folder are removed. The folder is made. BadData if `path` cannot be written."""
    if path.is_dir():                                                                         # so is the path of ""
        raise BadData(f"{path}: is a directory; give the name of a file")
    remove_left_parts(path.parent.resolve())
    part = path.with_name(f".{path.name}.{machine()}-{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
    except OSError as error:
        raise BadData(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    return part


@cache
def machine() -> str:
    """Eight hex digits for all processes whose numbers can be compared: of one machine, and of one container."""
    try:
        container = os.readlink("/proc/self/ns/pid")
    except OSError:                                            # not Linux
        container = ""
    return sha256(f"{platform.node()} {container}".encode()).hexdigest()[:8]


@cache
def remove_left_parts(folder: Path) -> None:
    """Remove from a folder, once in the life of this process, the temporary files of processes that live no more."""
    try:
        parts = [(path, PART.fullmatch(path.name)) for path in folder.glob(".*.part")]
    except OSError:                                            # whoever writes will hear of it
        return
    for path, match in parts:
        with suppress(OSError):                                # another process may remove it at the same moment
            if match and is_left(path, *match.groups()):
                path.unlink()


def is_left(part: Path, where: str | None, process: str | None) -> bool:
    """Has the process that wrote a temporary file ended? Of one elsewhere, and on Windows, nothing but the age tells:
    there, signal 0 is no question, but Ctrl-C."""
    if where == machine() and os.name != "nt":
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):               # it lives, but is another user's
            pass
    return time.time() - part.stat().st_mtime > DAY


def check_writable(*paths: str | Path | None, in_place: bool = False) -> None:
    """BadData, before hours of work, if one of these files could not be written at their end. No folder is made: it is
    enough that it could be. None is no file. in_place: a file that is there is not replaced, but written into."""
    for path in paths:
        if path is None:
            continue
        if Path(path).is_dir():
            raise BadData(f"{path}: is a directory; give the name of a file")
        if in_place and os.access(path, os.W_OK):
            continue
        folder = Path(path).absolute().parent
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        trial = folder / f".{os.urandom(4).hex()}.part"
        try:
            trial.touch()
            trial.unlink()
        except OSError as error:
            raise BadData(f"{path}: cannot be written ({error.strerror}); choose another place") from error


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path`, which becomes `path` at the end, or is removed if anything is raised before.

    No reader ever sees half a file. Raises BadData if `path` cannot be written, as on a full disk.
    """
    path, part = Path(path), new_part(Path(path))
    mode = part.stat().st_mode
    try:
        with naming(path):
            yield part
        part.chmod(mode)                                                 # safetensors makes files of its own, private
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_tensors(path: str | Path, tensors: dict[str, torch.Tensor], about: dict[str, str] | None = None) -> None:
    """A .safetensors file, whole or not at all. BadData if it cannot be written, as on a full disk."""
    with replacing(path) as part:
        try:
            save_file({name: y.detach().cpu().contiguous() for name, y in tensors.items()}, part, about)
        except SafetensorError as error:
            raise BadData(f"{path}: cannot be written ({first_line(error)}); is the disk full?") from error


def write_text(path: str | Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_text(path: Path) -> str:
    """UTF-8 text; BadData if there is no such file, or if it is not text."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadData(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BadData(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None


def read_json(path: Path):
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path}: is not JSON ({first_line(error)})") from None


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a JSONL file, one per line; BadData names a line that is not one."""
    rows = []
    for n, line in enumerate(read_text(path).splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise BadData(f"{path}, line {n}: is not JSON ({first_line(error)})") from None
        if not isinstance(rows[-1], dict):
            raise BadData(f"{path}, line {n}: expected an object")
    return rows


def is_number(value) -> bool:
    """Can a value of a file be a time or a count? No NaN, no infinity, no true or false, nothing from 10^12 on."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12


def apart(*paths: str | Path) -> None:
    """BadData if two of the paths are one file: an output would destroy the input, or another output. "" is none."""
    seen = set()
    for path in filter(None, map(str, paths)):
        place = Path(re.sub(r"(\.safetensors):.*", r"\1", path)).resolve()        # FILE.safetensors:NAME is FILE
        if place in seen and not place.is_char_device():                          # /dev/null takes everything
            raise BadData(f"{path}: is given twice, as input and output or as two outputs; choose another name")
        seen.add(place)


def file_name(name: str) -> str:
    """A name from data (a video's id) as the name of one file: no separators, no way out of its folder, invertible."""
    quoted = quote(name, safe=" !#$&'()+,;=@[]{}~^`")
    return quoted.replace(".", "%2E") if not quoted.strip(".") else quoted


def one_line(text: str) -> str:
    """Generated text for files and terminals: white space collapsed, control and format characters removed."""
    return " ".join("".join(c for c in text if c.isspace() or unicodedata.category(c)[0] != "C").split())


# ---------------------------------------------------------------------- figures

def pyplot():
    """matplotlib, drawing to files only; imported when a figure is wanted."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def save_figure(figure, png: str | Path) -> None:
    with replacing(png) as part:
        figure.savefig(part, dpi=100, format="png", bbox_inches="tight")
    pyplot().close(figure)
    print(f"written: {png}", file=sys.stderr)


# ---------------------------------------------------------------------- progress

EVERY = 60.0                               # seconds between two lines of progress where there is no terminal


def progress(items: Iterable | None = None, desc: str = "", total: int | None = None, unit: str = "",
             initial: int = 0, **how):
    """The items, with a bar on stderr that says how many there have been, and of how many; without items, `update(n)`
    counts. On a terminal it is tqdm's bar (`how`: further options of it), which goes at the end; in a pipe or a file
    it is one plain line a minute. Under torchrun, only one process shows it."""
    if rank()[0] > 0:
        how["disable"] = True
    if sys.stderr.isatty() or how.get("disable"):
        return tqdm(items, desc, total, initial=initial, unit=unit, **how)
    return PlainProgress(items, desc, total, unit, initial)


class PlainProgress:
    """Progress as lines, with what is used of tqdm's methods."""

    def __init__(self, items: Iterable | None, desc: str, total: int | None, unit: str, initial: int = 0):
        self.items, self.desc, self.unit, self.n, self.initial = items, desc, unit, initial, initial
        self.total = len(items) if total is None and hasattr(items, "__len__") else total
        self.began = self.said = time.monotonic()
        self.postfix = ""

    def __iter__(self) -> Iterator:
        for item in self.items:
            yield item
            self.update()

    def update(self, more: int = 1) -> None:
        self.n += more
        now = time.monotonic()
        if now - self.said >= EVERY:
            self.said = now
            print(self.line(now - self.began), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """Such as "streaming: 1200 of 7200 frames in 60 s, 20.0 a second; cache 157+60 tokens"."""
        count = f"{self.n} of {self.total}" if self.total else f"{self.n}"
        speed = (self.n - self.initial) / seconds
        name = f"{self.desc}: " if self.desc else ""
        more = f"; {self.postfix}" if self.postfix else ""
        return f"{name}{count} {self.unit}s in {seconds:.0f} s, {speed:.3g} a second{more}"

    def set_postfix(self, values: dict | None = None, refresh: bool = True, **more) -> None:
        self.postfix = ", ".join(f"{name} {value}" for name, value in ((values or {}) | more).items())

    def __enter__(self) -> "PlainProgress":
        return self

    def __exit__(self, *_) -> None:
        pass


# ---------------------------------------------------------------------- values of options (argparse types)

def in_range(convert: type, low: float, high: float, says: str) -> Callable[[str], float]:
    """An argparse type: `convert` of the text, refused (exit code 2) unless low <= value <= high."""
    def parse(text: str):
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:                              # nan is in no range
            raise argparse.ArgumentTypeError(f"must be {says}, not {text!r}")
        return value
    return parse


LARGEST = 10 ** 9                          # beyond it, libraries and loops fail in ways of their own
positive_int = in_range(int, 1, LARGEST, "a whole number, 1 or more (at most a billion)")
whole = in_range(int, 0, LARGEST, "a whole number, 0 or more (at most a billion)")
positive_float = in_range(float, 1 / LARGEST, LARGEST, "a number above 0 (from a billionth to a billion)")
non_negative = in_range(float, 0, LARGEST, "a number, 0 or more (at most a billion)")
probability = in_range(float, 0, 1, "a number from 0 to 1")


# ---------------------------------------------------------------------- devices and libraries

DTYPES = ("float32", "bfloat16", "float16")


def choose(device: str = "auto", dtype: str = "auto") -> tuple[str, torch.dtype]:
    """The one place where device and dtype are decided: bf16 on CUDA, else fp32. BadData if the device is not there."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":                                                            # under torchrun: this process's GPU
        gpu = f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"
        device = gpu if cuda else "mps" if mps else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise BadData(f"--device is cpu, cuda, cuda:N, mps or auto, not {device}")
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count() or kind == "mps" and not mps:
        raise BadData(f"--device {device}: there is no such device here; use cpu, or auto for the best one")
    if dtype == "auto":
        dtype = "bfloat16" if kind == "cuda" else "float32"
    if dtype not in DTYPES:
        raise BadData(f"--dtype is auto, {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, not {dtype}")
    return device, getattr(torch, dtype)


def synchronise(where: torch.device | torch.Tensor) -> None:
    """Wait for a CUDA device, so that elapsed times are right; does nothing for other devices."""
    device = where.device if isinstance(where, torch.Tensor) else where
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rank() -> tuple[int, int]:
    """(rank, processes) under torchrun, else (0, 1)."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def print_table(rows: list[tuple[str, dict]]):
    """One column for each row's label; shares and scores with three digits, what was not computed as -."""
    form = lambda value: "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
    if len(rows) > 1:
        print(" " * 26 + "".join(f"{label:>17}" for label, _ in rows))
    for name in rows[0][1]:
        print(f"{name.replace('_', ' '):26}" + "".join(f"{form(row.get(name)):>17}" for _, row in rows))


def chunks(items: Iterator, size: int) -> Iterator[list]:
    """Lists of `size` items, the last one shorter."""
    items = iter(items)
    while chunk := list(islice(items, size)):
        yield chunk


def ahead(items: Iterable, size: int) -> Iterator:
    """The same items: a thread makes up to `size` of them before they are asked for. Errors come in their turn."""
    source, end = iter(items), object()
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, source, end) for _ in range(size))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(thread.submit(next, source, end))
            yield item


def quiet():
    """Turn off the progress bars and warnings of transformers."""
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
