"""experiments/starts.py: what lets CLAM learn from random weights."""
import pytest
import torch

from experiments import starts
from test_evaluate import command


def test_each_arm_takes_away_what_it_names():
    x = torch.randn(50, 10, 32) + 2
    alone = {cure: starts.start(f"published, {cure}", x, seed=0) for cure in starts.CURES}
    published = starts.start("published", x, seed=0)
    frozen = {name for name, p in alone["constant"].named_parameters() if not p.requires_grad}
    assert frozen == set(starts.CONSTANT)
    assert all(p.requires_grad for p in published.parameters())

    shared = x.mean((0, 1))
    k, v, _ = alone["mean"].project(shared)
    assert (k == 0).all() and (v == 0).all()
    k, v, log_gate = published.project(shared)
    assert k.abs().max() > 0 and v.abs().max() > 0

    assert log_gate.exp().mean().item() == pytest.approx(0.5, abs=0.02)
    _, _, log_gate = alone["gates"].project(shared)
    assert log_gate.exp().min() > 0.9

    assert len(starts.arms()) == 2 ** 3 + 1
    assert starts.start("mimetic", x, seed=0).target is not None


def test_one_step_makes_all_memory_tokens_one_in_the_published_start(tmp_path, monkeypatch):
    """The command in miniature: after one step, nothing differs between the memory tokens, unless
    the constant path is not trained, or the start is mimetic."""
    monkeypatch.setattr(starts, "FILE", tmp_path / "starts.jsonl")
    for name, value in (("VIDEOS", 4), ("TEST_VIDEOS", 2), ("STEPS", 1), ("WARMUP", 0.0)):
        monkeypatch.setattr(starts, name, value)
    shown = command("--seeds", 3, main=starts.main)
    assert command("--seeds", 3, "--show", main=starts.main) == shown
    assert len(shown.splitlines()) == 2 + len(starts.arms())

    def differ(arm):
        return starts.result(arm, 3, True)["tokens_differ"]

    assert differ("published") < 1e-3
    assert differ("published, constant") > 0.1
    assert differ("mimetic") > 0.1
    assert "| published | -" in command("--seeds", 4, "--show", main=starts.main)
