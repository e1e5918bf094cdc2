"""Several processes of one command, as torchrun starts them: sums, and what all must agree on.

With one process, nothing here does anything. An error in one process is one in all: each says one
line, and none waits for a process that is gone.
"""
from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.common.devices import check_launcher, is_alone, rank
from support.common.errors import BadData, end_at_once, first_line
from support.common.marks import digest_of_program

ARRIVAL = timedelta(minutes=5)             # until all processes have started
SHARES = timedelta(days=100)               # until the last one is through with its share of work


class KnownToAll(BadData):
    """A problem that ends all processes at the same place."""
    known_to_all = True


class PeerGone(BadData):
    """Another process of the command has ended without a word, or does not answer."""


class Different(KnownToAll):
    """The processes do not have in common what they must."""


# ---------------------------------------------------------------------- beginning and end

@contextmanager
def process_group() -> Iterator[None]:
    """A context, or a decorator, of a command whose processes share work.

    It is the outermost one: whatever ends a process within it, the others notice when they next
    exchange something. After an error that all know of, none leaves before the others: torchrun
    ends all processes as soon as one has ended, and the first one may still write a state.

    BadData if another launcher has started the processes, or if not all come; Different if they do
    not run the same program.
    """
    check_launcher()
    if is_alone():
        yield
        return
    try:
        meet()
        check_equal({"the program, of hash": digest_of_program(), "PyTorch": torch.__version__})
        yield
    except BaseException as error:
        end_at_once()
        if getattr(error, "known_to_all", False):
            leave_together()
        raise
    dist.destroy_process_group()


def meet() -> None:
    """Wait until all processes are here, and connect them."""
    end_with_launcher()
    process, processes = rank()
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=ARRIVAL))
        store = dist.PrefixStore(this_start(), store)
        store.set(f"{process} is here", "")
        store.wait([f"{n} is here" for n in range(processes)], ARRIVAL)
        # gloo notices at once that a process died
        dist.init_process_group("gloo", store=store, rank=process, world_size=processes)
        patient_group()
    except (RuntimeError, ValueError) as error:          # a port that cannot be is a ValueError
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise BadData(f"the {processes} processes of this run do not meet at {place}; has one of "
                      f"them ended, is the port in use, or is there a firewall? "
                      f"({first_line(error)})") from error


def this_start() -> str:
    """What tells these processes from those before a restart (torchrun --max-restarts), whose
    addresses are still in the store. (For several machines: docs/training.md.)
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return ""                                            # each machine counts its own restarts


@cache
def patient_group() -> dist.ProcessGroup:
    """All processes, for an exchange before which they may wait for each other for days."""
    return dist.new_group(timeout=SHARES, backend="gloo")


def end_with_launcher() -> None:
    """If torchrun is killed, its processes get SIGTERM, which lets them save (on Linux)."""
    PR_SET_PDEATHSIG = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@cache
def group_for(device: str) -> dist.ProcessGroup | None:
    """All processes, for tensors on such a device. (NCCL's is made where it is needed: it wants a
    GPU for each process, and processes that encode may share one.)
    """
    has_nccl = device == "cuda" and dist.is_nccl_available()
    return dist.new_group(backend="nccl") if has_nccl else None


def leave_together() -> None:
    """Wait until all processes are here; torchrun's signal is not needed any more."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(PeerGone):                             # another one has not waited
        summed(0)


# ---------------------------------------------------------------------- exchanges

@contextmanager
def peers() -> Iterator[None]:
    """A context of one exchange. PeerGone if another process does not answer."""
    try:
        yield
    except RuntimeError as error:                        # gloo's and NCCL's
        problem = "has ended; its own message says why"
        if "timed out" in str(error).lower():
            problem = "has not answered for a long time; look at what it does"
        raise PeerGone(f"another process of this run {problem} "
                       f"({first_line(error)})") from error


def summed(*numbers: float) -> list[float]:
    """Each number, summed over all processes."""
    if is_alone():
        return list(numbers)
    total = torch.tensor(numbers, dtype=torch.float64)
    with peers():
        dist.all_reduce(total)
        return total.tolist()


def sum_tensors(tensors: list[Tensor]) -> None:
    """Sum each tensor over all processes, in place."""
    if not is_alone():
        with peers():
            for tensor in tensors:
                dist.all_reduce(tensor, group=group_for(tensor.device.type))


def gathered(value: Any, patiently: bool = False) -> list[Any]:
    """The value of each process, in all processes."""
    if is_alone():
        return [value]
    values = [None] * dist.get_world_size()
    with peers():
        dist.all_gather_object(values, value, patient_group() if patiently else None)
    return values


def tensor_from_first(tensor: Tensor) -> None:
    """Overwrite a tensor with that of the first process."""
    if not is_alone():
        with peers():
            dist.broadcast(tensor.data, 0, group=group_for(tensor.device.type))


def check_equal(facts: dict[str, Any]) -> None:
    """Different, in all processes, if one has another value of something than the first one."""
    first, *others = gathered(facts)
    for process, of_process in enumerate(others, 1):
        for name in first | of_process:
            value, expected = of_process.get(name), first.get(name)
            if value != expected:
                raise Different(f"at the start, process {process} has {name} {value!s:.100}, and "
                                f"process 0 has {expected!s:.100}: all must have the same")


# ---------------------------------------------------------------------- work

def all_go_on(failed: bool = False, patiently: bool = False) -> None:
    """KnownToAll, where another process has said, here too, that it cannot go on."""
    failures = gathered(failed, patiently)
    if any(failures) and not failed:
        raise KnownToAll("another process of this run cannot go on; its own message says why")


def tell_others(error: BaseException | None, patiently: bool = False) -> None:
    """An error that ends this process is one in the others, which next call `all_go_on`. (Not a
    signal: what ends one of torchrun's processes so, it sends to all.)
    """
    known = isinstance(error, PeerGone) or getattr(error, "known_to_all", False)
    if isinstance(error, Exception) and not known:
        error.known_to_all = True
        all_go_on(failed=True, patiently=patiently)


def together(call: Callable, *values, patiently: bool = False) -> Any:
    """call(*values) of this process. If it fails in one of the processes, all fail."""
    try:
        result = call(*values)
    except Exception as error:
        tell_others(error, patiently)
        raise
    all_go_on(patiently=patiently)
    return result


def sum_of(call: Callable) -> list[float]:
    """The numbers that call() gives, summed over all processes; see `together`."""
    return summed(*together(call))


def my_share(items: Sequence) -> Sequence:
    """The items that are this process's work, of a list that all processes have."""
    process, processes = rank()
    return items[process::processes]


def in_shares(work: Callable[[], Any]) -> list[Any]:
    """work() of each process -> what each has given, in all processes.

    No process goes on, or ends, before all are through, however long that takes: torchrun ends all
    when one has ended with an error. See `together`.
    """
    return gathered(together(work, patiently=True))
