"""Products with weights on a processor (not in the paper): by oneDNN, where that is faster than PyTorch's own choice.

In fp32 PyTorch calls MKL, which reaches only a third of what AMD's processors can. oneDNN comes with PyTorch as well; a
call costs some microseconds more, so small products stay with MKL. Elsewhere, and in other formats, nothing changes.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
SMALL = 2 ** 21               # multiplications


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: x [.., D] and weight [E, D] -> [.., E]."""
    if (not ONEDNN or x.device.type != "cpu" or not x.dtype == weight.dtype == torch.float32
            or torch.compiler.is_compiling() or x.numel() * len(weight) < SMALL):
        return F.linear(x, weight, bias)
    learns = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (x, weight, bias))
    return Product.apply(x, weight, bias) if learns else product(x, weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class Product(torch.autograd.Function):
    """`product` with its gradients, which are such products themselves."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (x, weight), (for_x, for_weight, for_bias) = ctx.saved_tensors, ctx.needs_input_grad
        rows = gradient.reshape(-1, len(weight))                            # also of a single row
        inputs = x.reshape(-1, weight.shape[1])
        return (product(gradient, weight.t()) if for_x else None,
                product(rows.t(), inputs.t()) if for_weight else None,
                rows.sum(0) if for_bias else None)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def speed_up(model: nn.Module) -> None:
    """Let all linear layers of a model compute in this way."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


if ONEDNN:
    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def operations(x: torch.Size, weight: torch.Size, *args, **kwargs) -> int:
        """Multiplications and additions, for PyTorch's counter (experiments/efficiency.py)."""
        return 2 * x.numel() * weight[0]
