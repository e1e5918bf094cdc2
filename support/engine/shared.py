"""Several streams in one pass with one attention, for CUDA (not in the paper).

On a processor every stream has buffers of its own, and attends by itself. On a GPU each of these small
steps costs as much as a large one. So there, the streams have rows of the same buffers, their new
tokens are padded to one number, and one attention with a mask serves all. The pass is captured as a
graph, one for each number of tokens.

Glossary (B rows, one for each stream; N new tokens of each, padded; S slots, and one for the padding):
    keys, values    of each layer                                           [B, S + 1, G, c]
    positions       of the slots, EMPTY where there is nothing              [B, S + 1]
    places          of the new tokens in the buffers, row * (S + 1) + slot  [B * N]
"""
from __future__ import annotations

from weakref import ref

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from support.engine.slots import EMPTY, Slots

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)      # numbers of tokens to which streams are padded


class SharedRows:
    """Passes of several streams for a Decoder without routers."""

    def __init__(self, decoder, capture: bool):
        """capture: run the pass as a CUDA graph."""
        self.decoder = decoder
        self.capture = capture
        self.streams: list[ref[Slots] | None] = []      # that of each row
        self.slots = 0                                  # S
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.positions: Tensor | None = None
        self.inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}      # N -> what a pass reads
        self.graphs: dict[int, tuple] = {}              # N -> a captured pass, and what it writes

    # ------------------------------------------------------------------ rows

    def in_row(self, row: int) -> Slots | None:
        """The stream whose buffers are in a row. None: it has ended, or its buffers have grown."""
        stream = self.streams[row]
        slots = stream and stream()
        if slots is None or slots.positions.data_ptr() != self.positions[row].data_ptr():
            return None
        return slots

    def give_rows(self, streams: list[Slots]) -> list[int]:
        """The rows of these streams. A new one takes a free row; if none is free, or too small, all
        move to new buffers."""
        present = [self.in_row(row) for row in range(len(self.streams))]
        row_of = {id(slots): row for row, slots in enumerate(present) if slots is not None}
        new = [slots for slots in streams if id(slots) not in row_of]
        free = [row for row, slots in enumerate(present) if slots is None]
        if len(new) > len(free) or any(len(slots.used) > self.slots for slots in new):
            everyone = [slots for slots in present if slots is not None] + new
            self.make_buffers(everyone)
            row_of = {}
            new = everyone
            free = range(len(everyone))
        for slots, row in zip(new, free):
            self.enter(slots, row)
            row_of[id(slots)] = row
        return [row_of[id(slots)] for slots in streams]

    def make_buffers(self, streams: list[Slots]) -> None:
        """New buffers, which have room for these streams."""
        like = streams[0].keys[0]
        B = 1 << (len(streams) - 1).bit_length()        # a power of two
        S = max(len(slots.used) for slots in streams)
        layers = range(len(streams[0].keys))
        self.slots = S
        self.streams = [None] * B
        self.positions = streams[0].positions.new_full((B, S + 1), EMPTY)
        self.keys = [like.new_zeros(B, S + 1, *like.shape[1:]) for _ in layers]
        self.values = [like.new_zeros(B, S + 1, *like.shape[1:]) for _ in layers]
        self.inputs.clear()
        self.graphs.clear()

    def enter(self, slots: Slots, row: int) -> None:
        """A stream's buffers move into a row, and are from now on views of it."""
        count = len(slots.used)
        self.positions[row] = EMPTY
        self.positions[row, :count] = slots.positions
        slots.positions = self.positions[row, :count]
        for own, buffers in ((slots.keys, self.keys), (slots.values, self.values)):
            for layer, buffer in enumerate(buffers):
                buffer[row, :count] = own[layer]
                own[layer] = buffer[row, :count]
        slots.graphs.clear()                            # these were captured over other buffers
        self.streams[row] = ref(slots)

    # ------------------------------------------------------------------ the pass

    def __call__(self, inputs: list) -> list[Tensor]:
        """As Decoder: the logits [rows, V] of each PassInput. Their slots have been allocated."""
        rows = self.give_rows([given.slots for given in inputs])
        lengths = [given.plan.shape[1] for given in inputs]
        N = next((size for size in SIZES if size >= max(lengths)), max(lengths))
        # Where each stream's tokens stand among the B * N, and which of them are wanted.
        numbers = [row * N + np.arange(length) for row, length in zip(rows, lengths)]
        wanted = [own[given.rows] for own, given in zip(numbers, inputs)]
        starts = np.repeat(rows, lengths) * (self.slots + 1)

        device = self.positions.device
        at = torch.from_numpy(np.concatenate(numbers)).to(device)
        starts = torch.from_numpy(starts).to(device)
        ids, positions, slots = torch.cat([given.plan for given in inputs], dim=1)
        h, padded_positions, places = self.inputs_of(N)
        padded_positions.fill_(EMPTY).index_copy_(0, at, positions)
        places.fill_(self.slots).index_copy_(0, at, starts + slots)             # padding: row 0's last
        x = [given.x for given in inputs if given.x is not None]
        memory = [given.memory for given in inputs if given.memory is not None]
        e = self.decoder.narrator.embed(ids, torch.cat(x) if x else None,
                                        torch.cat(memory) if memory else None)
        h.index_copy_(0, at, e)

        hidden = self.run(N)
        counts = [len(part) for part in wanted]
        wanted = torch.from_numpy(np.concatenate(wanted)).to(device)
        logits = self.decoder.narrator.logits(hidden.index_select(0, wanted))
        return list(logits.split(counts))

    def inputs_of(self, N: int) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, positions and places of B * N tokens: a captured pass reads always these."""
        if N not in self.inputs:
            count = len(self.streams) * N
            weight = self.decoder.layers[0].norm_a[0]
            h = weight.new_zeros(count, len(weight))
            positions = self.positions.new_full((count,), EMPTY)
            places = self.positions.new_full((count,), self.slots)
            self.inputs[N] = h, positions, places
        return self.inputs[N]

    def run(self, N: int) -> Tensor:
        """The hidden states [B * N, D_lm] after the last layer, normalised."""
        inputs = self.inputs[N]
        if not self.capture:
            return self.forward(N, *inputs)
        with torch.cuda.device(self.positions.device):
            if N not in self.graphs:
                self.graphs[N] = self.decoder.capture_graph(lambda: self.forward(N, *inputs))
            graph, output = self.graphs[N]
            graph.replay()
        return output

    def forward(self, N: int, h: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        decoder = self.decoder
        self.positions.view(-1).index_copy_(0, places, positions)
        cos, sin = decoder.rotations(positions, h.dtype)
        queries_of_key = decoder.layers[0].heads // decoder.layers[0].groups
        by_row = positions.view(-1, N, 1)                                   # [B, N, 1]
        mask = self.positions[:, None] <= by_row                            # [B, N, S + 1]
        mask = mask.repeat_interleave(queries_of_key, 1)[:, None]                   # [B, 1, N H/G, S + 1]

        def attend(layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """q [B N, H, c], k and v [B N, G, c] -> [B N, H c]."""
            keys = self.keys[layer.place]
            values = self.values[layer.place]
            keys.flatten(0, 1).index_copy_(0, places, k)
            values.flatten(0, 1).index_copy_(0, places, v)
            q = q.unflatten(1, (layer.groups, -1)).unflatten(0, (-1, N)).transpose(1, 2)
            rows = q.flatten(2, 3)                                          # [B, G, N H/G, c]
            o = F.scaled_dot_product_attention(rows, keys.transpose(1, 2), values.transpose(1, 2),
                                               attn_mask=mask, scale=layer.scale)
            return o.view_as(q).transpose(1, 2).flatten(0, 1).flatten(1)

        for layer in decoder.layers:
            h = layer(h, cos, sin, attend)
        return decoder.last_norm(h)
