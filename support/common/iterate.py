"""Iterators whose items a thread prepares ahead."""
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from queue import SimpleQueue
from threading import Semaphore, Thread


def next_one_ready(reads: Iterable[Callable]) -> Iterator:
    """What each of the functions reads; a thread reads the next one."""
    return prefetch((read() for read in reads), 1)


def prefetch(items: Iterable, size: int) -> Iterator:
    """The same items; a thread makes up to `size` of them before they are asked for.

    An error is raised in place of its item. Ctrl-C works while the thread waits for an item.
    """
    ready = SimpleQueue()                                # (item, None), or (None, error)
    room = Semaphore(size - 1)                           # beside the item that is made
    end = object()                                       # comes after the last item
    abandoned = False

    def make():
        try:
            for item in chain(items, [end]):
                ready.put((item, None))
                room.acquire()
                if abandoned:
                    return
        except BaseException as error:
            ready.put((None, error))

    Thread(target=make, daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            room.release()
            if error is not None:
                raise error
            if item is end:
                return
            yield item
    finally:
        abandoned = True
        room.release()
