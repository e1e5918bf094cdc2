"""Keys and values of one stream in fixed buffers (not in the paper)."""
from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

# position of a slot that holds nothing: later than every query
EMPTY = torch.iinfo(torch.long).max


class Slots:
    """Keys and values of all layers of one stream. A token takes the first free slots, and nothing
    is ever moved.

    A key carries the rotation of its own position, so slots may be in any order. The one comparison
    `positions <= position of the query` is the mask: it hides the future and the empty slots alike.
    Full buffers grow by 25 %, one layer at a time, so memory never exceeds about 1.4 times what is
    in use.
    """

    def __init__(self, device: torch.device | str = "cpu", capacity: int = 256):
        self.positions = torch.full((capacity,), EMPTY, device=device)
        self.keys: list[Tensor] = []                    # of each layer [S, G, c]
        self.values: list[Tensor] = []
        self.used = np.zeros(capacity, bool)            # whether a slot is in use
        self.free = np.arange(capacity)                 # the slots that are not, in order
        self.span = 0                                   # queries look at so many slots
        self.places: dict[int, int] = {}                # layer -> its place in keys and values
        self.routed: Slots | None = None                # of layers with routers (baselines/mod.py)
        self.graphs: dict = {}                          # captured passes over these buffers
        # of the present pass through transformers' modules
        self.into: Tensor | None = None                 # slots of its tokens [N]
        self.mask: Tensor | None = None                 # its mask [N, span]

    def reserve(self, count: int) -> np.ndarray:
        """The first `count` free slots, now in use."""
        while len(self.free) < count:
            missing = count - len(self.free)
            self.grow(max(missing, len(self.used) // 4))
        slots = self.free[:count]
        self.free = self.free[count:]
        self.used[slots] = True
        self.set_span(max(self.span, 1 + int(slots.max(initial=-1))))
        return slots

    def release(self, slots: np.ndarray) -> None:
        """Free these slots: from now on, no query sees them."""
        if self.routed is not None:
            self.routed.release_for(slots)
        self.used[slots] = False
        self.recount()
        device = self.positions.device
        self.positions.index_fill_(0, torch.from_numpy(slots).to(device), EMPTY)

    def recount(self) -> None:
        """Find the free slots and the last used one, after `used` has changed."""
        self.free = np.flatnonzero(~self.used)
        self.set_span(1 + int(np.flatnonzero(self.used).max(initial=-1)))

    def set_span(self, end: int) -> None:
        """Let queries look at the slots before `end`. On CUDA they look at all: shapes then change
        only when the buffers grow, and captured passes can be used again."""
        self.span = len(self.used) if self.positions.is_cuda else end

    def grow(self, count: int) -> None:
        """Add at least `count` slots, in multiples of 64. Only one buffer is ever held twice."""
        added = -(-count // 64) * 64                    # rounded up
        self.graphs.clear()
        size = len(self.used)
        self.free = np.concatenate([self.free, np.arange(size, size + added)])
        self.used = np.pad(self.used, (0, added))
        empty = self.positions.new_full((added,), EMPTY)
        self.positions = torch.cat([self.positions, empty])
        for buffers in (self.keys, self.values):
            for i in range(len(buffers)):
                buffers[i] = F.pad(buffers[i], (0, 0, 0, 0, 0, added))      # [S + added, G, c]

    def allocate(self, layers: int, like: Tensor) -> None:
        """Add buffers until there are those of so many layers, for keys and values of the shape
        [.., G, c] of `like`."""
        for buffers in (self.keys, self.values):
            while len(buffers) < layers:
                buffers.append(like.new_zeros(len(self.used), *like.shape[-2:]))

    def place_and_mask(self, positions: Tensor, slots: Tensor) -> Tensor:
        """A pass of transformers' modules begins: its tokens at positions [N] go into `slots` [N].

        Returns the mask [N, span]: which slots each new token sees.
        """
        self.into = slots
        self.positions[slots] = positions
        self.mask = self.positions[:self.span] <= positions[:, None]
        return self.mask

    def update(self, keys: Tensor, values: Tensor, layer: int,
               *_, **options) -> tuple[Tensor, Tensor]:
        """Called by each attention layer, as transformers calls its caches: store keys and values
        [1, G, N, c], return all [1, G, span, c]. Further arguments depend on the version of
        transformers, and are not needed."""
        place = self.places.setdefault(layer, len(self.places))
        keys = rearrange(keys, "1 g n c -> n g c")
        values = rearrange(values, "1 g n c -> n g c")
        self.allocate(place + 1, keys)
        self.keys[place][self.into] = keys
        self.values[place][self.into] = values
        all_keys = rearrange(self.keys[place][:self.span], "s g c -> 1 g s c")
        all_values = rearrange(self.values[place][:self.span], "s g c -> 1 g s c")
        return all_keys, all_values

    def get_seq_length(self, layer: int = 0) -> int:
        """Called by transformers: how many tokens are in the cache."""
        return int(self.used.sum())

    def bytes(self) -> int:
        """Size of the keys and values in use [bytes], in all layers."""
        bytes_of_slot = sum(buffer[0].nbytes for buffer in self.keys + self.values)
        size = int(self.used.sum()) * bytes_of_slot
        if self.routed is not None:
            size += self.routed.bytes()
        return size

    def held(self) -> int:
        """Size of the buffers [bytes], with their free slots."""
        size = sum(buffer.nbytes for buffer in self.keys + self.values)
        if self.routed is not None:
            size += self.routed.held()
        return size
