"""Training (§3.5, App. B.6): the loop, exact resumption, the recipe, the command line."""
import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import data
import train
from helpers import ROOT, tiny, video


def test_defaults_are_the_paper():
    o = train.Options()
    assert (o.lr, o.warmup, o.clip, o.batch, o.epochs) == (2e-4, 0.05, 1.0, 64, 2.0)
    assert (o.lora_rank, o.lora_alpha, o.lora_dropout, o.memory_tokens, o.max_frames) == (128, 256, 0.05, 20, 1200)


def test_schedule():
    rates = [train.schedule(step, 200, 0.05) for step in range(200)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])          # 5 % warm-up
    assert rates[10] == pytest.approx(1) and rates[105] == pytest.approx(0.5)    # then half a cosine
    assert rates[-1] < 1e-3 and all(a >= b for a, b in zip(rates[9:], rates[10:]))


def test_order_covers_every_epoch():
    seen = [i for step in range(6) for i in train.order(8, 4, step, seed=3)]
    assert all(sorted(seen[e * 8:e * 8 + 8]) == list(range(8)) for e in range(3))
    assert seen[:8] != seen[8:16] and train.order(8, 4, 1, 3) == seen[4:8] and train.order(8, 4, 1, 4) != seen[4:8]


def examples(model, count=6):
    return [train.Example(*video(model, frames=12, at=(0, 4, 9), seed=seed)) for seed in range(count)]


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "narrator-log.jsonl").read_text().splitlines()]


class Stop(Exception):
    pass


def test_resumed_is_as_if_never_interrupted(tmp_path, monkeypatch):
    """Killed between two snapshots: the same losses and weights to the bit; dropout included."""
    def run(folder, resume=False, stop=None):
        torch.manual_seed(1)
        model = tiny(memory_dropout=0.1, lora_dropout=0.1)
        options = train.Options(output=str(folder), batch=2, epochs=3.0, lr=1e-3, save_every=2, resume=resume)
        calls = []
        real = train.order
        def order(count, batch, step, seed):
            calls.append(step)
            if step == stop:
                raise Stop
            return real(count, batch, step, seed)
        monkeypatch.setattr(train, "order", order)
        try:
            train.train_narrator(model, examples(model), options)
        except Stop:
            pass
        monkeypatch.setattr(train, "order", real)
        return model, calls

    whole, _ = run(tmp_path / "a")
    run(tmp_path / "b", stop=5)
    resumed, calls = run(tmp_path / "b", resume=True)
    assert calls[0] == 4                                                         # the last snapshot before the kill
    assert losses(tmp_path / "b") == losses(tmp_path / "a") and len(losses(tmp_path / "a")) == 9
    for name, p in whole.trainable().items():
        assert torch.equal(p, resumed.trainable()[name]), name
    assert (tmp_path / "b" / "narrator-loss.png").stat().st_size > 1000


def test_loss_falls():
    torch.manual_seed(0)
    model = tiny()
    x, narrations = video(model)
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=3e-3)
    values = []
    for _ in range(25):
        optimizer.zero_grad()
        loss, learned = model.loss(x, narrations)
        (loss / learned).backward()
        optimizer.step()
        values.append(loss.item() / learned)
    assert values[-1] < 0.5 * values[0]


def test_checkpointing_changes_nothing(tmp_path):
    gradients = []
    for checkpointing in (False, True):
        model = tiny()
        if checkpointing:
            model.llm.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model.loss(*video(model))[0].backward()
        gradients.append({n: p.grad for n, p in model.trainable().items()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-5), name


def test_resume_with_other_settings_is_refused(tmp_path):
    options = train.Options(output=str(tmp_path), batch=2, epochs=0.34)
    train.train_narrator(tiny(), examples(tiny()), options)
    with pytest.raises(data.BadData, match="other settings"):
        train.train_narrator(tiny(lora_rank=5), examples(tiny()), replace(options, resume=True))


def test_late_in_a_long_stream():
    """`long` gives a video the memory of others and a far position; from the seed and the step alone."""
    model = tiny()
    videos = examples(model, 3)
    state, before = train.past(model, videos, random.Random(3))
    again = train.past(model, videos, random.Random(3))
    assert torch.equal(state, again[0]) and before == again[1] and 1 <= before <= 100_000
    assert state.shape == model.memory.initial_state().shape and state.abs().sum() > 0 and not state.requires_grad


def test_command_without_data_says_what_to_do():
    run = subprocess.run([sys.executable, "train.py", "--data", "ego4d"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and "Traceback" not in run.stderr and "toy" in run.stderr
