"""Attention of a sequence whose segments see few of the keys before them (paper §3.5), without any
[L, L] tensor.

The rows of a segment are one small rectangle of that matrix: its own tokens as queries, and the
keys that it sees. Segments of similar sizes are padded to one size and computed at once. Which keys
a segment sees is the caller's business.

Glossary (L tokens, S segments of one rectangle, Q queries and K keys of each, c channels a head):
    queries     numbers of tokens, L where padded                         [S, Q]
    keys        numbers of tokens in increasing order, L where padded     [S, K]
    seen        0 where a query sees a key, elsewhere -infinity           [S, 1, Q, K]
    q, k, v     of all tokens and, last, of the padding                   [L + 1, heads, c]
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, log

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from support.common.errors import BadData
from support.engine import flex

NAME = "rectangles"         # of this attention among those of transformers
PADDED = 1.1                # a rectangle is at most so many times larger than its segments,
MOST_PAIRS = 2 ** 20        # and has at most so many pairs of query and key: a cache holds its keys
KEPT = 2 ** 22              # up to so many numbers of gathered keys are kept for the backward pass
Row = tuple[Tensor, Tensor]                     # queries [q] and keys [k] of one segment
Rectangle = tuple[Tensor, Tensor, Tensor]       # queries, keys, seen


def install(llm) -> None:
    """Let a language model of transformers attend as its argument `rectangles` says.

    Without this argument it attends as with "sdpa". BadData if the model's attention stays its own.
    """
    from transformers import AttentionInterface
    AttentionInterface.register(NAME, partial(in_rectangles, AttentionInterface()["sdpa"]))
    llm.set_attn_implementation(NAME)
    if llm.config._attn_implementation != NAME:
        raise BadData(f"{type(llm).__name__} does not let its attention be replaced; "
                      f"use a Llama-like model")


def rectangles(rows: list[Row], length: int, device: str | torch.device) -> list[Rectangle]:
    """Queries and keys of each segment of a sequence of `length` tokens -> the rectangles.

    All layers share them. `seen` holds numbers, because each layer would have to make numbers of
    true and false.
    """
    def size_class(row: Row) -> tuple[int, int]:
        """Segments with nearly as many queries are neighbours, in order of their keys."""
        queries, keys = row
        return int(log(len(queries), PADDED)), len(keys)

    groups = [[]]                               # the segments of each rectangle
    area = 0                                    # pairs of query and key in the last group, unpadded
    for row in sorted(rows, key=size_class):
        group = groups[-1]
        with_row = group + [row]
        Q = max(len(queries) for queries, _ in with_row)
        K = max(len(keys) for _, keys in with_row)
        added = len(row[0]) * len(row[1])
        if group and len(with_row) * Q * K > min(PADDED * (area + added), MOST_PAIRS):
            groups.append([row])
            area = added
        else:
            group.append(row)
            area += added

    result = []
    for group in groups:
        queries, keys = zip(*group)
        queries = pad_sequence(queries, batch_first=True, padding_value=length).to(device)  # [S, Q]
        keys = pad_sequence(keys, batch_first=True, padding_value=length).to(device)        # [S, K]
        # a query does not see the keys after it, and no query sees padding among the keys
        hidden = keys[:, None, None] > queries[:, None, :, None]            # [S, 1, Q, K]
        seen = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -inf)
        result.append((queries, keys, seen))
    return result


def in_rectangles(sdpa: Callable, module, query: Tensor, key: Tensor, value: Tensor,
                  attention_mask: Tensor | None, rectangles: list[Rectangle] | None = None,
                  dropout: float = 0.0, scaling: float | None = None,
                  watch: Callable | None = None, **options) -> tuple[Tensor, None]:
    """An attention function of transformers: query [1, heads, L, c] -> [1, L, heads, c].

    rectangles: or a mask of FlexAttention (support/engine/flex.py).
    watch: called with query, key, value and scaling, in the form in which the model gives them.
    """
    if watch is not None:
        watch(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)
    if rectangles is None:
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                    **options)
    if dropout:
        raise BadData("a language model with dropout in its attention cannot be trained")
    if not isinstance(rectangles, list):
        return flex.attend_by_mask(query, key, value, rectangles, scaling), None
    q, k, v = (with_padding(heads) for heads in (query, key, value))
    return InRectangles.apply(q, k, v, rectangles, scaling)[None, :-1], None


def with_padding(heads: Tensor) -> Tensor:
    """[1, heads, L, c] -> [L + 1, heads, c], zero in the last row."""
    return F.pad(heads[0].transpose(0, 1), (0, 0, 0, 0, 0, 1))


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [S, Q, heads, c], k and v [S, K, kv heads, c], seen [S, 1, Q, K] of one rectangle
    -> [S, Q, heads, c].

    Heads that share keys become further rows, so that no key is copied for them.
    """
    shared = q.shape[2] // k.shape[2]
    seen = seen.to(q.dtype)
    if shared > 1:
        seen = seen.repeat(1, 1, shared, 1)                                 # [S, 1, shared * Q, K]
    rows = rearrange(q, "s q (h g) c -> s h (g q) c", g=shared)
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2),
                                         attn_mask=seen, scale=scale)
    return rearrange(out, "s h (g q) c -> s q (h g) c", g=shared)


class InRectangles(torch.autograd.Function):
    """Attention, one rectangle after the other.

    Small rectangles are stored for the backward pass. Otherwise only q, k and v are stored and the
    rectangles are computed again. The gradients of keys that several rectangles see are summed in
    place.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, rectangles: list[Rectangle],
                scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.rectangles = rectangles
        ctx.scale = scale
        ctx.computed = []                       # of each rectangle; None: to be computed again
        # the same key is gathered once for each rectangle that sees it
        size = sum(keys.numel() for _, keys, _ in rectangles) * k[0].numel()
        result = torch.zeros_like(q)
        for rectangle in rectangles:
            queries = rectangle[0]
            gathered, attended = attend_rectangle((q, k, v), rectangle, scale)
            result[queries] = attended.detach()
            ctx.computed.append((gathered, attended) if size <= KEPT else None)
        return result

    @staticmethod
    def backward(ctx, gradient: Tensor):
        qkv = ctx.saved_tensors
        sums = [torch.zeros_like(tensor) for tensor in qkv]
        for rectangle, computed in zip(ctx.rectangles, ctx.computed):
            queries, keys, _ = rectangle
            if computed is None:
                computed = attend_rectangle(qkv, rectangle, ctx.scale)
            gathered, attended = computed
            gradients = torch.autograd.grad(attended, gathered, rows_at(gradient, queries))
            for total, numbers, part in zip(sums, (queries, keys, keys), gradients):
                total.index_add_(0, numbers.flatten(), part.flatten(0, 1))
        return *sums, None, None


@torch.enable_grad()
def attend_rectangle(qkv: tuple[Tensor, ...], rectangle: Rectangle,
                     scale: float) -> tuple[list[Tensor], Tensor]:
    """The q, k and v of one rectangle, and the result of its attention, with a graph for the
    backward pass."""
    queries, keys, seen = rectangle
    gathered = []
    for tensor, numbers in zip(qkv, (queries, keys, keys)):
        gathered.append(rows_at(tensor.detach(), numbers).requires_grad_())
    return gathered, attend(*gathered, seen, scale)


def rows_at(tensor: Tensor, numbers: Tensor) -> Tensor:
    """tensor[numbers] for numbers [S, N]; faster, because rows are copied whole."""
    return tensor.index_select(0, numbers.flatten()).unflatten(0, numbers.shape)
