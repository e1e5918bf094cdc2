"""The inputs of a command line, and the files to which their narrations go."""
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.common.disk import check_apart, check_writable
from support.common.errors import BadData
from support.common.locks import lock_opened, locked
from support.common.options import DEFAULT_MODEL
from support.common.text import without_controls
from support.files.own_videos import check_not_narrations
from support.files.sources import Source

FORMS = ("jsonl", "srt", "vtt", "trace", "html", "state")      # options that name output files
WRITTEN = FORMS[:4]                                     # line by line, as the stream goes on


@dataclass
class Input:
    """One input of a command line, and where its narrations go.

    name        of its outputs; "" of a single input
    files       {one of FORMS: path}, those that are asked for
    """
    source: Source
    name: str
    files: dict[str, str]


def inputs_of(args: Namespace) -> list[Input]:
    """The inputs of a command line.

    The options name the output files of a single input, which has no name. With several inputs, the
    options name folders. BadData if two inputs have the same name or a file in common, or if an
    output cannot be written, or only in place of your own narrations.
    """
    options = {form: getattr(args, form) for form in FORMS if getattr(args, form)}
    inputs = []
    for source in args.input:
        if len(args.input) == 1:
            inputs.append(Input(source, "", options))
            continue
        # a.mp4 is called a, and a.safetensors:NAME is called NAME
        name = without_controls(Path(source.tensor or source.path).stem)
        if name in [other.name for other in inputs]:
            raise BadData(f"several inputs are called {name}; rename one of them, or narrate "
                          f"it in another command, so that their outputs differ")
        files = {form: f"{folder}/{name}.{form}" for form, folder in options.items()}
        if "trace" in files:
            files["trace"] += ".jsonl"
        inputs.append(Input(source, name, files))

    read = [given.source.path for given in inputs if not given.source.is_live]
    read += [args.model or DEFAULT_MODEL]
    read += [getattr(args, kind, None) for kind in ("llm", "vision")]      # absent: not given
    check_apart(read, [file for given in inputs for file in given.files.values()])
    for given in inputs:
        for form, path in given.files.items():
            check_writable(path, in_place=form in WRITTEN)
        # a stream that continues from its state continues its files, too
        if not os.path.exists(given.files.get("state", "")):
            check_not_narrations(*given.files.values(), source=given.source.path.resolve())
    return inputs


@contextmanager
def files_locked(given: Input) -> Iterator[None]:
    """A context in which no other run writes the files of an input; Locked if one does."""
    with ExitStack() as stack:
        for file in given.files.values():
            path = Path(os.path.realpath(file))             # a link, and the file itself
            if path.is_file() or not os.path.exists(file):  # no pipe, nor /dev/null
                stack.enter_context(locked(path.parent, path.name))
            if path.is_file():                              # by its other names (hard links), too
                lock_opened(stack.enter_context(path.open("a")))
        yield
