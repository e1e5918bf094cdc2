"""What all files share: errors that are the user's to put right, files that appear whole, figures, devices.

No section of the paper, and nothing about videos or models.
"""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class BadData(ValueError):
    """Something that the user can put right; the message is one line that says what to do."""


class NotDownloaded(BadData):
    """A data set is not there; the message says in a few lines what to fetch and where to put it."""


def command_line(main: Callable[[], None]) -> None:
    """Runs a command line and exits: 0 done, 1 bad input (one line on stderr), 130 Ctrl-C; argparse exits with 2.

    A closed pipe (`| head`) ends quietly, with a shell's 141.
    """
    try:
        main()
        sys.stdout.flush()
        code = 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())         # or Python's last flush complains
        code = 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except NotDownloaded as error:                                             # the one message of several lines
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except (BadData, OSError) as error:
        named = isinstance(error, OSError) and error.filename is not None
        message = f"{error.filename}: {error.strerror}" if named else str(error) or type(error).__name__
        print("error:", " ".join(message.split()), file=sys.stderr)
        code = 1
    sys.exit(code)


def first_line(error: Exception) -> str:
    """Of another library's error, to quote in ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---------------------------------------------------------------------- files

@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name beside `path`, which becomes `path` at the end, or vanishes if anything is raised on the way.

    No reader ever sees half a file. Raises BadData if `path` cannot be written.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    if path.is_dir():
        raise BadData(f"{path}: is a directory; give the name of a file")
    try:
        part.touch()
    except OSError as error:
        raise BadData(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadData(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise BadData(f"{path}: is not JSON ({error})") from None


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


# ---------------------------------------------------------------------- devices and libraries

def choose(device: str = "auto", dtype: str = "auto") -> tuple[str, torch.dtype]:
    """The one place where device and dtype are decided: bf16 on CUDA, else fp32."""
    if device == "auto":                                                            # under torchrun: this process's GPU
        gpu = f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"
        device = gpu if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return device, getattr(torch, dtype)


def quiet():
    """No progress bars and warnings of transformers between our lines."""
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
