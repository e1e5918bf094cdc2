"""Products by oneDNN (support/engine/linear.py): F.linear and its gradients, whatever the layout in memory."""
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

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
def test_only_large_products_in_fp32(monkeypatch):
    called = []
    monkeypatch.setattr(linear, "product", lambda *given: called.append(1) or F.linear(*given))
    small, large = torch.randn(1, 64), torch.randn(64, 512)
    with torch.no_grad():
        linear.linear(small, torch.randn(32, 64))
        linear.linear(large.bfloat16(), torch.randn(512, 512).bfloat16())
        linear.linear(large.to("meta"), torch.randn(512, 512, device="meta"))
        assert called == []
        linear.linear(large, torch.randn(512, 512))
        assert called == [1]


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
