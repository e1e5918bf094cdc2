"""Attention of a sequence whose segments see few of the keys before them (paper §3.5), without any [L, L] tensor.

The rows of a segment are one small rectangle of that matrix: its own tokens as queries, the keys that it sees. Segments
of similar sizes are padded to one size and computed at once. Which keys a segment sees is the caller's business.

Glossary (L tokens, S segments of one rectangle, Q queries and K keys of each, c channels of a head):
    queries     numbers of tokens, L where padded                         [S, Q]
    keys        likewise, in increasing order                             [S, K]
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

NAME = "rectangles"           # of this attention among those of transformers
PADDED = 1.1                  # segments share a rectangle that is at most so many times larger than they are,
MOST_PAIRS = 2 ** 20          # and has at most so many pairs of query and key: its keys stay in a processor's cache
KEPT = 2 ** 22                # up to so many numbers of gathered keys are kept for the backward pass
Row, Rectangle = tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]


def install(llm) -> None:
    """Let a language model of transformers attend as its argument `rectangles` says; without one, as with "sdpa"."""
    from transformers import AttentionInterface
    AttentionInterface.register(NAME, partial(in_rectangles, AttentionInterface()["sdpa"]))
    llm.set_attn_implementation(NAME)
    if llm.config._attn_implementation != NAME:
        raise BadData(f"{type(llm).__name__} does not let its attention be replaced; use a Llama-like model")


def rectangles(rows: list[Row], length: int, device: str | torch.device) -> list[Rectangle]:
    """(queries [q], keys [k]) of each segment of a sequence of this length -> queries, keys and seen of each rectangle.

    All layers use the same; what is seen is made once, as numbers, or each layer would make them out of true and false.
    """
    groups, area = [[]], 0
    for row in sorted(rows, key=lambda row: (int(log(len(row[0]), PADDED)), len(row[1]))):
        size = len(row[0]) * len(row[1])
        Q, K = (max(map(len, column)) for column in zip(row, *groups[-1]))
        if groups[-1] and (len(groups[-1]) + 1) * Q * K > min(PADDED * (area + size), MOST_PAIRS):
            groups.append([])
            area = 0
        groups[-1].append(row)
        area += size
    parts = [[pad_sequence(column, batch_first=True, padding_value=length).to(device) for column in zip(*group)]
             for group in groups]
    hidden = [keys[:, None, None] > queries[:, None, :, None] for queries, keys in parts]
    return [(*part, torch.zeros(y.shape, device=device).masked_fill_(y, -inf)) for part, y in zip(parts, hidden)]


def in_rectangles(sdpa: Callable, module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                  rectangles: list[Rectangle] | None = None, dropout: float = 0.0, scaling: float | None = None,
                  watch: Callable | None = None, **more) -> tuple[Tensor, None]:
    """An attention function of transformers: query [1, heads, L, c] -> [1, L, heads, c].

    watch: called with query, key, value and scaling, as they are when the model is done with them.
    """
    if watch is not None:
        watch(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)
    if rectangles is None:
        return sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more)
    if dropout:
        raise BadData("a language model with dropout in its attention cannot be trained")
    q, k, v = (F.pad(y[0].transpose(0, 1), (0, 0, 0, 0, 0, 1)) for y in (query, key, value))     # [L + 1, heads, c]
    return InRectangles.apply(q, k, v, rectangles, scaling)[None, :-1], None


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """q [S, Q, heads, c], k and v [S, K, kv heads, c], seen [S, 1, Q, K] of one rectangle -> [S, Q, heads, c].

    Heads that share keys become further rows, so that no key is copied for them.
    """
    shared = q.shape[2] // k.shape[2]
    seen = seen.to(q.dtype).repeat(1, 1, shared, 1) if shared > 1 else seen.to(q.dtype)   # [S, 1, shared * Q, K]
    rows = rearrange(q, "s q (h g) c -> s h (g q) c", g=shared)
    k, v = (y.transpose(1, 2) for y in (k, v))
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen, scale=scale)
    return rearrange(out, "s h (g q) c -> s q (h g) c", g=shared)


class InRectangles(torch.autograd.Function):
    """Attention one rectangle after the other. If they are small, they are kept for the backward pass; else only q, k
    and v are, and each is computed again. The gradients of keys that several rectangles see are summed in place."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, parts: list[Rectangle], scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.parts, ctx.scale, ctx.kept = parts, scale, []
        small = sum(keys.numel() for _, keys, _ in parts) * k[0].numel() <= KEPT
        out = torch.zeros_like(q)
        for part in parts:
            computed = compute((q, k, v), part, scale)
            out[part[0]] = computed[1].detach()
            ctx.kept.append(computed if small else None)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor):
        whole = ctx.saved_tensors
        sums = [torch.zeros_like(y) for y in whole]
        for part, kept in zip(ctx.parts, ctx.kept):
            queries, keys, _ = part
            pieces, out = kept or compute(whole, part, ctx.scale)
            found = torch.autograd.grad(out, pieces, rows_at(gradient, queries))
            for total, places, more in zip(sums, (queries, keys, keys), found):
                total.index_add_(0, places.flatten(), more.flatten(0, 1))
        return *sums, None, None


@torch.enable_grad()
def compute(whole: tuple[Tensor, ...], part: Rectangle, scale: float) -> tuple[list[Tensor], Tensor]:
    """The q, k and v of one rectangle, and what its queries attend to, ready for the backward pass."""
    queries, keys, seen = part
    pieces = [rows_at(y.detach(), places).requires_grad_() for y, places in zip(whole, (queries, keys, keys))]
    return pieces, attend(*pieces, seen, scale)


def rows_at(y: Tensor, places: Tensor) -> Tensor:
    """y[places] for places [S, N]; faster, because rows are copied whole."""
    return y.index_select(0, places.flatten()).unflatten(0, places.shape)
