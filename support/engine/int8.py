"""Weights in int8 (not in the paper): a quarter of fp32's memory, and faster; never the default.

    w [e]     a row of a weight                 about  scale[e] * q[e],      q in -127 .. 127
    x [n]     a row of inputs                   about  size[n] * p[n],       p in -127 .. 127

A row of inputs has its size of its own, so that one large number does not blur the other rows. On
a processor p is a byte, too. With 7 bits in it, the perplexity of a pretrained language model grows
by a seventh, with 8 bits by a fortieth. So its inputs have two parts, a coarse byte and a fine one,
which are multiplied as two rows: nothing is lost that can be seen. A vision encoder loses less, and
takes far longer: its inputs have one part.

Elsewhere the inputs stay as they are, and q becomes their format for each product.
"""
from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.common.errors import BadData

TINY = 1e-12
ROWS_AT_ONCE = 256              # of inputs: what they become stays in the processor's cache
PIECE = 2 ** 24                 # so many numbers, or some more, are packed at once
MAKE = "_make_per_channel_quantized_tensor"
# Without VNNI a processor sums two products in 16 bits: those of 8 bits times 8 do not fit, those
# of 7 bits times 8 do. There PyTorch's FBGEMM multiplies, which is faster for a single row.
VNNI = torch.cpu._is_vnni_supported() and hasattr(torch.ops.onednn, "qlinear_pointwise")
LEVELS = 127 if VNNI else 63
ZERO = 128                      # oneDNN is fast where inputs are unsigned: p + 128
FBGEMM_STEP = 2 / 127           # to which FBGEMM rounds where the largest is 1, the least -1
# Only these multiply the bytes that we choose.
OUR_BYTES = VNNI or torch.backends.quantized.engine in ("x86", "fbgemm")


def check_int8(device: str) -> None:
    """BadData if this PyTorch has no products of int8 on a processor."""
    if device != "cpu" or VNNI:
        return
    quantized = torch.ops.quantized
    names = "linear_prepack", "linear_dynamic"
    there = torch.backends.quantized.engine != "none" and MAKE in dir(torch)
    if not (there and all(hasattr(quantized, name) for name in names)):
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

    @classmethod
    def joined(cls, weights: Sequence[Int8Weight]) -> Int8Weight:
        """The rows of several weights as one; none is held twice."""
        pieces = [piece for weight in weights for piece in weight.pieces]
        return cls(sum(map(len, weights)), pieces, weights[0].two_parts)

    @torch.no_grad()
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [.., D] -> x w^T + bias [.., E]."""
        if x.device.type != "cpu":
            y = join_rows([F.linear(x, q.to(x.dtype)) * scale.to(x.dtype)
                           for q, scale in self.pieces])
            return y if bias is None else y.add_(bias)
        rows = x.float().reshape(-1, x.shape[-1])              # [N, D]
        y = rows.new_empty(len(rows), self.rows)
        for part, out in zip(rows.split(ROWS_AT_ONCE), y.split(ROWS_AT_ONCE)):
            size = largest(part) / LEVELS
            torch.mul(self.product_of_rows(part / size), size, out=out)
        if bias is not None:
            y.add_(bias)
        return y.view(*x.shape[:-1], -1).to(x.dtype)

    def product_of_rows(self, rows: Tensor) -> Tensor:
        """rows [N, D], from -LEVELS to LEVELS -> rows w^T [N, E]."""
        if not OUR_BYTES:
            return join_rows([dynamic(rows, piece) for piece in self.pieces])
        if not self.two_parts:
            return self.product_of_bytes(rows.round_())
        both = rows.new_empty(2, *rows.shape)
        coarse, fine = both
        torch.round(rows, out=coarse)
        # What is left is at most a half.
        torch.sub(rows, coarse, out=fine).mul_(2 * LEVELS).round_()
        y = self.product_of_bytes(both.flatten(0, 1))
        of_coarse, of_fine = y.chunk(2)
        return of_coarse.add_(of_fine, alpha=1 / (2 * LEVELS))

    def product_of_bytes(self, p: Tensor) -> Tensor:
        """p [N, D], whole numbers from -LEVELS to LEVELS, changed here -> p w^T [N, E], exactly."""
        if VNNI:
            p = p.add_(ZERO).to(torch.uint8)
            return join_rows([onednn_product(p, *piece) for piece in self.pieces])
        # With a row that has both 1 and -1, FBGEMM rounds to steps of FBGEMM_STEP: p is kept.
        ends = p.new_zeros(1, p.shape[1])
        ends[0, 0] = 1
        ends[0, -1] = -1
        inputs = torch.cat([p * FBGEMM_STEP, ends])
        y = join_rows([dynamic(inputs, piece) for piece in self.pieces])
        return y[:-1] / FBGEMM_STEP


def dynamic(x: Tensor, packed) -> Tensor:
    """PyTorch rounds x [N, D] to 7 bits, of the whole tensor's range, and multiplies -> [N, E]."""
    return torch.ops.quantized.linear_dynamic(x, packed, True)


def onednn_product(p: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """Bytes p + ZERO [N, D] times a weight from `pack_rows` -> fp32 [N, E]."""
    return torch.ops.onednn.qlinear_pointwise(
        p, 1.0, ZERO,                           # the inputs, their scale and their zero
        packed, scale, zeros,                   # the weight, the same for each of its rows
        None,                                   # no bias
        1.0, 0, torch.float32,                  # the outputs, their scale and their zero
        "none", [], "",                         # nothing follows
    )


def largest(x: Tensor) -> Tensor:
    """The largest absolute value of each row [.., D] -> [.., 1], and not 0."""
    # aminmax takes five times as long as these two
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
    zeros = torch.zeros(len(q), dtype=torch.long)
    if VNNI:
        return torch.ops.onednn.qlinear_prepack(q, None), scale, zeros
    with warnings.catch_warnings():
        # a later PyTorch will make such tensors in another way
        warnings.simplefilter("ignore", UserWarning)
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


class WideEmbedding(nn.Embedding):
    """Embeddings whose table is bf16, as numbers of the format in which the model computes."""

    computes_in = torch.float32

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).to(self.computes_in)
