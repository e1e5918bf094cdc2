"""Training (§3.5, App. B.6): the loop, exact resumption, the recipe, the command line."""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import data
import narrator as nar
import train
from baselines.variants import load_narrator
from commands import train as train_command
from helpers import ROOT, TOY, tiny, two_ranks, video
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
def test_resume_with_other_settings_is_refused(tmp_path, change, message):
    """Except those that do not change the result (message None)."""
    given = {"output": str(tmp_path), "batch": 2, "epochs": 0.34, "lr": 1e-3}
    train.train_narrator(tiny(), examples(tiny()), train.Options(**given))
    options = train.Options(**given | change, resume=True)
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
        train.train_narrator(tiny(lora_rank=5), examples(tiny()), train.Options(**given, resume=True))
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
    """As on one process: zeros would count as a step of Adam and let the parameter drift by its momentum."""
    monkeypatch.setattr(training, "rank", lambda: (0, 2))
    monkeypatch.setattr(training.dist, "all_reduce", lambda flat: flat.mul_(2))
    parameters = {name: torch.nn.Parameter(torch.ones(2, 3)) for name in "ab"}
    parameters["a"].grad = torch.full((2, 3), 0.5)
    training.sum_gradients(parameters)
    assert parameters["b"].grad is None and torch.equal(parameters["a"].grad, torch.ones(2, 3))


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
        train.train_narrator(model, train.Annotated(samples, model.layout), options)
    assert len(losses(tmp_path / "out")) == 2


# ------------------------------------------------------------------ other language models

def trained(model, folder):
    """A few steps on one video: the losses of the first and the last."""
    folder.mkdir()
    train.train_narrator(model, examples(model, 1), train.Options(output=str(folder), batch=1, epochs=12.0, lr=3e-3))
    return losses(folder)[0], losses(folder)[-1]


def test_bf16_base_with_fp32_lora(tmp_path):
    """The base stays as it is in bf16; all that is trained is fp32, and loads as it was saved."""
    config = tiny().config
    model = nar.Narrator(*checkpoint.load_llm(config.llm, torch.bfloat16), config)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    first, last = trained(model, tmp_path / "out")
    assert last < 0.9 * first
    assert all(p.dtype == torch.float32 for p in model.trainable().values())
    parameters = dict(model.named_parameters())
    assert all(p.dtype == torch.bfloat16 and torch.equal(p, parameters[name]) for name, p in frozen.items())
    model.save(tmp_path / "saved")
    again = load_narrator(str(tmp_path / "saved"), dtype=torch.bfloat16)
    assert all(p.dtype == torch.float32 and torch.equal(p, again.trainable()[n]) for n, p in model.trainable().items())
    with torch.no_grad():
        x, narrations = video(model)
        assert torch.equal(model(x, narrations)[0], again(x, narrations)[0])


def test_grouped_query_attention(tmp_path):
    """Fewer heads for keys and values than for queries, as in Llama 3: every LoRA matrix learns."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    tokenizer = checkpoint.load_tokenizer(str(TOY / "llm"))
    llm = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
                                       num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
    config = nar.Config(width=32, memory_tokens=4, memory_heads=2, lora_rank=4, lora_dropout=0.0)
    model = nar.Narrator(llm, tokenizer, config)
    assert model.trainable()["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"].shape == (16, 4)
    first, last = trained(model, tmp_path / "out")
    assert last < 0.9 * first
    assert all(p.abs().sum() > 0 for name, p in model.trainable().items() if "lora_B" in name)


# ------------------------------------------------------------------ training on annotated data sets

def epic(root, videos=6, width=16):
    """EPIC-Kitchens in its published layout, in miniature."""
    (root / "annotations").mkdir(parents=True)
    things = ["red cup", "blue pan", "green bowl", "knife"]
    rows = [{"time": 0.4 + 2.3 * i, "text": f"You wash the {thing}."} for i, thing in enumerate(things)]
    for split in ("train", "val"):
        content = {f"{split}_{n}": rows[:2 + n % 3] for n in range(videos)}
        (root / "annotations" / f"refined_{split}_narrations.json").write_text(json.dumps(content))
    names = [f"{split}_{n}" for split in ("train", "val") for n in range(videos)]
    metadata = {name: {"duration": 10.0, "path": f"{name}.pt"} for name in names}
    (root / "features_metadata.json").write_text(json.dumps(metadata))
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(21, 10, width, generator=generator) for name in names}, root / "features.safetensors")


def arguments(root, output, *more, processes=1):
    launcher = [sys.executable] if processes == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone",
                                                        "--nproc-per-node", str(processes)]
    line = [*launcher, ROOT / "train.py", "--data", "ek100", "--root", root, "--output", output, "--llm", TOY / "llm",
            "--vision", TOY / "vision", "--memory-heads", 2, "--memory-tokens", 4, "--memory-dropout", 0,
            "--lora-rank", 4, "--lora-dropout", 0, "--batch", 4, "--epochs", 2, "--lr", 1e-4, "--val-limit", 2,
            "--device", "cpu", *more]
    return list(map(str, line))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The data set, and the output of the same training on one process (this one) and on two."""
    folder = tmp_path_factory.mktemp("whole")
    epic(folder / "root", videos=12)
    run = subprocess.run(arguments(folder / "root", folder / "2", processes=2), cwd=ROOT, capture_output=True,
                         text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-2000:]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", arguments(folder / "root", folder / "1")[1:])
        train_command.main()
    assert end.value.code == 0
    return folder


def test_two_processes_are_one(whole):
    """The same losses and weights from two gloo processes as from one with twice the accumulation."""
    logs = [[json.loads(line) for line in (whole / n / "narrator-log.jsonl").read_text().splitlines()] for n in "12"]
    assert [len(log) for log in logs] == [6, 6]
    for key, entries in (("loss", [0, 1, 2, 3, 4, 5]), ("val_loss", [2, 5])):
        one, two = ([log[n][key] for n in entries] for log in logs)
        assert one == pytest.approx(two, abs=1e-4), [a - b for a, b in zip(one, two)]
    one, two = (load_narrator(str(whole / n)).trainable() for n in "12")
    assert all(torch.allclose(w, two[name], atol=1e-4) for name, w in one.items())


def ended(line, folder, how, environments):
    """Start a process in each environment and send all of them a signal as soon as there is a state; the processes."""
    running = [subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
               for environment in environments]
    while running[0].poll() is None and not (folder / "narrator-state.safetensors").exists():
        time.sleep(0.005)
    for one in running:
        one.send_signal(how)
    return running


def test_killed_training_is_resumed(whole, tmp_path):
    """Two processes, kill -9 in the middle, --resume: the losses and weights of the run that was never killed."""
    line = arguments(whole / "root", tmp_path, "--save-every", 1)
    for one in ended(line, tmp_path, signal.SIGKILL, two_ranks()):
        one.communicate()
    assert not (tmp_path / "adapter_model.safetensors").exists()
    again = [subprocess.Popen([*line, "--resume"], cwd=ROOT, stderr=subprocess.DEVNULL, env=environment)
             for environment in two_ranks()]
    assert [one.wait() for one in again] == [0, 0]
    assert losses(tmp_path) == losses(whole / "2")
    one, two = (load_file(folder / "adapter_model.safetensors") for folder in (whole / "2", tmp_path))
    assert all(torch.equal(w, two[name]) for name, w in one.items())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_exits_with_130(how, whole, tmp_path):
    """And so does SIGTERM, by which schedulers end a job."""
    line = arguments(whole / "root", tmp_path / "out", "--save-every", 1, "--epochs", 1000)
    process, = ended(line, tmp_path / "out", how, [os.environ | {"OMP_NUM_THREADS": "1"}])
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and said.splitlines()[-1] == "interrupted" and "Traceback" not in said
    with safe_open(tmp_path / "out" / "narrator-state.safetensors", "pt") as file:
        assert int(file.metadata()["step"]) >= 1


# ------------------------------------------------------------------ options

WRONG = {"data": "ego5d", "start": "zero", "memory": "clamm", "memory_tokens": "0", "memory_heads": "2.5",
         "readout": "last", "last_k": "-1", "lr": "nan", "warmup": "nan", "clip": "-1", "batch": "0", "epochs": "inf",
         "lora_rank": "x", "lora_alpha": "0", "lora_dropout": "1.5", "memory_dropout": "-0.1", "long": "2",
         "restart": "2", "max_frames": "0", "val_limit": "-1", "dtype": "nonsense", "limit": "0", "seed": "-1",
         "save_every": "0", "world": "noon", "idle": "1.1", "mod_keep": "1.1", "narration_memory": "-1",
         "width_second": "-1", "llm_width": "0", "grid": "-1"}


def parsed(monkeypatch, *line):
    monkeypatch.setattr(sys, "argv", ["train.py", *line])
    return train_command.parse()


def test_invalid_options_are_refused_at_once(monkeypatch, capsys):
    """Before an hour of training, not after: exit code 2, and the last line names the option."""
    names = {f.name for f in fields(train.Options) if f.default is not False}
    assert names - WRONG.keys() == {"root", "output", "llm", "vision", "look", "init", "device"}   # checked later
    lines = [["--" + name.replace("_", "-"), value] for name, value in WRONG.items()]
    lines += [["--start", "published", "--init", "x"], ["--data", "toy", "--max-frames", "9"],
              ["--data", "toy", "--device", "cuda"], ["--data", "ek100", "--idle", "0.5"], ["--world", "hard"],
              ["--data", "ek100", "--grid", "0"]]
    for line in lines:
        with pytest.raises(SystemExit) as exit:
            parsed(monkeypatch, *line)
        assert exit.value.code == 2 and line[-2] in capsys.readouterr().err.splitlines()[-1], line


def test_options_know_what_was_given(monkeypatch, capsys):
    options = parsed(monkeypatch, "--data", "toy", "--last-k", "0", "--no-prune")
    assert options.given == {"data", "last_k", "no_prune"}
    assert options.last_k == 0 and options.batch == stages.DEFAULTS["batch"]
    with pytest.raises(TypeError, match="bach"):
        train.Options(bach=3)
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--help")
    assert "(toy: 4)" in capsys.readouterr().out


@pytest.mark.parametrize("given, says", [({"memory_heads": 3}, "heads"), ({"device": "nonsense"}, "--device"),
                                         ({"root": "nowhere"}, "nowhere"), ({"llm": "./nowhere"}, "nowhere"),
                                         ({"init": "./nowhere"}, "nowhere")])
def test_options_that_do_not_fit_are_refused(tmp_path, given, says):
    """In one line, exit code 1, before anything is written."""
    epic(tmp_path / "root")
    with pytest.raises(BadData, match=says) as caught:
        train_command.train(train.Options(**{"data": "ek100", "root": str(tmp_path / "root"), "output": str(tmp_path / "out"),
                                     "llm": str(TOY / "llm"), "device": "cpu", "memory_heads": 2} | given))
    assert not (tmp_path / "out").exists() and (says == "nowhere" or "\n" not in str(caught.value))


def test_a_finished_narrator_is_not_replaced_unasked(tmp_path, monkeypatch):
    """--overwrite does it; --resume, which goes on, needs no leave."""
    tiny(width=16).save(tmp_path / "out")
    before = {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    trained = []
    monkeypatch.setattr(train_command, "train_annotated", trained.append)
    given = {"data": "ek100", "output": str(tmp_path / "out")}
    with pytest.raises(BadData, match="out holds a finished narrator; choose another --output, or give --overwrite"):
        train_command.train(train.Options(**given))
    assert not trained and before == {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    for more in ({"overwrite": True}, {"resume": True}, {"output": str(tmp_path / "another")}):
        train_command.train(train.Options(**given | more))
    assert len(trained) == 3


def test_toy_refuses_before_it_trains(tmp_path):
    with pytest.raises(BadData, match="heads"):
        train_command.train(train.Options(data="toy", memory_heads=3, output=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------ --init

SAVED = {"width": 16, "memory_tokens": 3, "readout": "cls", "last_k": 4, "memory_dropout": 0.2, "lora_dropout": 0.3}
FREE = {"last_k": 7, "readout": "frame", "memory_dropout": 0.0, "lora_dropout": 0.0, "llm": str(TOY / "llm"),
        "vision": "owner/name"}
FIXED = {"memory": "none", "memory_tokens": 4, "memory_heads": 4, "lora_rank": 8, "lora_alpha": 16, "no_prune": True,
         "mod_keep": 0.2, "narration_memory": 4, "grid": 2, "width_second": 4}


def test_every_option_of_a_narrator_is_tested_with_init():
    about = {f.name for f in fields(train.Options)} & {f.name for f in fields(nar.Config)}
    assert FREE.keys() | FIXED.keys() == about | {"no_prune"}


@pytest.mark.parametrize("given", [{}, *({name: value} for name, value in FREE.items()), {"last_k": None}, FREE])
def test_init_takes_what_is_given_and_keeps_the_rest(tmp_path, given):
    first = tiny(**SAVED)
    first.save(tmp_path)
    second = train.pretrained(train.Options(init=str(tmp_path), **given))
    assert asdict(second.config) == asdict(first.config) | given
    assert second.layout.M == 3 and second.connector[0].in_features == 16
    assert all(torch.equal(p, second.trainable()[name]) for name, p in first.trainable().items())


@pytest.mark.parametrize("name, value", FIXED.items())
def test_init_refuses_what_its_weights_are_not_made_for(tmp_path, name, value):
    tiny(**SAVED).save(tmp_path)
    with pytest.raises(BadData) as caught:
        train.pretrained(train.Options(init=str(tmp_path), **{name: value}))
    message = str(caught.value)
    assert "--" + name.replace("_", "-") in message and f"--init {tmp_path}" in message and "\n" not in message
    same = {"memory": "clam", "memory_tokens": 3, "memory_heads": 2, "lora_rank": 4, "lora_alpha": 8, "no_prune": False,
            "mod_keep": None, "narration_memory": 0, "grid": 3, "width_second": 0}
    assert train.pretrained(train.Options(init=str(tmp_path), **{name: same[name]})).config.memory_tokens == 3


def test_fine_tuning(tmp_path):
    """--init keeps the weights, memory and read-out of the checkpoint; features of another width are refused."""
    epic(tmp_path / "root")
    first = tiny(**SAVED)
    first.save(tmp_path / "first")
    given = dict(data="ek100", root=str(tmp_path / "root"), output=str(tmp_path / "second"), batch=4, epochs=0.5,
                 lr=1e-9, val_limit=0, device="cpu")
    train_command.train(train.Options(**given, init=str(tmp_path / "first")))
    second = load_narrator(str(tmp_path / "second"))
    assert asdict(second.config) == asdict(first.config)
    assert all(torch.allclose(p, second.trainable()[name], atol=1e-6) for name, p in first.trainable().items())
    tiny(width=32).save(tmp_path / "wide")
    with pytest.raises(BadData, match="16 wide"):
        train_command.train(train.Options(**given, init=str(tmp_path / "wide"), overwrite=True))


# ------------------------------------------------------------------ --start, and what a checkpoint names

def started(tmp_path, monkeypatch, **given):
    """The narrator that training begins with."""
    if not (tmp_path / "root").exists():
        epic(tmp_path / "root", width=32)
    models = []
    monkeypatch.setattr(train, "train_narrator", lambda narrator, *_: models.append(narrator))
    usual = {"data": "ek100", "root": str(tmp_path / "root"), "output": str(tmp_path / "out"), "device": "cpu",
             "llm": str(TOY / "llm"), "lora_rank": 4, "memory_heads": 2, "memory_tokens": 8}
    train_command.train(train.Options(**usual | given))
    return models[0]


def test_start_published(tmp_path, monkeypatch):
    """N(0, 0.02), in_proj Xavier, biases 0, norms 1, LoRA's B 0; no learned targets; read after the frame."""
    model = started(tmp_path, monkeypatch)
    assert not model.config.memory_target and model.config.readout == "frame"
    for name, p in [*model.memory.named_parameters(), *model.connector.named_parameters()]:
        if p.dim() == 1:
            assert p.eq(0 if name.endswith("bias") else 1).all(), name
        elif "in_proj" in name:
            assert p.abs().max() < (6 / (3 * 32 + 32)) ** 0.5 and p.std() > 0.1
        else:
            assert 0.015 < p.std() < 0.025 and p.mean().abs() < 0.005, name
    for name, p in model.trainable().items():
        if "lora_" in name:
            assert p.eq(0).all() if "lora_B" in name else p.abs().sum() > 0


def test_start_statistics(tmp_path, monkeypatch):
    """Learned targets, decays near 1, and a connector that standardises the features, on any data set."""
    model = started(tmp_path, monkeypatch, start="statistics")
    assert model.config.memory_target and model.memory.target.abs().sum() > 0
    bias = model.trainable()["base_model.model.clustering.layers.0.multihead_attn.gk_proj.1.bias"]
    assert bias.tolist() == pytest.approx([4.0] * 8 + [8.0] * 8)
    x = train.Annotated(list(data.load_dataset("ek100", tmp_path / "root", "train")), model.layout)[0].x
    assert model.connector[0](x[:, 1:]).mean((0, 1)).abs().max() < 0.5 and model.connector[0].bias.abs().sum() > 0


def test_a_new_toy_narrator_starts_from_statistics():
    assert train.Options(data="toy").start == "statistics" and train.Options(data="ek100").start == "published"


@pytest.mark.parametrize("inside", [True, False])
def test_checkpoint_with_a_relative_llm_can_be_moved(tmp_path, monkeypatch, inside):
    """A model inside the checkpoint's folder is named relatively, one elsewhere absolutely; a hub id as it is."""
    monkeypatch.chdir(tmp_path)
    where = Path("out/llm" if inside else "llm")
    shutil.copytree(TOY / "llm", where)
    started(tmp_path, monkeypatch, llm=str(where), output="out")
    there = json.loads(Path("out/adapter_config.json").read_text())["base_model_name_or_path"]
    assert there == ("llm" if inside else str(tmp_path / "llm"))
    shutil.move("out", "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_narrator(str(tmp_path / "moved")).config.vision == nar.Config.vision


# ------------------------------------------------------------------ the toy

def test_toy_runs_all_stages_in_order(tmp_path, monkeypatch):
    """All of --data toy in miniature: its stages, its options, a checkpoint with its own models that can be moved."""
    monkeypatch.setattr(stages, "encoder", partial(stages.encoder, steps=2, batch=2, videos=2, each=2))
    monkeypatch.setattr(stages, "language", partial(stages.language, steps=2, batch=2))
    monkeypatch.setattr(stages, "STEPS", {"look": 1, "remember": 2, "recall": 3})
    fit, ran = train.fit, []

    def recorded_fit(stage, parameters, backward, steps, lr, options, *validate):
        ran.append((stage, steps, lr))
        fit(stage, parameters, backward, steps, lr, options, *validate)

    for module in (train, toy_train):
        monkeypatch.setattr(module, "fit", recorded_fit)
    out = tmp_path / "out"
    train_command.train(train.Options(data="toy", output=str(out), limit=2, batch=1, epochs=0.5, lora_rank=4, idle=1.0))
    assert ran == [("encoder", 2, 1.5e-3), ("language", 2, 2e-3), ("look", 1, 7e-4), ("remember", 2, 1e-3),
                   ("recall", 3, 7e-4), ("narrator", 1, 7e-4)]
    out.rename(tmp_path / "moved")
    model = load_narrator(str(tmp_path / "moved"))
    assert (model.config.memory_target, model.config.last_k, model.config.width) == (True, 10, 128)
    assert model.config.vision == str(tmp_path / "moved" / "vision")


def test_toy_of_one_token_and_with_a_narration_memory(tmp_path, monkeypatch):
    """--grid 0 --narration-memory 5: last_k is 0 unless it is given, features have a file of their own."""
    shutil.copytree(TOY / "vision", tmp_path / "vision")
    monkeypatch.setattr(stages, "STEPS", {"look": 1, "remember": 1, "recall": 1})
    given = {"data": "toy", "limit": 2, "batch": 2, "epochs": 1.0, "lora_rank": 4, "llm": str(TOY / "llm"),
             "vision": str(tmp_path / "vision"), "long": 1.0, "grid": 0, "narration_memory": 5}
    train_command.train(train.Options(**given, output=str(tmp_path / "out")))
    assert {path.name for path in tmp_path.iterdir()} == {"out", "vision", "features0.safetensors"}
    model = load_narrator(str(tmp_path / "out"))
    assert (model.config.J, model.config.last_k, model.layout.history_tokens, model.layout.M) == (1, 0, 5, 10)
    train_command.train(train.Options(data="toy", init=str(tmp_path / "out"), output=str(tmp_path / "more"), limit=1, batch=1))
    assert load_narrator(str(tmp_path / "more")).config.narration_memory == 5
    assert model.vision_encoder()(torch.zeros(2, 96, 96, 3, dtype=torch.uint8)).shape == (2, 1, 128)
    with pytest.raises(BadData, match="last_k = 3: narration_memory"):
        train_command.train(train.Options(**given, last_k=3, output=str(tmp_path / "other")))
    assert train.Options(data="toy").last_k == 10 and train.Options(narration_memory=5).last_k == 0


def test_fine_tuning_on_the_toy(tmp_path, monkeypatch):
    """--data toy --init: the checkpoint's own models and settings, the last stage alone, nothing written beside it."""
    before = sorted(TOY.rglob("*"))
    train_command.train(train.Options(data="toy", init=str(TOY), output=str(tmp_path), limit=2, batch=1, epochs=0.5, lr=1e-9))
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["narrator-log.jsonl"]
    assert sorted(TOY.rglob("*")) == before
    first, second = load_narrator(str(TOY)), load_narrator(str(tmp_path))
    assert asdict(second.config) == asdict(first.config) and Path(second.config.llm) == TOY / "llm"
    assert losses(tmp_path)[0] < 1                                      # LoRA on the language model that it belongs to


# ------------------------------------------------------------------ the data sets' files

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
        train_command.train(train.Options(data="ek100", root=str(tmp_path), output=str(tmp_path / "out"), llm=str(TOY / "llm"),
                                  device="cpu"))


def test_command_without_data_says_what_to_do(tmp_path, monkeypatch, capsys):
    """What to fetch, where to put it, and how to try the toy instead; nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "ego4d"])
    with pytest.raises(SystemExit) as end:
        train_command.main()
    said = capsys.readouterr().err
    assert end.value.code == 1 and "Traceback" not in said and 3 <= len(said.splitlines()) <= 8
    for needed in ("refined_narration_stream_train.json", "FlowNar-Data", "data/ego4d/features", "data.py encode",
                   "--data toy"):
        assert needed in said, needed
    assert list(tmp_path.iterdir()) == []
