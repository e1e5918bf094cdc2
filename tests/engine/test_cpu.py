"""Faster operators (cpu.py, norms.py): the same numbers, and what stays as it is."""
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import narrator as nar
from helpers import ROOT, grouped, small, tiny, video
from support.engine import cpu
from support.engine.norms import fuse_norms
from test_equalities import hidden_and_gradients

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


def kinds(model):
    return {type(module) for module in model.modules()}


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(cpu, "LARGE", 1)


def test_small_models_stay_as_they_are():
    model = tiny()
    before = kinds(model)
    cpu.speed_up(model)
    assert kinds(model) == before


@needs_onednn
def test_a_training_step_in_fp32(any_size):
    model = tiny(llm=grouped())
    hidden, gradients = hidden_and_gradients(model, *video(model))
    cpu.speed_up(model, learns=True)
    assert cpu.OneDNNLinear in kinds(model)
    fast_hidden, fast_gradients = hidden_and_gradients(model, *video(model))
    assert (fast_hidden - hidden).norm() < 1e-5 * hidden.norm()
    assert fast_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (fast_gradients[name] - gradient).norm() < 1e-4 * gradient.norm() + 1e-6, name


packs = pytest.mark.skipif(not cpu.multiplies_bf16(), reason="this processor does not multiply bf16")


@needs_onednn
@pytest.mark.parametrize("dtype, kind, tolerance", [
    (torch.float32, cpu.OneDNNLinear, 1e-5),
    pytest.param(torch.bfloat16, cpu.PackedLinear, 0.02, marks=packs),
])
def test_the_numbers_of_a_stream_stay(any_size, dtype, kind, tolerance):
    llm = grouped(dtype)
    llm.lm_head.weight = llm.get_input_embeddings().weight
    model = tiny(llm=llm).eval()
    if kind is cpu.PackedLinear:                # for streams alone
        cpu.speed_up(model, learns=True)
        assert kind not in kinds(model)
    for module in model.modules():
        if hasattr(module, "lora_B"):
            torch.nn.init.zeros_(module.lora_B.weight)
    model.merge()
    ids = torch.arange(30)
    mask = torch.ones(30, 30, dtype=torch.bool).tril()
    with torch.no_grad():
        before = model.logits(model.run(model.embed(ids), ids, mask))
        cpu.speed_up(model)
        after = model.logits(model.run(model.embed(ids), ids, mask))
    assert kind in kinds(model)
    assert model.llm.lm_head.weight is model.llm.get_input_embeddings().weight
    assert (after - before).norm() < tolerance * before.norm()


PACKS = """
import re
from pathlib import Path
import torch
from torch import nn
from support.engine import cpu

def resident():
    return 1024 * int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

cpu.LARGE = 1
# glibc now keeps what is smaller, as after a model has been loaded
torch.ones(30 * 2 ** 20, dtype=torch.uint8)
before = resident()
sizes = 12 * [(1024, 1024), (1024, 1024), (1024, 4096), (4096, 1024)]
model = nn.Sequential(*[nn.Linear(*size, dtype=torch.bfloat16) for size in sizes])
weights = sum(layer.weight.nbytes for layer in model)
cpu.speed_up(model)
print((resident() - before) / weights)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
@packs
def test_packed_weights_are_held_once():
    """What the weights before them took is given back to the system. (240 MB)"""
    done = subprocess.run([sys.executable, "-c", PACKS], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) < 1.1


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
