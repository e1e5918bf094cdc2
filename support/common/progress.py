"""How far a command has come: a bar on a terminal, else a line a minute."""
from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from support.common.devices import rank


EVERY = 60.0                                             # seconds between two lines of progress


def progress(items: Iterable | None = None, desc: str = "", total: int | None = None,
             unit: str = "", initial: int = 0, **how):
    """The items, with their count on stderr; without items, `update(n)` counts.

    On a terminal it is tqdm's bar (`how`: further options of it); in a pipe or a file it is one
    line a minute. Under torchrun, only the process of rank 0 shows it.
    """
    process, _ = rank()
    if process > 0:
        how["disable"] = True
    if sys.stderr.isatty() or how.get("disable"):
        return tqdm(items, desc, total, initial=initial, unit=unit, **how)
    return PlainProgress(items, desc, total, unit, initial)


def say(line: str) -> None:
    """Print a line on stderr, above a bar if there is one."""
    tqdm.write(line, file=sys.stderr)


def duration(seconds: float) -> str:
    """Roughly: 40 s, 5 min or 3.2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class PlainProgress:
    """Progress as lines. It has those of tqdm's methods that this project uses."""

    def __init__(self, items: Iterable | None, desc: str, total: int | None, unit: str,
                 initial: int = 0):
        if total is None and hasattr(items, "__len__"):
            total = len(items)
        self.items = items
        self.desc = desc
        self.total = total
        self.unit = unit
        self.initial = initial                           # items that an earlier run has counted
        self.n = initial
        self.postfix = ""
        self.began = time.monotonic()
        self.printed_at = self.began

    def __iter__(self) -> Iterator:
        for item in self.items:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        self.n += count
        now = time.monotonic()
        if now - self.printed_at >= EVERY:
            self.printed_at = now
            print(self.line(now - self.began), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """"streaming: 120 of 720 frames in 60 s, 2 a second, 5 min left; cache 157+60 tokens", for
        example."""
        count = f"{self.n} of {self.total}" if self.total else f"{self.n}"
        speed = (self.n - self.initial) / seconds
        left = ""
        if self.total and speed > 0:
            left = f", {duration((self.total - self.n) / speed)} left"
        prefix = f"{self.desc}: " if self.desc else ""
        postfix = f"; {self.postfix}" if self.postfix else ""
        return (f"{prefix}{count} {self.unit}s in {seconds:.0f} s, {speed:.3g} a second"
                f"{left}{postfix}")

    def set_postfix(self, values: dict | None = None, refresh: bool = True, **more) -> None:
        values = (values or {}) | more
        self.postfix = ", ".join(f"{name} {value}" for name, value in values.items())

    def __enter__(self) -> "PlainProgress":
        return self

    def __exit__(self, *_) -> None:
        pass
