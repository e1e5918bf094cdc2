"""Devices, number formats and processes."""
from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch

from support.common.errors import BadData


DTYPES = ("float32", "bfloat16", "float16")
CONTAINER = Path("/sys/fs/cgroup")         # where Linux says what a container may take


def device_and_dtype(device: str = "auto", dtype: str = "auto") -> tuple[str, torch.dtype]:
    """Decide device and dtype, for all commands.

    "auto": CUDA before MPS before the CPU, and bfloat16 on CUDA, else float32. Under torchrun,
    "cuda" is this process's GPU. BadData if this machine has no such device.
    """
    has_mps = torch.backends.mps.is_available()
    if device == "auto":
        if torch.cuda.is_available():
            device = "cuda"
        elif has_mps:
            device = "mps"
        else:
            device = "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise BadData(f"--device is cpu, cuda, cuda:N, mps or auto, not {device}")
    kind, _, number = device.partition(":")
    exists = True
    if kind == "cuda":
        exists = int(number or 0) < torch.cuda.device_count()
    elif kind == "mps":
        exists = has_mps
    if not exists:
        raise BadData(f"--device {device}: there is no such device here; "
                      f"use cpu, or auto for the best one")
    if dtype == "auto":
        dtype = "bfloat16" if kind == "cuda" else "float32"
    if dtype not in DTYPES:
        raise BadData(f"--dtype is auto, {', '.join(DTYPES)}, not {dtype}")
    return device, getattr(torch, dtype)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def vision_dtype(args: argparse.Namespace) -> torch.dtype:
    """The dtype of a command's vision encoder: --vision-dtype, or else --dtype."""
    _, dtype = device_and_dtype(args.device, args.vision_dtype or args.dtype)
    return dtype


def free_memory(device: str = "cpu") -> int | None:
    """Bytes that this process can still take on a device; None where the system does not say.

    On a processor, swap is included. Where only the size of the whole memory is known (macOS), it
    is that.
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return whole_memory()
    sizes = {}
    for line in lines:
        name, value = line.split(":")
        sizes[name] = 1024 * int(value.split()[0])
    if "MemAvailable" not in sizes:
        return None
    free = sizes["MemAvailable"] + sizes.get("SwapFree", 0)
    # a container can have a limit of its own
    try:
        limit = int((CONTAINER / "memory.max").read_text())
        used = int((CONTAINER / "memory.current").read_text())
        lines = (CONTAINER / "memory.stat").read_text().splitlines()
        counts = dict(line.split() for line in lines)
    except (OSError, ValueError):               # no such file, or "max": no limit
        return free
    # copies of files, which make room when it is needed
    cached = int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))
    return min(free, limit - used + cached)


def whole_memory() -> int | None:
    """Bytes of this machine's memory; None where the system does not say (Windows)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def synchronise(where: torch.device | torch.Tensor) -> None:
    """Wait until a CUDA device is done, so that times are right; does nothing for other devices."""
    device = where.device if isinstance(where, torch.Tensor) else where
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rank() -> tuple[int, int]:
    """(rank, processes) under torchrun, else (0, 1)."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def quiet() -> None:
    """Turn off the progress bars and warnings of transformers."""
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
