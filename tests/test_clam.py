"""CLAM (§3.3). That its three forms are one function: method/test_equalities.py."""
import math

import pytest
import torch

from beyond.baselines.memories import RecentFrames
from clam import CLAM
from beyond.commands.example_of_clam import main
from support.engine.first_weights import start_memory
from test_equalities import make


def test_state_stays_constant_and_fp32():
    clam = make().to(torch.bfloat16)
    state = clam.initial_state()
    for _ in range(50):
        state = clam.step(torch.randn(1, 10, 32, dtype=torch.bfloat16), state)
    assert state.shape == (1, 2, 8, 16) and state.dtype == torch.float32
    assert clam.read(state).dtype == torch.bfloat16


def test_absorb_does_not_overflow_or_lose_the_end():
    """1,000 gates near zero: the sums of logs reach -1e5, and the last token counts in full."""
    k = torch.ones(1000, 1, 1)
    v = torch.arange(1000.0).view(-1, 1, 1)
    log_gate = torch.full((1000, 1, 1), -100.0)
    decay, update = CLAM.absorb(k, v, log_gate)
    assert (decay.item(), update.item()) == (0, 999)
    log_gate[-1] = -0.5
    decay, update = CLAM.absorb(k, v, log_gate)
    assert update.item() == pytest.approx(999 + 998 * math.exp(-0.5), rel=1e-6)


def test_recent_are_the_last_frames():
    x = torch.arange(60.0).view(1, 60, 1).expand(1, 60, 4)
    memory, _ = RecentFrames(4, 20)(x, torch.tensor([[10, 50]]))
    assert memory[0, :, :, 0].tolist() == [[0] * 10 + list(range(10)), list(range(30, 50))]


def kept_for_backward(form, x, read_at) -> int:
    """Bytes that a form keeps for its backward pass, the weights among them."""
    kept = {}                                  # address of each tensor's memory: its bytes

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        memory, _ = form(x, read_at)
    memory.sum().backward()
    return sum(kept.values())


def test_memory_kept_for_backward():
    clam = make(width=256, tokens=20, heads=4)
    x = torch.randn(1, 600, 256)
    read_at = torch.arange(60, 601, 60)[None]
    chunked = kept_for_backward(clam.chunked, x, read_at)
    recurrent = kept_for_backward(clam.recurrent, x, read_at)
    assert recurrent - chunked > 500 * clam.initial_state().nbytes


def test_example_is_right(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["clam.py"])
    main()
    printed = capsys.readouterr().out
    assert "= [3 2.5 ; 0 4]" in printed
    assert "decay [0.125 0.25], update [3 2.5 ; 0 4]" in printed


def test_initialise_is_transparent():
    """Of two things that were shown, a token says more of the one that looked like itself."""
    torch.manual_seed(0)
    looks = torch.randn(10, 64)                         # usual appearance of each slot
    clam = CLAM(64, 10, 2, dropout=0.0)
    start_memory(clam, looks + 0.1 * torch.randn(200, 10, 64))
    right = 0
    with torch.no_grad():
        usual = (looks + 0.1 * torch.randn(20, 10, 64)).reshape(1, -1, 64)
        before, state = clam(usual, torch.tensor([[200]]))
        for slot in range(10):
            thing = torch.randn(64)
            frame = looks.clone()
            frame[slot] += thing
            after = clam.read(clam.step(frame[None], state))
            # as the tokens have changed, in the direction of the thing
            change = (after - before[:, 0])[0] @ thing                  # [M]
            right += change.argmax() == slot
    assert right >= 8


def test_initialise_is_not_moved_by_what_all_tokens_share():
    torch.manual_seed(0)
    x = torch.randn(200, 10, 64) + 3 * torch.randn(64)
    clam = CLAM(64, 10, 2, dropout=0.0)
    start_memory(clam, x)
    shared = x.mean((0, 1))
    k, v, _ = clam.project(shared)
    assert max(k.abs().max(), v.abs().max()) < 1e-4


@pytest.mark.parametrize("shape, read_at", [
    ((1, 5, 31), [[2]]),
    ((1, 5, 32), [[6]]),
    ((1, 5, 32), [[3, 2]]),
    ((1, 5, 32), [[1], [2]]),
])
def test_wrong_shapes_are_noticed(shape, read_at):
    with pytest.raises((AssertionError, RuntimeError, TypeError)):
        make()(torch.zeros(shape), torch.tensor(read_at))


def test_each_stream_has_its_state():
    clam = make()
    for x, streams in ((torch.randn(2, 10, 32), 1), (torch.randn(2, 32), 2)):
        with pytest.raises(AssertionError, match="its own state"):
            clam.step(x, clam.initial_state(streams))
    for streams in (1, 3):
        with pytest.raises(AssertionError, match="its own"):
            clam(torch.randn(2, 10, 32), torch.tensor([[4], [8]]), clam.initial_state(streams))


def test_width_must_fit_heads():
    with pytest.raises(ValueError, match="heads"):
        CLAM(30, heads=8)
