"""Files that are written whole or not at all, and read with clear errors."""
from __future__ import annotations

import json
import os
import platform
import re
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from support.common.errors import BadData, first_line, is_full


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


def check_distinct(*paths: str | Path) -> None:
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
