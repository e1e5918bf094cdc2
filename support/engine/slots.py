"""Keys and values of one stream in fixed buffers (not in the paper)."""
from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


EMPTY = torch.iinfo(torch.long).max     # position of a slot that holds nothing: later than every query


class Slots:
    """Keys and values of all layers of one stream. A token takes the first free slots, and nothing is ever moved.

    A key carries the rotation of its own position, so slots may be in any order. The one comparison `positions <=
    position of the query` is the mask: it hides the future and the empty slots alike. Where the slots do not suffice,
    there are a quarter more, layer by layer: what is held is at any moment at most about 1.4 times what was used.
    """

    def __init__(self, device: torch.device | str = "cpu", capacity: int = 256):
        self.positions = torch.full((capacity,), EMPTY, device=device)
        self.keys: list[Tensor] = []                                        # of each layer [S, G, c]
        self.values: list[Tensor] = []
        self.used = np.zeros(capacity, bool)
        self.free = np.arange(capacity)
        self.span = 0
        self.into: Tensor | None = None                                     # slots of the present plain pass [N]
        self.mask: Tensor | None = None                                     # its mask [N, span]
        self.places: dict[int, int] = {}                                    # layer -> its place in keys and values
        self.routed: Slots | None = None                                    # of layers with routers (baselines/mod.py)
        self.graphs: dict = {}                                              # captured passes over these buffers

    def take(self, count: int) -> np.ndarray:
        """The first `count` free slots, now in use."""
        while len(self.free) < count:
            self.grow(max(count - len(self.free), len(self.used) // 4))
        slots, self.free = self.free[:count], self.free[count:]
        self.used[slots] = True
        self.span = len(self.used) if self.positions.is_cuda else max(self.span, 1 + int(slots.max(initial=-1)))
        return slots

    def release(self, slots: np.ndarray) -> None:
        """Free these slots: from now on, no query sees them."""
        if self.routed is not None:
            self.routed.release_for(slots)
        self.used[slots] = False
        self.free = np.flatnonzero(~self.used)
        self.span = len(self.used) if self.positions.is_cuda else 1 + int(np.flatnonzero(self.used).max(initial=-1))
        self.positions.index_fill_(0, torch.from_numpy(slots).to(self.positions.device), EMPTY)

    def grow(self, more: int) -> None:
        """Add slots, in multiples of 64; only one buffer is ever held twice."""
        more = -(-more // 64) * 64
        self.graphs.clear()
        self.free = np.concatenate([self.free, np.arange(len(self.used), len(self.used) + more)])
        self.used = np.pad(self.used, (0, more))
        self.positions = torch.cat([self.positions, self.positions.new_full((more,), EMPTY)])
        for buffers in (self.keys, self.values):
            for i in range(len(buffers)):
                buffers[i] = F.pad(buffers[i], (0, 0, 0, 0, 0, more))

    def allocate(self, layers: int, like: Tensor) -> None:
        """Buffers of so many layers for keys and values of the shape [.., G, c] of `like`, where there are none yet."""
        for buffers in (self.keys, self.values):
            buffers += [like.new_zeros(len(self.used), *like.shape[-2:]) for _ in range(layers - len(buffers))]

    def begin(self, positions: Tensor, slots: Tensor) -> Tensor:
        """A pass of transformers' modules begins: its tokens at positions [N] go into `slots` [N].

        Returns the mask [N, span]: which slots each new token sees.
        """
        self.into = slots
        self.positions[slots] = positions
        self.mask = self.positions[:self.span] <= positions[:, None]
        return self.mask

    def update(self, keys: Tensor, values: Tensor, layer: int, *_) -> tuple[Tensor, Tensor]:
        """Called by each attention layer, as transformers calls its caches: store keys and values, return all."""
        place = self.places.setdefault(layer, len(self.places))
        self.allocate(place + 1, rearrange(keys, "1 g n c -> n g c"))
        for buffers, new in ((self.keys, keys), (self.values, values)):
            buffers[place][self.into] = rearrange(new, "1 g n c -> n g c")
        return tuple(rearrange(y[place][:self.span], "s g c -> 1 g s c") for y in (self.keys, self.values))

    def get_seq_length(self, layer: int = 0) -> int:
        """Likewise: how many tokens are in the cache."""
        return int(self.used.sum())

    def bytes(self) -> int:
        """Size of the keys and values in use, in all layers."""
        own = int(self.used.sum()) * sum(y[0].nbytes for y in self.keys + self.values)
        return own + (self.routed.bytes() if self.routed is not None else 0)

    def held(self) -> int:
        """Size of the buffers, with their free slots."""
        own = sum(y.nbytes for y in self.keys + self.values)
        return own + (self.routed.held() if self.routed is not None else 0)
