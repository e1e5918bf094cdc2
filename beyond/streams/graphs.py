"""A stream as CUDA graphs (not in the paper): what a GPU computes again and again is recorded once,
and then started by one call in place of hundreds.

A graph needs shapes that do not change. So a pass of the language model has 1, 2, 4, ... tokens:
others are padded behind the last one. Keys and values lie in buffers of one capacity, and where a
pass writes is a number on the device. Padding writes behind the cache's end, where nobody looks,
and the next pass writes over it.

Elsewhere than on CUDA the same passes are computed without graphs: so they are tested.
"""
import gc
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrator import Narrator
from beyond.streams.ahead import Ahead, GrowingCache

CAPACITY = 512                  # tokens, at first; it doubles where more are needed


class Recorded:
    """A function of tensors. On CUDA it is recorded as a graph, once for each shape of them."""

    def __init__(self, function: Callable[..., Tensor]):
        self.function = function
        self.graphs = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        if inputs[0].device.type != "cuda":
            return self.function(*inputs)
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if shapes not in self.graphs:
            self.graphs[shapes] = self.record(inputs)
        graph, places, output = self.graphs[shapes]
        for place, tensor in zip(places, inputs):
            place.copy_(tensor)
        graph.replay()
        return output.clone()                               # the next replay writes over it

    def record(self, inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, list, Tensor]:
        """The graph, the places of its inputs and that of its output."""
        places = [tensor.clone() for tensor in inputs]
        # what allocates or chooses a kernel at first does so before the recording
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self.function(*places)
        torch.cuda.current_stream().wait_stream(beside)
        # No graph that is garbage, of an earlier stream, may be freed while one is recorded.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        # other threads may go on: a camera's
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = self.function(*places)
        return graph, places, output


class FixedCache(GrowingCache):
    """A Cache whose buffers have one capacity, and the pass of the language model that fills them."""

    def __init__(self, largest: int, narrator: Narrator):
        super().__init__(largest)
        self.narrator = narrator
        self.capacity = CAPACITY
        self.rows: Tensor | None = None         # where the present pass writes [size]
        self.compute = Recorded(self.compute_padded)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        if self.rows is None:                               # those of a stream that was suspended
            return super().update(keys, values, layer)
        if layer not in self.buffers:                       # the first pass
            self.buffers[layer] = (self.with_room(keys), self.with_room(values))
        for buffer, new in zip(self.buffers[layer], (keys, values)):
            buffer.index_copy_(2, self.rows, new)
        return self.buffers[layer]

    def make_room(self, size: int) -> None:
        """For a pass of so many tokens. Graphs know the old buffers: they are recorded anew."""
        before = self.capacity
        super().make_room(padded_size(size))
        if self.capacity > before:
            self.compute = Recorded(self.compute_padded)

    def capacity_for(self, tokens: int) -> int:
        return padded_size(tokens)

    def run(self, e: Tensor, positions: Tensor) -> Tensor:
        """As `Narrator.run`: embeddings [L, D_lm], positions [L] -> hidden states [L, D_lm]."""
        new = len(e)
        size = padded_size(new)
        self.make_room(size)
        if new < size:
            e = F.pad(e, (0, 0, 0, size - new))
            positions = F.pad(positions, (0, size - new))
        # no copy of a number, for which the processor would wait
        old = torch.full((), self.old, device=e.device)
        return self.compute(e, positions, old)[:new]

    def compute_padded(self, e: Tensor, positions: Tensor, old: Tensor) -> Tensor:
        """The pass with its padding [size, D_lm], where `old` tokens are in the cache."""
        llm = self.narrator.llm
        self.rows = old + torch.arange(len(e), device=e.device)
        # Row i sees columns 0 .. old + i; the heads that share a key are rows (attention.py).
        shared = llm.config.num_attention_heads // llm.config.num_key_value_heads
        last_seen = self.rows[:, None].expand(-1, shared).reshape(-1, 1)
        column = torch.arange(self.capacity, device=e.device)
        mask = torch.zeros(len(last_seen), self.capacity, dtype=e.dtype, device=e.device)
        mask = mask.masked_fill(column > last_seen, -torch.inf)
        output = llm.model(
            inputs_embeds=e[None],
            position_ids=positions[None],
            attention_mask=mask[None, None],
            segments=None,
            use_cache=True,
            **{self.narrator.cache_name: self},
        )
        self.rows = None
        return output.last_hidden_state[0]


def padded_size(tokens: int) -> int:
    """1, 2, 4, ...: the next one."""
    return 1 << (tokens - 1).bit_length()


def use_graphs(context: Ahead, encoder: nn.Module | None = None) -> None:
    """Let a new stream compute by passes of fixed shapes, and its narrator's memory and head, and
    the vision encoder, by graphs. All stays as it is for VideoLLM-MoD, whose shapes depend on the
    frame, and for two memories.
    """
    narrator = context.narrator
    if type(narrator) is not Narrator:
        return
    context.cache = FixedCache(context.cache.largest, narrator)
    if not isinstance(narrator.logits, Recorded):           # its first stream
        record_parts(narrator, context.queries)
    if encoder is not None and "forward" not in vars(encoder):      # its first stream, too
        encode = Recorded(encoder.forward)
        encoder.forward = lambda pictures: encode(pictures.to(encoder.model.device))


def record_parts(narrator: Narrator, queries) -> None:
    """Passes go to the cache, if it is a FixedCache; head and memory are recorded.

    queries     of the memory: the same for all streams
    """
    plain_run = narrator.run

    def run(e: Tensor, positions: Tensor, sees=None, cache=None) -> Tensor:
        if isinstance(cache, FixedCache):
            return cache.run(e, positions)
        return plain_run(e, positions, sees, cache)

    narrator.run = run
    narrator.logits = Recorded(narrator.logits)
    memory = narrator.memory
    if memory.M:
        memory.step = Recorded(memory.step)
    if queries is not None:                     # else `read` computes little, or nothing
        plain_read = memory.read
        read = Recorded(lambda state: plain_read(state, queries))
        memory.read = lambda state, queries=None: read(state)
