"""The attention of training (paper §3.5) by PyTorch's FlexAttention, for CUDA: one kernel that skips
the blocks of keys that no query of a block sees (train.py --flex).

`block_mask` takes the place of `attention.rectangles`: the same rows give the same numbers. PyTorch
has no gradients of it on a processor.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from support.common.errors import BadData


def check_flex(device: str) -> None:
    """BadData unless FlexAttention can train on the device."""
    if not device.startswith("cuda"):
        raise BadData("--flex: FlexAttention trains on CUDA only")


def block_mask(rows: list[tuple[Tensor, Tensor]], length: int, device: str | torch.device):
    """Queries and keys of each segment of a sequence of `length` tokens -> FlexAttention's mask."""
    from torch.nn.attention.flex_attention import create_block_mask
    segment_of = torch.zeros(length, dtype=torch.long)                      # [L]
    seen = torch.zeros(len(rows), length, dtype=torch.bool)                 # by a segment [S, L]
    for number, (queries, keys) in enumerate(rows):
        segment_of[queries] = number
        seen[number, keys] = True
    segment_of = segment_of.to(device)
    seen = seen.to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen[segment_of[query], key] & (key <= query)

    return create_block_mask(sees, None, None, length, length, device=str(device))


def attend_by_mask(query: Tensor, key: Tensor, value: Tensor, mask, scale: float | None) -> Tensor:
    """query [1, heads, L, c], key and value [1, kv heads, L, c] -> [1, L, heads, c]."""
    attend = kernel(compiled=query.is_cuda)
    attended = attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2)


@cache
def kernel(compiled: bool) -> Callable:
    """FlexAttention. Lengths change from video to video: it is compiled once for all."""
    from torch.nn.attention.flex_attention import flex_attention
    if compiled:
        return torch.compile(flex_attention, dynamic=True)
    return flex_attention
