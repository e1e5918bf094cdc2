"""LoRA (Hu et al., 2022), with which the paper tunes every linear layer of the language model (App. B.6)."""
import re

import torch
from torch import Tensor, nn

from support.linear import linear

TARGETS = "model.*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)|lm_head$"     # all linear layers


class LoRALinear(nn.Module):
    """y = W x + alpha / r * B A x with W frozen (Hu et al., 2022); names as in PEFT. x has W's dtype."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float):
        super().__init__()
        self.base_layer, self.scale, self.dropout = base.requires_grad_(False), alpha / rank, dropout
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=5 ** 0.5)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        dropped = torch.rand(x.shape, device=x.device) < p if p else None
        scale = self.scale / (1 - p) if p < 1 else 0.0                       # what is kept is scaled up, as in dropout
        A, B = self.lora_A.weight.to(x.dtype), (scale * self.lora_B.weight).to(x.dtype)
        return ProductWithLoRA.apply(x, dropped, self.base_layer.weight, self.base_layer.bias, A, B)


class ProductWithLoRA(torch.autograd.Function):
    """W x + bias + B A x' for x [.., D], where x' is x with zeros where it is `dropped`, if that is given. W and bias
    are frozen. The small product is added to the large one in place, forward and backward; x, A x' and what is dropped
    are all that is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, dropped: Tensor | None, weight: Tensor, bias: Tensor | None, A: Tensor,
                B: Tensor) -> Tensor:
        y, inner = linear(x, weight, bias), linear(without(x, dropped), A)
        ctx.save_for_backward(x, dropped, inner, weight, A, B)
        add_product(y, inner, B)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, dropped, inner, weight, A, B = ctx.saved_tensors
        rows, of_x = gradient.flatten(0, -2), linear(gradient, weight.t())
        of_inner = linear(rows, B.t())
        of_A = of_inner.t() @ without(x, dropped).flatten(0, -2)
        of_B = rows.t() @ inner.flatten(0, -2)
        if dropped is None:
            add_product(of_x, of_inner, A.t())
        else:
            of_x += linear(of_inner, A.t()).view_as(x).masked_fill_(dropped, 0)
        return of_x, None, None, None, of_A, of_B


def add_product(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """y [.., E] += x [.., D] weight^T [D, E], in place."""
    y = y.view(-1, len(weight))
    torch.addmm(y, x.flatten(0, -2), weight.t(), out=y)                # not addmm_, which PyTorch's counter overlooks


def without(x: Tensor, dropped: Tensor | None) -> Tensor:
    """x with zeros where it is dropped, if anything is."""
    return x if dropped is None else x.masked_fill(dropped, 0)


def add_lora(llm: nn.Module, rank: int, alpha: float, dropout: float):
    """Wrap every linear layer whose name matches TARGETS."""
    for name, module in list(llm.named_modules()):
        if isinstance(module, nn.Linear) and re.fullmatch(TARGETS, name):
            parent, _, child = name.rpartition(".")
            setattr(llm.get_submodule(parent), child, LoRALinear(module, rank, alpha, dropout))


@torch.no_grad()
def merge_lora(llm: nn.Module) -> None:
    """Replace every layer that has LoRA by one linear layer with the sum, computed in fp32.

    The sum is a new tensor, so an output head that shares the embeddings' weight leaves them as they are.
    """
    for name, module in list(llm.named_modules()):
        if hasattr(module, "lora_A"):
            base, a, b = module.base_layer, module.lora_A.weight.float(), module.lora_B.weight.float()
            base.weight = nn.Parameter((base.weight.float() + module.scale * b @ a).to(base.weight.dtype), False)
            parent, _, child = name.rpartition(".")
            setattr(llm.get_submodule(parent), child, base)
