"""beyond/baselines/memories.py: the memories of Table 5, each against a plain oracle."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import narrator as nar
from beyond.baselines import memories
from beyond.baselines.memories import (
    DeltaNet, KMeans, MovieChat, RecentFrames, RetNet, TiedCLAM, TokenMLP,
    WritingCLAM,
)
from clam import CLAM
from helpers import tiny, video
from support.engine.first_weights import start_memory
from support.common.errors import BadData
from test_equalities import assert_chunked_is_recurrent, assert_same, both_ways

WIDTH, M, J = 32, 25, 10                       # frames do not fill the M places exactly
LEARNED = {"clam": CLAM, "retnet": RetNet, "tokenmlp": TokenMLP,
           "tied": TiedCLAM, "writing": WritingCLAM, "delta": DeltaNet}
GIVEN = {"kmeans": KMeans, "moviechat": MovieChat, "recent": RecentFrames}


def make(name):
    torch.manual_seed(0)
    kind = memories.MEMORIES[name]
    options = {"heads": 2, "dropout": 0.0} if issubclass(kind, CLAM) else {"J": J}
    memory = kind(WIDTH, M, **options)
    start_memory(memory, torch.randn(40, J, WIDTH))
    return memory


def states_of(memory, x):
    """The state before the first frame of x [B, T J, D], and after each one."""
    states = [memory.initial_state(len(x))]
    for frame in x.split(J, dim=1):
        states.append(memory.step(frame, states[-1]))
    return states


def near(one, other):
    return torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("name", LEARNED | GIVEN)
@torch.no_grad()
def test_training_is_streaming_by_construction(name):
    """Frame by frame, eight frames at a time, in one go, and from a state that was kept."""
    memory = make(name)
    x = torch.randn(1, 16 * J, WIDTH)
    read_at = torch.tensor([[0, 1, 3, 3, 12, 16]]) * J
    parallel, last = memory(x, read_at)
    assert parallel.shape == (1, 6, M, WIDTH)
    assert last.dtype == torch.float32

    states = states_of(memory, x)
    streamed = [memory.read(states[n // J]) for n in read_at[0]]
    assert near(torch.stack(streamed, 1), parallel)
    assert near(states[-1], last)

    eighth = memory.step(x[:, :8 * J], memory.initial_state())
    sixteenth = memory.step(x[:, 8 * J:], eighth)
    assert near(memory.read(sixteenth, memory.queries()), parallel[:, -1])

    no_read_out = torch.zeros(1, 0, dtype=torch.long)
    nothing, fifth = memory(x[:, :5 * J], no_read_out)
    assert nothing.shape == (1, 0, M, WIDTH)
    assert near(fifth, states[5])
    continued, end = memory(x[:, 5 * J:], read_at[:, 4:] - 5 * J, fifth)
    assert near(continued, parallel[:, 4:]) and near(end, last)


@pytest.mark.parametrize("name", LEARNED | GIVEN)
def test_videos_of_a_batch_are_each_alone(name):
    memory = make(name)
    x = torch.randn(3, 4 * J, WIDTH)
    read_at = torch.tensor([[1, 3], [2, 2], [0, 4]]) * J
    together, last = memory(x, read_at)
    for b in range(3):
        alone, state = memory(x[b:b + 1], read_at[b:b + 1])
        assert near(together[b:b + 1], alone) and near(last[b:b + 1], state)


@pytest.mark.parametrize("name", ["kmeans", "moviechat", "tokenmlp", "recent"])
def test_half_a_frame_is_refused(name):
    memory = make(name)
    with pytest.raises(ValueError, match="frames of 10 tokens, got 15"):
        memory.step(torch.zeros(1, 15, WIDTH), memory.initial_state())
    with pytest.raises(ValueError):
        memory(torch.zeros(1, 20, WIDTH), torch.tensor([[15]]))
    with pytest.raises(BadData, match=f"readout: memory '{name}'"):
        nar.Config(memory=name, readout="cls")


@pytest.mark.parametrize("name", LEARNED | GIVEN)
def test_the_narrator_sees_the_past(name):
    model = tiny(memory=name, memory_tokens=15)
    narrations, streamed, parallel = both_ways(model, frames=12)
    assert_same(model, narrations, streamed, parallel)
    x, narrations = video(model, at=(0, 9, 12))
    changed_frame = 8 if name == "recent" else 3
    changed = x.clone()
    changed[changed_frame] += 1
    with torch.no_grad():
        hidden, _, tokens = model(x, narrations)
        other_hidden, _, _ = model(changed, narrations)
    difference = (other_hidden - hidden).abs().amax(1)
    assert difference[torch.tensor(tokens.segment) == 2].max() > 1e-4


@pytest.mark.parametrize("name", LEARNED)
def test_every_parameter_learns(name):
    memory = make(name)
    x = torch.randn(1, 6 * J, WIDTH).requires_grad_()
    for p in memory.parameters():              # `initialise` leaves some at zero
        p.data.add_(0.1 * torch.randn_like(p))
    tokens, _ = memory(x, torch.tensor([[6 * J]]))
    loss = (tokens.square() * torch.randn_like(tokens)).sum()
    loss.backward()
    for parameter, p in memory.named_parameters():
        assert p.grad.isfinite().all() and p.grad.any(), parameter
    assert x.grad[:, :J].any()


def lloyd(x, frames):
    """K-Means in double precision: centres and counts after x [L, D]."""
    centres = np.zeros((M, WIDTH))
    counts = np.zeros(M)
    seen = 0
    for frame in x.double().numpy().reshape(frames, J, WIDTH):
        # The first M tokens become centres.
        first, rest = np.split(frame, [max(0, M - seen)])
        centres[seen:seen + len(first)] = first
        counts[seen:seen + len(first)] = 1
        seen += J
        # Two rounds over the earlier centres, with their weights, and the new tokens.
        points = np.concatenate([centres, rest])
        weights = np.concatenate([counts, np.ones(len(rest))])
        for _ in range(2 if len(rest) else 0):
            nearest = ((points[:, None] - centres) ** 2).sum(-1).argmin(1)
            for i in range(M):
                mine = nearest == i
                counts[i] = weights[mine].sum()
                if counts[i]:
                    centres[i] = weights[mine] @ points[mine] / counts[i]
    return centres, counts


def test_kmeans_by_hand():
    x = torch.randn(1, 20 * J, WIDTH) + 3 * torch.randn(1, 1, WIDTH)
    for frames in (1, 2, 3, 12, 20):
        state = states_of(make("kmeans"), x[:, :frames * J])[-1]
        centres, counts = lloyd(x[0, :frames * J], frames)
        assert state[0, :, -1].tolist() == counts.tolist()
        assert counts.sum() == frames * J
        assert np.allclose(state[0, :, :-1], centres, atol=1e-4)


def merge(x):
    """MovieChat with a list, in double precision: (mean, count) of each place after x [L, D]."""
    bank = []
    for token in x.double().numpy():
        bank.append((token, 1))
        if len(bank) <= M:
            continue
        # The two neighbours that are most alike become one.
        means = np.array([mean for mean, _ in bank])
        directions = means / np.linalg.norm(means, axis=1, keepdims=True)
        cosines = (directions[:-1] * directions[1:]).sum(1)
        i = cosines.argmax()
        (first, n), (second, m) = bank[i:i + 2]
        bank[i:i + 2] = [((n * first + m * second) / (n + m), n + m)]
    return bank


def test_moviechat_by_hand():
    x = torch.randn(1, 20 * J, WIDTH)
    for frames in (1, 2, 3, 12, 20):
        memory = make("moviechat")
        state = states_of(memory, x[:, :frames * J])[-1]
        bank = merge(x[0, :frames * J])
        empty = M - len(bank)
        assert state[0, :, -1].tolist() == [0] * empty + [count for _, count in bank]
        assert state[..., -1].sum() == frames * J
        assert not state[0, :empty].any()
        means = np.stack([mean for mean, _ in bank])
        assert np.allclose(memory.read(state)[0, empty:], means, atol=1e-4)


def test_tokenmlp_by_hand():
    memory = make("tokenmlp")
    x = torch.randn(J, WIDTH)
    state = torch.randn(M, WIDTH)
    norm, inner, _, outer = memory.mlp
    rows = [*state, *x]
    scores = torch.stack([outer(F.gelu(inner(norm(row)))) for row in rows])    # [M + J, M]
    after = memory.step(x[None], state[None])[0]
    for m in range(M):
        weights = scores[:, m].exp() / scores[:, m].exp().sum()
        expected = sum(weight * row for weight, row in zip(weights, rows))
        assert near(after[m], expected)


@pytest.mark.parametrize("name", ["retnet", "tied", "writing", "delta"])
@pytest.mark.parametrize("lengths", [[10, 30, 20], [1, 300, 7], [0, 3, 0]], ids=str)
def test_chunked_is_recurrent_without_gates_per_channel(name, lengths):
    assert_chunked_is_recurrent(make(name), lengths)


def test_retnet_forgets_at_its_own_pace():
    """RetNet's eight decays; tokens of zero add nothing, so only they act on a state."""
    memory = RetNet(32, 5)
    decay = 1 - 0.5 ** torch.arange(5.0, 13)
    assert torch.allclose(memory.project(torch.zeros(1, 32))[2].exp()[0, :, 0], decay)
    state = memory.initial_state() + 1
    after = memory.step(torch.zeros(1, 100, 32), state)
    assert torch.allclose(after, decay.pow(100)[:, None, None] * state, rtol=1e-3)


@pytest.mark.parametrize("kind, gates, beta, tokens, held", [
    # a channel with G = 1/4 takes in 3/4 of its key; one that keeps everything takes in nothing
    (TiedCLAM, [0.25, 1.0], None, [[4, 5, 1], [8, 6, 1]], [3 / 4 + 6, 0]),
    # keys have norm 1, half of the state stays, a quarter is written
    (WritingCLAM, [0.5, 0.5], 0.25, [[3, 4, 8], [0, 2, 4]], [0.6, 0.8 + 1]),
    # what is written at a key replaces what was there: with beta 1 wholly, with 1/4 in part
    (DeltaNet, None, 1.0, [[1, 0, 3], [2, 0, 5], [0, 1, 7], [0.5, 0, 9]], [9, 7]),
    (DeltaNet, None, 0.25, [[1, 0, 3], [2, 0, 5], [0, 1, 7], [0.5, 0, 9]],
     [0.75 ** 2 * 0.75 + 0.75 * 1.25 + 2.25, 1.75]),
], ids=["tied", "writing", "delta, beta 1", "delta, beta 1/4"])
@torch.no_grad()
def test_writing_by_hand(kind, gates, beta, tokens, held):
    """Two channels of a key, and one of a value, are three numbers of each token."""
    memory = kind(4, 1, heads=1)
    memory.w_k.weight.copy_(torch.eye(4)[:2])
    memory.w_v.weight.copy_(torch.eye(4)[[2, 3, 2, 3]])
    if gates:
        memory.w_gate[1].weight.zero_()
        memory.w_gate[1].bias.copy_(torch.tensor(gates).logit(eps=1e-7))
    if beta:
        memory.w_beta.weight.zero_()
        memory.w_beta.bias.fill_(torch.tensor(beta).logit(eps=1e-7))
    x = F.pad(torch.tensor(tokens, dtype=torch.float32), (0, 1))
    state = memory.step(x[None], memory.initial_state())
    assert near(state[0, 0, :, 0], torch.tensor(held, dtype=torch.float32))


def test_a_tied_clam_has_the_weights_of_a_clam():
    shapes = [{name: weight.shape for name, weight in kind(4, 1, heads=1).state_dict().items()}
              for kind in (TiedCLAM, CLAM)]
    assert shapes[0] == shapes[1]
