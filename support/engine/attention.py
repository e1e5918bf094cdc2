"""The attention of a narrator's language model (paper §3.5): by a mask, or segment by segment.

On long videos hardly anything of the mask of Fig. 4 is visible: at 6,400 tokens 8 % of all pairs.
There attention is called once for each segment, with the segment's own tokens as queries and the
keys that they see, so that there is no [L, L] tensor. Which keys these are is the caller's business
(narrator.py: `visible`).

g heads of queries that share their keys become g rows of one product, so that no key is copied for
them.

Here is also the loss in pieces, for the same reason: what is as long as a video stays small.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NAME = "segments"               # of this attention among those of transformers
# what layers may say of it, and what need not be done for it
IGNORED = {"position_ids", "use_cache", "output_attentions", "is_causal", "cache_position",
           "layer_idx"}


class Segments:
    """What the tokens of each segment see. It is made once for all layers.

    segment     of each token, from 0 on, without gaps [L]
    seen        bool [n, L]: which tokens those of each segment see, if they come before them
    llm         whose layers will ask
    """

    def __init__(self, segment: list[int], seen: Tensor, llm):
        _, lengths = torch.tensor(segment).unique_consecutive(return_counts=True)
        self.masks = []
        keys = []
        for tokens, seen_by_segment in zip(torch.arange(len(segment)).split(lengths.tolist()), seen):
            seen_keys = seen_by_segment[:tokens[-1] + 1].nonzero()[:, 0]
            keys.append(seen_keys)
            self.masks.append(mask_of_rows(seen_keys <= tokens[:, None], llm))
        self.rows = [mask.shape[2] for mask in self.masks]      # of queries, in each segment
        self.keys = [len(seen_keys) for seen_keys in keys]      # how many they see
        self.all_keys = torch.cat(keys).to(llm.device)


def mask_of_rows(sees: Tensor, llm) -> Tensor:
    """A mask for `attend`, made once for all layers: 0 or -inf [1, 1, Q g, K], from bool [Q, K]: what
    each query sees. g heads of queries share their keys.
    """
    config = llm.config
    shared = config.num_attention_heads // config.num_key_value_heads
    rows = sees.to(llm.device).repeat_interleave(shared, 0)
    return rows.to(llm.dtype).log()[None, None]             # log 1 = 0, log 0 = -inf


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

    Without mask and segments, a token sees all tokens up to itself, and a single one all keys.
    ValueError if a layer asks for something beside softmax(q k^T / sqrt(c)) v, such as a window.
    """
    asked = [name for name, wanted in options.items()
             if wanted is not None and name not in IGNORED]
    if asked:
        raise ValueError(f"its attention is asked for {', '.join(asked)}")
    if attention_mask is None and segments is None and query.shape[2] > 1:
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout,
                                                  scale=scaling, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2), None
    shared = query.shape[1] // key.shape[1]
    rows = rearrange(query, "b (h g) q c -> b h (q g) c", g=shared)
    if segments is not None:
        # The same keys are copied for each segment that sees them. For the backward pass they are
        # copied again, so that they need not be kept.
        attended = checkpoint(attend_by_segments, rows, key, value, segments, dropout, scaling,
                              use_reentrant=False)
    else:
        if attention_mask is not None and attention_mask.shape[2] < rows.shape[2]:
            # of a layer with a router (beyond/baselines/mod.py): one row a query
            attention_mask = attention_mask.repeat_interleave(shared, 2)
        attended = F.scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask,
                                                  dropout_p=dropout, scale=scaling)
    return rearrange(attended, "b h (q g) c -> b q (h g) c", g=shared), None


def attend_by_segments(rows: Tensor, key: Tensor, value: Tensor, segments: Segments,
                       dropout: float, scale: float | None) -> Tensor:
    """Queries as rows [1, kv heads, L g, c], key and value [1, kv heads, L, c] -> as the rows."""
    # One copy of all keys is split afterwards: a gradient is then summed once, not once a segment.
    row_pieces = rows.split(segments.rows, dim=2)
    k_pieces = key.index_select(2, segments.all_keys).split(segments.keys, dim=2)
    v_pieces = value.index_select(2, segments.all_keys).split(segments.keys, dim=2)
    attended = []
    for q, k, v, mask in zip(row_pieces, k_pieces, v_pieces, segments.masks):
        attended.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout,
                                                       scale=scale))
    return torch.cat(attended, dim=2)


# ---------------------------------------------------------------------- the loss in pieces

def cross_entropy(logits: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor,
                  rows: int = 256) -> Tensor:
    """F.cross_entropy(logits(hidden), labels, reduction="sum") of hidden states [R, D_lm] with
    labels [R], where `logits` maps [.., D_lm] to [.., V].

    Only the logits of `rows` hidden states are held at once: the backward pass computes them again.
    """
    total = 0
    for hidden_rows, label_rows in zip(hidden.split(rows), labels.split(rows)):
        total = total + checkpoint(lambda hidden, labels: F.cross_entropy(logits(hidden), labels,
                                                                          reduction="sum"),
                                   hidden_rows, label_rows, use_reentrant=False)
    return total
