"""Devices, number formats and processes."""
from __future__ import annotations

import os
import re

import torch

from support.common.errors import BadData


DTYPES = ("float32", "bfloat16", "float16")


def device_and_dtype(device: str = "auto", dtype: str = "auto") -> tuple[str, torch.dtype]:
    """Decide device and dtype, for all commands.

    "auto": CUDA before MPS before the CPU, and bfloat16 on CUDA, else float32. Under torchrun,
    "cuda" is this process's GPU. BadData if this machine has no such device.
    """
    if device == "auto":
        device = "cpu"
        if torch.backends.mps.is_available():
            device = "mps"
        if torch.cuda.is_available():
            device = "cuda"
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
            raise ValueError
        torch.empty(1, device=device)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise BadData(f"--device {device}: there is no such device here; "
                      f"use cpu, or auto for the best one") from error
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return device, getattr(torch, dtype)


def synchronise(device: torch.device) -> None:
    """Wait until a CUDA device is done, so that times are right; does nothing for other devices."""
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
