"""Which part of the statistics start CLAM needs."""
import pytest
import torch
from einops import einsum

from experiments import starts
from experiments.starts import PUBLISHED, set_start, unstarted
from test_evaluate import command
from toy import stages, world
from commands.train import options_from


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
    options = options_from(data="toy")
    torch.manual_seed(0)
    narrator = unstarted(start, options)
    set_start(narrator, start, options, videos)
    return narrator


def memory_of(start, videos):
    """{name: value} of the memory's parameters."""
    memory = started(start, videos).memory
    return {name: p.detach() for name, p in memory.named_parameters()}


def first_word(name):
    return name.partition(".")[0]


def test_published_leaves_nothing_out(videos):
    names = {first_word(name) for name in memory_of("statistics", videos)}
    assert names == PUBLISHED["published"]


SAME_IN_BOTH = {"norm_o.weight", "self_attn.in_proj_bias", "self_attn.out_proj.bias"}


@pytest.mark.parametrize("start", ["without keys", "without values", "without queries",
                                   "without gates", "without sizes"])
def test_one_part_as_published_and_all_others_from_statistics(start, videos):
    full = memory_of("statistics", videos)
    for name, value in memory_of(start, videos).items():
        is_left_out = first_word(name) in PUBLISHED[start]
        assert torch.equal(value, full[name]) != (is_left_out and name not in SAME_IN_BOTH), name


def test_published_gates_forget(videos):
    """A bias of 0 loses half of the state at every token; all else of that start is published."""
    for start in ("without gates", "published"):
        assert not memory_of(start, videos)["w_gate.1.bias"].any()
    gates_alone = memory_of("gates alone", videos)
    published = memory_of("published", videos)
    assert gates_alone.keys() == published.keys()
    for name, value in gates_alone.items():
        if first_word(name) != "w_gate":
            assert torch.equal(value, published[name]), name
    assert (gates_alone["w_gate.1.bias"] >= 4).all()


@torch.no_grad()
@pytest.mark.parametrize("start, finds", [
    ("statistics", True), ("without targets", True), ("without keys", False),
    ("without queries", False), ("gates alone", False), ("published", False),
])
def test_memory_tokens_ask_for_their_slots(start, finds, videos):
    """The key that is most like the query of memory token m is that of slot m."""
    memory = started(start, videos).memory
    has_targets = start not in ("without targets", "gates alone", "published")
    assert (memory.target is not None) == has_targets
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
