"""How far a command has come: a bar on a terminal, else a line a minute."""
from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from support.common.devices import rank


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
