"""LION-FS (Table 2): the tokens of two vision encoders, mixed by a router into as many as one has.

LION-FS narrates with two pathways; this is the fast one. A general encoder (SigLIP) and an
egocentric video encoder (EgoVLPv2) give J tokens a frame each. In features they stand side by side,
[T, J, D_s + D_t], so all that reads, remembers and caches frames stays as it is. Each half has a
connector. The router looks at the general CLS token and mixes the two, place by place:

    w = softmax(router(e[CLS]))             [J, 2], over the encoders; as in its public code: two
                                            layers with GELU
    E = w_0 * e + w_1 * connector(y)        equal shares at first, if not `--start published`

Its other half, token dropping, is VideoLLM-MoD's (baselines/mod.py) with half of the tokens kept
(`mod_keep` 0.5). Its code chooses among all tokens of a video, which no stream can; here each frame
keeps its own half, as in its text. Memory tokens, which LION-FS does not have, go through the first
connector alone (their first D_s features).

    python train.py --data ego4d --memory none --no-prune --mod-keep 0.5 --width-second 768

Does not include:
- EgoVLPv2, whose weights and features are not at hand, and videos at 8 frames per second. The
  command above trains on files in which the features of both encoders are joined.
- The slow pathway: 36 pooled patches and the boxes of hands and touched objects, read before a
  sentence, without training. Boxes need a detector. The patches are no part of features of J tokens
  a frame, and streams would have to carry a second kind of frame past memory, cache and look-ahead,
  for tokens that training has never seen.

Glossary (F frames of J tokens; D_s and D_t, widths of the general and the egocentric features)
    x           features of both encoders               [F, J, D_s + D_t]
    y           features of the second encoder          [F, J, D_t]
    e           general tokens behind their connector   [F, J, D_lm]
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn

from baselines.mod import RoutedConfig, RoutedNarrator
from narrator import FRAME
from support.common.errors import BadData
from support.engine.start import start_as_published, start_connector


@dataclass
class LionConfig(RoutedConfig):
    """Settings with those of LION-FS."""
    width_second: int = 0                   # D_t: of D, those of the second encoder

    def __post_init__(self):
        super().__post_init__()
        if self.width_second >= self.width:
            raise BadData(f"width_second: {self.width_second} of {self.width} features "
                          f"leave none to the first encoder")


class Aggregation(nn.Module):
    """The token aggregation router, and the second encoder's connector."""

    def __init__(self, width: int, hidden: int, J: int):
        super().__init__()
        self.J = J
        self.width = width                                                  # D_t
        self.connector = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
        )
        self.router = nn.Sequential(
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, 2 * J),
        )
        for p in self.router[2].parameters():                               # equal shares
            nn.init.zeros_(p)

    def shares(self, e: Tensor) -> Tensor:
        """e [F, J, D_lm] -> the share of each encoder in each token [F, J, 2]."""
        scores = self.router(e[:, 0])                                       # of the CLS token
        return rearrange(scores, "f (j s) -> f j s", s=2).softmax(-1)

    def forward(self, e: Tensor, x: Tensor) -> Tensor:
        """Tokens of whole frames: e [.., D_lm] and x [.., D_s + D_t] -> [.., D_lm]."""
        general = rearrange(e.flatten(0, -2), "(f j) d -> f j d", j=self.J)
        y = x[..., -self.width:].flatten(0, -2).to(e.dtype)
        egocentric = self.connector(y).view_as(general)
        w = self.shares(general)
        return (w[..., :1] * general + w[..., 1:] * egocentric).view_as(e)


class LionNarrator(RoutedNarrator):
    """A narrator whose frame tokens are those of two encoders, side by side [T, J, D_s + D_t]."""

    def add_connector(self, hidden: int) -> None:
        config = self.config
        first = config.width - config.width_second
        self.connector = nn.Sequential(
            nn.Linear(first, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
        )
        self.aggregation = Aggregation(config.width_second, hidden, config.J)

    def embed_visual(self, x: Tensor) -> Tensor:
        """Memory tokens go through the first connector alone, with their first features."""
        first = self.connector[0].in_features                               # D_s
        return super().embed_visual(x[..., :first])

    def embed(self, ids: Tensor, x: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        e = super().embed(ids, memory=memory)
        if x is not None:
            e = e.masked_scatter((ids == FRAME)[:, None], self.embed_frames(x).to(e.dtype))
        return e

    def embed_frames(self, x: Tensor) -> Tensor:
        """Whole frames [.., J, D_s + D_t] -> [.., J, D_lm]."""
        return self.aggregation(self.embed_visual(x), x)

    def start_published(self):
        super().start_published()
        start_as_published(self.aggregation)

    @torch.no_grad()
    def initialise(self, x: Tensor):
        first = self.connector[0].in_features
        self.memory.initialise(x)
        start_connector(self.connector, x[..., :first])
        start_connector(self.aggregation.connector, x[..., first:])

    def vision_encoder(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        raise BadData("LION-FS reads features of two vision encoders: give it a file in which they "
                      "are joined, not pictures")
