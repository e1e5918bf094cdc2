"""Iterators: in lists of equal size, and prepared ahead by a thread."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

MOST = 1000                     # items that wait, however many are asked for: each takes memory


def chunks(items: Iterator, size: int) -> Iterator[list]:
    """Lists of `size` items, the last one shorter."""
    items = iter(items)
    while True:
        chunk = list(islice(items, size))
        if not chunk:
            return
        yield chunk


def prefetch(items: Iterable, size: int) -> Iterator:
    """The same items; a thread makes up to `size` of them, at most MOST, before they are asked for.

    An error is raised in place of its item.
    """
    source = iter(items)
    end = object()                                       # `next` returns it when no item is left
    with ThreadPoolExecutor(1) as thread:
        waiting = deque(thread.submit(next, source, end) for _ in range(min(size, MOST)))
        while True:
            item = waiting.popleft().result()
            if item is end:
                return
            waiting.append(thread.submit(next, source, end))
            yield item
