"""Norms and rotations of a language model by few operators (not in the paper): on a GPU, the launch of
each takes time. The numbers are the same, in fp32 to 1e-6, in bf16 up to rounding.

norms       one operator each, in place of transformers' six
rotations   of queries and keys by their positions: five operators for both, in place of ten
"""
import sys

import torch
from torch import Tensor, nn


@torch.no_grad()
def fuse(llm: nn.Module) -> None:
    """Replace norms and rotations of a model of transformers where both ways compute the same."""
    if llm.device.type != "meta":                       # without numbers nothing can be compared
        fuse_norms(llm)
        fuse_rotations(sys.modules[type(llm).__module__])


def fuse_norms(llm: nn.Module) -> None:
    """Replace each RMSNorm by torch's."""
    for name, norm in list(llm.named_modules()):
        eps = getattr(norm, "variance_epsilon", None)
        if eps is None or getattr(norm, "weight", None) is None:
            continue
        fused = nn.RMSNorm(norm.weight.shape, eps, device=norm.weight.device)
        fused.weight = norm.weight
        x = torch.linspace(-3, 3, len(norm.weight)).to(norm.weight)[None]
        tolerance = 1e-6 if x.dtype == torch.float32 else 2e-2
        if torch.allclose(fused(x), norm(x), tolerance, tolerance):     # Gemma's adds 1 to weights
            llm.set_submodule(name, fused)


def fuse_rotations(family) -> None:
    """Replace the function by which a family of models (its module in transformers) rotates queries
    and keys.
    """
    theirs = getattr(family, "apply_rotary_pos_emb", None)
    q, k, angles = torch.linspace(-3, 3, 48).view(3, 1, 2, 2, 4)
    given = (q, k, angles[:, 0].cos(), angles[:, 0].sin())
    try:
        same = all(torch.allclose(ours, other, 1e-6, 1e-6)
                   for ours, other in zip(rotate(*given), theirs(*given)))
    except Exception:                           # there is none, or it takes other arguments
        return
    if same:
        family.apply_rotary_pos_emb = rotate


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor,
           unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, heads, L, c] together, by the angles of their positions [B, L, c].

    Channels i and i + c/2 are the two coordinates that rotate together.
    """
    x = torch.cat([q, k], 1)
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)                # by 90 degrees
    rotated = torch.addcmul(x * cos.unsqueeze(unsqueeze_dim), turned, sin.unsqueeze(unsqueeze_dim))
    return rotated.split([q.shape[1], k.shape[1]], 1)
