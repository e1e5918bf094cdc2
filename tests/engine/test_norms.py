"""Norms by one operator each: the numbers stay, and so do norms that compute something else."""
import pytest
import torch
from torch import nn

import narrator as nar
from helpers import small
from support.engine.norms import fuse_norms


def norms_of(llm) -> list[nn.Module]:
    return [module for name, module in llm.named_modules() if name.endswith("norm")]


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_numbers_stay(family, dtype):
    llm = small(family).to(dtype).eval()
    ids = torch.arange(20)[None]
    before = llm(ids).logits.float()
    names = llm.state_dict().keys()
    fuse_norms(llm)
    assert all(type(norm) is nn.RMSNorm for norm in norms_of(llm))
    assert llm.state_dict().keys() == names
    after = llm(ids).logits.float()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert (after - before).norm() < tolerance * before.norm()


class PlusOne(nn.Module):
    """As Gemma's: its weight is what is added to 1."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:], eps=self.variance_epsilon) * (1 + self.weight)


class OfHeads(PlusOne):
    """As Command R+ has for its queries: it cannot take all channels."""

    def __init__(self, width: int):
        super().__init__(width)
        self.weight = nn.Parameter(self.weight.view(4, -1))


@pytest.mark.parametrize("kind", [PlusOne, OfHeads])
def test_norms_that_compute_something_else_stay(kind):
    llm = small("Llama")
    llm.model.norm = kind(64)
    fuse_norms(llm)
    assert type(llm.model.norm) is kind


def test_a_loaded_narrator_has_them():
    narrator = nar.load("toy/checkpoint")
    assert all(type(norm) is nn.RMSNorm for norm in norms_of(narrator.llm))
