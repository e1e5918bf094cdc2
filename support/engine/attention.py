"""The attention of a long sequence whose segments see few of the keys before them (paper §3.5).

On long videos hardly anything of the mask of Fig. 4 is visible: at 6,400 tokens 8 % of all pairs.
Here attention is called once for each segment, with the segment's own tokens as queries and the
keys that they see, so that there is no [L, L] tensor. Which keys these are is the caller's business
(narrator.py: `segment_rows`).
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NAME = "segments"               # of this attention among those of transformers
Segments = list[tuple[Tensor, Tensor]]


def install(llm) -> None:
    """Let a language model of transformers attend as its argument `segments` says, if it is given,
    and otherwise by the mask, as with "sdpa".
    """
    from transformers import AttentionInterface
    AttentionInterface.register(NAME, by_mask_or_segments)
    llm.set_attn_implementation(NAME)


def by_mask_or_segments(module, query: Tensor, key: Tensor, value: Tensor,
                        attention_mask: Tensor | None, segments: Segments | None = None,
                        dropout: float = 0.0, scaling: float | None = None,
                        **options) -> tuple[Tensor, None]:
    """An attention function of transformers: query [B, heads, L, c] -> [B, L, heads, c].

    segments    the indices of each segment's tokens (queries) [Q] and of the keys that at least one
                of them sees [K]; a query sees those of the keys that do not come after it
    """
    if segments is None and attention_mask is None:
        from transformers import AttentionInterface
        causal = AttentionInterface()["sdpa"]
        return causal(module, query, key, value, None, dropout=dropout, scaling=scaling, **options)
    if segments is None:
        attended = attend_shared(query, key, value, attention_mask, dropout, scaling)
        return attended.transpose(1, 2), None
    # The same keys are copied for each segment that sees them. For the backward pass they are
    # copied again, so that they need not be kept.
    attended = checkpoint(attend, query, key, value, segments, dropout, scaling,
                          use_reentrant=False)
    return attended.transpose(1, 2), None


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, dropout: float,
           scale: float | None) -> Tensor:
    """query [1, heads, L, c], key and value [1, kv heads, L, c] -> [1, heads, L, c]."""
    # One copy of all keys is split afterwards: a gradient is then summed once, not once a segment.
    all_keys = torch.cat([keys for _, keys in segments])
    queries_of_segments = [len(queries) for queries, _ in segments]
    keys_of_segments = [len(keys) for _, keys in segments]
    q_pieces = query.split(queries_of_segments, dim=2)
    k_pieces = key.index_select(2, all_keys).split(keys_of_segments, dim=2)
    v_pieces = value.index_select(2, all_keys).split(keys_of_segments, dim=2)

    attended = []
    for (queries, keys), q, k, v in zip(segments, q_pieces, k_pieces, v_pieces):
        seen = keys <= queries[:, None]                                     # [Q, K]
        attended.append(attend_shared(q, k, v, seen, dropout, scale))
    return torch.cat(attended, dim=2)


def attend_shared(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, dropout: float,
                  scale: float | None) -> Tensor:
    """query [B, heads, Q, c], key and value [B, kv heads, K, c], seen bool [Q, K] or [B, 1, Q, K]
    -> [B, heads, Q, c].

    Heads of queries that share their keys become further rows, so that no key is copied for them.
    """
    shared = query.shape[1] // key.shape[1]
    rows = rearrange(query, "b (h g) q c -> b h (g q) c", g=shared)
    seen = torch.cat([seen] * shared, dim=-2)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=seen, dropout_p=dropout,
                                         scale=scale)
    return rearrange(out, "b h (g q) c -> b (h g) q c", g=shared)
