"""Devices, number formats and processes."""
from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch

from support.common.errors import BadData


# ---------------------------------------------------------------------- devices and libraries

DTYPES = ("float32", "bfloat16", "float16")
DTYPES_OF_STREAMS = (*DTYPES, "int8")


def device_and_dtype(device: str = "auto", dtype: str = "auto") -> tuple[str, torch.dtype]:
    """The one place where device and dtype are decided: bf16 on CUDA, else fp32. BadData if the device is not there.

    int8 (torch.int8) is of weights, and for streams only; the numbers between them are bf16 on CUDA, else fp32.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":                                                            # under torchrun: this process's GPU
        gpu = f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"
        device = gpu if cuda else "mps" if mps else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise BadData(f"--device is cpu, cuda, cuda:N, mps or auto, not {device}")
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count() or kind == "mps" and not mps:
        raise BadData(f"--device {device}: there is no such device here; use cpu, or auto for the best one")
    if dtype == "auto":
        dtype = "bfloat16" if kind == "cuda" else "float32"
    if dtype not in DTYPES_OF_STREAMS:
        raise BadData(f"--dtype is auto, {', '.join(DTYPES)} or int8, not {dtype}")
    return device, getattr(torch, dtype)


def vision_dtype(args: argparse.Namespace) -> torch.dtype:
    """That of a command's vision encoder."""
    return device_and_dtype(args.device, args.vision_dtype or args.dtype)[1]


def synchronise(where: torch.device | torch.Tensor) -> None:
    """Wait for a CUDA device, so that elapsed times are right; does nothing for other devices."""
    device = where.device if isinstance(where, torch.Tensor) else where
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory() -> int | None:
    """Bytes that this process can still take, swap included; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: 1024 * int(value.split()[0]) for name, value in (y.split(":") for y in lines)}
    if "MemAvailable" not in sizes:
        return None
    free = sizes["MemAvailable"] + sizes.get("SwapFree", 0)
    try:                                                        # a container's own limit
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):                               # "max": it has none
        return free


def rank() -> tuple[int, int]:
    """(rank, processes) under torchrun, else (0, 1)."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def quiet():
    """Turn off the progress bars and warnings of transformers."""
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
