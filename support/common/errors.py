"""Errors that a user can cause, and how a command reports them: one line, exit code 1."""
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from threading import RLock, current_thread, main_thread
from typing import TextIO

from tqdm import tqdm

from support.common.text import one_line


class BadData(ValueError):
    """A problem that the user can fix; the message says what to do.

    It is shown in one line without control characters, because it can quote names from files.
    """
    def __str__(self) -> str:
        return one_line(super().__str__())


class NotDownloaded(BadData):
    """A data set is missing; the message says in a few lines what to fetch and where to put it."""
    __str__ = ValueError.__str__


# Signals that end a process: of schedulers, before the time is over, and of a terminal that closes.
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
          if hasattr(signal, name)]


def command_line(main: Callable[[], None]) -> None:
    """Run a command line and exit.

    Exit codes: 0 done, 1 bad input (one line on stderr), 130 Ctrl-C, 141 a closed pipe (`| head`;
    no message; the code is a shell's); argparse exits with 2. The signals by which schedulers and
    closed terminals end a job are treated as Ctrl-C. A character that stdout cannot encode, as in a
    file name, is printed as "?"; on stderr, Python itself does that. What stderr does not take is
    lost, and ends nothing.
    """
    # tqdm's own lock has a semaphore, of which Python says that it leaked where a command ends at once
    tqdm.set_lock(RLock())
    with redirect_stderr(sys.stderr and Log(sys.stderr)):
        code = exit_code(main)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:                           # it is closed: python ... >&-
            try:
                stream.flush()
            except OSError:
                drop(stream)
    if ends_at_once:
        os._exit(code)
    sys.exit(code)


def exit_code(main: Callable[[], None]) -> int:
    """Run a command line, and say what went wrong."""
    if hasattr(sys.stdout, "reconfigure"):               # False if a test has replaced it
        sys.stdout.reconfigure(errors="replace")
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:   # nohup
            signal.signal(number, signal.default_int_handler)
    code = 1
    message = ""
    try:
        main()
        if sys.stdout is not None:                       # it is closed: python ... >&-
            sys.stdout.flush()
        code = 0
    except BrokenPipeError:
        drop(sys.stdout)
        code = 141
    except KeyboardInterrupt:
        for number in ENDING:                            # a second signal does not break off the end
            signal.signal(number, lambda *_: None)
        message = "interrupted"
        code = 130
    except BadData as error:
        message = f"error: {error}"
    except OSError as error:
        message = f"error: {one_line(str(error) or type(error).__name__)}"
        if error.filename is not None:
            message = f"error: {one_line(str(error.filename))}: {error.strerror}"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):        # all other files have a name
            drop(sys.stdout)
            message = "error: standard output: cannot be written, the disk is full"
    except (RuntimeError, MemoryError) as error:
        # torch raises a RuntimeError with one of several messages
        out_of_memory = re.search("out of memory|allocate memory", str(error))
        if isinstance(error, RuntimeError) and not out_of_memory:
            raise
        message = (f"error: out of memory ({first_line(error)}); "
                   f"use a smaller model or --dtype bfloat16")
    if message:
        print(message, file=sys.stderr)
    return code


class Log:
    """A stream that drops what cannot be written: no full disk under a log ends days of work."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self.stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


# Whether a command ends without cleaning up: several processes after an error in one, because what
# connects them can crash when Python takes it down alone.
ends_at_once = False


def end_at_once() -> None:
    global ends_at_once
    ends_at_once = True


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A context that Ctrl-C and its like (ENDING) do not end; they act after it."""
    if current_thread() is not main_thread():            # signals reach the main thread alone
        yield
        return
    came = []
    kept = {number: signal.signal(number, lambda number, frame: came.append(number))
            for number in (signal.SIGINT, *ENDING)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if came:
            os.kill(os.getpid(), came[0])


def drop(stream: TextIO) -> None:
    """Drop the text that a broken or full stdout or stderr has not taken.

    Otherwise Python fails when it flushes them at the end.
    """
    with suppress(OSError):                              # it may be no file, and hold no text
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def first_line(error: Exception) -> str:
    """The first line of another library's error, at most 250 characters, to quote in our own."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0][:250]
