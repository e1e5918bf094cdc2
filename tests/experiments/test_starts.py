"""experiments/starts.py: what lets CLAM learn from random weights."""
import json

import pytest
import torch

from commands.evaluate import shares_that_differ
from experiments import starts
from experiments.knowledge import moments_of
from test_evaluate import command
from toy.probe import Probe
from toy.stages import Scene


def test_each_arm_takes_away_what_it_names():
    x = torch.randn(50, 10, 32) + 2
    alone = {}
    for cure in ("constant", "mean", "gates"):
        alone[cure] = starts.start(f"published, {cure}", x, seed=0)
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

    assert starts.start("mimetic", x, seed=0).target is not None


def test_a_few_steps_make_all_memory_tokens_one_in_the_published_start(monkeypatch):
    """Unless the constant path is not trained, or the start is mimetic."""
    monkeypatch.setattr(starts, "STEPS", 5)
    torch.manual_seed(0)
    labels = torch.randint(7, (40, 9, 2))
    videos = [Scene(torch.randn(40, 10, 32) + 2, [], labels)]

    def tokens_differ(arm):
        clam = starts.start(arm, videos[0].x, seed=0)
        starts.train_by_labels(clam, videos, seed=0)
        memory = moments_of(clam, videos).tokens.unflatten(1, (clam.M, 32))
        return shares_that_differ(memory)[0]

    assert tokens_differ("published") < 1e-3
    assert tokens_differ("published, constant") > 0.1
    assert tokens_differ("mimetic") > 0.1


def test_the_first_gradient_of_the_published_start_is_in_the_constant_path():
    clam = starts.start("published", torch.randn(50, 10, 32), seed=0)
    memory, _ = clam(torch.randn(1, 400, 32), torch.tensor([[100, 200, 300, 400]]))
    (memory * torch.randn_like(memory)).sum().backward()
    of_all = {name: p.grad.square().sum().item() for name, p in clam.named_parameters()
              if p.grad is not None}
    of_constant = sum(of_all[name] for name in starts.CONSTANT)
    assert of_constant > 0.99 * sum(of_all.values())


def test_what_is_hidden_and_read_rightly():
    """A place shows a thing in every second frame, and the probe names that thing always."""
    clam = starts.start("mimetic", torch.randn(50, 10, 32), seed=0)
    labels = torch.zeros(40, 9, 2, dtype=torch.long)
    labels[:2, 3] = torch.tensor([2, 5])
    labels[:2, 4] = torch.tensor([2, 6])
    moments = moments_of(clam, [Scene(torch.randn(40, 10, 32), [], labels)])
    probe = Probe(moments.tokens.shape[1])
    with torch.no_grad():
        answers = probe.linear.bias.view(9, -1)
        answers[:, 2] = 1                      # type 2
        answers[:, 7 + 5] = 1                  # colour 5
    assert starts.share_right(probe, moments) == 0.5


def test_results_are_kept_and_shown(tmp_path, monkeypatch):
    """One line for an arm, a seed, and whether it was trained; those of another world are not
    shown."""
    monkeypatch.setattr(starts, "FILE", tmp_path / "starts.jsonl")
    rows = []
    for seed, trained, share in ((0, False, 0.25), (0, True, 0.5), (1, True, 0.75)):
        rows.append(starts.identity_of_arm("mimetic", seed, trained) | {
            "hidden_right": share, "tokens_differ": 0.1, "read_outs_differ": 1e-6})
    rows.append(rows[0] | {"arm": "published", "worlds": "others"})
    starts.FILE.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = command("--show", main=starts.main).splitlines()
    assert "| mimetic | 0.25 | 0.5, 0.75 | 0.1, 0.1 | 1e-06, 1e-06 |" in shown
    assert "| published | - | - | - | - |" in shown
