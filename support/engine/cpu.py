"""Products with the weights of large models on a processor (not in the paper): the same numbers, up
to rounding, in less time.

fp32    PyTorch calls MKL, which is slow on AMD's processors. oneDNN, which comes with PyTorch,
        takes half of its time for a frame's tokens, and 0.85 of it for a video's.
bf16    PyTorch calls oneDNN, where the processor multiplies bf16. A frame's tokens, or a word, take
        two thirds of the time with a weight that is kept in oneDNN's own order.

Commands call `speed_up` after they have loaded a narrator; nothing else knows of it. Small models,
such as the toy's, gain nothing and stay as they are.
"""
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.common.garbage import return_freed_memory

LARGE = 2 * 10 ** 8             # weights


def is_large(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) >= LARGE


def multiplies_bf16() -> bool:
    """Whether this processor has instructions for products of bf16."""
    instructions = torch.cpu.get_capabilities()
    names = ("avx512_bf16", "amx_bf16", "bf16")     # the last one is ARM's
    return any(instructions.get(name, False) for name in names)


class FrozenProduct(torch.autograd.Function):
    """x weight^T + bias in fp32, by oneDNN; gradients for x alone.

    PyTorch's own backward pass of it would keep another copy of x for each layer.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x.to_mkldnn(), weight, bias).to_dense()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        weight, = ctx.saved_tensors
        return F.linear(gradient.to_mkldnn(), weight.t()).to_dense(), None, None


class OneDNNLinear(nn.Linear):
    """A linear layer in fp32 that computes by oneDNN, and does not learn."""

    def forward(self, x: Tensor) -> Tensor:
        return FrozenProduct.apply(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """A linear layer in bf16 with its weight in oneDNN's order. It cannot learn."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        # Neither of these two operations has a public name.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.data)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


@torch.no_grad()
def speed_up(model: nn.Module, learns: bool = False) -> None:
    """Let the linear layers of a large model on a processor compute by oneDNN. Other models, and
    other devices, stay as they are.

    learns      whether it is trained: then layers that learn stay as they are, too
    """
    if not torch.backends.mkldnn.is_available() or not is_large(model):
        return
    pack = multiplies_bf16() and not learns
    uses = Counter(id(parameter) for module in model.modules()
                   for parameter in module.parameters(recurse=False))
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in names:                          # one after the other: old weights are freed
        layer = model.get_submodule(name)
        weight = layer.weight
        if weight.device.type != "cpu" or (learns and weight.requires_grad):
            continue
        if weight.dtype == torch.float32:
            layer.__class__ = OneDNNLinear
        # A head may share the table of words, which has to stay as it is.
        elif weight.dtype == torch.bfloat16 and pack and uses[id(weight)] == 1:
            model.set_submodule(name, PackedLinear(layer))
    return_freed_memory()
