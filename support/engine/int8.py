"""Weights in int8 (not in the paper): a quarter of fp32's memory, and faster; never the default.

    w [e]     a row of a weight                 about  scale[e] * q[e],      q in -127 .. 127
    x [n]     a row of inputs                   about  size[n] * p[n],       p in 8 bits, or 2 x 7

On a processor p and q are multiplied as they are, by what PyTorch has for it (oneDNN, FBGEMM,
QNNPACK). A row of inputs has its size of its own, so that one large number does not blur the other
rows. Elsewhere the inputs stay as they are, and q becomes their format for each product.

Where the products are of 7 bits, a language model's inputs are the sum of two parts, a coarse and a
fine one, which are multiplied as two rows: with 7 bits alone, the perplexity of a pretrained one
grows by a seventh. A vision encoder loses less, and takes far longer: its inputs have one part.
"""
from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.common.errors import BadData

TINY = 1e-12
PIECE = 2 ** 24                 # so many numbers, or some more, are packed at once
MAKE = "_make_per_channel_quantized_tensor"
# Two products of 8 bits are summed in 16. Where the processor has no sum of its own for these
# (VNNI), inputs have 7 bits, or sums would not fit.
SEVEN_BITS = not torch.cpu._is_vnni_supported()
# FBGEMM then rounds inputs to multiples of (largest - least) / 127. Are those of a language model in
# two parts?
TWO_PARTS = SEVEN_BITS and torch.backends.quantized.engine in ("x86", "fbgemm")
STEP = 2 / 127                  # where the largest is 1 and the least -1
COARSE = 63                     # the coarse part is a multiple of 1 / 63,
FINE = 126                      # the fine part of 1 / 126 of that


def check_int8(device: str) -> None:
    """BadData if this PyTorch has no products of int8 on a processor."""
    quantized = torch.ops.quantized
    names = "linear_prepack", "linear_dynamic"
    there = torch.backends.quantized.engine != "none" and MAKE in dir(torch)
    if device == "cpu" and not (there and all(hasattr(quantized, name) for name in names)):
        raise BadData("int8: this build of PyTorch has no products of int8 on a processor; "
                      "use --dtype bfloat16 or float32")


class Int8Weight:
    """A weight [E, D] in int8, with a scale for each row.

    pieces      of its rows: packed by PyTorch on a processor, else q and scale
    two_parts   whether its inputs are multiplied in two parts
    """

    def __init__(self, rows: int, pieces: list, two_parts: bool = False):
        self.rows = rows
        self.pieces = pieces
        self.two_parts = two_parts

    def __len__(self) -> int:
        return self.rows

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [.., D] -> x w^T + bias [.., E]."""
        if x.device.type == "cpu":
            size = largest(x)
            unit = (x / size).float()                   # each row reaches 1 or -1 exactly
            y = self.product_in_two_parts(unit) if self.two_parts else self.product_of_bytes(unit)
            y = y.to(x.dtype).mul_(size)
        else:
            y = [F.linear(x, q.to(x.dtype)) * scale.to(x.dtype) for q, scale in self.pieces]
            y = join_rows(y)
        return y if bias is None else y.add_(bias)


    def product_of_bytes(self, unit: Tensor) -> Tensor:
        """unit [.., D], all from -1 to 1 -> unit w^T [.., E]. PyTorch rounds the inputs."""
        multiply = torch.ops.quantized.linear_dynamic
        return join_rows([multiply(unit, piece, SEVEN_BITS) for piece in self.pieces])

    def product_in_two_parts(self, unit: Tensor) -> Tensor:
        """The same, with inputs n / 63 + m / (63 * 126), n and m from -63 to 63."""
        rows = unit.reshape(-1, unit.shape[-1])
        scaled = rows * COARSE
        n = scaled.round()
        m = ((scaled - n) * FINE).round()
        # With a row that has both 1 and -1, PyTorch rounds to multiples of STEP, and n * STEP and
        # m * STEP are multiplied as they are.
        ends = rows.new_zeros(1, rows.shape[1])
        ends[0, 0] = 1
        ends[0, -1] = -1
        y = self.product_of_bytes(torch.cat([n * STEP, m * STEP, ends]))
        coarse, fine, _ = y.split([len(rows), len(rows), 1])
        y = (coarse + fine / FINE) / (COARSE * STEP)
        return y.view(*unit.shape[:-1], -1)


def largest(x: Tensor) -> Tensor:
    """The largest absolute value of each row [.., D] -> [.., 1], and not 0."""
    return torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)).clamp_min(TINY)


def join_rows(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def into_int8(blocks: Iterable[Tensor], device: str, two_parts: bool = False) -> Int8Weight:
    """A weight in int8, given its rows, some at a time: little is held in another format."""
    pieces, waiting = [], []
    rows = numbers = 0

    def finish():
        q, scale = (torch.cat(parts) for parts in zip(*waiting))
        pieces.append(pack_rows(q, scale) if device == "cpu" else (q, scale))
        waiting.clear()

    for block in blocks:
        block = block.to(device).float()
        scale = largest(block) / 127
        waiting.append(((block / scale).round_().to(torch.int8), scale[:, 0]))
        rows += len(block)
        numbers += block.numel()
        if numbers >= PIECE:
            finish()
            numbers = 0
    if waiting:
        finish()
    return Int8Weight(rows, pieces, two_parts)


def pack_rows(q: Tensor, scale: Tensor):
    """Rows in int8 with their scales, in the order in memory in which they are multiplied."""
    with warnings.catch_warnings():
        # a later PyTorch will make such tensors in another way
        warnings.simplefilter("ignore", UserWarning)
        zeros = torch.zeros(len(q), dtype=torch.long)
        tensor = getattr(torch, MAKE)(q, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(tensor, None)


class Int8Linear(nn.Module):
    """A linear layer with a weight in int8. It cannot learn."""

    def __init__(self, layer: nn.Linear, blocks: Iterable[Tensor], device: str, dtype: torch.dtype,
                 two_parts: bool = False):
        """Sizes and bias of a layer, other rows; `dtype` is that of its inputs."""
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = into_int8(blocks, device, two_parts)
        self.bias = None
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.data.to(device, dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.product(x, self.bias)


def join_int8(layers: Sequence[Int8Linear]) -> tuple[Int8Weight, Tensor | None]:
    """Weight and bias of layers of one input as one; none is held twice."""
    biases = [layer.bias for layer in layers]
    bias = None if biases[0] is None else torch.cat(biases)
    pieces = [piece for layer in layers for piece in layer.weight.pieces]
    rows = sum(len(layer.weight) for layer in layers)
    return Int8Weight(rows, pieces, layers[0].weight.two_parts), bias


class WideEmbedding(nn.Embedding):
    """Embeddings whose table is bf16, as numbers of the format in which the model computes."""

    computes_in = torch.float32

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).to(self.computes_in)
