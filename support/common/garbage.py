"""Memory of a process."""
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def without_collection() -> Iterator[None]:
    """A context in which Python does not look for garbage: where millions of objects are made, that
    takes as long as all else.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def return_freed_memory() -> None:
    """Give freed memory back to the system, of which glibc keeps what lay in pieces of some
    megabytes. Nothing happens where there is another C library.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
