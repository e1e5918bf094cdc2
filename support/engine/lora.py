"""LoRA (Hu et al., 2022), with which the paper tunes every linear layer of the language model
(App. B.6).

W, bias     the frozen layer: weight [E, D] and bias [E]
A, B        the low-rank weights [rank, D] and [E, rank]
"""
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from support.engine.int8 import OUR_BYTES, Int8Linear
from support.engine.linear import linear
from support.engine.weights import ROWS, WeightFiles, format_beside_int8

# all linear layers
TARGETS = "model.*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)|lm_head$"


class LoRALinear(nn.Module):
    """W x + bias + alpha / rank * B A x; names as in PEFT. x has W's dtype."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.scale = alpha / rank
        self.dropout = dropout
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=5 ** 0.5)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        dropped = torch.rand(x.shape, device=x.device) < p if p else None
        # dropout scales the remaining x up by 1 / (1 - p): here this is part of B
        scale = self.scale / (1 - p) if p < 1 else 0.0
        A = self.lora_A.weight.to(x.dtype)
        B = (scale * self.lora_B.weight).to(x.dtype)
        return ProductWithLoRA.apply(x, dropped, self.base_layer.weight, self.base_layer.bias, A, B)


class ProductWithLoRA(torch.autograd.Function):
    """W x + bias + B A x' for x [.., D] -> [.., E]. x' is x with zeros where `dropped` is true.

    The small product is added to the large one in place, forward and backward. For the backward
    pass only x, A x' and the dropout mask are stored.
    """

    @staticmethod
    def forward(ctx, x: Tensor, dropped: Tensor | None, W: Tensor, bias: Tensor | None, A: Tensor,
                B: Tensor) -> Tensor:
        output = linear(x, W, bias)                                    # [.., E]
        inner = linear(without(x, dropped), A)                         # A x': [.., rank]
        ctx.save_for_backward(x, dropped, inner, W, A, B)
        add_product(output, inner, B)
        return output

    @staticmethod
    def backward(ctx, gradient: Tensor):
        """gradient [.., E] of the output -> gradients of x, A and B."""
        x, dropped, inner, W, A, B = ctx.saved_tensors
        rows = gradient.flatten(0, -2)                                 # [R, E]
        of_x = linear(gradient, W.t())                                 # [.., D]
        of_inner = linear(rows, B.t())                                 # [R, rank]
        of_A = of_inner.t() @ without(x, dropped).flatten(0, -2)       # [rank, D]
        of_B = rows.t() @ inner.flatten(0, -2)                         # [E, rank]
        if dropped is None:
            add_product(of_x, of_inner, A.t())
        else:
            of_x += linear(of_inner, A.t()).view_as(x).masked_fill_(dropped, 0)
        return of_x, None, None, None, of_A, of_B


def add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """total [.., E] += x [.., D] weight^T [D, E], in place."""
    total = total.view(-1, len(weight))
    # not addmm_, which PyTorch's counter of operations overlooks
    torch.addmm(total, x.flatten(0, -2), weight.t(), out=total)


def without(x: Tensor, dropped: Tensor | None) -> Tensor:
    """x with zeros where `dropped` is true; x itself without dropout."""
    return x if dropped is None else x.masked_fill(dropped, 0)


def add_lora(llm: nn.Module, rank: int, alpha: float, dropout: float):
    """Replace every linear layer whose name matches TARGETS by one with LoRA."""
    for name, module in list(llm.named_modules()):
        if isinstance(module, nn.Linear) and re.fullmatch(TARGETS, name):
            llm.set_submodule(name, LoRALinear(module, rank, alpha, dropout))


@torch.no_grad()
def merge_lora(llm: nn.Module) -> None:
    """Replace every layer with LoRA by one linear layer with W + scale * B A, computed in fp32.

    One layer after the other: its W, A and B are freed before the next one is merged.
    """
    for name in layers_with_lora(llm):
        module = llm.get_submodule(name)
        base = module.base_layer
        if module.lora_B.weight.any():              # else a head that shares the embeddings goes on
            base.weight = nn.Parameter(merged_weight(base.weight, module), requires_grad=False)
        llm.set_submodule(name, base)


def merged_weight(weight: Tensor, module: LoRALinear) -> Tensor:
    """W + scale * B A for weight W [E, D], as a new tensor: an output head that shares the weight
    of the embeddings must not change them.
    """
    if weight.dtype == torch.float32:
        B = module.scale * module.lora_B.weight.float()
        return (B @ module.lora_A.weight.float()).add_(weight)
    merged = torch.empty_like(weight)
    for rows, out in zip(merged_blocks(weight, module), merged.split(ROWS)):
        out.copy_(rows)
    return merged


def merged_blocks(weight: Tensor, module: LoRALinear) -> Iterator[Tensor]:
    """The same in fp32, some rows at a time, so that little is held."""
    A = module.lora_A.weight.float()
    B = module.scale * module.lora_B.weight.float()
    for rows, low_rank in zip(weight.split(ROWS), B.split(ROWS)):
        yield linear(low_rank, A.t()).add_(rows)


@torch.no_grad()
def merge_into_int8(llm: nn.Module, files: WeightFiles, device: str) -> None:
    """Replace every layer with LoRA by one in int8, and read everything else into its place.

    The frozen weights are read from their files one after the other.
    """
    dtype = format_beside_int8(device)
    for name in layers_with_lora(llm):
        module = llm.get_submodule(name)
        base = module.base_layer
        weight = files.read(f"{name}.weight".replace(".inner.", "."), base.weight.data)
        layer = Int8Linear(base, merged_blocks(weight, module), device, dtype, OUR_BYTES)
        llm.set_submodule(name, layer)
    files.place_int8(llm, llm, device, OUR_BYTES)


def layers_with_lora(llm: nn.Module) -> list[str]:
    return [name for name, module in llm.named_modules() if isinstance(module, LoRALinear)]
