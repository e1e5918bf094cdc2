"""Errors that a user can cause, and how a command reports them: one line, exit code 1."""
from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Callable

from tqdm import tqdm


class BadData(ValueError):
    """A problem that the user can fix; the message is one line that says what to do."""


class NotDownloaded(BadData):
    """A data set is not there; the message says in a few lines what to fetch and where to put it."""


def command_line(main: Callable[[], None]) -> None:
    """Runs a command line and exits: 0 done, 1 bad input (one line on stderr), 130 Ctrl-C; argparse exits with 2.

    SIGTERM, by which schedulers end a job, is as Ctrl-C. A closed pipe (`| head`) ends quietly, with a shell's 141.
    A character that stdout cannot encode, as in a file name, is printed as "?"; Python sees to that on stderr.
    """
    SAID_ONCE.clear()
    if hasattr(sys.stdout, "reconfigure"):                                     # not if a test has put another one there
        sys.stdout.reconfigure(errors="replace")
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        main()
        sys.stdout.flush()
        code = 0
    except BrokenPipeError:
        drop_stdout()
        code = 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except NotDownloaded as error:                                             # the one message of several lines
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except (BadData, OSError) as error:
        message = str(error) or type(error).__name__
        if is_full(error) and error.filename is None:                          # all other files have been named
            drop_stdout()
            message = "standard output: cannot be written, the disk is full"
        elif isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        print("error:", " ".join(message.split()), file=sys.stderr)
        code = 1
    except (RuntimeError, MemoryError) as error:                               # torch has several messages for it
        if isinstance(error, RuntimeError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        print(f"error: out of memory ({first_line(error)[:200]}); use a smaller model or --dtype bfloat16",
              file=sys.stderr)
        code = 1
    sys.exit(code)


SAID_ONCE: set[str] = set()


def say_once(text: str) -> None:
    """A line on stderr, the first time that it is said in a command."""
    if text not in SAID_ONCE:
        SAID_ONCE.add(text)
        tqdm.write(text, file=sys.stderr)


def drop_stdout() -> None:
    """What is still to be written to a broken or full stdout is dropped, or Python's last flush complains."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:                                                            # it is no file, so nothing is left in it
        pass


def first_line(error: Exception) -> str:
    """The first line of another library's error, to quote in our own."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---------------------------------------------------------------------- files


def is_full(error: Exception) -> bool:
    """Does it say that a disk is full, or the user's share of it?"""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
