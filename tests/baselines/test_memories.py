"""The memories of Table 5 (baselines/memories.py): each against a plain oracle, in streaming, training, checkpoints."""
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import narrator as nar
import train
from baselines import memories
from baselines.memories import KMeans, MovieChat, RecentFrames, RetNet, ScalarGate, TokenMLP
from baselines.variants import load_narrator
from clam import CLAM
from helpers import tiny, video
from support.common.errors import BadData
from test_clam import close, run
from test_stages import scene
from test_stream import assert_same, both_ways
from toy import stages

WIDTH, M, J = 32, 25, 10                                                # frames do not fill the places exactly
LEARNED = {"clam": CLAM, "scalar": ScalarGate, "retnet": RetNet, "tokenmlp": TokenMLP}
GIVEN = {"kmeans": KMeans, "moviechat": MovieChat, "recent": RecentFrames}


def make(name):
    torch.manual_seed(0)
    options = {"heads": 2, "dropout": 0.0} if issubclass(kind := nar.MEMORIES[name], CLAM) else {"J": J}
    memory = kind(WIDTH, M, **options)
    memory.initialise(torch.randn(40, J, WIDTH))
    return memory


def stream(memory, x, state=None):
    """The state after each frame of x [B, T J, D], the first state included."""
    states = [memory.initial_state(len(x)) if state is None else state]
    for frame in x.split(J, dim=1):
        states.append(memory.step(frame, states[-1]))
    return states


# ------------------------------------------------------------------ what all of them promise

@pytest.mark.parametrize("name", LEARNED | GIVEN)
def test_training_is_streaming_by_construction(name):
    """Frame by frame, eight frames at a time, in one go, and from a state that was kept."""
    memory, x = make(name), torch.randn(1, 16 * J, WIDTH)
    read_at = torch.tensor([[0, 1, 3, 3, 12, 16]]) * J
    with torch.no_grad():
        parallel, last = memory(x, read_at)
        states = stream(memory, x)
        assert parallel.shape == (1, 6, M, WIDTH) and last.dtype == torch.float32
        assert torch.allclose(torch.stack([memory.read(states[n // J]) for n in read_at[0]], 1), parallel, atol=1e-5)
        assert torch.allclose(states[-1], last, atol=1e-5)
        eight = memory.step(x[:, 8 * J:], memory.step(x[:, :8 * J], memory.initial_state()))
        assert torch.allclose(memory.read(eight, memory.queries()), parallel[:, -1], atol=1e-5)
        nothing, middle = memory(x[:, :5 * J], torch.zeros(1, 0, dtype=torch.long))
        assert nothing.shape == (1, 0, M, WIDTH) and torch.allclose(middle, states[5], atol=1e-5)
        again, end = memory(x[:, 5 * J:], read_at[:, 4:] - 5 * J, middle)
        assert torch.allclose(again, parallel[:, 4:], atol=1e-5) and torch.allclose(end, last, atol=1e-5)


@pytest.mark.parametrize("name", LEARNED | GIVEN)
def test_videos_of_a_batch_are_each_alone(name):
    memory, x = make(name), torch.randn(3, 4 * J, WIDTH)
    read_at = torch.tensor([[1, 3], [2, 2], [0, 4]]) * J
    together, last = memory(x, read_at)
    for b in range(3):
        alone, state = memory(x[b:b + 1], read_at[b:b + 1])
        assert torch.allclose(together[b:b + 1], alone, atol=1e-5) and torch.allclose(last[b:b + 1], state, atol=1e-5)


def test_the_table_of_sizes_is_true():
    """Numbers of each state at the paper's sizes, constant over a stream."""
    rows = dict(re.findall(r"^    (\w+) +\[.*\] +([\d,]+)  ", memories.__doc__, re.M))
    assert rows.keys() == nar.MEMORIES.keys() - {"none"}
    for name, size in rows.items():
        kind = nar.MEMORIES[name]
        with torch.device("meta"):
            memory = kind(1024, 20, **({} if issubclass(kind, CLAM) else {"J": J}))
            assert f"{memory.initial_state()[0].numel():,}" == size
            state = memory.step(torch.zeros(1, 3 * J, 1024), memory.initial_state())
        assert (state.shape, state.dtype) == (memory.initial_state().shape, torch.float32)
        assert bool(list(memory.parameters())) == (name in LEARNED)


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
def test_all_frames_are_told_by_the_narrator(name):
    """In the narrator, teacher-forced: the logits of training are those of streaming, and depend on the past."""
    model = tiny(memory=name, memory_tokens=15)
    narrations, streamed, parallel = both_ways(model, frames=20)
    assert_same(model, narrations, streamed, parallel)
    x, narrations = video(model, at=(0, 9, 12))
    other = x.clone()
    other[8 if name == "recent" else 3] += 1
    with torch.no_grad():
        hidden, _, tokens = model(x, narrations)
        change = (model(other, narrations)[0] - hidden).abs().amax(1)
    assert change[torch.tensor(tokens.segment) == 2].max() > 1e-4


# ------------------------------------------------------------------ what is learned, and its files

@pytest.mark.parametrize("name", LEARNED)
def test_every_parameter_learns(name):
    """From a read-out at the end alone; the first frame, too, has a part in it."""
    memory, x = make(name), torch.randn(1, 6 * J, WIDTH).requires_grad_()
    for parameter in memory.parameters():                               # `initialise` leaves some at zero
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    tokens, _ = memory(x, torch.tensor([[6 * J]]))
    tokens.square().mul(torch.randn_like(tokens)).sum().backward()
    for parameter, value in memory.named_parameters():
        assert value.grad is not None and value.grad.isfinite().all() and value.grad.any(), parameter
    assert x.grad[:, :J].any()


@pytest.mark.parametrize("name", LEARNED)
def test_it_can_learn_to_keep(name):
    """One thing is shown once, four frames ago; a linear map of the memory tokens is to name it."""
    torch.manual_seed(0)
    things, memory = torch.randn(4, WIDTH), make(name)
    head = torch.nn.Linear(M * WIDTH, 4)
    optimizer = torch.optim.Adam([*memory.parameters(), *head.parameters()], lr=3e-3)
    losses = []
    for _ in range(60):
        shown = torch.randint(4, (16,))
        x = 0.3 * torch.randn(16, 5 * J, WIDTH)
        x[:, 3] += things[shown]
        loss = F.cross_entropy(head(memory(x, torch.full((16, 1), 5 * J))[0].flatten(1)), shown)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 0.3, losses[-10:]


@pytest.mark.parametrize("name", LEARNED | GIVEN)
def test_saved_and_loaded(name, tmp_path):
    """The same narrator again; a file without what another memory needs is refused, by name."""
    model = tiny(memory=name)
    model.save(tmp_path)
    again = load_narrator(str(tmp_path))
    x, narrations = video(model)
    with torch.no_grad():
        assert torch.equal(model(x, narrations)[0], again(x, narrations)[0])
    for other in LEARNED.keys() - {name} | ({"kmeans"} if name in LEARNED else set()):
        with pytest.raises(BadData, match="(lacks|has unexpected|has the wrong shape for) .*clustering"):
            load_narrator(str(tmp_path), memory=other)


@pytest.mark.parametrize("start", ["published", "statistics"])
@pytest.mark.parametrize("name", LEARNED | GIVEN)
def test_training_begins_and_takes_a_step(name, start):
    model = tiny(memory=name)
    x, narrations = video(model)
    train.begin(model, train.Options(start=start), [train.Example(x, narrations)])
    loss, _ = model.loss(x, narrations)
    loss.backward()
    grads = [p.grad for n, p in model.named_parameters() if n.startswith("memory.")]
    assert loss.isfinite() and bool(grads) == (name in LEARNED) and all(g is not None for g in grads)


@pytest.mark.parametrize("name", nar.MEMORIES)
def test_learned_memories_have_the_stage_remember(name, monkeypatch):
    monkeypatch.setattr(stages, "STEPS", dict.fromkeys(stages.STEPS, 1))
    model, done = tiny(memory=name), []

    def fit(stage, parameters, backward, steps, lr):
        done.append(stage)
        if stage == "remember":
            assert 0 < backward(0)[0] < 20 and all(p.grad is not None for p in model.memory.parameters())

    stages.before_narrating(fit, model, [scene(0, 32)], 1e-3, 0)
    assert done == (["look", "remember", "recall"] if name in LEARNED else ["look", "recall"])


# ------------------------------------------------------------------ K-Means

def lloyd(x, frames):
    """The original way in plain loops, in double precision: centres and counts after x [L, D]."""
    centres, counts = np.zeros((M, WIDTH)), np.zeros(M)
    seen = 0
    for frame in x.double().numpy().reshape(frames, J, WIDTH):
        rest = []
        for token in frame:
            if seen < M:
                centres[seen], counts[seen] = token, 1
            else:
                rest.append(token)
            seen += 1
        points = [*zip(centres.copy(), counts.copy()), *((token, 1) for token in rest)]
        for _ in range(2 if rest else 0):
            members = [[] for _ in range(M)]
            for point, weight in points:
                members[np.argmin([((point - centre) ** 2).sum() for centre in centres])].append((point, weight))
            for i, member in enumerate(members):
                counts[i] = sum(weight for _, weight in member)
                if counts[i]:
                    centres[i] = sum(weight * point for point, weight in member) / counts[i]
    return centres, counts


def test_kmeans_by_hand():
    x = torch.randn(1, 40 * J, WIDTH) + 3 * torch.randn(1, 1, WIDTH)
    for frames in (1, 2, 3, 12, 40):
        state = stream(make("kmeans"), x[:, :frames * J])[-1]
        centres, counts = lloyd(x[0, :frames * J], frames)
        assert state[0, :, -1].tolist() == counts.tolist() and counts.sum() == frames * J
        assert np.allclose(state[0, :, :-1], centres, atol=1e-4)


def test_kmeans_keeps_what_fits():
    memory, x = make("kmeans"), torch.randn(1, 2 * J, WIDTH)
    tokens, _ = memory(x, torch.tensor([[2 * J]]))
    assert torch.equal(tokens[0, 0, :2 * J], x[0]) and not tokens[0, 0, 2 * J:].any()


def test_kmeans_finds_clusters_that_are_far_apart():
    """Two places, two crowds: each centre is the mean of its crowd, however long the stream."""
    memory = KMeans(WIDTH, 2, J=2)
    crowds = torch.stack([torch.full((WIDTH,), 50.0), torch.full((WIDTH,), -50.0)])
    x = torch.randn(500, 2, WIDTH) + crowds
    state = memory.step(x.view(1, 1000, WIDTH), memory.initial_state())
    assert torch.allclose(memory.read(state)[0], x.mean(0), atol=1e-4) and state[0, :, -1].tolist() == [500, 500]


def test_kmeans_does_not_see_the_order_within_a_frame():
    memory, x = make("kmeans"), torch.randn(1, 6 * J, WIDTH)
    frames = x.view(6, J, WIDTH).clone()
    frames[3:] = frames[3:, torch.randperm(J)]
    a, b = (stream(memory, y.reshape(1, -1, WIDTH))[-1] for y in (x, frames))
    assert torch.allclose(a, b, atol=1e-4)


def test_a_centre_without_tokens_stays():
    """Two equal tokens: the first place wins both, the second stays where it is, with count 0."""
    memory = KMeans(2, 3, J=1)
    x = torch.tensor([[[0.0, 0], [0, 0], [9, 9], [9, 8]]])
    state = memory.step(x, memory.initial_state())
    assert state[0].tolist() == [[0, 0, 2], [0, 0, 0], [9, 8.5, 2]]


# ------------------------------------------------------------------ MovieChat

def merge(x):
    """The same with lists, in double precision: (mean, count) of each place after x [L, D], without the empty ones."""
    bank = []
    for token in x.double().numpy():
        bank.append((token, 1))
        if len(bank) > M:
            a, b = np.array([y for y, _ in bank[:-1]]), np.array([y for y, _ in bank[1:]])
            i = np.argmax((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))
            (y, n), (z, m) = bank[i:i + 2]
            bank[i:i + 2] = [((n * y + m * z) / (n + m), n + m)]
    return bank


def test_moviechat_by_hand():
    x = torch.randn(1, 40 * J, WIDTH)
    for frames in (1, 2, 3, 12, 40):
        memory = make("moviechat")
        state, bank = stream(memory, x[:, :frames * J])[-1], merge(x[0, :frames * J])
        empty = M - len(bank)
        assert state[0, :, -1].tolist() == [0] * empty + [n for _, n in bank]
        assert state[..., -1].sum() == frames * J and not state[0, :empty].any()
        assert np.allclose(memory.read(state)[0, empty:], np.stack([y for y, _ in bank]), atol=1e-4)


def test_moviechat_merges_what_is_alike_and_keeps_the_order():
    memory = MovieChat(WIDTH, 4, J=1)
    a, b, c, d = F.normalize(torch.randn(4, WIDTH), dim=-1) * torch.tensor([1, 2, 3, 4.0])[:, None]
    read = lambda *tokens: memory.read(memory.step(torch.stack(tokens)[None], memory.initial_state()))[0]
    assert torch.equal(read(a, b, c, d), torch.stack([a, b, c, d]))
    assert torch.allclose(read(a, b, b, 3 * b, c, d), torch.stack([a, 5 * b / 3, c, d]))
    assert torch.equal(read(a, b), torch.stack([0 * a, 0 * a, a, b]))


# ------------------------------------------------------------------ TokenMLP

def test_tokenmlp_averages():
    """Weights over old and new tokens sum to 1: what is equal everywhere stays, and no token leaves their range."""
    memory, same = make("tokenmlp"), torch.randn(WIDTH)
    state = memory.step(same.expand(1, 3 * J, WIDTH), same.expand(1, M, WIDTH))
    assert torch.allclose(state, same.expand(1, M, WIDTH), atol=1e-5)
    x = torch.randn(1, J, WIDTH)
    state = memory.step(x, torch.randn(1, M, WIDTH) + 1)
    again = memory.step(x[:, torch.randperm(J)], state)
    assert torch.allclose(again, memory.step(x, state), atol=1e-5)
    both = torch.cat([state, x], dim=1)
    assert (again <= both.amax(1, keepdim=True) + 1e-5).all() and (again >= both.amin(1, keepdim=True) - 1e-5).all()


def test_tokenmlp_by_hand():
    memory, x, state = make("tokenmlp"), torch.randn(J, WIDTH), torch.randn(M, WIDTH)
    norm, inner, _, outer = memory.mlp
    rows = [*state, *x]
    scores = torch.stack([outer(F.gelu(inner(norm(row)))) for row in rows])          # [M + J, M]
    for m in range(M):
        weights = scores[:, m].exp() / scores[:, m].exp().sum()
        expected = sum(w * row for w, row in zip(weights, rows))
        assert torch.allclose(memory.step(x[None], state[None])[0, m], expected, atol=1e-5)


# ------------------------------------------------------------------ RetNet, one gate per head

@pytest.mark.parametrize("name", ["retnet", "scalar"])
@pytest.mark.parametrize("lengths", [[1], [10, 30, 20], [1, 1000, 7], [0, 3, 0]])
def test_chunked_is_recurrent_without_gates_per_channel(name, lengths):
    memory, read_at = make(name), torch.tensor([lengths]).cumsum(1)
    x, state = torch.randn(1, sum(lengths) + 3, WIDTH), memory.initial_state() + 0.3
    fast, slow = (run(form, x, read_at, memory, state) for form in (memory.chunked, memory.recurrent))
    assert close(fast[0], slow[0]) and close(fast[1], slow[1]) and fast[2].keys() == slow[2].keys()
    largest = max(g.norm() for g in slow[2].values())
    for parameter, gradient in slow[2].items():
        assert (fast[2][parameter] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6 * largest, parameter


def test_retnet_forgets_at_its_own_pace():
    """RetNet's eight decays; tokens of zero add nothing, so only they act on a state."""
    memory, decay = RetNet(32, 5), 1 - 0.5 ** torch.arange(5.0, 13)
    assert torch.allclose(memory.log_gate(torch.zeros(1, 32)).exp()[0, :, 0], decay)
    state = memory.initial_state() + 1
    kept = memory.step(torch.zeros(1, 100, 32), state)
    assert torch.allclose(kept, decay.pow(100)[:, None, None] * state, rtol=1e-3)
    half = [int(life) for life in re.findall(r"\d+", RetNet.__doc__.split("after ")[1])[:8]]
    assert torch.allclose(decay ** torch.tensor(half), torch.tensor(0.5), atol=0.01)


def test_a_gate_per_head_is_a_gate_per_channel_repeated():
    scalar, full = make("scalar"), make("clam")
    weights = scalar.state_dict()
    for part in ("w_gate.1.weight", "w_gate.1.bias"):
        weights[part] = weights[part].repeat_interleave(WIDTH // 4, 0)
    full.load_state_dict(weights)
    x, read_at = torch.randn(1, 50, WIDTH), torch.tensor([[10, 50]])
    assert torch.allclose(scalar(x, read_at)[0], full(x, read_at)[0], atol=1e-5)
    gates = scalar.log_gate(x)
    assert gates.shape == (1, 50, 2, 1) and gates.std(dim=1).min() > 0
