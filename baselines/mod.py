"""VideoLLM-MoD (Tables 1 and 2, Fig. 1): layers that compute, and keep in the cache, only a few tokens of a frame.

VideoLLM-online with routers. In every other layer a router scores the tokens of a frame, and the layer computes only
the k best of the J; the others pass by it unchanged. Text always takes part. No public code of it was found: this
follows its paper, except for g, which is ours.

    s = w . RMSNorm(h)                          the router's score, in fp32
    g = 2 sigmoid(s); for text 1                its factor, through which w learns: 1 at the start, so that a pretrained
                                                layer starts as it was (published: s, which would switch it off)
    h' = h + g (layer(h[kept]) - h[kept])       for the kept tokens; for the others h' = h

The choice depends on the hidden states of the frame's own tokens alone, and what is kept keeps its position in the
sequence. So training is streaming.

Glossary (N tokens of a pass, F frames of J tokens each, k kept of each, n kept in all):
    frame       whether a token belongs to a frame                              bool [N]
    kept        numbers of the tokens that a layer computes                     [n]
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.common import BadData
from support.decode import Part, Slots

# which of L layers have routers; never the first: in raw embeddings there is no context to judge a token by
LAYERS = {"interleaved": lambda L: range(1, L, 2), "all": lambda L: range(1, L),
          "deep": lambda L: range(max(1, L // 2), L)}


class Routing:
    """Gives routers to layers of a language model, tells them which tokens of the present pass belong to frames, and
    finds slots for those that they keep.

    keep: k / J; None: no layer has a router. Raises BadData if the model has only one layer.
    """

    def __init__(self, llm: nn.Module, J: int, keep: float | None, which: str):
        layers, self.J, self.k = llm.model.layers, J, max(1, round((keep or 1) * J))
        self.layers = LAYERS[which](len(layers)) if keep else range(0)
        if keep and not self.layers:
            raise BadData("mod_keep: a language model with one layer has none for a router")
        for i, layer in enumerate(layers):
            layer = getattr(layer, "inner", layer)                      # without another narrator's router
            layers[i] = MoDLayer(layer, i, llm.config.hidden_size, self) if i in self.layers else layer
        self.skipped = [J - self.k if i in self.layers else 0 for i in range(len(layers))]  # of a frame, in each layer

    def begin(self, frame: Tensor, count: int) -> None:
        """A pass over N tokens begins; `frame` says which of them belong to its `count` frames. Every one comes whole.
        """
        self.frame, self.count, own = frame, count, count * self.J
        if self.layers and count:
            self.text, frames = frame.int().argsort(stable=True).split([len(frame) - own, own])     # [N - F J], [F J]
            self.frames = frames.view(count, self.J)

    def choose(self, scores: Tensor) -> Tensor:
        """Scores [N] -> `kept`: all text, and the k tokens of each frame with the highest scores."""
        chosen = self.frames.gather(1, scores[self.frames].topk(self.k).indices)
        return torch.cat([self.text, chosen.flatten()]).sort().values

    def enter(self, part: Part) -> None:
        """A stream's part of a pass begins: `part.routed`, if there are routers, with slots that are free so far."""
        if not self.layers or part.routed is not None:                  # there already: the pass is run once more
            return
        ids, positions, theirs = part.plan.cpu().numpy()
        frame, whole = ids < 0, part.slots                              # placeholders: there is no memory
        some = ~frame | ((frame.cumsum() - 1) % self.J < self.k)
        whole.fewer = whole.fewer or Fewer(whole)
        mine = whole.fewer.follow(theirs[some], len(whole.used))
        part.routed = torch.from_numpy(np.stack([positions[some], mine])).to(part.plan.device)


class Fewer(Slots):
    """Keys and values of the layers with routers, beside the stream's own slots.

    These layers keep different tokens of a frame, but equally many, and in order. So they share slots and mask: those
    of the frame's first k tokens, whichever k a layer has kept. Rotations are of the tokens' own positions.
    """

    def __init__(self, whole: Slots):
        super().__init__(whole.positions.device, capacity=192)          # of equal sizes, a compiler would make one
        self.graphs = whole.graphs                                      # captured passes are over the buffers of both
        self.of = np.zeros(0, int)                                      # slot of the stream's own -> slot here, or -1

    def follow(self, theirs: np.ndarray, whole: int) -> np.ndarray:
        """Slots for the tokens that the stream has in slots `theirs`, of `whole` in all."""
        if len(self.of) < whole:
            self.of = np.pad(self.of, (0, whole - len(self.of)), constant_values=-1)
        self.of[theirs] = mine = self.take(len(theirs))
        return mine

    def leave(self, theirs: np.ndarray) -> None:
        """Free the slots that belong to these of the stream's own."""
        mine, self.of[theirs] = self.of[theirs], -1
        self.release(mine[mine >= 0])


class MoDLayer(nn.Module):
    """A decoder layer of transformers behind a router: h [1, N, D_lm] -> [1, N, D_lm]."""

    def __init__(self, layer: nn.Module, number: int, width: int, routing: Routing):
        super().__init__()
        self.router = nn.Linear(width, 1, bias=False)
        nn.init.normal_(self.router.weight, std=0.02 * width ** -0.5)       # s of std 0.02: an order, no effect yet
        self.inner, self.number, self.routing = layer, number, routing

    def forward(self, h: Tensor, attention_mask: Tensor | None, position_ids: Tensor,
                position_embeddings: tuple[Tensor, Tensor], past_key_values=None, **more) -> Tensor:
        def layer(some: Tensor, at: Tensor, *rotations: Tensor) -> Tensor:
            mask, cache = self.context(attention_mask, past_key_values, len(some))
            return self.inner(some[None], attention_mask=mask, position_ids=at[None], past_key_values=cache,
                              position_embeddings=tuple(y[None] for y in rotations), **more)[0]

        return self.route(layer, h[0], position_ids[0], *(y[0] for y in position_embeddings))[None]

    def route(self, layer: Callable[..., Tensor], h: Tensor, *about: Tensor) -> Tensor:
        """h [N, D_lm] -> [N, D_lm]; `layer` computes [n, D_lm] from the kept rows of h and of `about`, each [N, ..]."""
        if not self.routing.count:                                            # text alone
            return layer(h, *about)
        scores = self.router(F.rms_norm(h.to(self.router.weight.dtype), h.shape[-1:]))[:, 0]
        kept = self.routing.choose(scores)
        g = torch.where(self.routing.frame, 2 * scores.sigmoid(), 1.0).to(h.dtype)[:, None]
        before, g, *about = (y.index_select(0, kept) for y in (h, g, *about))
        return h.index_copy(0, kept, before.lerp(layer(before, *about), g))     # where g = 1, the layer's own bits

    def context(self, mask: Tensor | None, cache, n: int) -> tuple:
        """The mask of n kept tokens (None: causal), and the cache with the keys before them, if there is one."""
        if isinstance(cache, Slots):
            return cache.fewer.mask[None, None], cache.fewer
        if mask is not None:                                                # nothing is pruned: all before them
            old = 0 if cache is None else cache.get_seq_length(self.number)
            mask = mask.new_ones(n, old + n).tril(old)[None, None]
        return mask, cache
