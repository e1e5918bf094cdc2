"""Training (§3.5, App. B.6): the loop, exact resumption, the recipe, the command line."""
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import narrator as nar
import data
import train
from support.common import BadData
from helpers import ROOT, TOY, tiny, video


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
    with pytest.raises(BadData, match="other settings"):
        train.train_narrator(tiny(lora_rank=5), examples(tiny()), replace(options, resume=True))


def test_late_in_a_long_stream():
    """`long` gives a video the memory of others and a far position; from the seed and the step alone."""
    model = tiny()
    videos = examples(model, 3)
    earlier, before = train.gone_by(3, random.Random(3))
    assert (earlier, before) == train.gone_by(3, random.Random(3)) and 1 <= before <= 100_000
    state = train.past(model, [videos[i] for i in earlier])
    assert state.shape == model.memory.initial_state().shape and state.abs().sum() > 0 and not state.requires_grad


# ------------------------------------------------------------------ training on annotated data sets

def epic(root, videos=6, width=16):
    """EPIC-Kitchens in its published layout, in miniature."""
    (root / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        told = {f"{split}_{n}": [{"time": 0.4 + 2.3 * i, "text": f"You wash the {thing}."} for i, thing in
                                 enumerate(["red cup", "blue pan", "green bowl", "knife"][:2 + n % 3])] for n in range(videos)}
        (root / "annotations" / f"refined_{split}_narrations.json").write_text(json.dumps(told))
    names = [f"{split}_{n}" for split in ("train", "val") for n in range(videos)]
    (root / "features_metadata.json").write_text(json.dumps({name: {"duration": 10.0, "path": f"{name}.pt"} for name in names}))
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(21, 10, width, generator=generator) for name in names}, root / "features.safetensors")


def arguments(root, output, *more, processes=1):
    launcher = [sys.executable] if processes == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone",
                                                        "--nproc-per-node", str(processes)]
    line = [*launcher, ROOT / "train.py", "--data", "ek100", "--root", root, "--output", output, "--llm", TOY / "llm", "--vision",
            TOY / "vision", "--memory-heads", 2, "--memory-tokens", 4, "--lora-rank", 4, "--lora-dropout", 0.1, "--memory-dropout", 0,
            "--batch", 4, "--epochs", 2, "--lr", 1e-3, "--val-limit", 2, "--device", "cpu", *more]
    return list(map(str, line))


def command(*args, **more):
    return subprocess.run(arguments(*args, **more), cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_two_processes_are_one(tmp_path):
    """The same losses and weights from two gloo processes as from one with twice the accumulation; a checkpoint that loads."""
    epic(tmp_path / "root")
    weights, curves = [], []
    for processes in (1, 2):
        run = command(tmp_path / "root", tmp_path / str(processes), "--lora-dropout", 0, processes=processes)
        assert run.returncode == 0, run.stderr[-2000:]
        log = [json.loads(line) for line in (tmp_path / str(processes) / "narrator-log.jsonl").read_text().splitlines()]
        curves.append([entry["loss"] for entry in log])
        assert len(log) == 3 and log[-1]["val_loss"] > 0
        weights.append(nar.Narrator.load(str(tmp_path / str(processes))).trainable())
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)
    assert all(torch.allclose(w, weights[1][name], atol=1e-4) for name, w in weights[0].items())


def test_killed_training_goes_on(tmp_path):
    """kill -9 in the middle, --resume: the losses and weights of the run that was never killed."""
    epic(tmp_path / "root", videos=12)
    assert command(tmp_path / "root", tmp_path / "whole", "--save-every", 1).returncode == 0
    process = subprocess.Popen(arguments(tmp_path / "root", tmp_path / "killed", "--save-every", 1), cwd=ROOT, stderr=subprocess.DEVNULL,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})
    while process.poll() is None and not (tmp_path / "killed" / "narrator-state.safetensors").exists():
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (tmp_path / "killed" / "adapter_model.safetensors").exists()
    assert command(tmp_path / "root", tmp_path / "killed", "--save-every", 1, "--resume").returncode == 0
    whole, killed = (losses(tmp_path / name) for name in ("whole", "killed"))
    assert whole == killed and len(whole) == 6
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(w, two[name]) for name, w in one.items())


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--lr", "nan"], ["--memory", "clamm"]])
def test_options_that_make_no_sense_are_refused_at_once(tmp_path, arguments):
    """Before an hour of training, not after."""
    run = subprocess.run([sys.executable, "train.py", "--data", "toy", "--output", str(tmp_path / "out"), *arguments], cwd=ROOT,
                         capture_output=True, text=True)
    assert run.returncode == 2 and arguments[0] in run.stderr and not (tmp_path / "out").exists()


def test_init_goes_on_from_a_checkpoint(tmp_path):
    """--init: the weights, memory and read-out of the checkpoint, whatever its kind; another width is refused."""
    epic(tmp_path / "root")
    first = tiny(width=16, readout="cls", memory_tokens=3)
    first.save(tmp_path / "first")
    options = train.Options(data="ek100", root=str(tmp_path / "root"), output=str(tmp_path / "second"), init=str(tmp_path / "first"),
                            batch=4, epochs=0.5, lr=1e-9, val_limit=0, device="cpu")
    train.train_annotated(options)
    second = nar.Narrator.load(str(tmp_path / "second"))
    assert (second.config.readout, second.config.memory_tokens) == ("cls", 3)
    assert all(torch.allclose(p, second.trainable()[name], atol=1e-6) for name, p in first.trainable().items())
    tiny(width=32).save(tmp_path / "wide")
    with pytest.raises(BadData, match="16 wide"):
        train.train_annotated(replace(options, init=str(tmp_path / "wide")))


def test_annotated_training_reads_only_its_range(tmp_path):
    epic(tmp_path)
    samples = list(data.load_dataset("ek100", tmp_path, "train", max_frames=6))
    asked = []
    for sample in samples:
        real = sample.read
        sample.read = lambda start, stop, real=real: asked.append(stop - start) or real(start, stop)
    found = train.Annotated(samples, tiny().layout)
    assert [len(found[i].x) for i in range(len(found))] == asked == [sample.num_frames for sample in samples]
    assert max(asked) <= 6


@pytest.mark.parametrize("break_it, says", [
    (lambda root: (root / "features_metadata.json").unlink(), "features_metadata.json"),
    (lambda root: (root / "features.safetensors").unlink(), "train_0"),
    (lambda root: (root / "annotations/refined_train_narrations.json").write_text("{"), "not JSON")])
def test_broken_data_is_one_line(tmp_path, break_it, says):
    epic(tmp_path)
    break_it(tmp_path)
    with pytest.raises(BadData, match=says):
        train.train_annotated(train.Options(data="ek100", root=str(tmp_path), output=str(tmp_path / "out"), llm=str(TOY / "llm"),
                                            device="cpu"))


def test_command_without_data_says_what_to_do(tmp_path):
    """What to fetch, where to put it, and how to try the toy instead; nothing is written."""
    run = subprocess.run([sys.executable, str(ROOT / "train.py"), "--data", "ego4d"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1 and "Traceback" not in run.stderr and 3 <= len(run.stderr.splitlines()) <= 8
    for needed in ("refined_narration_stream_train.json", "FlowNar-Data", "data/ego4d/features", "data.py encode", "--data toy"):
        assert needed in run.stderr, needed
    assert list(tmp_path.iterdir()) == []
