"""LoRA (Hu et al., 2022), with which the paper tunes every linear layer of the language model
(App. B.6): W x + alpha / rank * B A x, where W is frozen.
"""
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.common.errors import BadData
from support.common.text import listed

# all linear layers
TARGETS = "model.*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)|lm_head$"
ROWS = 4096                     # of a weight that are merged at a time


class LoRALinear(nn.Module):
    """A linear layer with LoRA; names as in PEFT. Products are in the dtype of W, weights A and B
    in fp32.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float):
        super().__init__()
        self.base_layer = base.requires_grad_(False)                        # W
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=5 ** 0.5)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        A = self.lora_A.weight.to(x.dtype)
        B = self.lora_B.weight.to(x.dtype)
        inner = F.linear(self.dropout(x), A)                                # [.., rank]
        return self.base_layer(x).add_(F.linear(inner, self.scale * B))


def add_lora(llm: nn.Module, rank: int, alpha: float, dropout: float):
    """Replace every linear layer whose name matches TARGETS by one with LoRA. BadData if the model
    has other layers with a weight matrix: they would be left out.
    """
    words = llm.get_input_embeddings()
    left_out = []
    for name, module in list(llm.named_modules()):
        has_matrix = any(weight.dim() > 1 for weight in module.parameters(recurse=False))
        # a subclass, as of quantised layers, computes something else
        if type(module) is nn.Linear and re.fullmatch(TARGETS, name):
            llm.set_submodule(name, LoRALinear(module, rank, alpha, dropout))
        elif has_matrix and module is not words:
            left_out.append(f"{name}, {type(module).__name__}")
    if left_out:
        raise BadData(f"{type(llm).__name__} has layers that LoRA would leave out "
                      f"({listed(left_out, '; ')}); use a Llama-like language model")


def train_lora_alone(llm: nn.Module, mode: bool) -> None:
    """Of a language model, leave only LoRA in training mode: what is frozen has no dropout of its
    own.
    """
    llm.eval()
    for module in llm.modules():
        # layers of transformers that are not in training mode ignore --checkpointing
        if hasattr(module, "gradient_checkpointing"):
            module.training = mode
        if isinstance(module, LoRALinear):
            module.train(mode)


@torch.no_grad()
def merge_lora(llm: nn.Module) -> None:
    """Replace every layer with LoRA by one linear layer with W + scale * B A, computed in fp32."""
    names = [name for name, module in llm.named_modules() if isinstance(module, LoRALinear)]
    for name in names:                      # one after the other: each W is freed before the next
        module = llm.get_submodule(name)
        base = module.base_layer
        if module.lora_B.weight.any():
            # A new tensor: the head may share its weight with the table of words, which stays.
            merged = merged_weight(module)
            base.weight = nn.Parameter(merged, requires_grad=False)
        llm.set_submodule(name, base)


def merged_weight(module: LoRALinear) -> Tensor:
    """W + scale * B A, some rows at a time, so that little is held in fp32."""
    W = module.base_layer.weight
    A = module.lora_A.weight.float()
    B = module.scale * module.lora_B.weight.float()
    merged = torch.empty_like(W)
    for out, W_rows, B_rows in zip(merged.split(ROWS), W.split(ROWS), B.split(ROWS)):
        out.copy_(B_rows @ A + W_rows)
    return merged
