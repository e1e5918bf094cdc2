"""The attention of a narrator's language model (paper §3.5): by a mask, or segment by segment.

On long videos hardly anything of the mask of Fig. 4 is visible: at 6,400 tokens 8 % of all pairs.
There attention is called once for each segment, with the segment's own tokens as queries and the
keys that they see, so that there is no [L, L] tensor. Which keys these are is the caller's business
(narrator.py: `visible`). A GPU takes longer to start so many calls than to compute them: there one
call attends in all segments (`by_one_call`).

g heads of queries that share their keys become g rows of one product, so that no key is copied for
them.

Here is also the loss in pieces, for the same reason: what is as long as a video stays small.
"""
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support.common.errors import BadData

NAME = "segments"               # of this attention among those of transformers
# what layers may say of it, and what need not be done for it
IGNORED = {"position_ids", "use_cache", "output_attentions", "is_causal", "cache_position",
           "layer_idx", "dropout"}      # what is frozen has no dropout
GPUS = ("cuda",)                # devices that may have `by_one_call`
TRIED = WeakKeyDictionary()     # of language models: whether `by_one_call` gives the loop's numbers
# The copies of keys for all segments are kept for the backward pass if they are at most so many times
# as many as the tokens; more of them are made again.
KEPT = 4


class Segments:
    """What the tokens of each segment see. It is made once for all layers.

    segment     of each token, from 0 on, without gaps [L]
    seen        bool [n, L]: which tokens those of each segment see, if they come before them: all
                of their own segment, and others
    llm         whose layers will ask
    """

    def __init__(self, segment: list[int], seen: Tensor, llm):
        rows = torch.tensor(segment).bincount()             # tokens of each segment
        seen = seen & (torch.arange(len(segment)) < rows.cumsum(0)[:, None])
        counts = torch.stack([rows, seen.sum(1)])
        self.rows, self.keys = counts.tolist()              # and how many it sees
        self.bounds = F.pad(counts.cumsum(1), (1, 0)).int().to(llm.device)          # [2, n + 1]
        self.all_keys = seen.nonzero()[:, 1].to(llm.device)
        self.in_one_call = llm.device.type in GPUS and one_call_is_right(llm)
        self.masks = []                         # of each segment, for the loop
        if not self.in_one_call:
            for rows, keys in zip(self.rows, self.keys):
                # its tokens are the last that it sees
                sees = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
                self.masks.append(mask_of_rows(sees, llm))


@dataclass
class KeysAndValues:
    """Of all layers, in a stream: of its cache, what layers of transformers are given."""
    # of each layer [1, heads, tokens, c]
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def update(
        self,
        keys: Tensor,
        values: Tensor,
        layer: int,
        *_,
        **__,
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer of transformers: append the keys and values
        [1, heads, N, c] of new tokens; returns those of all tokens.
        """
        if layer in self.keys:
            keys = torch.cat([self.keys[layer], keys], dim=2)
            values = torch.cat([self.values[layer], values], dim=2)
        self.keys[layer] = keys
        self.values[layer] = values
        return keys, values


def mask_of_rows(sees: Tensor, llm) -> Tensor:
    """A mask for attention, made once for all layers: 0 or -inf [1, 1, Q g, K], from bool [Q, K]: what
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
                        scaling: float | None = None, **options) -> tuple[Tensor, None]:
    """An attention function of transformers: query [B, heads, L, c] -> [B, L, heads, c].

    Without mask and segments, a token sees all tokens up to itself, and a single one all keys.
    BadData if a layer asks for something beside softmax(q k^T / sqrt(c)) v, such as a window.
    """
    asked = [name for name, wanted in options.items()
             if wanted is not None and name not in IGNORED]
    if "sliding_window" in asked:
        raise BadData("its layers do not see all tokens (sliding_window)")
    if asked:
        raise BadData(f"its attention is asked for {', '.join(asked)}")
    if attention_mask is None and segments is None and query.shape[2] > 1:
        attended = F.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True,
                                                  enable_gqa=True)
        return attended.transpose(1, 2), None
    if segments is not None and segments.in_one_call:
        return checkpoint(by_one_call, query, key, value, segments, scaling,
                          use_reentrant=False), None
    shared = query.shape[1] // key.shape[1]
    rows = rearrange(query, "b (h g) q c -> b h (q g) c", g=shared)
    if segments is None:
        attended = F.scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask,
                                                  scale=scaling)
    elif len(segments.all_keys) <= KEPT * query.shape[2]:
        attended = by_loop(rows, key, value, segments, scaling)
    else:
        attended = checkpoint(by_loop, rows, key, value, segments, scaling, use_reentrant=False)
    return rearrange(attended, "b h (q g) c -> b q (h g) c", g=shared), None


def by_loop(rows: Tensor, key: Tensor, value: Tensor, segments: Segments,
            scale: float | None) -> Tensor:
    """Segment by segment: queries as rows [1, kv heads, L g, c], key and value [1, kv heads, L, c]
    -> as the rows. The oracle for `by_one_call`.
    """
    row_pieces = rows.split([mask.shape[2] for mask in segments.masks], dim=2)
    # One copy of all keys is split afterwards: a gradient is then summed once, not once a segment.
    k_pieces = key.index_select(2, segments.all_keys).split(segments.keys, dim=2)
    v_pieces = value.index_select(2, segments.all_keys).split(segments.keys, dim=2)
    attended = []
    for q, k, v, mask in zip(row_pieces, k_pieces, v_pieces, segments.masks):
        attended.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    return torch.cat(attended, dim=2)


def by_one_call(query: Tensor, key: Tensor, value: Tensor, segments: Segments,
                scale: float | None) -> Tensor:
    """All segments at once: query [1, heads, L, c], key and value [1, kv heads, L, c] -> [1, L,
    heads, c].

    A segment sees what is left of the past, and then itself: its attention is causal, and its
    queries are the last rows of its keys. PyTorch has one call for many of such lengths.
    """
    from torch.nn.attention.varlen import varlen_attn       # takes seconds, and only GPUs have it
    options = {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True            # since torch 2.12 it must be told of shared keys
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    attended = varlen_attn(
        q,
        k.index_select(0, segments.all_keys),
        v.index_select(0, segments.all_keys),
        *segments.bounds, max(segments.rows), max(segments.keys),
        scale=scale, window_size=(-1, 0), **options)        # causal
    return attended[None]


@torch.enable_grad()
def one_call_is_right(llm) -> bool:
    """Whether `by_one_call` gives the gradients of `by_loop` for such a model: tried once, on two
    small segments. A GPU may have no kernel, and a kernel may take queries for the first rows of
    their keys.
    """
    if llm in TRIED:
        return TRIED[llm]
    TRIED[llm] = False                          # while it is tried, and if that fails
    heads, kv_heads = llm.config.num_attention_heads, llm.config.num_key_value_heads
    c = getattr(llm.config, "head_dim", None) or llm.config.hidden_size // heads
    segments = Segments([0] * 20 + [1] * 40, torch.ones(2, 60, dtype=torch.bool), llm)
    chance = torch.Generator(llm.device).manual_seed(0)
    inputs = [torch.randn(1, n, 60, c, generator=chance, device=llm.device, dtype=llm.dtype,
                          requires_grad=True) for n in (heads, kv_heads, kv_heads)]
    gradients = []
    try:
        for in_one_call in (False, True):
            segments.in_one_call = in_one_call
            attended, _ = by_mask_or_segments(llm, *inputs, None, segments)
            gradients.append(torch.autograd.grad(attended.square().sum(), inputs))
    except RuntimeError:
        return False
    TRIED[llm] = all((one - loop).norm() < 0.05 * loop.norm() for loop, one in zip(*gradients))
    return TRIED[llm]


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
