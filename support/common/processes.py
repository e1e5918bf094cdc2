"""Several processes of one command, as torchrun starts them: sums, and what all of them must agree on.

With one process, nothing here does anything. An error in one process is one in all: each says one
line, and none waits for a process that is gone.
"""
from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.common.devices import rank
from support.common.errors import BadData


class PeerFailed(BadData):
    """Another process of the command cannot go on, and has said so."""


class PeerGone(BadData):
    """Another process of the command has ended without a word."""


LONGEST_SAVING = timedelta(seconds=60)                   # of a state, after an error


@cache
def common_store() -> dist.Store:
    """A dictionary that all processes have in common."""
    with peers("cannot be reached"):
        store, _, _ = next(dist.rendezvous("env://"))
        return store


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """A context in which the processes of torchrun can exchange tensors of `device`."""
    if rank() == (0, 1):
        yield
        return
    backend = "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)                    # this process's GPU
        backend = "nccl"
    process, processes = rank()
    with peers("cannot be reached"):
        dist.init_process_group(backend, store=common_store(), rank=process, world_size=processes)
    yield
    # not after an error: the others may be gone, and would be waited for
    dist.destroy_process_group()


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
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor(numbers, dtype=torch.float32, device=device)
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
    failed = None
    result = None
    try:
        result = call(*values)
    except PeerGone:
        raise
    except Exception as error:
        failed = error
    failures, = summed(failed is not None)
    if failed is not None:
        raise failed
    if failures:
        raise PeerFailed("another process of this run cannot go on; its own message says why")
    return result


def sum_of(call: Callable, *values) -> list[float]:
    """The numbers that call(*values) gives, summed over all processes; see `together`."""
    return summed(*together(call, *values))


def leave_after_first() -> None:
    """After an error: wait until the first process has written what it can.

    torchrun ends all processes soon after one has ended.
    """
    process, processes = rank()
    if processes == 1:
        return
    try:
        if process == 0:
            common_store().set("may leave", "")
        else:
            common_store().wait(["may leave"], LONGEST_SAVING)
    except RuntimeError:                                 # the first process is gone
        pass


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

PAUSE = 0.2                                              # [s] between two looks at the others
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
        store.set(f"{name} {process}", pickle.dumps((failed is not None, result)))
        store.add(f"{name} through", 1)
        wait_for(store, f"{name} through", processes)
        all_of_them = [pickle.loads(store.get(f"{name} {n}")) for n in range(processes)]
        # the first process can hold the store, so it leaves last
        store.add(f"{name} read", 1)
        if process == 0:
            wait_for(store, f"{name} read", processes)
    if failed is not None:
        raise failed
    if any(others_failed for others_failed, _ in all_of_them):
        raise PeerFailed("another process of this run could not do its part; its own message says "
                         "why")
    return [given for _, given in all_of_them]


def wait_for(store: dist.Store, key: str, number: int) -> None:
    while store.add(key, 0) < number:
        time.sleep(PAUSE)
