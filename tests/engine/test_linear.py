"""Products by oneDNN (support/engine/linear.py): F.linear and its gradients, whatever the layout in memory."""
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import narrator as nar
from helpers import TOY
from support.engine import linear

LAYOUTS = {"plain": lambda: torch.randn(64, 256), "batch": lambda: torch.randn(2, 32, 256),
           "transposed": lambda: torch.randn(256, 64).t(),
            "one row for all": lambda: torch.randn(1, 256).expand(64, 256),
           "every other": lambda: torch.randn(64, 512)[:, ::2],
           "a single row": lambda: torch.randn(256)}
needs_onednn = pytest.mark.skipif(not linear.ONEDNN, reason="this PyTorch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_pytorch(layout, bias, monkeypatch):
    """Values, and gradients of input, weight and bias: a gradient that is stored plainly, and one number for all."""
    torch.manual_seed(0)
    monkeypatch.setattr(linear, "SMALL", 0)
    given = [LAYOUTS[layout](), torch.randn(96, 256), torch.randn(96) if bias else None]
    results = []
    for function in (F.linear, linear.linear):
        leaves = [y if y is None else y.detach().requires_grad_() for y in given]
        y = function(*leaves)
        gradients = [torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None], retain_graph=True)
                     for loss in (y.sum(), (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum())]
        results.append([y, *gradients[0], *gradients[1]])
    for theirs, ours in zip(*results):
        assert theirs.shape == ours.shape and (theirs - ours).abs().max() < 1e-4 * theirs.abs().max()
    with torch.no_grad():
        assert torch.allclose(linear.linear(*given), F.linear(*given), rtol=1e-4, atol=1e-3)


@needs_onednn
def test_only_large_products(monkeypatch):
    called = []
    monkeypatch.setattr(linear, "product", lambda *given: called.append(1) or F.linear(*given))
    small, large = torch.randn(1, 64), torch.randn(64, 512)
    with torch.no_grad():
        linear.linear(small, torch.randn(32, 64))
        linear.linear(large.half(), torch.randn(512, 512).half())
        linear.linear(large.to("meta"), torch.randn(512, 512, device="meta"))
        assert called == []
        linear.linear(large, torch.randn(512, 512))
        linear.linear(large.bfloat16(), torch.randn(512, 512).bfloat16())
        assert called == [1, 1]


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_bf16(rows, onednn, bias, monkeypatch):
    """In blocks of fp32 where the processor has no products of bf16, as exact as PyTorch's own."""
    if onednn and not linear.ONEDNN_BF16:
        pytest.skip("this processor has no products of bf16")
    torch.manual_seed(0)
    monkeypatch.setattr(linear, "SMALL", 0)
    monkeypatch.setattr(linear, "BLOCK", 256 * 10)
    monkeypatch.setattr(linear, "ONEDNN_BF16", onednn)
    x, weight = torch.randn(rows, 256), torch.randn(96, 256)
    given = [y.bfloat16() for y in (x, weight, torch.randn(96))][:2 + bias]
    exact = F.linear(*(y.float() for y in given))
    y = linear.linear(*given)
    assert y.dtype == torch.bfloat16 and (y - exact).norm() < 4e-3 * exact.norm()
    leaves = [y.requires_grad_() for y in given]
    linear.linear(*leaves).float().sum().backward()
    assert (leaves[0].grad - weight.sum(0)).norm() < 0.02 * leaves[0].grad.norm()
    assert (leaves[1].grad - x.sum(0)).norm() < 0.02 * leaves[1].grad.norm()


@pytest.mark.skipif(not linear.ONEDNN_BF16, reason="this processor has no products of bf16")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_packed_weights(rows, bias):
    """In oneDNN's order, each layer alone and joined: as exact as before."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(256, 96, bias=bias), nn.Linear(256, 33, bias=bias)])
    model.to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, rows, 256).bfloat16()
    exact = [F.linear(x.float(), layer.weight.float(), layer.bias.float() if bias else None)
             for layer in model]
    weights = [layer.weight.clone() for layer in model]
    assert linear.pack_weights(model)
    assert [type(layer) for layer in model] == [linear.PackedLinear] * 2
    joined = linear.linear(x, *linear.join_layers(model))
    for layer, expected, part in zip(model, exact, joined.split([96, 33], -1)):
        assert layer(x).dtype == torch.bfloat16
        assert (layer(x) - expected).norm() < 4e-3 * expected.norm()
        assert torch.equal(layer(x), part)
    assert linear.unpack_weights(model)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(model, weights))


def test_what_is_not_packed(monkeypatch):
    """Other formats and devices, weights that are used twice, and all weights where the processor
    does not multiply bf16."""
    model = nn.ModuleDict({
        "fp32": nn.Linear(8, 8),
        "elsewhere": nn.Linear(8, 8, dtype=torch.bfloat16, device="meta"),
        "table": nn.Embedding(8, 8, dtype=torch.bfloat16),
        "head": nn.Linear(8, 8, bias=False, dtype=torch.bfloat16),
    })
    model["head"].weight = model["table"].weight
    assert not linear.pack_weights(model)
    assert linear.PackedLinear not in map(type, model.modules())
    monkeypatch.setattr(linear, "ONEDNN_BF16", False)
    model = nn.ModuleList([nn.Linear(8, 8, dtype=torch.bfloat16)])
    assert not linear.pack_weights(model)
    assert type(model[0]) is nn.Linear


@needs_onednn
def test_operations_are_counted():
    """As many as for PyTorch's own product, forward and backward."""
    counts = []
    for function in (F.linear, linear.linear):
        x, weight = torch.randn(64, 512, requires_grad=True), torch.randn(512, 512, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            function(x, weight).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 64 * 512 * 512
