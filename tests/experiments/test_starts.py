"""Which part of the statistics start CLAM needs."""
import pytest
import torch

from commands.train import options_from
from experiments import starts
from experiments.starts import PUBLISHED, set_start, unstarted
from test_evaluate import command
from toy import stages, world


@pytest.fixture(scope="module")
def videos():
    """Two videos of random features; the ten token slots of a frame look different."""
    torch.manual_seed(0)
    slots = 3 * torch.randn(10, stages.WIDTH)
    kitchens = list(world.kitchens("train", 2))
    return [stages.Scene(slots + torch.randn(len(kitchen), 10, stages.WIDTH), [], None)
            for _, kitchen in kitchens]


def memory_of(start, videos):
    """{name: value} of the memory's first weights."""
    options = options_from(data="toy")
    torch.manual_seed(0)
    narrator = unstarted(start, options)
    set_start(narrator, start, options, videos)
    return {name: p.detach() for name, p in narrator.memory.named_parameters()}


def first_word(name):
    return name.partition(".")[0]


SAME_IN_BOTH = {"norm_o.weight", "self_attn.in_proj_bias", "self_attn.out_proj.bias"}


def test_one_part_as_published_and_all_others_from_statistics(videos):
    full = memory_of("statistics", videos)
    assert {first_word(name) for name in full} == PUBLISHED["published"]
    for start in ("without keys", "without values", "without queries", "without gates",
                  "without sizes"):
        for name, value in memory_of(start, videos).items():
            is_left_out = first_word(name) in PUBLISHED[start]
            same = torch.equal(value, full[name])
            assert same != (is_left_out and name not in SAME_IN_BOTH), (start, name)


def test_published_gates_forget(videos):
    """A bias of 0 loses half of the state at every token; all else of that start is published."""
    published = memory_of("published", videos)
    assert not published["w_gate.1.bias"].any()
    gates_alone = memory_of("gates alone", videos)
    for name, value in gates_alone.items():
        assert torch.equal(value, published[name]) or first_word(name) == "w_gate", name
    assert (gates_alone["w_gate.1.bias"] >= 4).all()


def test_the_command(monkeypatch, tmp_path):
    """What is trained once is not trained again, and each start has a loss of its own."""
    monkeypatch.setitem(stages.STEPS, "recall", 2)
    monkeypatch.setitem(stages.DEFAULTS, "limit", 2)
    words = ["--only", "statistics", "without keys", "--output", tmp_path]
    found = command(*words, main=starts.main)
    labels, losses = zip(*(line.rsplit(maxsplit=1) for line in found.splitlines()))
    assert labels == ("statistics", "without keys")
    assert losses[0] != losses[1]
    logs = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.jsonl")}
    assert command(*words, main=starts.main) == found
    assert logs == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.jsonl")}
