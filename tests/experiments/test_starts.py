"""Which part of the statistics start CLAM needs."""
import pytest
import torch
from einops import einsum

from experiments import starts
from experiments.starts import PARTS, new_narrator, start_memory
from test_evaluate import command
from toy import stages, world
from train import Options


@pytest.fixture(scope="module")
def videos():
    """Two videos of random features; the ten token slots of a frame look different."""
    torch.manual_seed(0)
    slots = 3 * torch.randn(10, stages.WIDTH)
    kitchens = list(world.kitchens("train", 2))
    return [stages.Scene(slots + torch.randn(len(kitchen), 10, stages.WIDTH), [], None)
            for _, kitchen in kitchens]


def started(start, videos):
    """A narrator whose memory has its first weights."""
    options = Options(data="toy", start="published" if start == "published" else "statistics")
    torch.manual_seed(0)
    narrator = new_narrator(start, options)
    start_memory(narrator, start, options, videos)
    return narrator


def memory_of(start, videos):
    """{name: value} of the memory's parameters."""
    memory = started(start, videos).memory
    return {name: p.detach() for name, p in memory.named_parameters()}


def test_every_parameter_belongs_to_one_part(videos):
    names = [name.partition(".")[0] for name in memory_of("statistics", videos)]
    parts = [name for part in PARTS.values() for name in part]
    assert set(names) == {*parts, "target"}
    assert len(parts) == len(set(parts))


@pytest.mark.parametrize("start", PARTS)
def test_one_part_as_published_and_all_others_from_statistics(start, videos):
    full = memory_of("statistics", videos)
    for name, value in memory_of(start, videos).items():
        is_left_out = name.partition(".")[0] in PARTS[start]
        if not is_left_out:
            assert torch.equal(value, full[name]), name
        elif name not in ("norm_o.weight", "self_attn.in_proj_bias", "self_attn.out_proj.bias"):
            assert not torch.equal(value, full[name]), name            # those are the same in both


def test_published_gates_forget(videos):
    """Without that part, half of the state is lost at every token."""
    assert not memory_of("without gates", videos)["w_gate.1.bias"].any()
    assert (memory_of("statistics", videos)["w_gate.1.bias"] >= 4).all()


@torch.no_grad()
@pytest.mark.parametrize("start, finds", [
    ("statistics", True), ("without targets", True), ("without keys", False),
    ("without queries", False), ("published", False),
])
def test_memory_tokens_ask_for_their_slots(start, finds, videos):
    """The key that is most like the query of memory token m is that of slot m."""
    memory = started(start, videos).memory
    assert (memory.target is None) == (start in ("without targets", "published"))
    usual = torch.cat([video.x for video in videos]).median(0).values          # [J, D]
    k, _, _ = memory.project(usual)                                            # [J, h, c]
    _, q, _ = memory.queries()                                                 # [h, M, c]
    similar = einsum(q, k, "h m c, j h c -> m j")
    assert (similar.argmax(1).tolist() == list(range(10))) == finds


def test_the_command(monkeypatch, tmp_path):
    """What is trained once is not trained again, and each start has a loss of its own."""
    monkeypatch.setitem(stages.STEPS, "recall", 2)
    monkeypatch.setitem(stages.DEFAULTS, "limit", 2)
    words = ["--only", "statistics", "without keys", "--output", tmp_path, "--json"]
    found = command(*words, main=starts.main)
    losses = found["seed 0"]
    assert losses.keys() == {"statistics", "without keys"}
    assert losses["statistics"] != losses["without keys"]
    monkeypatch.setattr(starts, "fit", None)   # must not be called
    assert command(*words, main=starts.main) == found
