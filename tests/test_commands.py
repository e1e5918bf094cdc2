"""Every command, with nonsense and with what cannot work: one line, exit code 1 or 2."""
import argparse
import importlib
import io
import json
import os
import re
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from beyond.commands import data_command, stream_command, train_command
from forks import Forked
from helpers import ROOT, TOY, tiny
from narrator import Narrator
from support.common.errors import BadData, command_line
from support.common.options import FILES, needs_of
from support.engine import cpu, frozen
from support.engine.checkpoint import Checkpoint, open_checkpoint
from support.engine.registry import NARRATORS
from support.files.video import write_video

VISION = f"--vision {TOY / 'vision'}"
# Each command with arguments that work, and quickly, in the folder of the fixture `world`.
COMMANDS = [
    "stream.py x.safetensors --device cpu",
    "evaluate.py score --pred p.json --gt g.json",
    "evaluate.py stream --data toy --root toys --limit 1 --device cpu",
    "data.py stats --data toy --root toys",
    "data.py toy --seed 1 --minutes 0.02 --output new.mp4",
    f"data.py encode toys/a.mp4 {VISION} --output features --device cpu",
    "train.py --data ek100 --root nowhere --device cpu",
    "narrator.py",
    "-m beyond.experiments.cost stream --frames 4 --device cpu",
    "-m beyond.experiments.attention --data toy --root toys --limit 1 --device cpu",
    "-m beyond.experiments.asked summaries --pred p.json --gt g.json --llm toys",
]
# An input that is missing, an output that cannot be written, a model that is not there.
CANNOT_WORK = [
    ("evaluate.py stream --data toy --root nowhere", "nowhere: no such folder; make some"),
    ("evaluate.py stream --data toys", "toys: none of its 1 videos is for val"),
    ("evaluate.py stream --data toy --output p.json/new", "cannot be written"),
    ("evaluate.py teacher --data toy --per-video p.json/new.json", "cannot be written"),
    ("evaluate.py stream --data toy --model toys",
     "model 'toys' cannot be loaded: it has no adapter_config.json"),
    ("evaluate.py score --pred p.json --gt p.json --per-video p.json", "is given twice"),
    ("train.py --data toy --output p.json/new", "cannot be written"),
    ("train.py --data toy --output new --vision ./nowhere", "there is no such folder"),
    ("train.py --data toy --output new --look nowhere", "nowhere: no such file"),
    (f"data.py encode nowhere.mp4 --output new {VISION}", "nowhere.mp4: No such file"),
    (f"data.py encode toys/a.mp4 --output p.json/new {VISION}", "cannot be written"),
    ("data.py encode toys/a.mp4 --output new", "cannot be loaded"),
    ("stream.py missing.mp4", "missing.mp4: no such file"),
    ("stream.py toys/a.mp4 --jsonl toys/a.mp4/n.jsonl", "a.mp4/n.jsonl: cannot be written"),
    ("stream.py toys/a.mp4 --state .", "'.' is a folder"),
    ("stream.py toys/a.mp4 --vtt hard_link", "hard_link: is given twice"),
    ("stream.py toys/a.mp4 ./toys/a.mp4", "several inputs are called a; rename one of them"),
    # x's trace and the JSONL of x.trace would be one file
    ("stream.py x.safetensors x.trace.safetensors --jsonl out --trace out", "is given twice"),
    ("stream.py toys/a.mp4 --live", "a.mp4: --live is for what comes as it happens"),
    ("stream.py toys/a.mp4 --model nowhere", "model 'nowhere' cannot be loaded"),
    ("stream.py toys/a.mp4 --vision a/nowhere", "vision model 'a/nowhere' cannot be loaded"),
    ("stream.py toys/a.mp4 x.safetensors --serve", "--serve shows one input"),
    ("stream.py toys/a.mp4 --html p.html --state s", "would be a page of what came after"),
    ("stream.py toys/a.mp4 --serve --state s", "--serve with --state needs --jsonl FILE"),
    ("stream.py lavfi:testsrc --lookahead 2", "are for recordings; lavfi:testsrc is live"),
    ("stream.py lavfi:testsrc camera", "start a process for each"),
    ("stream.py toys/a.mp4 --explain --lookahead 2", "--explain shows one frame a pass"),
    ("evaluate.py teacher --data toy --output new --per-video new/settings.json", "is given twice"),
    ("stream.py toys/a.mp4 http://u:SECRET@127.0.0.1/a.mp4", "http://127.0.0.1/...: is no file"),
]
# A command, and what an option can need that it has not.
LACKS = [
    ("stream.py x.safetensors --device cpu", "pictures"),
    ("stream.py x.safetensors --device cpu", "a live source that can be opened again"),
    ("stream.py x.safetensors --static", "two thresholds"),
    ("stream.py x.safetensors --refractory 0", "a refractory time"),
    ("evaluate.py stream --data toys", "pictures"),
    ("evaluate.py stream --data toy --root toys", data_command.SPLITS),
    ("data.py stats --data toy --root toys", data_command.RENDERED),
    ("train.py --data ek100 --output new", "--data toy"),
    ("train.py --data toy --output new", FILES),
    (f"train.py --data toy --output new --init {TOY}", "a new narrator"),
    ("train.py --data toy --output new --quick", "the stage recall"),
    ("train.py --data toy --output new --quick", "a connector of its own"),
    ("train.py --data toy --output new --memory recent", "a memory with heads"),
    ("train.py --data toy --output new --memory recent", "a memory that is read within frames"),
    ("train.py --data toy --output new --memory kmeans", "a memory that learns"),
    ("train.py --data toy --output new --memory none", "a memory"),
]
NEEDS = (needs_of(train_command.Options, *NARRATORS) | stream_command.NEEDS
         | data_command.NEEDS)


def module_and_arguments(words: list[str]):
    """The module with the `main` of a command: of `python stream.py`, what its foot imports."""
    if words[0] == "-m":
        return importlib.import_module(words[1]), words[2:]
    foot = re.search(r"from (beyond\.commands\.\w+) import", (ROOT / words[0]).read_text())
    return importlib.import_module(foot[1]), words[1:]


def parser_of(module) -> argparse.ArgumentParser:
    """That of a command, which is stopped where it parses."""
    with (mock.patch.object(argparse.ArgumentParser, "parse_args", autospec=True,
                            side_effect=EOFError) as parse, pytest.raises(EOFError)):
        module.main()
    return parse.call_args.args[0]


def options_of(module, arguments: list[str]) -> list[argparse.Action]:
    actions = parser_of(module)._actions
    for action in actions:
        if isinstance(action, argparse._SubParsersAction) and arguments[0] in action.choices:
            actions = action.choices[arguments[0]]._actions
    return [action for action in actions if action.option_strings]


def outcome(module, words: list[str]) -> tuple[int, str, str]:
    """Run a command -> (exit code, what it wrote to stdout, and to stderr)."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with mock.patch("sys.argv", ["command", *words]), redirect_stdout(out), redirect_stderr(err):
        try:
            command_line(module.main)
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), err.getvalue()


def call(module, words: list[str]) -> tuple[int, str]:
    """Run a command -> (exit code, what it wrote to stderr)."""
    code, _, err = outcome(module, words)
    return code, err


@pytest.fixture
def world(tmp_path, monkeypatch, no_java):
    """A folder with the inputs of the commands. A narrator is loaded once, Java is not started."""
    monkeypatch.chdir(tmp_path)
    save_file({"x": torch.randn(3, 10, 128)}, "x.safetensors")
    (tmp_path / "toys").mkdir()
    data_command.write_toy(1, 0.02, tmp_path / "toys" / "a.mp4")
    os.link("toys/a.mp4", "hard_link")
    for name in ("p.json", "g.json"):
        (tmp_path / name).write_text(json.dumps({"a": [{"time": 2.0, "text": "You look."}]}))
    load = Checkpoint.narrator
    load_once = cache(lambda *how: load(open_checkpoint(TOY), *how))
    monkeypatch.setattr(Checkpoint, "narrator", lambda _, *how: load_once(*how))
    return tmp_path


@pytest.fixture
def no_model(monkeypatch):
    for name in ("AutoModel", "AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained",
                            lambda *_, **__: pytest.fail("a model is loaded"))


@pytest.mark.parametrize("line", COMMANDS)
def test_nonsense_is_refused_in_one_line(line, world):
    module, arguments = module_and_arguments(line.split())
    options = [option.option_strings[-1] for option in options_of(module, arguments)
               if option.nargs != 0]
    refused = 0
    for option in options:
        code, err = call(module, [*arguments, f"{option}=-1"])
        lines = re.findall(r"^(?:error: |[\w. -]+: error: )", err, re.M)
        assert code in (0, 1, 2) and "Traceback" not in err, (option, err)
        assert len(lines) == (code != 0), (option, err)
        refused += code != 0
    assert refused >= len(options) / 2
    code, err = call(module, [*arguments, "--nonsense"])
    assert code == 2
    assert re.fullmatch(r".* error: unrecognized arguments: --nonsense; see --help\n", err)


@pytest.mark.parametrize("line, message", CANNOT_WORK)
def test_what_cannot_work_is_refused_before_anything_is_loaded(line, message, world, no_model):
    words = line.split()
    if words[0] == "stream.py":
        words += ["--srt", "new/folder/n.srt", "--device", "cpu"]
    before = {file: file.is_file() and file.read_bytes() for file in world.rglob("*")}
    code, err = call(*module_and_arguments(words))
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 1 and len(errors) == 1 and message in errors[0], err
    assert {file: file.is_file() and file.read_bytes() for file in world.rglob("*")} == before


@pytest.mark.parametrize("line, lacks", LACKS, ids=str)
def test_an_option_without_effect_is_refused(line, lacks, world, no_model):
    module, arguments = module_and_arguments(line.split())
    before = sorted(world.rglob("*"))
    refused = 0
    for option in options_of(module, arguments):
        if lacks in NEEDS.get(option.dest, "").split(", "):
            flag = option.option_strings[-1]
            value = "a=1" if flag == "--source-option" else [*(option.choices or "1")][0]
            words = [flag] if option.nargs == 0 else [flag, value]
            assert call(module, [*arguments, *words]) == (1, f"error: {flag} needs {lacks}\n")
            refused += 1
    assert refused > 0 and sorted(world.rglob("*")) == before


def test_every_need_is_tried():
    assert {need for needs in NEEDS.values() for need in needs.split(", ")} - {""} == {
        lacks for _, lacks in LACKS}


@pytest.mark.parametrize("asked, expected", [("", torch.bfloat16), ("--dtype float32", torch.float32)])
def test_a_large_model_streams_in_bf16_where_that_is_faster(asked, expected, world, monkeypatch):
    monkeypatch.setattr(frozen, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(cpu, "LARGE", 1000)
    loaded = []

    def vision_encoder(narrator, dtype):
        loaded.extend([narrator.llm.dtype, dtype])
        raise BadData("enough")

    monkeypatch.setattr(Narrator, "vision_encoder", vision_encoder)
    code, err = call(stream_command, f"toys/a.mp4 --device cpu {asked}".split())
    assert code == 1 and "error: enough" in err
    assert loaded == [expected, expected]
    assert ("in bfloat16, which is faster on this processor" in err) == (asked == "")


@pytest.mark.parametrize("line", [
    "train.py --data ego4d --help",
    "stream.py real.mp4 --model {model}",
])
def test_the_toy_is_imported_where_a_toy_is_used_alone(line, tmp_path):
    """In a process of its own, with a narrator whose words are the toy's but not its folder."""
    tiny(width=16).save(tmp_path / "model")
    write_video(tmp_path / "real.mp4", (np.full((32, 48, 3), k, np.uint8) for k in range(6)), 2)
    words = line.format(model=tmp_path / "model").split()
    code = ("import os, runpy, sys; os._exit = sys.exit; del sys.argv[:2]\n"
            "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
            "finally: print('toy modules:', [name for name in sys.modules "
            "if name.split('.')[0] == 'toy'], file=sys.stderr)")
    _, errors = Forked(["-c", code, ROOT / words[0], *words[1:]], tmp_path, os.environ).end()
    assert "toy modules: []" in errors, errors
