"""--compile: CLAM and the language model of a stream by torch.compile (not in the paper). The
numbers are the same up to rounding.
"""
from __future__ import annotations

import torch
from torch import nn


def compile_narrator(narrator) -> None:
    """Compile the language model's forward, and what the memory computes."""
    compile_memory(narrator.memory)
    model = narrator.llm.model
    # The forward, not the module: names of parameters stay as they are.
    model.forward = torch.compile(model.forward, dynamic=True)


def compile_memory(memory: nn.Module) -> None:
    """Compile what CLAM (clam.py) computes for each frame and each narration.

    Other memories stay the same.
    """
    if hasattr(memory, "absorb"):
        memory.absorb = torch.compile(memory.absorb, dynamic=True)
        memory.read = torch.compile(memory.read, dynamic=True)
