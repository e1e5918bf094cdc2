"""The equalities on which the method stands.

CLAM's three forms are one function (§3.3); the mask is the rule that the paper tells in words (§3.5,
Fig. 4).
"""
import pytest
import torch

import narrator as nar
from clam import CLAM
from helpers import tiny

# ---------------------------------------------------------------------- §3.3: CLAM

def make(width=32, tokens=5, heads=2, bias=4.0, **options):
    torch.manual_seed(0)
    clam = CLAM(width, tokens, heads, dropout=0.0, **options)
    torch.nn.init.constant_(clam.w_gate[1].bias, bias)
    return clam


def close(a, b, tolerance=1e-4):
    return (a - b).norm() <= tolerance * b.norm() + 1e-12


def run(form, x, read_at, clam, state=None):
    """Memory tokens, last state and gradients of one form of a memory."""
    clam.zero_grad()
    x = x.clone().requires_grad_()
    memory, last = form(x, read_at, state)
    weight = torch.linspace(-1, 1, memory.numel()).view_as(memory)
    loss = (memory * weight).sum() + last.square().mean()
    loss.backward()
    gradients = {"x": x.grad}
    for name, p in clam.named_parameters():
        if p.grad is not None:
            gradients[name] = p.grad.clone()
    return memory.detach(), last.detach(), gradients


@pytest.mark.parametrize("bias", [-30.0, -9.0, 0.0, 4.0, 12.0])     # gates from 1e-13 to 1 - 6e-6
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [10, 30, 20], [1000], [1, 1000, 7], [0, 3, 0]])
def test_chunked_is_recurrent(bias, lengths):
    clam = make(bias=bias, width=16)
    read_at = torch.tensor([lengths]).cumsum(1)
    x = torch.randn(1, sum(lengths) + 3, 16)
    state = clam.initial_state() + 0.3
    memory, last, gradients = run(clam.chunked, x, read_at, clam, state)
    oracle_memory, oracle_last, oracle_gradients = run(clam.recurrent, x, read_at, clam, state)
    assert close(memory, oracle_memory)
    assert close(last, oracle_last)
    assert gradients.keys() == oracle_gradients.keys()
    # below 1e-6 of the largest, a gradient is rounding
    rounding = 1e-6 * max(gradient.norm() for gradient in oracle_gradients.values())
    for name, gradient in oracle_gradients.items():
        difference = (gradients[name] - gradient).norm()
        assert difference <= 1e-4 * gradient.norm() + rounding, name


def test_step_is_chunked():
    """Frame by frame, with reads in between, and in two parts: the same tokens as all at once."""
    J = 10
    memory = make()
    x = torch.randn(1, 120, 32)
    read_at = torch.tensor([[10, 40, 50, 120]])
    parallel, last = memory(x, read_at)
    state = memory.initial_state()
    reads = []
    for begin in range(0, 120, J):
        end = begin + J
        state = memory.step(x[:, begin:end], state)
        if end in read_at:
            reads.append(memory.read(state))
    assert torch.allclose(torch.stack(reads, 1), parallel, atol=1e-5)
    assert torch.allclose(state, last, atol=1e-5)
    _, middle = memory(x[:, :50], torch.tensor([[10]]))
    later, _ = memory(x[:, 50:], torch.tensor([[70]]), middle)
    assert torch.allclose(later[:, 0], parallel[:, 3], atol=1e-5)


# ---------------------------------------------------------------------- §3.5, Fig. 4: the mask

@pytest.mark.parametrize("last_k", [None, 0, 1, 2])
def test_visible_is_the_rule(last_k):
    layout = tiny(memory_tokens=2).layout
    tokens = layout.sequence([(0, [5, 6]), (2, [7]), (3, [8, 9]), (6, [5])])
    mask = nar.attention_mask(tokens, last_k)

    def sees(i, j):
        """Whether token i sees token j, in words of the paper."""
        if j > i:
            return False
        same_segment = tokens.segment[j] == tokens.segment[i]
        if tokens.kind[j] == nar.PROMPT or same_segment:
            return True
        if tokens.kind[j] == nar.VISUAL:
            return False
        return last_k is None or tokens.number[j] >= tokens.segment[i] - last_k

    for i in range(len(tokens)):
        for j in range(len(tokens)):
            assert mask[i, j] == sees(i, j), (i, j)
    assert mask.diagonal().all()


def test_without_pruning_causal():
    tokens = tiny().layout.sequence([(0, [5]), (2, [6])])
    causal = torch.ones(len(tokens), len(tokens)).tril().bool()
    assert torch.equal(nar.attention_mask(tokens, prune=False), causal)
