"""Several processes of one command, as torchrun starts them: sums, and what all of them must agree on.

With one process, nothing here does anything. An error in one process is one in all: each says one
line, and none waits for a process that is gone.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
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
store: dist.Store | None = None                          # what the processes have in common


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """A context in which the processes of torchrun can exchange tensors of `device`."""
    _, processes = rank()
    if processes == 1:
        yield
        return
    backend = "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)                    # this process's GPU
        backend = "nccl"
    global store
    with peers("cannot be reached"):
        store, process, processes = next(dist.rendezvous("env://"))
        dist.init_process_group(backend, store=store, rank=process, world_size=processes)
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
            store.set("may leave", "")
        else:
            store.wait(["may leave"], LONGEST_SAVING)
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
