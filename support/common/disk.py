"""Files that are written whole or not at all, and read with clear errors."""
import errno
import glob
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from tempfile import mkdtemp

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from support.common.errors import BadData, first_line


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """A context in which `path` is written: if that fails, as on a full disk, BadData names it."""
    try:
        yield
    except OSError as error:
        # errors of other files name them, and those of libraries and pipes have types of their own;
        # where the disk is full, it is this file's, under whatever name
        is_other = type(error) is not OSError or error.filename
        if is_other and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BadData(f"{path}: cannot be written ({error.strerror}); is there room?") from error


# ---------------------------------------------------------------------- writing

def check_regular(path: str | Path) -> None:
    """BadData if a file that is written whole cannot have this name.

    It would take the place of what has its name: of /dev/null, too.
    """
    is_other = Path(path).exists() and not Path(path).is_file()        # "" is the present folder
    if is_other or str(path) == "-":           # as an input, "-" is a pipe
        raise BadData(f"{str(path)!r} is a folder, a device or a pipe; give the name of a file")


def check_writable(*paths: str | Path | None, in_place: bool = False) -> None:
    """BadData if one of these files cannot be written: asked before hours of work, not after them.

    No folder is made; a path in a folder that could be made is good. None is no file.
    in_place: an existing file is not replaced, but written into.
    """
    for path in paths:
        if path is None:
            continue
        if in_place and os.access(path, os.W_OK) and not Path(path).is_dir():
            continue
        check_regular(path)
        folder = Path(os.path.realpath(path)).parent
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise BadData(f"{path}: cannot be written; choose another place")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path`. At the end it becomes `path`; after an error it is removed.

    No reader ever sees half a file. BadData if `path` cannot be written, as on a full disk.
    """
    check_regular(path)
    path = Path(os.path.realpath(path))        # of a symbolic link, what it names is replaced
    # of this process alone, on whatever machine; safetensors puts files of its own beside it
    name = f".{path.name[:40]}.{gethostname()[:40]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_of_killed(path.parent, name)
        folder = Path(mkdtemp(".part", f"{name}.{os.getpid()}.", path.parent))
        part = folder / path.name
        part.touch()
    except OSError as error:
        raise BadData(f"{path}: cannot be written ({error.strerror}); "
                      f"choose another place") from error
    mode = part.stat().st_mode
    try:
        with naming(path):
            yield part
            with part.open("rb+") as file:     # or a power cut may leave it empty
                os.fsync(file.fileno())
            with suppress(PermissionError):    # some disks know no rights
                part.chmod(mode)               # safetensors makes a private file in its place
        os.replace(part, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_of_killed(folder: Path, name: str) -> None:
    """Remove what `replacing` of killed processes of this machine has left."""
    if os.name == "nt":                        # where asking for a process would end it
        return
    for left in folder.glob(f"{glob.escape(name)}.*.part"):
        *_, process, _, _ = left.name.split(".")
        try:
            os.kill(int(process), 0)           # asks only whether it runs
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (PermissionError, ValueError):  # somebody else's
            continue


def write_tensors(path: str | Path, tensors: dict[str, torch.Tensor],
                  about: dict[str, str] | None = None) -> None:
    """Write a .safetensors file, whole or not at all, with the metadata `about`.

    BadData if it cannot be written, as on a full disk.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as part:
        try:
            save_file(tensors, part, about)
        except SafetensorError as error:
            raise BadData(f"{path}: cannot be written ({first_line(error)}); "
                          f"is there room?") from error


def write_text(path: str | Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


# ---------------------------------------------------------------------- reading

def read_text(path: Path) -> str:
    """UTF-8 text, with or without a byte-order mark; BadData if there is no such file, or if it is
    none.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadData(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BadData(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    # other encodings that are read without an error: UTF-16 has zeros, ISO-2022 has escapes
    if "\0" in text or "\x1b" in text:
        raise BadData(f"{path}: is not UTF-8 text (it has control characters)")
    return text


def parse_json(text: str):
    """The content of a JSON text. ValueError if a name stands twice in an object, of which the first
    would be lost, and for NaN and Infinity, which are no JSON.
    """
    return json.loads(text, object_pairs_hook=each_name_once, parse_constant=refuse_constant)


def refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def each_name_once(pairs: list[tuple[str, object]]) -> dict:
    content = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the name {name!r:.200} stands twice in one object")
        content[name] = value
    return content


def read_json(path: Path):
    """The content of a JSON file. BadData if it is damaged."""
    text = read_text(path)
    if is_pointer(path):
        raise BadData(f"{path}: {POINTER}")
    with expecting(path, "JSON"):
        return parse_json(text)


POINTER = "is a Git LFS pointer, not the file that it stands for; get that by `git lfs pull`"


def is_pointer(path: Path) -> bool:
    """Whether a file that cannot be read has a pointer of Git LFS in its place."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(23) == b"version https://git-lfs"


@contextmanager
def expecting(path: str | Path, content: str) -> Iterator[None]:
    """A context in which a file's content is used.

    If it is used as what it is not, BadData says in one line that `content` was expected.
    """
    try:
        yield
    except BadData:                            # it names the file, this one or another
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError,
            RecursionError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise BadData(f"{path}: expected {content} ({reason})") from error


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a JSONL file, one per line; BadData names a line that is no object."""
    rows = []
    # not splitlines: a text may hold U+2028
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            with expecting(f"{path}, line {number}", "a JSON object"):
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise TypeError(f"{row!r:.60}")
                rows.append(row)
    return rows


def is_number(value) -> bool:
    """Can a value of a file be a time or a count?

    NaN, infinity, true, false, and values from 10^12 on cannot.
    """
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and abs(value) < 1e12        # not true for NaN


# ---------------------------------------------------------------------- names


def check_apart(inputs: Iterable[str | Path | None], outputs: Iterable[str | Path | None]) -> None:
    """BadData if an output would destroy an input or another output.

    inputs      files, and folders, of whose files none may be an output
    None and "" are no path.
    """
    taken = set()
    for path in filter(None, inputs):
        taken.add(file_behind(path))
        if os.path.isdir(path):
            taken |= {file_behind(file) for file in Path(path).iterdir() if file.is_file()}
    for path in filter(None, outputs):
        if file_behind(path) in taken:
            raise BadData(f"{path}: is given twice, as input (or in its folder) and output or as two "
                          f"outputs; choose another name")
        taken.add(file_behind(path))


def file_behind(path: str | Path) -> tuple[int, int] | str:
    """What a path leads to: links are what they lead to, two names of one file (hard links) are one."""
    if os.path.exists(path):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return os.path.realpath(path)              # a loop of links is told when it is opened


def file_name(name: str) -> str:
    """A name from data (a video's id) as a file's name: no separators, never "." or "..".

    Different names become different files. Letters of other scripts stay: quoted, each would take
    nine of the 255 bytes that a name can have.
    """
    return re.sub(r'[\x00-\x1f\x7f%/\\:*?"<>|]|^\.',
                  lambda match: f"%{ord(match[0]):02X}", name)
