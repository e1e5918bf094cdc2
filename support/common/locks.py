"""One run at a time: in a folder, or at a file."""
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout

from support.common.errors import BadData


class Locked(BadData):
    """Another run is at work there."""


def lock_opened(file: TextIO) -> None:
    """Until an open file is closed, no other run writes into it, by whatever name. Locked if one does.
    """
    try:
        import fcntl                             # Windows has none
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Locked(f"{file.name}: another run is writing it by another name; wait for it, or choose "
                     f"another file") from None
    except (ImportError, OSError):               # a disk that knows no locks: as if there were none
        return


@contextmanager
def locked(folder: str | Path, name: str = "") -> Iterator[None]:
    """A context in which no other run has this lock; Locked if another one has it.

    folder      is made; if nothing has been written into it, it is removed again
    name        of the file that is locked in the folder; "": all of it

    The system holds the lock, so that a run that is killed leaves none. (What it does leave is an
    empty file, which locks nothing.)
    """
    folder = Path(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".{name}.lock"
    lock = FileLock(file, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        what = name or "into it"
        raise Locked(f"{folder}: another run is writing {what}; wait for it, or choose another "
                     f"place") from None
    except (OSError, NotImplementedError):       # a disk that knows no locks: as if there were none
        lock = None
    try:
        yield
    finally:
        if lock:
            file.unlink(missing_ok=True)         # while it is held
            lock.release()
        for path in made:                        # the innermost first
            try:
                os.rmdir(path)
            except OSError:                      # not empty
                break
