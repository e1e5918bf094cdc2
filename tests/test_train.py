"""Training (§3.5, App. B.6): the loop, exact resumption, the recipe, the command line."""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import data
import narrator as nar
import train
from baselines.variants import load_narrator
from commands import train as train_command
from helpers import ROOT, TOY, grouped, tiny, two_ranks, video
from support.common.disk import read_jsonl
from support.common.errors import BadData
from support.common.iterate import prefetch
from support.engine import checkpoint, training
from toy import stages, train as toy_train


def test_defaults_are_the_paper():
    options = train.Options()
    assert (options.lr, options.warmup, options.clip) == (2e-4, 0.05, 1.0)
    assert (options.batch, options.epochs) == (64, 2.0)
    assert (options.lora_rank, options.lora_alpha, options.lora_dropout) == (128, 256, 0.05)
    assert (options.memory_tokens, options.max_frames) == (20, 1200)


def test_schedule():
    """5 % warm-up, then half a cosine."""
    rates = [train.schedule(step, 200, 0.05) for step in range(200)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[10] == pytest.approx(1)
    assert rates[105] == pytest.approx(0.5)
    assert rates[-1] < 1e-3
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_order_covers_every_epoch():
    indices = []
    for step in range(6):
        indices += train.order(8, 4, step, seed=3)
    first, second, third = indices[:8], indices[8:16], indices[16:]
    assert sorted(first) == sorted(second) == sorted(third) == list(range(8))
    assert first != second
    assert train.order(8, 4, 1, seed=3) == first[4:]           # at any step
    assert train.order(8, 4, 1, seed=4) != first[4:]


def examples(model, count=6, at=(0, 4, 9)):
    return [train.Example(*video(model, frames=12, at=at, seed=seed)) for seed in range(count)]


def losses(folder):
    return [line["loss"] for line in read_jsonl(folder / "narrator-log.jsonl")]


def interrupted(folder, monkeypatch, error=RuntimeError, at=None, videos=examples, **given):
    """Train, stopped by an error in step `at` -> the model, and the steps that it ran."""
    torch.manual_seed(1)
    model = tiny(memory_dropout=0.1, lora_dropout=0.1)
    steps = []
    order = train.order

    def recorded_order(count, batch, step, seed):
        steps.append(step)
        if step == at:
            raise error
        return order(count, batch, step, seed)

    monkeypatch.setattr(train, "order", recorded_order)
    given = {"batch": 2, "epochs": 3.0, "lr": 1e-3, "save_every": 2} | given
    options = train.Options(output=str(folder), **given)
    with nullcontext() if at is None else pytest.raises(error):
        train.train_narrator(model, videos(model), options)
    monkeypatch.setattr(train, "order", order)
    return model, steps


def few_memories(model):
    """Six videos of which two need no memory: their steps give CLAM no gradient."""
    return examples(model, 3) + examples(model, 3, at=(0,))


@pytest.mark.parametrize("videos, batch", [(examples, 2), (few_memories, 1)])
def test_resumed_is_as_if_never_interrupted(tmp_path, monkeypatch, videos, batch):
    """Killed between two snapshots: the same losses and weights to the bit, with dropout and
    missing gradients.
    """
    setup = {"videos": videos, "batch": batch}
    whole, _ = interrupted(tmp_path / "a", monkeypatch, **setup)
    interrupted(tmp_path / "b", monkeypatch, at=5, **setup)
    resumed, steps = interrupted(tmp_path / "b", monkeypatch, resume=True, **setup)
    assert steps[0] == 4                       # the last snapshot before the kill
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    assert len(losses(tmp_path / "a")) == 18 // batch
    for name, p in whole.trainable().items():
        assert torch.equal(p, resumed.trainable()[name]), name
    assert (tmp_path / "b" / "narrator-loss.png").stat().st_size > 1000


def test_ctrl_c_keeps_the_state(tmp_path, monkeypatch):
    """Nothing is lost, whatever --save-every says: resumed at the same step, as if never
    interrupted.
    """
    whole, _ = interrupted(tmp_path / "a", monkeypatch)
    interrupted(tmp_path / "b", monkeypatch, KeyboardInterrupt, at=5, save_every=50)
    resumed, steps = interrupted(tmp_path / "b", monkeypatch, resume=True)
    assert steps[0] == 5
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    for name, p in whole.trainable().items():
        assert torch.equal(p, resumed.trainable()[name]), name


def test_interrupted_while_it_validates(tmp_path):
    """The step is in the log and in the state. Its validation is made up for on --resume."""
    def run(folder, resume=False, at=None):
        p = torch.nn.Parameter(torch.ones(3))

        def backward(step):
            loss = (p ** 2).sum()
            loss.backward()
            return loss.item(), 1

        def validate(step):
            if step == at:
                raise KeyboardInterrupt
            return {"val_loss": step} if step % 2 else {}

        options = train.Options(output=str(folder))
        options.resume = resume
        with nullcontext() if at is None else pytest.raises(KeyboardInterrupt):
            train.fit("narrator", {"p": p}, backward, 6, 0.1, options, validate)
        log = read_jsonl(folder / "narrator-log.jsonl")
        return [(line["step"], line["loss"], line.get("val_loss")) for line in log]

    whole = run(tmp_path / "a")
    assert not training.unfinished(tmp_path / "a")
    assert len(run(tmp_path / "b", at=3)) == 4
    assert training.unfinished(tmp_path / "b")
    message = "is of an interrupted training; give --resume to go on, or delete it"
    with pytest.raises(BadData, match=message):
        train_command.train(train.Options(data="toy", output=str(tmp_path / "b")))
    assert run(tmp_path / "b", resume=True) == whole


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


def test_the_loss_in_parts_is_the_whole():
    """Value and gradients. The last part is shorter. Logits are made twice, and never for all rows
    at once.
    """
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50)
    rows = []
    head.register_forward_hook(lambda module, arguments, logits: rows.append(len(logits)))
    hidden = torch.randn(70, 16, requires_grad=True)
    labels = torch.randint(50, (70,))
    loss = training.cross_entropy(head, hidden, labels, rows=32)
    gradients = torch.autograd.grad(loss, [hidden, head.weight])
    assert rows[:3] == [32, 32, 6]
    assert sorted(rows[3:]) == [6, 32, 32]
    whole = torch.nn.functional.cross_entropy(head(hidden), labels, reduction="sum")
    assert torch.allclose(loss, whole)
    for gradient, expected in zip(gradients, torch.autograd.grad(whole, [hidden, head.weight])):
        assert torch.allclose(gradient, expected, atol=1e-5)


def test_checkpointing_changes_nothing():
    gradients = []
    for checkpointing in (False, True):
        model = tiny()
        if checkpointing:
            model.llm.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        loss, _ = model.loss(*video(model))
        loss.backward()
        gradients.append({name: p.grad for name, p in model.trainable().items()})
    without, with_checkpoints = gradients
    for name, gradient in without.items():
        assert torch.allclose(gradient, with_checkpoints[name], atol=1e-5), name


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """The options of a training that has ended after one step."""
    folder = tmp_path_factory.mktemp("one_step")
    given = {"output": str(folder), "batch": 2, "epochs": 0.34, "lr": 1e-3}
    train.train_narrator(tiny(), examples(tiny()), train.Options(**given))
    return given


@pytest.mark.parametrize("change, message", [
    ({"lr": 2e-3}, "lr = 0.001, not 0.002"),
    ({"batch": 3}, "batch = 2, not 3"),
    ({"seed": 1}, "seed = 0, not 1"),
    ({"epochs": 4.0}, "epochs = 0.34, not 4.0"),
    ({"data": "ek100"}, "data = ego4d, not ek100"),
    ({"root": "elsewhere"}, "root = None, not elsewhere"),
    ({"limit": 3}, "limit = None, not 3"),
    ({"save_every": 7, "val_limit": 0, "checkpointing": True, "device": "cpu"}, None),
])
def test_resume_with_other_settings_is_refused(one_step, change, message):
    """Except those that do not change the result (message None)."""
    options = train.Options(**one_step | change, resume=True)
    if message is None:
        train.train_narrator(tiny(), examples(tiny()), options)
        return
    with pytest.raises(BadData, match=message) as error:
        train.train_narrator(tiny(), examples(tiny()), options)
    assert "\n" not in str(error.value)


def test_resume_with_other_videos_or_weights_is_refused(tmp_path):
    given = {"output": str(tmp_path), "batch": 2, "epochs": 1.0}
    train.train_narrator(tiny(), examples(tiny()), train.Options(**given))
    with pytest.raises(BadData, match="steps = 3, not 4"):
        train.train_narrator(tiny(), examples(tiny(), 8), train.Options(**given, resume=True))
    with pytest.raises(BadData, match="weights = "):
        other = tiny(lora_rank=5)
        train.train_narrator(other, examples(tiny()), train.Options(**given, resume=True))
    (tmp_path / "narrator-state.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(BadData, match="damaged"):
        train.train_narrator(tiny(), examples(tiny()), train.Options(**given, resume=True))


def test_late_in_a_long_stream():
    """`long` gives a video the memory of others and a far position; the random state decides."""
    model = tiny()
    videos = examples(model, 3)
    earlier, before = train.earlier_videos(3, random.Random(3))
    assert (earlier, before) == train.earlier_videos(3, random.Random(3))
    assert 1 <= before <= 100_000
    state = train.memory_after(model, [videos[i] for i in earlier])
    assert state.shape == model.memory.initial_state().shape
    assert state.abs().sum() > 0
    assert not state.requires_grad


def test_a_parameter_that_no_process_reaches_has_no_gradient(monkeypatch):
    """As on one process: zeros would count as a step of Adam, and let the parameter drift by its
    momentum."""
    monkeypatch.setattr(training, "rank", lambda: (0, 2))
    monkeypatch.setattr(training.dist, "all_reduce", lambda flat: flat.mul_(2))
    parameters = {name: torch.nn.Parameter(torch.ones(2, 3)) for name in "ab"}
    parameters["a"].grad = torch.full((2, 3), 0.5)
    training.sum_gradients(parameters)
    assert parameters["b"].grad is None
    assert torch.equal(parameters["a"].grad, torch.ones(2, 3))


def test_validation_is_shared(tmp_path, monkeypatch):
    """Each process takes its part of the held-out videos."""
    indices = set()

    class HeldOut(list):
        def __getitem__(self, index):
            indices.add(index)
            return super().__getitem__(index)

    model = tiny()
    monkeypatch.setattr(train, "rank", lambda: (1, 2))
    options = train.Options(output=str(tmp_path), batch=2, epochs=1.0)
    train.train_narrator(model, examples(model, 2), options, HeldOut(examples(model, 5)))
    assert indices == {1, 3}


def test_features_of_another_shape_are_refused_by_name(tmp_path):
    model = tiny()
    short = data.Sample(name="b", narrations=[], memory_words=[], fps=2, num_frames=2, duration=1.0,
                        source=None, read=lambda start, stop: torch.zeros(2, 5, 128))
    with pytest.raises(BadData, match=r"b: has frame tokens \[5, 128\], not \[10, 32"):
        train.Annotated([short], model)[0]


def test_a_log_without_the_line_of_a_step_keeps_its_others(tmp_path):
    """Ctrl-C came after the step, and before its line was written."""
    log = tmp_path / "a-log.jsonl"
    log.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (0, 1, 3, 4)))
    training.cut_log(log, 3, lambda step: {"val_loss": step})
    assert [row["step"] for row in read_jsonl(log)] == [0, 1]
    training.cut_log(log, 2, lambda step: {"val_loss": step})
    assert read_jsonl(log)[1]["val_loss"] == 1


def test_half_a_line_of_a_log_is_left_out(tmp_path):
    """A full disk has taken no more of it."""
    log = tmp_path / "a-log.jsonl"
    log.write_text('{"step": 0, "loss": 1.0, "val_loss": 2.0}\n{"step": 1, "lo')
    training.cut_log(log, 1, lambda step: {})
    assert [row["step"] for row in read_jsonl(log)] == [0]


def test_many_epochs_are_validated_ten_times(tmp_path, capsys):
    model = tiny(max_new_tokens=2)
    options = train.Options(output=str(tmp_path), batch=1, epochs=20.0, lr=1e-9)
    train.train_narrator(model, examples(model, 1), options, examples(model, 1),
                         train_command.narrate_one)
    log = read_jsonl(tmp_path / "narrator-log.jsonl")
    validated = [row["step"] + 1 for row in log if "val_loss" in row]
    assert validated == list(range(2, 21, 2))
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("after ")]
    assert len(shown) == 10 and shown[-1].startswith("after 20 steps: ")


def test_one_narration_is_shown(capsys):
    """As the bundled narrator writes it, and the true one."""
    model = load_narrator(str(TOY))
    sample = next(iter(data.load_dataset("toy", split="test", limit=1)))
    last_frame, _ = sample.narrations[3]
    pictures = np.stack(list(islice(sample.frames(), last_frame + 1)))
    x = model.vision_encoder()(torch.from_numpy(pictures))
    narrations = []
    for frame, text in sample.narrations[:4]:
        narrations.append((frame, model.layout.encode(" " + text)))
    texts = [text for _, text in sample.narrations]
    for step in range(3):
        train_command.narrate_one(model, [train.Example(x, narrations)], step)
    for step, line in enumerate(capsys.readouterr().err.splitlines()):
        written, true = re.fullmatch(f"after {step} steps: '(.*)', where the truth is '(.*)'",
                                     line).groups()
        assert written == true and true in texts


@pytest.mark.parametrize("options", [
    {"mod_keep": 0.5, "memory": "none", "prune": False},
    {"narration_memory": 4, "last_k": 0},
])
def test_one_narration_of_any_narrator(options, capsys):
    model = tiny(**options)
    train_command.narrate_one(model, [train.Example(*video(model))], 7)
    assert capsys.readouterr().err.startswith("after 7 steps: ")


def test_prefetch_makes_the_next_item_while_one_is_used():
    """In a thread of its own, one ahead and no more. An error comes when its item is asked for."""
    made = []
    begun = [threading.Event() for _ in range(5)]
    threads = set()

    def items():
        for i in range(4):
            threads.add(threading.get_ident())
            made.append(i)
            begun[i].set()
            yield i
        begun[4].set()
        raise BadData("v4.pt: damaged")

    coming = prefetch(items(), 1)
    for i in range(4):
        assert next(coming) == i
        assert begun[i + 1].wait(10)
        assert made == list(range(min(i + 2, 4)))
    with pytest.raises(BadData, match="v4.pt"):
        next(coming)
    assert len(threads) == 1 and threading.get_ident() not in threads
    assert list(prefetch([], 1)) == []
    assert list(prefetch("ab", 1)) == ["a", "b"]


@pytest.mark.parametrize("process, processes", [(0, 1), (0, 2), (1, 2)])
def test_examples_are_read_ahead_and_once(tmp_path, monkeypatch, process, processes):
    """Each process reads its part of all batches, in order, but not on the thread that trains."""
    indices = []
    threads = set()

    class Files(list):
        def __getitem__(self, index):
            indices.append(index)
            threads.add(threading.get_ident())
            return super().__getitem__(index)

    model = tiny()
    monkeypatch.setattr(train, "rank", lambda: (process, processes))
    options = train.Options(output=str(tmp_path), batch=2, epochs=1.5)
    train.train_narrator(model, Files(examples(model, 4)), options)
    expected = []
    for step in range(3):
        expected += train.order(4, 2, step, 0)[process::processes]
    assert indices == expected
    assert threading.get_ident() not in threads


def test_a_damaged_file_ends_training_by_name(tmp_path):
    """In its own step: although files are read ahead, the state of the step before it is kept."""
    epic(tmp_path / "root", width=32)
    samples = list(data.load_dataset("ek100", tmp_path / "root", "train"))
    third, = train.order(6, 1, 2, 0)
    name = samples[third].name

    def damaged(start, stop):
        raise BadData(f"{name}: damaged")

    samples[third].read = damaged
    model = tiny()
    options = train.Options(output=str(tmp_path / "out"), batch=1, epochs=1.0, save_every=1)
    with pytest.raises(BadData, match=f"^{name}: damaged$"):
        train.train_narrator(model, train.Annotated(samples, model), options)
    assert len(losses(tmp_path / "out")) == 2


# ------------------------------------------------------------------ other language models

def first_and_last_loss(model, folder):
    """Of a dozen steps on one video."""
    folder.mkdir()
    options = train.Options(output=str(folder), batch=1, epochs=12.0, lr=3e-3)
    train.train_narrator(model, examples(model, 1), options)
    return losses(folder)[0], losses(folder)[-1]


def test_bf16_base_with_fp32_lora(tmp_path):
    """The base stays as it is in bf16; all that is trained is fp32, and loads as it was saved."""
    config = tiny().config
    model = nar.Narrator(*checkpoint.load_llm(config.llm, torch.bfloat16), config)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    first, last = first_and_last_loss(model, tmp_path / "out")
    assert last < 0.9 * first
    for p in model.trainable().values():
        assert p.dtype == torch.float32
    parameters = dict(model.named_parameters())
    for name, before in frozen.items():
        assert before.dtype == torch.bfloat16
        assert torch.equal(before, parameters[name]), name

    model.save(tmp_path / "saved")
    loaded = load_narrator(str(tmp_path / "saved"), dtype=torch.bfloat16)
    for name, p in model.trainable().items():
        assert p.dtype == torch.float32
        assert torch.equal(p, loaded.trainable()[name]), name
    with torch.no_grad():
        x, narrations = video(model)
        hidden, _, _ = model(x, narrations)
        hidden_of_loaded, _, _ = loaded(x, narrations)
        assert torch.equal(hidden, hidden_of_loaded)


def test_grouped_query_attention(tmp_path):
    """Fewer heads for keys and values than for queries, as in Llama 3: every LoRA matrix learns."""
    model = tiny(llm=grouped())
    k_proj = "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"
    assert model.trainable()[k_proj].shape == (32, 4)
    lora = {name: p for name, p in model.trainable().items() if "lora_" in name}
    before = {name: p.clone() for name, p in lora.items()}
    first, last = first_and_last_loss(model, tmp_path / "out")
    assert last < 0.9 * first
    for name, p in lora.items():
        assert not torch.equal(p, before[name]), name


# ------------------------------------------------------------------ training on annotated data sets

def epic(root, videos=6, width=16):
    """EPIC-Kitchens in its published layout, in miniature."""
    (root / "annotations").mkdir(parents=True)
    rows = []
    for i, thing in enumerate(["red cup", "blue pan", "green bowl", "knife"]):
        rows.append({"time": 0.4 + 2.3 * i, "text": f"You wash the {thing}."})
    names = []
    for split in ("train", "val"):
        names += [f"{split}_{n}" for n in range(videos)]
        narrations = {f"{split}_{n}": rows[:2 + n % 3] for n in range(videos)}
        file = root / "annotations" / f"refined_{split}_narrations.json"
        file.write_text(json.dumps(narrations))
    metadata = {name: {"duration": 10.0, "path": f"{name}.pt"} for name in names}
    (root / "features_metadata.json").write_text(json.dumps(metadata))
    generator = torch.Generator().manual_seed(0)
    x = {name: torch.randn(21, 10, width, generator=generator) for name in names}
    save_file(x, root / "features.safetensors")


def arguments(root, output, *more):
    """`train.py ...`, as words."""
    line = ["train.py", "--data", "ek100", "--root", root, "--output", output,
            "--llm", TOY / "llm", "--vision", TOY / "vision", "--memory-heads", 2,
            "--memory-tokens", 4, "--memory-dropout", 0, "--lora-rank", 4, "--lora-dropout", 0,
            "--batch", 4, "--epochs", 2, "--lr", 1e-4, "--val-limit", 2, "--device", "cpu", *more]
    return [str(word) for word in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The data set in root/, and in out/ what the command makes of it in one process."""
    folder = tmp_path_factory.mktemp("whole")
    epic(folder / "root", videos=12)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", arguments(folder / "root", folder / "out"))
        train_command.main()
    assert end.value.code == 0
    return folder


def start_training(line, environment):
    return subprocess.Popen([sys.executable, *line], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                            env=environment)


def signal_when_saved(processes, folder, sent):
    """Send a signal to all processes as soon as there is a state of their training."""
    state = folder / "narrator-state.safetensors"
    while processes[0].poll() is None and not state.exists():
        time.sleep(0.005)
    for process in processes:
        process.send_signal(sent)


def test_two_processes_killed_and_resumed_are_one(whole, tmp_path):
    """Two processes, as torchrun starts them, get kill -9 in the middle; two resume. Losses and
    weights are those of one process with twice the accumulation, which was never killed."""
    line = arguments(whole / "root", tmp_path, "--save-every", 1)
    processes = [start_training(line, environment) for environment in two_ranks()]
    signal_when_saved(processes, tmp_path, signal.SIGKILL)
    for process in processes:
        process.communicate()
    assert not (tmp_path / "adapter_model.safetensors").exists()
    done = len(losses(tmp_path))
    assert 1 <= done < 6

    processes = [start_training([*line, "--resume"], environment) for environment in two_ranks()]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors[-2000:]
    log = read_jsonl(tmp_path / "narrator-log.jsonl")
    expected = read_jsonl(whole / "out" / "narrator-log.jsonl")
    assert [row["step"] for row in log] == list(range(6))
    for row, expected_row in zip(log, expected):
        assert row["loss"] == pytest.approx(expected_row["loss"], abs=1e-4)
    # validated after each epoch
    assert log[2]["val_loss"] == pytest.approx(expected[2]["val_loss"], abs=1e-4)
    assert log[5]["val_loss"] == pytest.approx(expected[5]["val_loss"], abs=1e-4)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    for name, weight in load_file(whole / "out" / "adapter_model.safetensors").items():
        assert torch.allclose(weight, weights[name], atol=1e-4), name


def test_sigterm_exits_with_130(whole, tmp_path):
    """By which schedulers end a job: as Ctrl-C does, in one line, with a state."""
    line = arguments(whole / "root", tmp_path / "out", "--save-every", 1, "--epochs", 1000)
    process = start_training(line, os.environ | {"OMP_NUM_THREADS": "1"})
    signal_when_saved([process], tmp_path / "out", signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    with safe_open(tmp_path / "out" / "narrator-state.safetensors", "pt") as file:
        assert int(file.metadata()["step"]) >= 1


# ------------------------------------------------------------------ options

WRONG = {                                      # option -> a value that it cannot have
    "data": "ego5d", "start": "zero", "memory": "clamm", "memory_tokens": "0",
    "memory_heads": "2.5", "readout": "last", "last_k": "-1", "lr": "nan", "warmup": "nan",
    "clip": "-1", "batch": "0", "epochs": "inf", "lora_rank": "x", "lora_alpha": "0",
    "lora_dropout": "1.5", "memory_dropout": "-0.1", "long": "2", "max_frames": "0",
    "val_limit": "-1", "dtype": "nonsense", "limit": "0", "seed": "-1", "save_every": "0",
    "world": "noon", "idle": "1.1", "mod_keep": "1.1", "narration_memory": "-1",
    "width_second": "-1", "llm_width": "0", "grid": "-1",
}
CHECKED_LATER = {"root", "output", "llm", "vision", "look", "init", "device"}


def parsed(monkeypatch, *line):
    monkeypatch.setattr(sys, "argv", ["train.py", *line])
    return train_command.parse()


def test_every_option_with_a_value_has_a_wrong_one():
    names = {f.name for f in fields(train.Options) if f.default is not False}
    assert names == WRONG.keys() | CHECKED_LATER


@pytest.mark.parametrize("line", [
    *(["--" + name.replace("_", "-"), value] for name, value in WRONG.items()),
    ["--start", "published", "--init", "x"],
    ["--data", "toy", "--max-frames", "9"],
    ["--data", "toy", "--device", "cuda"],
    ["--data", "ek100", "--idle", "0.5"],
    ["--world", "hard"],
    ["--data", "ek100", "--grid", "0"],
    ["--data", "toy", "--init", "narrator", "--look", "look.safetensors"],
    ["--data", "toy", "--no-recall", "--init", "narrator"],
    ["--data", "toy", "--quick", "--llm-width", "256"],
    ["--memory", "none", "--memory-tokens", "5"],
], ids=" ".join)
def test_invalid_options_are_refused_at_once(line, monkeypatch, capsys):
    """Before an hour of training, not after: exit code 2, and the last line names the option."""
    with pytest.raises(SystemExit) as end:
        parsed(monkeypatch, *line)
    assert end.value.code == 2
    assert line[-2] in capsys.readouterr().err.splitlines()[-1]


def test_options_know_what_was_given(monkeypatch, capsys):
    options = parsed(monkeypatch, "--data", "toy", "--last-k", "0", "--no-prune")
    assert options.given == {"data", "last_k", "no_prune"}
    assert options.last_k == 0
    assert options.batch == stages.DEFAULTS["batch"]
    with pytest.raises(TypeError, match="bach"):
        train.Options(bach=3)
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--help")
    assert "(toy: 4)" in capsys.readouterr().out


@pytest.mark.parametrize("given, message", [
    ({"memory_heads": 3}, "heads"),
    ({"device": "nonsense"}, "--device"),
    ({"root": "nowhere"}, "nowhere"),
    ({"llm": "./nowhere"}, "nowhere"),
    ({"init": "./nowhere"}, "nowhere"),
])
def test_options_that_do_not_fit_are_refused(tmp_path, given, message):
    """Before anything is written; in one line, but for a missing data set."""
    epic(tmp_path / "root")
    usual = {"data": "ek100", "root": str(tmp_path / "root"), "output": str(tmp_path / "out"),
             "llm": str(TOY / "llm"), "device": "cpu", "memory_heads": 2}
    with pytest.raises(BadData, match=message) as error:
        train_command.train(train.Options(**usual | given))
    assert not (tmp_path / "out").exists()
    if message != "nowhere":
        assert "\n" not in str(error.value)


def test_a_finished_narrator_is_not_replaced_unasked(tmp_path, monkeypatch):
    """--overwrite does it; --resume, which goes on with a state, needs no leave."""
    tiny(width=16).save(tmp_path / "out")
    before = {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    trainings = []
    monkeypatch.setattr(train_command, "train_annotated", lambda options, *_: trainings.append(options))
    given = {"data": "ek100", "output": str(tmp_path / "out")}
    message = "out holds a finished narrator; choose another --output, or give --overwrite"
    for resume in (False, True):                # there is no state to go on with
        with pytest.raises(BadData, match=message):
            train_command.train(train.Options(**given, resume=resume))
    assert not trainings
    assert before == {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    for change in ({"overwrite": True}, {"output": str(tmp_path / "another")}, {"resume": True}):
        if "resume" in change:
            (tmp_path / "out" / "narrator-state.safetensors").touch()
        train_command.train(train.Options(**given | change))
    assert len(trainings) == 3


def test_toy_refuses_before_it_trains(tmp_path):
    options = train.Options(data="toy", memory_heads=3, output=str(tmp_path / "out"))
    with pytest.raises(BadData, match="heads"):
        train_command.train(options)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------ --init

SAVED = {"width": 16, "memory_tokens": 3, "readout": "cls", "last_k": 4, "memory_dropout": 0.2,
         "lora_dropout": 0.3}
# settings that --init may change, and values other than those of SAVED
FREE = {"last_k": 7, "readout": "frame", "memory_dropout": 0.0, "lora_dropout": 0.0,
        "llm": str(TOY / "llm"), "vision": "owner/name"}
# settings for which the weights are made: a value that contradicts them, and the one that does not
FIXED = {
    "memory": ("none", "clam"),
    "memory_tokens": (4, 3),
    "memory_heads": (4, 2),
    "lora_rank": (8, 4),
    "lora_alpha": (16, 8),
    "no_prune": (True, False),
    "mod_keep": (0.2, None),
    "narration_memory": (4, 0),
    "grid": (2, 3),
    "width_second": (4, 0),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a narrator with the settings SAVED."""
    folder = tmp_path_factory.mktemp("saved")
    tiny(**SAVED).save(folder)
    return folder


def test_every_option_of_a_narrator_is_tested_with_init():
    options = {f.name for f in fields(train.Options)} & {f.name for f in fields(nar.Config)}
    assert FREE.keys() | FIXED.keys() == options | {"no_prune"}


@pytest.mark.parametrize("given", [
    {},
    *({name: value} for name, value in FREE.items()),
    {"last_k": None},
    FREE,
], ids=str)
def test_init_takes_what_is_given_and_keeps_the_rest(saved, given):
    first = load_narrator(str(saved))
    second = train.pretrained(train.Options(init=str(saved), **given))
    assert asdict(second.config) == asdict(first.config) | given
    assert second.layout.M == 3
    assert second.connector[0].in_features == 16
    for name, p in first.trainable().items():
        assert torch.equal(p, second.trainable()[name]), name


@pytest.mark.parametrize("name", FIXED)
def test_init_refuses_what_its_weights_are_not_made_for(saved, name):
    contradiction, same = FIXED[name]
    with pytest.raises(BadData) as error:
        train.pretrained(train.Options(init=str(saved), **{name: contradiction}))
    message = str(error.value)
    assert "--" + name.replace("_", "-") in message
    assert f"--init {saved}" in message
    assert "\n" not in message
    model = train.pretrained(train.Options(init=str(saved), **{name: same}))
    assert model.config.memory_tokens == 3


def test_fine_tuning(saved, tmp_path):
    """--init keeps the weights, memory and read-out of the checkpoint; features of another width
    are refused."""
    epic(tmp_path / "root")
    first = load_narrator(str(saved))
    given = {"data": "ek100", "root": str(tmp_path / "root"), "output": str(tmp_path / "second"),
             "batch": 4, "epochs": 0.5, "lr": 1e-9, "val_limit": 0, "device": "cpu"}
    train_command.train(train.Options(**given, init=str(saved)))
    second = load_narrator(str(tmp_path / "second"))
    assert asdict(second.config) == asdict(first.config)
    for name, p in first.trainable().items():
        assert torch.allclose(p, second.trainable()[name], atol=1e-6), name
    tiny(width=32).save(tmp_path / "wide")
    options = train.Options(**given, init=str(tmp_path / "wide"), overwrite=True)
    with pytest.raises(BadData, match="16 wide"):
        train_command.train(options)


# ------------------------------------------------------------------ first weights, names of models

def started(tmp_path, monkeypatch, **given):
    """The narrator that training begins with."""
    if not (tmp_path / "root").exists():
        epic(tmp_path / "root", width=32)
    models = []
    monkeypatch.setattr(train, "train_narrator", lambda narrator, *_: models.append(narrator))
    usual = {"data": "ek100", "root": str(tmp_path / "root"), "output": str(tmp_path / "out"),
             "device": "cpu", "llm": str(TOY / "llm"), "lora_rank": 4, "memory_heads": 2,
             "memory_tokens": 8}
    train_command.train(train.Options(**usual | given))
    return models[0]


def test_start_published(tmp_path, monkeypatch):
    """N(0, 0.02), in_proj Xavier, biases 0, norms 1, LoRA's B 0; no learned targets; read after the
    frame."""
    model = started(tmp_path, monkeypatch)
    assert not model.config.memory_target
    assert model.config.readout == "frame"
    for name, p in [*model.memory.named_parameters(), *model.connector.named_parameters()]:
        if p.dim() == 1:
            assert p.eq(0 if name.endswith("bias") else 1).all(), name
        elif "in_proj" in name:
            assert p.abs().max() < (6 / (3 * 32 + 32)) ** 0.5
            assert p.std() > 0.1
        else:
            assert 0.015 < p.std() < 0.025, name
            assert p.mean().abs() < 0.005, name
    for name, p in model.trainable().items():
        if "lora_A" in name:
            assert p.abs().sum() > 0
        if "lora_B" in name:
            assert p.eq(0).all()


def test_start_statistics(tmp_path, monkeypatch):
    """Learned targets, decays near 1, and a connector that standardises the features, on any data
    set."""
    model = started(tmp_path, monkeypatch, start="statistics")
    assert model.config.memory_target
    assert model.memory.target.abs().sum() > 0
    gate = "base_model.model.clustering.layers.0.multihead_attn.gk_proj.1.bias"
    assert model.trainable()[gate].tolist() == pytest.approx([4.0] * 8 + [8.0] * 8)
    samples = list(data.load_dataset("ek100", tmp_path / "root", "train"))
    x = train.Annotated(samples, model)[0].x
    assert model.connector[0](x[:, 1:]).mean((0, 1)).abs().max() < 0.5
    assert model.connector[0].bias.abs().sum() > 0


def test_a_new_toy_narrator_starts_from_statistics():
    assert train.Options(data="toy").start == "statistics"
    assert train.Options(data="ek100").start == "published"


@pytest.mark.parametrize("llm, named", [("out/llm", "llm"), ("llm", "{here}/llm")])
def test_checkpoint_with_a_relative_llm_can_be_moved(tmp_path, monkeypatch, llm, named):
    """A model inside the checkpoint's folder is named relatively, one elsewhere absolutely; a hub
    id as it is."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TOY / "llm", llm)
    started(tmp_path, monkeypatch, llm=llm, output="out")
    adapter = json.loads(Path("out/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == named.format(here=tmp_path)
    shutil.move("out", "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_narrator(str(tmp_path / "moved")).config.vision == nar.Config.vision


# ------------------------------------------------------------------ the toy

def test_toy_runs_all_stages_in_order(tmp_path, monkeypatch, capsys):
    """All of --data toy in miniature: its stages, its options, a checkpoint with its own models
    that can be moved."""
    few_pictures = {"batch": 2, "videos": 2, "each": 2}
    monkeypatch.setattr(stages, "encoder", partial(stages.encoder, **few_pictures))
    monkeypatch.setattr(stages, "language", partial(stages.language, batch=2))
    steps = {"encoder": 2, "language": 2, "look": 1, "recall": 3}
    monkeypatch.setattr(stages, "STEPS", steps)
    fit = train.fit
    stages_run = []

    def recorded_fit(stage, parameters, backward, steps, lr, options, *validate):
        stages_run.append((stage, steps, lr))
        fit(stage, parameters, backward, steps, lr, options, *validate)

    for module in (train, toy_train):
        monkeypatch.setattr(module, "fit", recorded_fit)
    out = tmp_path / "out"
    train_command.train(train.Options(data="toy", output=str(out), limit=2, batch=1, epochs=0.5,
                                      lora_rank=4, idle=1.0))
    plan = ("stages: encoder (2 steps), language (2 steps), look (1 steps), recall (3 steps), "
            "narrator (1 steps); about 1 min on two cores")
    assert plan in capsys.readouterr().err
    assert stages_run == [
        ("encoder", 2, 1.5e-3),
        ("language", 2, 2e-3),
        ("look", 1, 7e-4),
        ("recall", 3, 7e-4),
        ("narrator", 1, 7e-4),
    ]
    out.rename(tmp_path / "moved")
    model = load_narrator(str(tmp_path / "moved"))
    config = model.config
    assert (config.memory_target, config.last_k, config.width) == (True, 10, 128)
    assert config.vision == str(tmp_path / "moved" / "vision")


def test_the_plan_says_how_long(monkeypatch):
    """Stages, videos that are rendered and encoded, and the paper's own training."""
    seconds = {"look": 0.1, "recall": 0.2, "video": 0.3, "narrator": 0.05}
    monkeypatch.setattr(stages, "SECONDS", seconds)
    options = train.Options(data="toy", limit=100, batch=4, epochs=2.0)
    # 140 + 240 + 30 + 10 seconds
    assert toy_train.plan_in_words(["look", "recall"], options) == (
        "stages: look (1400 steps), recall (1200 steps), narrator (50 steps); "
        "about 7 min on two cores of an AMD EPYC with nothing else running")


def test_quick_starts_from_what_others_have_learned(tmp_path, monkeypatch, capsys):
    """Its models are the bundled ones, there is one stage, and given options win."""
    out = tmp_path / "out"
    options = train.Options(data="toy", quick=True, output=str(out), limit=2, epochs=1.0)
    assert (options.no_recall, options.limit, options.batch) == (True, 2, 2)
    assert Path(options.vision) == TOY / "vision" and Path(options.llm) == TOY / "llm"
    train_command.train(options)
    assert "stages: narrator (1 steps)" in capsys.readouterr().err
    assert load_narrator(str(out)).config.vision == str((TOY / "vision").resolve())
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--data", "ego4d", "--quick")


def test_toy_of_one_token_and_with_a_narration_memory(tmp_path, monkeypatch):
    """--grid 0 --narration-memory 5: last_k is 0 unless it is given, features have a file of their
    own."""
    shutil.copytree(TOY / "vision", tmp_path / "vision")
    monkeypatch.setattr(stages, "STEPS", {"look": 1, "recall": 1})
    given = {"data": "toy", "limit": 2, "batch": 2, "epochs": 1.0, "lora_rank": 4,
             "llm": str(TOY / "llm"), "vision": str(tmp_path / "vision"), "long": 1.0, "grid": 0,
             "narration_memory": 5}
    out = str(tmp_path / "out")
    train_command.train(train.Options(**given, output=out))
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"out", "vision", "features0.safetensors"}
    model = load_narrator(out)
    assert (model.config.J, model.config.last_k) == (1, 0)
    assert (model.layout.history_tokens, model.layout.M) == (5, 10)

    fine_tuned = str(tmp_path / "fine-tuned")
    train_command.train(train.Options(data="toy", init=out, output=fine_tuned, limit=1, batch=1))
    assert load_narrator(fine_tuned).config.narration_memory == 5
    pictures = torch.zeros(2, 96, 96, 3, dtype=torch.uint8)
    assert model.vision_encoder()(pictures).shape == (2, 1, 128)
    with pytest.raises(BadData, match="last_k = 3: narration_memory"):
        train_command.train(train.Options(**given, last_k=3, output=str(tmp_path / "other")))
    assert train.Options(data="toy").last_k == 10
    assert train.Options(narration_memory=5).last_k == 0


def test_fine_tuning_on_the_toy(tmp_path):
    """--data toy --init: the checkpoint's own models and settings, the last stage alone, nothing
    written beside it."""
    before = sorted(TOY.rglob("*"))
    train_command.train(train.Options(data="toy", init=str(TOY), output=str(tmp_path), limit=2,
                                      batch=1, epochs=0.5, lr=1e-9))
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["narrator-log.jsonl"]
    assert sorted(TOY.rglob("*")) == before
    first = load_narrator(str(TOY))
    second = load_narrator(str(tmp_path))
    assert asdict(second.config) == asdict(first.config)
    assert Path(second.config.llm) == TOY / "llm"
    # LoRA on the language model that it belongs to
    assert losses(tmp_path)[0] < 1


# ------------------------------------------------------------------ the data sets' files

def test_annotated_training_reads_only_its_range(tmp_path):
    epic(tmp_path)
    samples = [data.shorten(sample, 6) for sample in data.load_dataset("ek100", tmp_path, "train")]
    lengths = []

    def recorded(read):
        def read_and_record(start, stop):
            lengths.append(stop - start)
            return read(start, stop)
        return read_and_record

    for sample in samples:
        sample.read = recorded(sample.read)
    annotated = train.Annotated(samples, tiny(width=16))
    assert [len(annotated[i].x) for i in range(len(annotated))] == lengths
    assert lengths == [sample.num_frames for sample in samples]
    assert max(lengths) <= 6


@pytest.mark.parametrize("file, content, message", [
    ("features_metadata.json", None, "features_metadata.json"),
    ("features.safetensors", None, "train_0"),
    ("annotations/refined_train_narrations.json", "{", "not JSON"),
])
def test_broken_data_is_one_line(tmp_path, file, content, message):
    """A file is missing (content None) or damaged."""
    epic(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    options = train.Options(data="ek100", root=str(tmp_path), output=str(tmp_path / "out"),
                            llm=str(TOY / "llm"), device="cpu")
    with pytest.raises(BadData, match=message):
        train_command.train(options)


@pytest.mark.parametrize("options, command", [
    ({"data": "toy", "world": "second", "output": "out/toy"},
     "evaluate.py stream --data toy --world second --model out/toy"),
    ({"data": "videos", "output": "out/mine"}, "evaluate.py stream --data videos --model out/mine"),
    ({"data": "ek100", "root": "/data/epic", "output": "x"},
     "evaluate.py stream --data ek100 --root /data/epic --model x"),
])
def test_the_next_command(options, command):
    assert train_command.next_command(train.Options(**options)) == f"python {command}"


def test_command_without_data_says_what_to_do(tmp_path, monkeypatch, capsys):
    """What to fetch, where to put it, and how to try the toy instead; nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "ego4d"])
    with pytest.raises(SystemExit) as end:
        train_command.main()
    errors = capsys.readouterr().err
    assert end.value.code == 1
    assert "Traceback" not in errors
    assert 3 <= len(errors.splitlines()) <= 8
    for needed in ("refined_narration_stream_train.json", "FlowNar-Data", "data/ego4d/features",
                   "data.py encode", "--data toy"):
        assert needed in errors, needed
    assert list(tmp_path.iterdir()) == []
