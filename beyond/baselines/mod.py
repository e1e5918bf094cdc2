"""VideoLLM-MoD (Tables 1 and 2, Fig. 1): layers that compute, and keep in the cache, only a few
tokens of a frame.

VideoLLM-online with routers. In every other layer a router scores the tokens of a frame, and the
layer computes only the k best of the J; the others pass by it unchanged. Text always takes part.
The FlowNar paper retrained it with its official code (§4.1), of which none was found: this follows
its own paper, except for g, which is ours.

    s = w . RMSNorm(h)                          the router's score, in fp32
    g = 2 sigmoid(s); for text 1                its factor, through which w learns: 1 at the start,
                                                so that a pretrained layer starts as it was
                                                (in its paper: s, which would switch it off)
    h' = h + g (layer(h[kept]) - h[kept])       for the kept tokens; for the others h' = h

Which tokens are kept depends only on the frame's own hidden states, and kept tokens keep their
positions. Therefore training and streaming compute the same.

Glossary (N tokens of a pass, F frames of J tokens each, k kept of each, n kept in all):
    frame       whether a token belongs to a frame                              bool [N]
    kept        numbers of the tokens that a layer computes                     [n]
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrator import FRAME, Config, Narrator
from stream import Cache, Context
from support.common.errors import BadData
from support.common.options import LEAST, setting
from support.engine.attention import mask_of_rows
from support.engine.checkpoint import published_name


@dataclass
class RoutedConfig(Config):
    """Settings with that of VideoLLM-MoD."""
    mod_keep: float = setting(0.2,
        "VideoLLM-MoD where given, with --memory none --no-prune: share of a frame's tokens kept, "
        "k / J",
        (LEAST, 1), needs="a new narrator")

    def __post_init__(self):
        super().__post_init__()
        if self.prune or self.memory != "none":
            raise BadData("mod_keep: VideoLLM-MoD has no memory and prunes nothing "
                          "(--memory none --no-prune)")


class Routing:
    """Gives routers to layers of a language model, and tells them which tokens of the present pass
    belong to frames.

    keep    k / J
    Raises BadData if the model has only one layer.
    """

    def __init__(self, llm: nn.Module, J: int, keep: float):
        layers = llm.model.layers
        self.llm = llm
        self.J = J
        self.k = max(1, round(keep * J))
        # every other layer, and not the first: it sees raw embeddings, without any context to judge
        # a token by
        self.layers = range(1, len(layers), 2)
        if not self.layers:
            raise BadData("mod_keep: a language model with one layer has none for a router")
        for i in self.layers:
            layers[i] = MoDLayer(layers[i], i, llm.config.hidden_size, self)

    def start_pass(self, ids: Tensor) -> None:
        """A pass over tokens with these ids [N] begins. Every frame comes whole."""
        self.frame = ids == FRAME
        self.text = self.frame.logical_not().nonzero()[:, 0]
        self.frames = self.frame.nonzero().view(-1, self.J)                     # [F, J]

    def choose(self, scores: Tensor) -> Tensor:
        """Scores [N] -> `kept` [n]: all text, and the k tokens of each frame with the highest
        scores."""
        best = scores[self.frames].topk(self.k).indices                         # [F, k]
        chosen = self.frames.gather(1, best)
        return torch.cat([self.text, chosen.flatten()]).sort().values


class MoDLayer(nn.Module):
    """A decoder layer of transformers behind a router: h [1, N, D_lm] -> [1, N, D_lm]."""

    def __init__(self, layer: nn.Module, number: int, width: int, routing: Routing):
        super().__init__()
        self.router = nn.Linear(width, 1, bias=False)
        # s of std 0.02: the scores order the tokens, but g has no effect yet
        nn.init.normal_(self.router.weight, std=0.02 * width ** -0.5)
        self.inner = layer
        self.number = number
        self.routing = routing

    def forward(self, h: Tensor, attention_mask: Tensor | None, position_ids: Tensor,
                position_embeddings: tuple[Tensor, Tensor], **options) -> Tensor:
        normed = F.rms_norm(h[0].to(self.router.weight.dtype), h.shape[-1:])
        scores = self.router(normed)[:, 0]                                      # s [N]
        g = torch.where(self.routing.frame, 2 * scores.sigmoid(), 1.0).to(h.dtype)
        kept = self.routing.choose(scores)                                      # [n]
        # before transformers 5.24 it was `past_key_values`
        cache = options.get("cache", options.get("past_key_values"))
        attention_mask = self.mask(cache, len(kept))
        cos, sin = position_embeddings
        before = h[:, kept]
        after = self.inner(
            before,
            attention_mask=attention_mask,
            position_ids=position_ids[:, kept],
            position_embeddings=(cos[:, kept], sin[:, kept]),
            **options,                          # the cache, too
        )
        # `lerp` gives the layer's own numbers where g = 1
        return h.index_copy(1, kept, before.lerp(after, g[kept, None]))

    def mask(self, cache: RoutedCache | None, n: int) -> Tensor:
        """What n kept tokens see of those that this layer holds: all before them, as nothing is
        pruned.
        """
        old = 0 if cache is None else cache.length(self.number)
        llm = self.routing.llm
        everything = torch.ones(n, old + n, dtype=torch.bool, device=llm.device)
        return mask_of_rows(everything.tril(old), llm)


class RoutedCache(Cache):
    """A cache in which layers with routers hold fewer tokens of each frame: different ones in each
    layer, but equally many, and in order. Nothing is ever pruned.
    """

    def __init__(self, routing: Routing):
        super().__init__()
        self.routing = routing

    def length(self, layer: int) -> int:
        """How many tokens a layer holds."""
        return self.keys[layer].shape[2] if layer in self.keys else 0

    def crop(self) -> None:
        frames = self.tokens.ids.count(FRAME) // self.routing.J
        for layer in self.keys:
            left = len(self.tokens)
            if layer in self.routing.layers:
                left -= frames * (self.routing.J - self.routing.k)
            self.keys[layer] = self.keys[layer][:, :, :left]
            self.values[layer] = self.values[layer][:, :, :left]


def with_routers(Base: type[Context]) -> type[Context]:
    """A Context of this kind whose cache knows of routers."""

    class RoutedContext(Base):
        def __init__(self, narrator: RoutedNarrator, **options):
            super().__init__(narrator, **options)
            self.cache = RoutedCache(narrator.routing)

    return RoutedContext


class RoutedNarrator(Narrator):
    """A narrator with routers in its language model."""

    def __init__(self, llm: nn.Module, tokenizer, config: RoutedConfig):
        super().__init__(llm, tokenizer, config)
        self.routing = Routing(llm, config.J, config.mod_keep)

    def embed(self, ids: list[int], x: Tensor | None = None,
              memory: Tensor | None = None) -> Tensor:
        """Each pass begins with this."""
        self.routing.start_pass(torch.tensor(ids, device=self.llm.device))
        return super().embed(ids, x, memory)

    def trainable(self) -> dict[str, Tensor]:
        """Also the routers; names as if no layer were inside another one."""
        weights = super().trainable()
        for name, p in self.named_parameters():
            if name.startswith("llm.") and ".router." in name:
                weights[published_name(name)] = p
        return {name.replace(".inner.", "."): p for name, p in weights.items()}
