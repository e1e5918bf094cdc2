"""Products with weights on a processor (not in the paper): by oneDNN, where that is faster than
PyTorch's own choice.

fp32    PyTorch calls MKL, which reaches only a third of what AMD's processors can. oneDNN comes
        with PyTorch as well. A call costs some microseconds more, so small products stay with MKL.
bf16    oneDNN has products for processors that can multiply bf16. Few rows take half as long with
        a weight that is kept in oneDNN's own order (`pack_weights`); such a weight cannot learn.
        For other processors PyTorch has slow products: there a weight becomes fp32 a block at a
        time, which stays in the processor's cache.
int8    see support/engine/int8.py

Elsewhere, and in other formats, nothing changes.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from support.engine.int8 import Int8Linear, Int8Weight, join_rows

MKLDNN = torch.ops.mkldnn
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(MKLDNN, "_linear_pointwise")
ONEDNN_BF16 = ONEDNN and MKLDNN._is_mkldnn_bf16_supported()
FORMATS = torch.float32, torch.bfloat16
SMALL = 2 ** 21               # multiplications
BLOCK = 2 ** 20               # numbers of a bf16 weight that become fp32 at a time
FEW_ROWS = 2                  # so many are as fast without


class PackedWeight:
    """A bf16 weight [E, D] in oneDNN's order. It cannot learn.

    pieces      some of its rows each, as oneDNN's tensors
    """

    def __init__(self, pieces: list[Tensor]):
        self.pieces = pieces

    def __len__(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    @classmethod
    def joined(cls, weights: Sequence[PackedWeight]) -> PackedWeight:
        """The rows of several weights as one; none is held twice."""
        return cls([piece for weight in weights for piece in weight.pieces])

    def plain(self) -> Tensor:
        """The weight in the usual order, as a new tensor."""
        return torch.cat([piece.to_dense() for piece in self.pieces])

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [.., D] -> x w^T + bias [.., E]."""
        lengths = [len(piece) for piece in self.pieces]
        biases = [None] * len(lengths) if bias is None else bias.split(lengths)
        return join_rows([product(x, piece, of_piece)
                          for piece, of_piece in zip(self.pieces, biases)])


def linear(x: Tensor, weight: Tensor | Int8Weight | PackedWeight,
           bias: Tensor | None = None) -> Tensor:
    """F.linear: x [.., D] and weight [E, D] -> [.., E]."""
    if isinstance(weight, Int8Weight | PackedWeight):
        return weight.product(x, bias)
    if (not ONEDNN or x.device.type != "cpu" or x.dtype != weight.dtype or x.dtype not in FORMATS
            or torch.compiler.is_compiling() or x.numel() * len(weight) < SMALL):
        return F.linear(x, weight, bias)
    given = (x, weight, bias)
    learns = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in given)
    return Product.apply(*given) if learns else product(*given)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.dtype == torch.float32 or ONEDNN_BF16:
        return MKLDNN._linear_pointwise(x, weight, bias, "none", [], "")
    if x.numel() <= FEW_ROWS * x.shape[-1]:
        return F.linear(x, weight, bias)
    return product_in_blocks(x, weight, bias)


def product_in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product of bf16 that is computed in fp32."""
    rows = max(1, BLOCK // weight.shape[1])
    inputs = x.float()
    blocks = [product(inputs, block.float()) for block in weight.split(rows)]
    total = torch.cat(blocks, -1)
    if bias is not None:
        total += bias
    return total.to(x.dtype)


class Product(torch.autograd.Function):
    """`product` with its gradients, which are such products themselves."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, len(weight))                            # also of a single row
        inputs = x.reshape(-1, weight.shape[1])
        return (product(gradient, weight.t()) if for_x else None,
                product(rows.t(), inputs.t()) if for_weight else None,
                rows.sum(0) if for_bias else None)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A linear layer with a weight in oneDNN's order. It cannot learn."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = PackedWeight([MKLDNN._reorder_linear_weight(layer.weight.data)])
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.product(x, self.bias)


def join_layers(layers: Sequence[Int8Linear | PackedLinear]
                ) -> tuple[Int8Weight | PackedWeight, Tensor | None]:
    """Weight and bias of layers of one kind and one input, as one layer; none is held twice."""
    biases = [layer.bias for layer in layers]
    bias = None if biases[0] is None else torch.cat(biases)
    weights = [layer.weight for layer in layers]
    return weights[0].joined(weights), bias


def speed_up(model: nn.Module) -> None:
    """Let all linear layers of a model compute in this way."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


@torch.no_grad()
def pack_weights(model: nn.Module) -> bool:
    """Put the weights of bf16 linear layers into oneDNN's order, where that is faster. Returns
    whether there were any.

    One layer after the other: its weight is freed before the next one. A weight that the model uses
    twice, as that of a head that is also the table of words, stays as it is.
    """
    if not ONEDNN_BF16:
        return False
    changed = False
    uses = Counter(id(parameter) for module in model.modules()
                   for parameter in module.parameters(recurse=False))
    names = [name for name, module in model.named_modules()
             if type(module) in (nn.Linear, Linear) and uses[id(module.weight)] == 1]
    for name in names:                          # the modules themselves are not held
        module = model.get_submodule(name)
        if module.weight.device.type == "cpu" and module.weight.dtype == torch.bfloat16:
            model.set_submodule(name, PackedLinear(module))
            changed = True
    return changed


@torch.no_grad()
def unpack_weights(model: nn.Module) -> bool:
    """Put them back into the usual order. Returns whether there were any."""
    names = [name for name, module in model.named_modules() if type(module) is PackedLinear]
    for name in names:
        packed = model.get_submodule(name)
        plain = Linear(packed.in_features, packed.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(packed.weight.plain(), requires_grad=False)
        plain.bias = packed.bias
        model.set_submodule(name, plain)
    return len(names) > 0


if ONEDNN:
    @register_flop_formula(MKLDNN._linear_pointwise)
    def operations(x: torch.Size, weight: torch.Size, *args, **kwargs) -> int:
        """Multiplications and additions, for PyTorch's counter (experiments/cost.py)."""
        return 2 * x.numel() * weight[0]
