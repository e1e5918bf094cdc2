"""How far a command has come, on stderr."""
import sys
from collections.abc import Iterable
from datetime import datetime

from tqdm import tqdm

from support.common.devices import is_first


EVERY = 60.0                                             # seconds between two lines of a log


class LinesOnStderr:
    """stderr where it is a pipe or a file: each state of a bar is a line of its own."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr)


def progress(items: Iterable | None = None, desc: str = "", total: int | None = None,
             unit: str = "", **how):
    """tqdm's bar over the items; without items, `update(n)` counts. `how`: its further options.

    In a pipe or a file it is a line a minute, and none if all is done before the first. Under
    torchrun, only the process of rank 0 shows it.
    """
    if not is_first():
        how["disable"] = True
    if not sys.stderr.isatty():
        # maxinterval: else tqdm looks at a slow bar every 10 s
        how |= {"file": LinesOnStderr(), "delay": EVERY, "mininterval": EVERY, "maxinterval": EVERY}
    return tqdm(items, desc, total, unit=unit, **how)


def say_as_one(line: str) -> None:
    """`say` it once, not in each process of torchrun."""
    if is_first():
        say(line)


def say(line: str) -> None:
    """Print a line on stderr, above a bar if there is one."""
    tqdm.write(line, file=sys.stderr)


def say_when(line: str) -> None:
    """The same with the time of day: of what goes on for days."""
    say(f"{datetime.now().isoformat(' ', 'seconds')} {line}")
