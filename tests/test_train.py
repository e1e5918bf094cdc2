"""Training (§3.5, App. B.6): the recipe, the loop, exact resumption, the command line."""
import json
import operator
import shutil
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import data
import narrator as nar
import train
from narrator import load
from beyond.commands import train_command
from beyond.commands.train_command import Options, options_from
from helpers import TOY, save_features, tiny, video
from beyond.training.late import LateExample, late, memory_after
from support.common.disk import read_jsonl
from support.common.figures import save_figure
from support.common.errors import BadData
from beyond.training import run as engine
from beyond.training.card import write_card
from beyond.training.run import cut_log
from support.engine.first_weights import first_weights
from toy import stages, world


def examples(model, count=6, at=(0, 2, 5)):
    return [train.Example(*video(model, frames=6, at=at, seed=seed)) for seed in range(count)]


def reads(videos):
    return [partial(operator.getitem, videos, i) for i in range(len(videos))]


def train_on(model, videos, options, held_out=()):
    """Train a narrator on videos in memory, validated after each epoch."""
    validate = partial(train.mean_loss, model, reads(held_out)) if len(held_out) else None
    every = train_command.steps_to_validation(options, len(videos))
    videos_of = train.in_order(reads(videos), options.batch, options.seed)
    with engine.Run("narrator", options, validate, every) as run:
        train.train(model, videos_of, train.number_of_steps(options, len(videos)), options, run)


def log_of(folder):
    return read_jsonl(folder / "narrator-log.jsonl")


def test_defaults_are_the_paper():
    recipe = options_from()
    config = nar.Config(**recipe.narrator)
    assert (recipe.lr, recipe.warmup, recipe.clip) == (2e-4, 0.05, 1.0)
    assert (recipe.batch, recipe.epochs) == (64, 2.0)
    assert (config.lora_rank, config.lora_alpha) == (128, 256)
    assert (config.memory, config.memory_tokens, config.last_k) == ("clam", 20, None)


def test_order_covers_every_epoch():
    indices = [index for step in range(6) for index in train.order(8, 4, step, seed=3)]
    first, second, third = indices[:8], indices[8:16], indices[16:]
    assert sorted(first) == sorted(second) == sorted(third) == list(range(8))
    assert first != second
    assert train.order(8, 4, 1, seed=4) != first[4:]


@pytest.mark.parametrize("variant", [{}, {"memory": "none", "prune": False, "mod_keep": 0.2}])
def test_checkpointing_changes_nothing(variant):
    gradients = []
    for checkpointing in (False, True):
        model = tiny(**variant).train()
        if checkpointing:
            engine.recompute_activations(model.llm)
        loss, _ = model.loss(*video(model))
        loss.backward()
        gradients.append([p.grad for p in model.trainable().values()])
    for without, with_checkpoints in zip(*gradients):
        assert torch.allclose(without, with_checkpoints, atol=1e-6)


def test_late_in_a_long_stream():
    """--long: the memory of other videos, and a far position; the same in every run."""
    model = tiny()
    videos = reads(examples(model, 3))
    videos_of = late(train.in_order(videos, 40, seed=0), videos, share=0.5, seed=0)

    def drawn(step):
        return [read() for read in videos_of(step)]

    are_late = [one for one in drawn(0) if isinstance(one, LateExample)]
    assert 10 < len(are_late) < 30
    assert all(1 <= one.tokens <= 100_000 and 1 <= len(one.earlier) <= 3 for one in are_late)
    first, *_ = are_late
    state = memory_after(model, first.earlier)
    assert state.abs().sum() > 0 and not state.requires_grad
    plain, _ = train.Example(first.x, first.narrations).loss(model)
    assert first.loss(model)[0] != plain
    now, again, later = ([getattr(one, "tokens", None) for one in drawn(step)] for step in (0, 0, 1))
    assert now == again != later


class Killed(Exception):
    """In place of kill -9."""


class Stopping(list):
    """Videos of which one stops the training: when the `at`th is read, counted from 0."""

    def __init__(self, videos, at, error):
        super().__init__(videos)
        self.at = at
        self.error = error
        self.read = 0

    def __getitem__(self, index):
        if self.read == self.at:
            raise self.error
        self.read += 1
        return super().__getitem__(index)


def few_memories(model):
    """Six videos of which three need no memory: a step of two of them gives CLAM no gradient."""
    return examples(model, 3) + examples(model, 3, at=(0,))


def run(folder, videos=few_memories, at=None, error=None, held_out_at=None, **given):
    """Train six steps of two videos -> the model, and how many videos were read. An error stops it
    where the `at`th is read, or the `held_out_at`th in the validation, every three steps.
    """
    torch.manual_seed(1)
    model = tiny(memory_dropout=0.1, lora_dropout=0.1)
    stopping = Stopping(videos(model), at, error)
    given = {"batch": 2, "epochs": 2.0, "lr": 1e-3, "save_every": 2} | given
    options = Options(output=str(folder), **given)
    with nullcontext() if error is None else pytest.raises(error):
        held_out = Stopping(examples(model, 1), held_out_at, error)
        train_on(model, stopping, options, held_out)
    return model, stopping.read


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    model, _ = run(folder)
    assert [row["step"] for row in log_of(folder) if "val_loss" in row] == [2, 5]
    return model, log_of(folder)


@pytest.mark.parametrize("stop, left", [
    # killed in the last step: from the last saved state
    ({"at": 11, "error": Killed}, 4),
    # whatever else ends it: nothing is lost, whatever --save-every says
    ({"held_out_at": 0, "error": KeyboardInterrupt, "save_every": 50}, 6),
], ids=["killed", "ctrl-c while it validates"])
def test_resumed_is_as_if_never_interrupted(whole, tmp_path, capsys, monkeypatch, stop, left):
    expected, expected_log = whole
    with monkeypatch.context() as patch:
        if stop["error"] is Killed:            # nothing of the process is left to save
            patch.setattr(engine.Run, "__exit__", lambda run, *_: None)
        run(tmp_path, **stop)
    done = 6 - left // 2
    says = f"narrator: {done} of 6 steps are saved; the same command with --resume goes on"
    assert (says in capsys.readouterr().err) == (stop["error"] is not Killed)
    resumed, videos_read = run(tmp_path, resume=True)
    assert videos_read == left and log_of(tmp_path) == expected_log
    for name, p in expected.trainable().items():
        assert torch.equal(p, resumed.trainable()[name]), name


def test_a_state_of_other_settings_or_steps_or_a_damaged_one_is_refused(tmp_path):
    """Except settings that do not change the result."""
    def go(count=6, **others):
        given = {"output": str(tmp_path), "batch": 2, "epochs": 0.34, "lr": 1e-3, "resume": True}
        train_on(tiny(), examples(tiny(), count), Options(**given | others))

    go(resume=False)
    go(save_every=7, val_limit=0, checkpointing=True, device="cpu")
    with pytest.raises(BadData, match="made with lr = 0.001, here 0.002; use the same settings"):
        go(lr=2e-3)
    with pytest.raises(BadData, match="steps = 1, here 2"):
        go(count=10)
    (tmp_path / "narrator-state.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(BadData, match="damaged"):
        go()


def test_a_damaged_log_does_not_stop_a_training(tmp_path):
    """What a loss of power leaves: zeros, bytes of other files, half a line."""
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(4)]
    log = tmp_path / "log.jsonl"
    log.write_bytes("".join(lines).encode() + b"\0\0\0\n\xff\xfe{\n{\"step\": 4")
    cut_log(log, 3)
    assert log.read_text() == "".join(lines[:3])


def test_a_card_counts_the_steps_whose_lines_are_lost(tmp_path):
    (tmp_path / "narrator-log.jsonl").write_text('{"step": 11, "loss": 1.5}\n')
    options = options_from(data="toy", output=str(tmp_path))
    write_card(nar.Config(), 2, options)
    assert "* Steps: 12\n" in (tmp_path / "README.md").read_text()


def test_many_epochs_are_validated_ten_times(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engine, "save_figure", save_figure)    # (tests/conftest.py)
    model = tiny()
    options = Options(output=str(tmp_path), batch=1, epochs=20.0, lr=1e-9)
    short = examples(model, 1, at=(0,))
    train_on(model, short, options, short)
    log = read_jsonl(tmp_path / "narrator-log.jsonl")
    validated = [row["step"] + 1 for row in log if "val_loss" in row]
    assert validated == list(range(2, 21, 2))
    losses_of = {row["step"] + 1: row["val_loss"] for row in log if "val_loss" in row}
    least = min(losses_of, key=losses_of.get)
    says = f"validation loss: {losses_of[least]:.3f} after {least} steps, its least; "
    assert says + f"{losses_of[20]:.3f} after 20" in capsys.readouterr().err
    assert (tmp_path / "narrator-loss.png").stat().st_size > 1000


def test_damaged_features_are_named(tmp_path):
    videos = examples(tiny())
    for one in videos:
        one.x[0, 0, 0] = float("nan")
    with pytest.raises(BadData, match="step 0: are features or weights damaged .NaN.\\?"):
        run(tmp_path, lambda model: videos)


def epic(root, videos=6, width=16):
    """EPIC-Kitchens in its published layout, in miniature."""
    (root / "annotations").mkdir(parents=True)
    things = ["red cup", "blue pan", "green bowl", "knife"]
    rows = [{"time": 0.4 + 2.3 * i, "text": f"You wash the {thing}."}
            for i, thing in enumerate(things)]
    names = [f"{split}_{n}" for split in ("train", "val") for n in range(videos)]
    for split in ("train", "val"):
        narrations = {f"{split}_{n}": rows[:2 + n % 3] for n in range(videos)}
        file = root / "annotations" / f"refined_{split}_narrations.json"
        file.write_text(json.dumps(narrations))
    metadata = {name: {"duration": 10.0, "path": f"{name}.pt"} for name in names}
    (root / "features_metadata.json").write_text(json.dumps(metadata))
    generator = torch.Generator().manual_seed(0)
    save_features(root, {name: torch.randn(21, 10, width, generator=generator) for name in names})


def given_for(folder, **given):
    """Options of a training of one step on folder/root, of width 16, written to folder/out."""
    if not (folder / "root").exists():
        epic(folder / "root")
    return {"data": "ek100", "root": str(folder / "root"), "output": str(folder / "out"),
            "device": "cpu", "llm": str(TOY / "llm"), "memory_heads": 2, "memory_tokens": 8,
            "lora_rank": 4, "batch": 4, "epochs": 0.5, "val_limit": 0} | given


def arguments(folder, **given):
    """`train.py ...`, as words: six steps, without dropout, validated after each epoch."""
    given = given_for(folder, vision=str(TOY / "vision"), memory_dropout=0, lora_dropout=0,
                      epochs=2, lr=1e-4, val_limit=2, **given)
    return ["train.py", *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())]


def test_examples_read_only_their_range(tmp_path):
    layout = tiny(width=16).layout
    for sample in train.load_samples(options_from(**given_for(tmp_path, max_frames=6)), "train", None):
        assert len(train.read_example(sample, layout).x) == sample.num_frames <= 6


def test_a_finished_narrator_is_not_replaced(tmp_path, capsys):
    given = given_for(tmp_path)
    out = tmp_path / "out"
    train_command.check_and_train(options_from(**given))
    line = f"next: python evaluate.py stream --data ek100 --root {tmp_path}/root --model {out}"
    assert line in capsys.readouterr().err
    for resume in (False, True):               # there is no state to go on with
        with pytest.raises(BadData, match="out holds a finished narrator; delete it"):
            train_command.check_and_train(options_from(**given, resume=resume))

    for stage, resume, says in (("narrator", False, "interrupted training; give --resume to go on"),
                                ("recall", True, "of a stage that this training has not")):
        state = out / f"{stage}-state.safetensors"
        state.touch()
        with pytest.raises(BadData, match=says):
            train_command.check_and_train(options_from(**given, resume=resume))
        state.unlink()                         # it is still there


def test_it_goes_on_in_the_format_in_which_it_began(tmp_path, monkeypatch):
    """--dtype auto is another one where there is a GPU; with the first one's name it goes on there."""
    given = given_for(tmp_path, save_every=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(nar.Narrator, "save", Mock(side_effect=KeyboardInterrupt))
        train_command.check_and_train(options_from(**given))
    auto = {"auto": torch.bfloat16, "float32": torch.float32}
    monkeypatch.setattr(train_command, "device_and_dtype", lambda device, dtype: ("cpu", auto[dtype]))
    with pytest.raises(BadData, match="--dtype = torch.float32, here torch.bfloat16"):
        train_command.check_and_train(options_from(**given, resume=True))
    train_command.check_and_train(options_from(**given, resume=True, dtype="float32"))


@pytest.mark.parametrize("llm, named", [("out/llm", "llm"), ("llm", "{here}/llm")])
def test_checkpoint_with_a_relative_llm_can_be_moved(tmp_path, monkeypatch, llm, named):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TOY / "llm", llm)
    train_command.check_and_train(options_from(**given_for(tmp_path, llm=llm, output="out")))
    adapter = json.loads(Path("out/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == named.format(here=tmp_path)
    shutil.move("out", "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load(str(tmp_path / "moved")).config.vision == nar.Config.vision


def test_options_know_what_was_given(monkeypatch):
    monkeypatch.setattr(sys, "argv", "train.py --data toy --no-prune --no-recall".split())
    options = train_command.parse()
    assert options.given.keys() == {"data", "prune", "recall"}
    assert (options.narrator["prune"], options.narrator["last_k"]) == (False, None)
    assert (options.recall, options.batch) == (False, train_command.TOY["batch"])
    assert options_from(data="toy").narrator["last_k"] == 10
    starts = {name: (options_from(data=name).start, options_from(data=name).connector_start)
              for name in ("toy", "ek100", "folder")}
    assert starts == {"toy": ("mimetic", "mimetic"), "ek100": ("published", "published"),
                      "folder": ("mimetic", "published")}


@pytest.mark.parametrize("given, message", [
    ({"memory_heads": 3}, "heads"),
    ({"device": "nonsense"}, "--device"),
    ({"data": "ego5d", "root": None}, "ego5d: no such folder; choose one of toy, ego4d"),
    ({"init": str(TOY)}, "features are 16 wide .* the narrator needs 128"),
])
def test_options_that_do_not_fit_are_refused(tmp_path, given, message):
    usual = given_for(tmp_path)
    if "init" in given:
        usual = {name: usual[name] for name in ("data", "root", "output", "device")}
    with pytest.raises(BadData, match=message) as error:
        train_command.check_and_train(options_from(**usual | given))
    assert not (tmp_path / "out").exists()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [
    {"last_k": None},
    {"last_k": 7, "readout": "frame", "memory_dropout": 0.0, "lora_dropout": 0.0,
     "llm": str(TOY / "llm"), "vision": "owner/name"},
], ids=str)
def test_init_takes_what_is_given_and_keeps_the_rest(tmp_path, given):
    tiny(width=16, memory_tokens=3, readout="cls", last_k=4, memory_dropout=0.2,
         lora_dropout=0.3).save(tmp_path)
    first = load(str(tmp_path))
    second = train.pretrained(options_from(init=str(tmp_path), **given))
    assert asdict(second.config) == asdict(first.config) | given
    for name, p in first.trainable().items():
        assert torch.equal(p, second.trainable()[name]), name


def begun(folder, **given):
    epic(folder / "root", width=32)
    options = options_from(**given_for(folder, **given))
    samples = list(data.load_dataset("ek100", options.root, "train"))
    narrator = train.narrator_for(options, samples[0], torch.float32)
    videos = [partial(train.read_example, sample, narrator.layout) for sample in samples]
    first_weights(narrator, options.start, options.connector_start, videos)
    return narrator, videos


def test_start_published(tmp_path):
    """N(0, 0.02), in_proj Xavier, biases 0, norms 1, LoRA's B 0; no learned targets."""
    model, _ = begun(tmp_path)
    assert not model.config.memory_target and model.config.readout == "frame"
    for name, p in model.trainable().items():
        if p.dim() == 1:
            assert p.eq(0 if name.endswith("bias") else 1).all(), name
        elif "lora_" in name:
            assert p.any() == ("lora_A" in name), name
        else:
            std = (2 / (3 * 32 + 32)) ** 0.5 if "in_proj" in name else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.25), name
            assert p.mean().abs() < std / 4, name


def test_start_mimetic(tmp_path):
    """Learned targets, decays near 1, standardised features; each alone leaves the other."""
    model, videos = begun(tmp_path, start="mimetic", connector_start="mimetic")
    assert model.config.memory_target and model.memory.target.abs().sum() > 0
    gate = "base_model.model.clustering.layers.0.multihead_attn.gk_proj.1.bias"
    assert model.trainable()[gate].tolist() == pytest.approx([4.0] * 8 + [8.0] * 8)
    x = torch.cat([read().x[:128] for read in videos])
    assert model.connector[0](x[:, 1:]).mean((0, 1)).abs().max() < 1e-4
    assert model.connector[0].bias.abs().sum() > 0
    memory, _ = begun(tmp_path / "memory", start="mimetic")
    assert memory.trainable()[gate].min() >= 4 and not memory.connector[0].bias.any()
    connector, _ = begun(tmp_path / "connector", connector_start="mimetic")
    assert not connector.trainable()[gate].any() and connector.connector[0].bias.any()


@pytest.fixture
def short_kitchens(monkeypatch):
    """Training videos of four sentences, and two steps of stage look."""
    monkeypatch.setattr(world, "SEGMENTS", (4, 4))
    monkeypatch.setattr(stages, "LOOK_STEPS", 2)


def steps_of(folder):
    return {log.name.removesuffix("-log.jsonl"): len(read_jsonl(log))
            for log in folder.glob("*-log.jsonl")}


@pytest.mark.parametrize("given, expected", [
    ({}, (10, 0, 10)),
    # one token a frame; last_k is 0 unless it is given
    ({"long": 1.0, "grid": 0, "narration_memory": 5}, (1, 5, 0)),
], ids=str)
def test_toy_runs_all_stages(tmp_path, short_kitchens, given, expected):
    options = options_from(data="toy", output=str(tmp_path), limit=1, batch=1, epochs=1, lora_rank=4,
                           idle=1.0, recall_steps=1, **given)
    train_command.check_and_train(options)
    assert steps_of(tmp_path) == {"look": 2, "recall": 1, "narrator": 1}
    config = load(str(tmp_path)).config
    assert (config.J, getattr(config, "narration_memory", 0), config.last_k) == expected
    assert (config.memory_target, config.width) == (True, 128)
    assert config.vision == str((TOY / "vision").resolve())


def test_quick_starts_from_what_others_have_learned(tmp_path, short_kitchens):
    options = options_from(data="toy", quick=True, output=str(tmp_path), limit=1, epochs=1.0)
    assert (options.recall, options.limit, options.batch) == (False, 1, 2)
    train_command.check_and_train(options)
    assert steps_of(tmp_path) == {"narrator": 1}


@pytest.mark.parametrize("option, part", [("freeze_memory", ".clustering."), ("freeze_lora", ".lora_")])
def test_what_is_frozen_does_not_change_in_recall(tmp_path, short_kitchens, option, part):
    options = options_from(data="toy", output=str(tmp_path), quick=True, recall=True, recall_steps=1,
                           **{option: True})
    model, videos = stages.new_toy(options, world.kitchens("train", 1))
    before = {name: p.detach().clone() for name, p in model.trainable().items()}
    before |= {name: weight.float() for name, weight in load_file(options.look).items()}
    stages.before_narrating(options, model, videos)
    changed = [name for name, weight in model.trainable().items()
               if not torch.equal(weight, before[name])]
    for other in (".clustering.", ".connector.", ".lora_"):
        assert any(other in name for name in changed) == (other != part)


def test_fine_tuning_on_the_toy(tmp_path, short_kitchens):
    before = sorted(TOY.rglob("*"))
    train_command.check_and_train(options_from(data="toy", init=str(TOY), output=str(tmp_path), limit=1,
                                     batch=1, epochs=1, lr=1e-9))
    assert steps_of(tmp_path) == {"narrator": 1}
    assert sorted(TOY.rglob("*")) == before
    config = load(str(tmp_path)).config
    assert config == load(str(TOY)).config and Path(config.llm) == TOY / "llm"
    # LoRA on the language model that it belongs to
    assert log_of(tmp_path)[0]["loss"] < 1
