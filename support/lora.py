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
        self.base_layer, self.scale, self.dropout = base.requires_grad_(False), alpha / rank, nn.Dropout(dropout)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=5 ** 0.5)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        A, B = self.lora_A.weight.to(x.dtype), (self.scale * self.lora_B.weight).to(x.dtype)
        return self.base_layer(x) + linear(linear(self.dropout(x), A), B)


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
