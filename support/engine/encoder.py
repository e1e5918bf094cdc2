"""A frozen vision encoder on a processor (not in the paper): half of its work is not products with
weights.

GELU        in the memory of its inputs. New memory of this size takes as long as GELU itself.
attention   of bf16 and int8 encoders: two products of bf16, for a few heads at a time, whose scores
            stay in the processor's cache. It takes two thirds of the time of PyTorch's own.
pooling     of bf16 and int8 encoders: SigLIP's, without copies of keys and values
products    support/engine/linear.py
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from support.engine.linear import ONEDNN_BF16, linear, pack_weights, speed_up

NAME = "few heads at a time"    # of this attention among those of transformers
SCORES = 2 ** 20                # of so many at a time
GELUS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}       # transformers' names and PyTorch's


def speed_up_encoder(model: nn.Module, dtype: torch.dtype) -> None:
    """All of this, for a vision model of transformers that computes in a dtype and does not learn.
    """
    speed_up(model)
    replace_gelu(model)
    if dtype != torch.float32:
        replace_pooling(model)
        pack_weights(model)
    on_processor = next(model.parameters()).device.type == "cpu"
    if dtype in (torch.bfloat16, torch.int8) and on_processor and ONEDNN_BF16:
        replace_attention(model)


def pictures_at_once(config, device: torch.device) -> int:
    """How many pictures a vision model with these settings encodes fastest in one pass.

    On a processor, a tensor of more than 32 MB gets new memory from the system each time, which
    takes longer than most of what is computed with it.
    """
    if device.type != "cpu":
        return 2 ** 20                          # all of them
    patches = (config.image_size // config.patch_size) ** 2
    widest = patches * getattr(config, "intermediate_size", 4 * config.hidden_size)
    return max(1, 2 ** 25 // (4 * widest))


# ---------------------------------------------------------------------- attention

def replace_attention(model: nn.Module) -> None:
    """Let a vision model's layers attend with `few_heads_at_a_time`."""
    from transformers import AttentionInterface
    AttentionInterface.register(NAME, few_heads_at_a_time)
    model.set_attn_implementation(NAME)


def few_heads_at_a_time(module, query: Tensor, key: Tensor, value: Tensor,
                        attention_mask: Tensor | None, scaling: float | None = None,
                        **options) -> tuple[Tensor, None]:
    """An attention function of transformers: query [B, heads, L, c] -> [B, L, heads, c].

    Each query sees all keys. Scores are rounded to bf16, where 300 becomes 300 or 302. A number that
    is the same for all keys of a query does not change its weights. So the keys' mean is subtracted
    from them: of a pretrained encoder's scores up to 310, at most 85 is left.
    """
    if attention_mask is not None:
        from transformers import AttentionInterface
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask,
                                            scaling=scaling, **options)
    B, heads, L, c = query.shape
    if scaling is None:
        scaling = c ** -0.5
    centred = key - key.mean(2, keepdim=True)
    # one matrix for each picture and head
    q, k, v = (y.to(torch.bfloat16).flatten(0, 1) for y in (query * scaling, centred, value))
    out = torch.empty_like(v)                                               # [B heads, L, c]
    few = max(1, SCORES // (L * L))
    for q_few, k_few, v_few, out_few in zip(*(y.split(few) for y in (q, k, v, out))):
        scores = torch.bmm(q_few, k_few.transpose(1, 2))                    # [few, L, L]
        torch.bmm(scores.softmax(-1), v_few, out=out_few)
    return rearrange(out, "(b h) l c -> b l h c", b=B).to(query.dtype), None


# ---------------------------------------------------------------------- pooling

class OneQuery(nn.MultiheadAttention):
    """Attention of one query for each picture, as in SigLIP's pooling head, in bf16 or less.

    PyTorch's own copies the keys and values, which takes longer than all the rest of it.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_) -> tuple[Tensor, None]:
        """query [B, 1, D], key and value the same [B, L, D] -> [B, 1, D], None."""
        of_query, of_keys = self.in_proj_weight.tensor_split([self.embed_dim])
        for_query, for_keys = self.in_proj_bias.tensor_split([self.embed_dim])
        q = linear(query, of_query, for_query)
        k, v = linear(key, of_keys, for_keys).chunk(2, -1)
        q, k, v = (rearrange(y, "b l (h c) -> b h l c", h=self.num_heads) for y in (q, k, v))
        out = rearrange(F.scaled_dot_product_attention(q, k, v), "b h l c -> b l (h c)")
        return linear(out, self.out_proj.weight, self.out_proj.bias), None


def replace_pooling(model: nn.Module) -> None:
    """Let the pooling heads of a vision model attend in this way."""
    for module in model.modules():
        plain = type(module) is nn.MultiheadAttention and module.batch_first
        if plain and module.in_proj_bias is not None and module.bias_k is None:
            module.__class__ = OneQuery


# ---------------------------------------------------------------------- GELU

class GELU(nn.Module):
    """GELU in the memory of its inputs, which nothing else may use. It cannot learn."""

    def __init__(self, approximate: str):
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.gelu_(x, approximate=self.approximate)


def replace_gelu(model: nn.Module) -> None:
    """Let a vision model compute GELU in this way. It follows a linear layer there, so nothing else
    uses its inputs.
    """
    from transformers.activations import ACT2FN
    kinds = {type(ACT2FN[name]): approximate for name, approximate in GELUS.items()}
    names = [name for name, module in model.named_modules() if type(module) in kinds]
    for name in names:
        kind = type(model.get_submodule(name))
        model.set_submodule(name, GELU(kinds[kind]))
