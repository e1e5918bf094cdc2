"""Several processes of one command, as torchrun starts them: sums, and what all must agree on.

With one process, nothing here does anything. An error in one process is one in all: each says one
line, and none waits for a process that is gone.
"""
from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.common.devices import rank
from support.common.errors import BadData, end_at_once


class PeerFailed(BadData):
    """Another process of the command cannot go on, and has said so."""
    known_to_all = True


class PeerGone(BadData):
    """Another process of the command has ended without a word."""


class Different(BadData):
    """The processes do not have in common what they must."""
    known_to_all = True


LONGEST_SAVING = 300.0                                   # [s] of a state, after an error
PAUSE = 0.2                                              # [s] between two looks at the others


@cache
def common_store() -> dist.Store:
    """A dictionary that all processes have in common."""
    with peers("cannot be reached"):
        store, _, _ = next(dist.rendezvous("env://"))
        return store


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """A context in which the processes of torchrun can exchange tensors.

    After an error that all know of, none leaves before the others: torchrun ends all processes as
    soon as one has ended, and the first one may still write a state.
    """
    process, processes = rank()
    if processes == 1:
        yield
        return
    backend = "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)                    # this process's GPU
        backend = "cpu:gloo,cuda:nccl"                   # gloo notices at once that a process died
    with peers("cannot be reached"):
        dist.init_process_group(backend, store=common_store(), rank=process, world_size=processes)
    try:
        check_gpus(device)
        yield
    except BaseException as error:
        end_at_once()
        if getattr(error, "known_to_all", False):
            leave_together()
        raise
    dist.destroy_process_group()


def check_gpus(device: str) -> None:
    """Different, in all processes, if two of them have the same GPU: NCCL cannot do that."""
    if not device.startswith("cuda"):
        return
    gpus = gathered(str(torch.cuda.get_device_properties(device).uuid))
    if len(set(gpus)) < len(gpus):
        raise Different(f"{len(gpus)} processes have {len(set(gpus))} GPUs, and each needs one of "
                        f"its own: give torchrun a smaller --nproc-per-node, no --device cuda:N")


def leave_together() -> None:
    """Wait until all processes are here; torchrun's signal is not needed any more."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        meet("leaving", LONGEST_SAVING)
    except RuntimeError:                                 # another one has not waited
        pass


def meet(name: str, longest: float = inf) -> None:
    """Wait for all processes, at most `longest` seconds. The first one, which can hold the store,
    goes on last.
    """
    process, processes = rank()
    common_store().add(name, 1)
    wait_for(name, processes, longest)
    common_store().add(f"{name}: seen", 1)
    if process == 0:
        wait_for(f"{name}: seen", processes, longest)


def wait_for(key: str, number: int, longest: float = inf) -> None:
    """Wait until a number of the store is reached."""
    began = time.monotonic()
    while common_store().add(key, 0) < number and time.monotonic() - began < longest:
        time.sleep(PAUSE)


@contextmanager
def peers(problem: str = "has ended; its own message says why") -> Iterator[None]:
    """A context of one exchange. PeerGone if another process does not answer."""
    try:
        yield
    except RuntimeError as error:                        # gloo's and NCCL's
        raise PeerGone(f"another process of this run {problem}") from error


def summed(*numbers: float) -> list[float]:
    """Each number, summed over all processes."""
    _, processes = rank()
    if processes == 1:
        return list(numbers)
    total = torch.tensor(numbers, dtype=torch.float64)
    with peers():
        dist.all_reduce(total)
        return total.tolist()


def sum_tensors(tensors: list[Tensor]) -> None:
    """Sum each tensor over all processes, in place."""
    _, processes = rank()
    if processes > 1:
        with peers():
            for tensor in tensors:
                dist.all_reduce(tensor)


def together(call: Callable, *values) -> Any:
    """call(*values) of this process. If it fails in one of the processes, all fail."""
    _, processes = rank()
    if processes == 1:
        return call(*values)
    failed = None
    result = None
    try:
        result = call(*values)
    except (PeerGone, PeerFailed, Different):            # all know of it
        raise
    except Exception as error:
        failed = error
    failures, = summed(failed is not None)
    if failed is not None:
        failed.known_to_all = True
        raise failed
    if failures:
        raise PeerFailed("another process of this run cannot go on; its own message says why")
    return result


def sum_of(call: Callable, *values) -> list[float]:
    """The numbers that call(*values) gives, summed over all processes; see `together`."""
    return summed(*together(call, *values))


def gathered(value: Any) -> list[Any]:
    """The value of each process, in all processes."""
    _, processes = rank()
    if processes == 1:
        return [value]
    values = [None] * processes
    with peers():
        dist.all_gather_object(values, value)
    return values


def check_equal(facts: dict[str, Any], where: str) -> None:
    """Different, in all processes, if one has another value of something than the first one."""
    first, *others = gathered(facts)
    for process, of_process in enumerate(others, 1):
        for name in first | of_process:
            value, expected = of_process.get(name), first.get(name)
            if value != expected:
                raise Different(f"{where}, process {process} has {name} {value!s:.100}, and "
                                f"process 0 has {expected!s:.100}: all must have the same")


def from_first(value: Any) -> Any:
    """The value that the first process has, in all processes."""
    _, processes = rank()
    if processes == 1:
        return value
    values = [value]
    with peers():
        dist.broadcast_object_list(values)
    return values[0]


def tensor_from_first(tensor: Tensor) -> None:
    """Overwrite a tensor with that of the first process."""
    _, processes = rank()
    if processes > 1:
        with peers():
            dist.broadcast(tensor.data, 0)


# ---------------------------------------------------------------------- work in shares

numbers = count()                                        # of what is done in shares


def my_share(items: Sequence) -> Sequence:
    """The items that are this process's work, of a list that all processes have."""
    process, processes = rank()
    return items[process::processes]


def in_shares(work: Callable[[], Any]) -> list[Any]:
    """work() of each process -> what each has given, in all processes.

    No process goes on, or ends, before all are through, however long that takes: torchrun ends all
    when one has ended with an error. After an error in one, it is raised there, and PeerFailed in
    the others. No process group is needed.
    """
    process, processes = rank()
    if processes == 1:
        return [work()]
    store = common_store()
    name = f"shares {next(numbers)}"
    failed = None
    result = None
    try:
        result = work()
    except Exception as error:
        failed = error
    with peers():
        # pickles, as in torch's own all_gather_object: the processes trust each other
        store.set(f"{name} {process}", pickle.dumps((failed is not None, result)))
        meet(f"{name} through")
        all_of_them = [pickle.loads(store.get(f"{name} {n}")) for n in range(processes)]
        meet(f"{name} read")
    if failed is not None:
        raise failed
    if any(others_failed for others_failed, _ in all_of_them):
        raise PeerFailed("another process of this run could not do its part; its own message says "
                         "why")
    return [given for _, given in all_of_them]
