"""Devices, number formats and processes."""
import os
import re
import shlex
import sys

import torch

from support.common.errors import BadData


DTYPES = ("float32", "bfloat16", "float16")


def device_and_dtype(device: str = "auto", dtype: str = "auto") -> tuple[str, torch.dtype]:
    """Decide device and dtype, for all commands.

    "auto": CUDA before MPS before the CPU, and bfloat16 on CUDA, else float32. Under torchrun,
    "cuda" is this process's GPU, and "cuda:0" one for all. BadData if this machine has no such
    device.
    """
    if device == "auto":
        device = "cpu"
        if torch.backends.mps.is_available():
            device = "mps"
        if torch.cuda.is_available():
            device = "cuda"
    if device == "cuda" and not is_alone():
        # where there are more processes than GPUs, they share them
        number = int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count())
        device = f"cuda:{number}"
    try:
        if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
            raise ValueError
        torch.empty(1, device=device)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise BadData(f"--device {device}: there is no such device here; "
                      f"use cpu, or auto for the best one") from error
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)                    # this process's GPU
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return device, getattr(torch, dtype)


# what torchrun sets in each of its processes
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# how many processes SLURM, or a launcher that is not torchrun, has started
SIZES = ("WORLD_SIZE", "SLURM_NTASKS")


def rank() -> tuple[int, int]:
    """(rank, processes) under torchrun, else (0, 1)."""
    if not under_torchrun():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def is_alone() -> bool:
    """Whether this process shares its work with no other one."""
    _, processes = rank()
    return processes == 1


def is_first() -> bool:
    """Whether this is the first, or only, process."""
    process, _ = rank()
    return process == 0


def under_torchrun() -> bool:
    """Whether the variables of torchrun are all there, and can be true."""
    values = {name: os.environ.get(name, "") for name in OF_TORCHRUN}
    if not values.pop("MASTER_ADDR") or not all(map(str.isdecimal, values.values())):
        return False
    return int(values["RANK"]) < int(values["WORLD_SIZE"])


def check_launcher() -> None:
    """BadData if another launcher than torchrun has started several processes: each would do the
    whole work.
    """
    if under_torchrun():
        return
    sizes = {name: os.environ.get(name, "") for name in SIZES}
    several = [name for name, size in sizes.items() if size.isdecimal() and int(size) > 1]
    if several:
        name = several[0]
        command = shlex.join(["torchrun", "--nproc-per-node", sizes[name], *sys.argv])
        raise BadData(f"{name}={sizes[name]} says that there are several processes, and only those "
                      f"of torchrun share work: {command} (several machines: docs/training.md); "
                      f"for one process alone, unset {' '.join(several)}")

