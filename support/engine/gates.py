"""How much the gate of a memory does: the memory as it is, and with each gate fixed at its mean."""
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def has_gate(memory: nn.Module) -> bool:
    """Whether a memory forgets more of one token than of another."""
    return hasattr(memory, "w_gate")


@contextmanager
def gate_at_mean(memory: nn.Module, x: Tensor) -> Iterator[None]:
    """Within it, log G of each channel is its mean over the tokens x [.., D], whatever comes in:
    a fixed decay. The memory must have a gate (`has_gate`).
    """
    project = memory.project
    with torch.no_grad():
        _, _, log_gate = project(x)
    mean = log_gate.flatten(0, -3).mean(0)                              # [h, c], or [h, 1]

    def with_mean(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v, _ = project(x)
        return k, v, mean.expand(*x.shape[:-1], -1, -1)

    memory.project = with_mean                                          # hides the method
    try:
        yield
    finally:
        del memory.project


@torch.no_grad()
def effect_of_gate(memory: nn.Module, x: Tensor, read_at: Tensor) -> float:
    """How far memory tokens move when log G is fixed at its mean over the tokens x [B, L, D].

    It is the root of a ratio of squares: what the tokens of all read-outs [B, N] move by, over what
    they differ by from their mean over videos and read-outs. 0: the gate does nothing. 1: without
    it, the memory is as wrong as one that says the same of every video. There must be at least two
    read-outs of different content.
    """
    memory.eval()                                                       # no dropout
    tokens, _ = memory(x, read_at)                                      # [B, N, M, D]
    with gate_at_mean(memory, x):
        of_mean, _ = memory(x, read_at)
    moved = (of_mean - tokens).square().sum()
    spread = (tokens - tokens.mean((0, 1))).square().sum()
    return (moved / spread).sqrt().item()
