"""CLAM (§3.3): its three forms are one function; the other memories do what their docstrings say."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baselines.memories import NoMemory, RecentFrames
from clam import CLAM, main
from experiments.clam_forms import profile

ROOT = Path(__file__).parent.parent


def make(width=32, tokens=5, heads=2, bias=4.0, **options):
    torch.manual_seed(0)
    clam = CLAM(width, tokens, heads, dropout=0.0, **options)
    torch.nn.init.constant_(clam.w_gate[1].bias, bias)
    return clam


def close(a, b, tolerance=1e-4):
    return (a - b).norm() <= tolerance * b.norm() + 1e-12


def run(form, x, read_at, clam, state=None):
    clam.zero_grad()
    x = x.clone().requires_grad_()
    memory, last = form(x, read_at, state)
    weight = torch.linspace(-1, 1, memory.numel()).view_as(memory)
    ((memory * weight).sum() + last.square().mean()).backward()
    return memory.detach(), last.detach(), {"x": x.grad} | {n: p.grad.clone() for n, p in clam.named_parameters()
                                                            if p.grad is not None}


@pytest.mark.parametrize("bias", [-30.0, -9.0, 0.0, 4.0, 12.0])           # gates from 1e-13 to 1 - 6e-6
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [10, 30, 20], [1000], [1, 1000, 7], [0, 3, 0]])
def test_chunked_is_recurrent(bias, lengths):
    clam = make(bias=bias, width=16)
    read_at = torch.tensor([lengths]).cumsum(1)
    x = torch.randn(1, sum(lengths) + 3, 16)
    state = clam.initial_state() + 0.3
    fast, slow = (run(form, x, read_at, clam, state) for form in (clam.chunked, clam.recurrent))
    assert close(fast[0], slow[0]) and close(fast[1], slow[1])
    assert fast[2].keys() == slow[2].keys()
    largest = max(g.norm() for g in slow[2].values())              # below 1e-6 of it, a gradient is rounding
    for name, gradient in slow[2].items():
        assert (fast[2][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6 * largest, name


def test_ragged_batch_is_each_alone():
    clam, x = make(), torch.randn(3, 40, 32)
    read_at = torch.tensor([[1, 11, 40], [20, 21, 22], [0, 39, 40]])
    memory, state = clam(x, read_at)
    assert memory.shape == (3, 3, 5, 32) and state.dtype == torch.float32
    for b in range(3):
        alone, last = clam.recurrent(x[b:b + 1], read_at[b:b + 1])
        assert close(memory[b:b + 1], alone) and close(state[b:b + 1], last)


@pytest.mark.parametrize("memory", [make(), RecentFrames(32, 20), NoMemory(32)], ids=["clam", "recent", "none"])
def test_streaming_is_parallel(memory):
    """Frame by frame, with reads in between, and in two parts: the same memory tokens as all at once."""
    x, J = torch.randn(1, 120, 32), 10
    read_at = torch.tensor([[10, 40, 50, 120]])
    parallel, last = memory(x, read_at)
    state, reads = memory.initial_state(), []
    for t in range(12):
        state = memory.step(x[:, t * J:(t + 1) * J], state)
        if (t + 1) * J in read_at:
            reads.append(memory.read(state))
    assert torch.allclose(torch.stack(reads, 1), parallel, atol=1e-5) and torch.allclose(state, last, atol=1e-5)
    _, middle = memory(x[:, :50], torch.tensor([[10]]))
    later, _ = memory(x[:, 50:], torch.tensor([[70]]), middle)
    assert torch.allclose(later[:, 0], parallel[:, 3], atol=1e-5)


def test_state_stays_constant_and_fp32():
    clam = make().to(torch.bfloat16)
    state = clam.initial_state()
    for _ in range(50):
        state = clam.step(torch.randn(1, 10, 32, dtype=torch.bfloat16), state)
    assert state.shape == (1, 2, 8, 16) and state.dtype == torch.float32
    assert clam.read(state).dtype == torch.bfloat16


def test_absorb_does_not_overflow_or_lose_the_end():
    """1,000 gates near zero: the sums of logs reach -1e5, and still the last token counts in full."""
    k, v, g = torch.ones(1000, 1, 1), torch.arange(1000.0).view(-1, 1, 1), torch.full((1000, 1, 1), -100.0)
    decay, update = CLAM.absorb(k, v, g)
    assert decay.item() == 0 and update.item() == 999
    g[-1] = -0.5
    assert CLAM.absorb(k, v, g)[1].item() == pytest.approx(999 + 998 * torch.tensor(-0.5).exp().item(), rel=1e-6)


def test_recent_are_the_last_frames():
    x = torch.arange(60.0).view(1, 60, 1).expand(1, 60, 4)
    memory, _ = RecentFrames(4, 20)(x, torch.tensor([[10, 50]]))
    assert memory[0, 1, :, 0].tolist() == list(range(30, 50))
    assert memory[0, 0, :, 0].tolist() == [0] * 10 + list(range(10))


def test_memory_kept_for_backward():
    """The recurrent form keeps a state for every token, the chunked one for every read-out."""
    clam = make(width=256, tokens=20, heads=4)
    x, read_at = torch.randn(1, 600, 256), torch.arange(60, 601, 60)[None]
    fast, slow = (profile(form, clam, x, 1, read_at) for form in (clam.chunked, clam.recurrent))
    assert slow["bytes"] - fast["bytes"] > 500 * clam.initial_state().nbytes


def test_example_is_right(monkeypatch, capsys):
    """The numbers of `clam.py`, by hand."""
    monkeypatch.setattr("sys.argv", ["clam.py"])
    main()
    printed = capsys.readouterr().out
    assert "= [3 2.5 ; 0 4]" in printed and "decay (0.125 0.25), update [3 2.5 ; 0 4]" in printed


def test_initialise_makes_pictures_of_the_past():
    """Without training: what was in a slot can be read linearly from its memory token, long after it has gone."""
    torch.manual_seed(0)
    looks, things = torch.randn(10, 64), torch.randn(6, 64)
    clam = CLAM(64, 10, 2, dropout=0.0)

    def video(frames=40):
        content = torch.full((frames, 10), -1)
        for slot in range(1, 10):
            content[5:8, slot] = torch.randint(6, ())
        shown = torch.where(content[..., None] >= 0, things[content.clamp_min(0)], 0)
        return looks + shown + 0.1 * torch.randn(frames, 10, 64), content[5]

    clam.initialise(torch.cat([video()[0] for _ in range(20)]))
    tokens, truth = [], []
    with torch.no_grad():
        for _ in range(60):
            x, content = video()
            memory, _ = clam(x.reshape(1, -1, 64), torch.tensor([[400]]))
            tokens.append(memory[0, 0, 1:])
            truth.append(content[1:])
    tokens, truth = torch.cat(tokens), torch.cat(truth)
    half = len(tokens) // 2
    ones = torch.cat([tokens, torch.ones(len(tokens), 1)], 1)
    target = torch.nn.functional.one_hot(truth, 6).float()
    weights = torch.linalg.solve(ones[:half].T @ ones[:half] + 0.1 * torch.eye(65), ones[:half].T @ target[:half])
    assert ((ones[half:] @ weights).argmax(1) == truth[half:]).float().mean() > 0.9


@pytest.mark.parametrize("x, read_at", [(torch.zeros(1, 5, 31), [[2]]), (torch.zeros(5, 32), [[2]]),
                                        (torch.zeros(1, 5, 32), [[6]]), (torch.zeros(1, 5, 32), [[3, 2]]),
                                        (torch.zeros(1, 5, 32), [2]), (torch.zeros(1, 5, 32), [[1], [2]])])
def test_wrong_shapes_are_refused(x, read_at):
    with pytest.raises(ValueError):
        make()(x, torch.tensor(read_at))


def test_width_must_fit_heads():
    with pytest.raises(ValueError, match="heads"):
        CLAM(30, heads=8)


def test_the_forms_are_compared():
    run = subprocess.run([sys.executable, "-m", "experiments.clam_forms", "--width", "64", "--length", "60", "--reads",
                          "3", "--no-compile"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    for form in ("recurrent, every token read out", "chunked"):
        assert result[form]["output_error"] < 1e-4 and result[form]["gradient_error"] < 1e-4
    assert result["step_error"] < 1e-4
