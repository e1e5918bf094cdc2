"""Every command, with nonsense for every option: exit code 1 or 2 and a few lines, no traceback."""
import argparse
import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import clam
from baselines import variants
from commands import (
    data as data_command, evaluate as evaluate_command, narrator as narrator_command,
    stream as stream_command, train as train_command,
)
import evaluate
from experiments import clam_forms, efficiency, figures, objects, summary, training_step
from helpers import TOY
from narrator import Narrator
from streams import speech
from support.common import errors
from support.common.errors import BadData, command_line
from support.engine import checkpoint, weights

NONSENSE = ("-1", "")                            # the types themselves are tested in test_common.py
# Each command with arguments that work, and quickly, in the folder of the fixture `world`.
COMMANDS = {
    "stream": (stream_command, "x.safetensors --device cpu"),
    "score": (evaluate_command, "score --pred p.json --gt g.json"),
    "evaluate stream": (
        evaluate_command, "stream --data toy --root toys --limit 1 --device cpu"),
    "evaluate teacher": (
        evaluate_command, "teacher --data toy --root toys --limit 1 --device cpu"),
    "data stats": (data_command, "stats --data toy --root toys"),
    "data toy": (data_command, "toy --seed 1 --minutes 0.02 --output new.mp4"),
    "data encode": (
        data_command,
        f"encode toys/a.mp4 --vision {TOY / 'vision'} --output features --device cpu"),
    "data rewrite": (
        data_command, f"rewrite --data ek100 --root nowhere --llm {TOY / 'llm'} --device cpu"),
    "train": (train_command, "--data ek100 --root nowhere --device cpu"),
    "clam": (clam, ""),
    "clam forms": (clam_forms, "--width 16 --heads 2 --length 20 --reads 2 --no-compile"),
    "narrator": (narrator_command, ""),
    "efficiency": (
        efficiency, "--frames 4 --window 2 --every 2 --words 2 --macs-frames 2 --streams 2 "
                    "--variants FlowNar --video toys/a.mp4 --device cpu"),
    "training step": (training_step, "--frames 4 --device cpu"),
    "attention": (figures, "attention --data toy --root toys --limit 1 --device cpu"),
    "timeline": (figures, "timeline toys/a.mp4 --device cpu"),
    "words": (figures, "words --data toy --root toys"),
    "examples": (figures, "examples toys/a.mp4 --from 0 --to 1 --png e.png"),
    "speech": (speech, "toys/a.mp4 s.jsonl --mp4 s.mp4"),
    "summary": (summary, "--pred p.json --gt g.json"),
    "objects": (objects, "--pred p.json --data toy --limit 1 --device cpu"),
}


class Parsed(Exception):
    pass


def catch_parser():
    """Within it, a command's main() raises Parsed with its parser instead of parsing."""
    def caught(parser, *_, **__):
        raise Parsed(parser)
    return mock.patch.object(argparse.ArgumentParser, "parse_args", caught)


def options(module, line: str) -> list[str]:
    """The options of a command that take a value."""
    with catch_parser(), pytest.raises(Parsed) as parsed:
        module.main()
    parser = parsed.value.args[0]
    actions = parser._actions
    subcommand = line.split(" ")[0]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and subcommand in action.choices:
            actions = action.choices[subcommand]._actions
    return [action.option_strings[-1] for action in actions
            if action.option_strings and action.nargs != 0]


def call(module, words: list[str]) -> tuple[int, str]:
    """Run a command -> (exit code, what it wrote to stderr)."""
    err = io.StringIO()
    with (mock.patch("sys.argv", ["command", *words]),
          redirect_stdout(io.StringIO()), redirect_stderr(err)):
        try:
            command_line(module.main)
        except SystemExit as end:
            return end.code or 0, err.getvalue()


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with the inputs of COMMANDS. Models are loaded once, Java is not started, pictures
    are not encoded.
    """
    monkeypatch.chdir(tmp_path)
    save_file({"x": torch.randn(3, 10, 128)}, "x.safetensors")
    (tmp_path / "toys").mkdir()
    data_command.write_toy(1, 0.02, tmp_path / "toys" / "a.mp4")
    row = {"start": 0.0, "end": 1.0, "text": "You look."}
    (tmp_path / "s.jsonl").write_text(json.dumps(row))
    for name in ("p.json", "g.json"):
        (tmp_path / name).write_text(json.dumps({"a": [{"time": 2.0, "text": "You look."}]}))
    load_once = cache(variants.load_narrator)
    for module in (variants, stream_command, efficiency):
        monkeypatch.setattr(module, "load_narrator", load_once)
    monkeypatch.setattr(evaluate, "java_problem", lambda: "needs Java")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig",
                        lambda figure, path, **settings: Path(path).write_bytes(b"PNG"))
    monkeypatch.setattr("matplotlib.figure.Figure.tight_layout", lambda figure, **settings: None)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_nonsense_is_refused_in_a_few_lines(name, world):
    module, line = COMMANDS[name]
    valued_options = options(module, line)
    assert valued_options or name in ("clam", "narrator")
    refused = 0
    for option in valued_options:
        for value in NONSENSE:
            code, err = call(module, line.split() + [f"{option}={value}"])
            errors = [line for line in err.splitlines()
                      if re.match(r"error: |[\w. -]+: error: ", line)]
            assert code in (0, 1, 2) and "Traceback" not in err, (option, value, err)
            assert len(errors) == (0 if code == 0 else 1), (option, value, err)
            if code != 0:
                refused += 1
    assert refused >= len(valued_options)


@pytest.mark.parametrize("module, line", [
    (evaluate_command, "stream --data toy --root nowhere"),
    (evaluate_command, "stream --data ek100 --root nowhere"),
    (evaluate_command, "stream --data toys"),
    (evaluate_command, "stream --data toy --output p.json/new"),
    (evaluate_command, "stream --data toy --vision owner/nowhere"),
    (evaluate_command, "teacher --data toy --vision ./nowhere"),
    (evaluate_command, "teacher --data toy --per-video p.json/new"),
    (evaluate_command, "stream --data toy --model toys"),
    (evaluate_command, "score --pred p.json --gt p.json --per-video p.json"),
    (train_command, "--data toy --output p.json/new"),
    (train_command, "--data toy --output new --vision ./nowhere"),
    (train_command, "--data toy --output new --llm ./nowhere"),
    (train_command, "--data toy --output new --llm toys"),
    (train_command, "--data toy --output new --look nowhere"),
    (train_command, "--data toy --output new --llm-width 7"),
    (train_command, "--data toy --output new --width-second 6"),
    (data_command, "encode nowhere.mp4 --output new"),
    (data_command, "encode toys/a.mp4 --output p.json/new"),
    (data_command, "encode toys/a.mp4 --output new"),
    (figures, "timeline nowhere.mp4"),
    (figures, "timeline toys/a.mp4 --png p.json/new"),
    (figures, "timeline toys/a.mp4 --vision owner/nowhere"),
    (efficiency, "--png p.json/new"),
    (summary, "--pred p.json --llm owner/nowhere --answers p.json/new"),
])
def test_what_cannot_work_is_refused_before_anything_is_loaded(module, line, world, monkeypatch):
    """A missing input, an output that cannot be written, a missing vision model: an error, and no
    new file.
    """
    for name in ("AutoModel", "AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained",
                            lambda *_, **__: pytest.fail("a model is loaded"))
    before = sorted(world.rglob("*"))
    code, err = call(module, line.split())
    assert code == 1
    assert sum(line.startswith("error: ") for line in err.splitlines()) == 1, err
    assert sorted(world.rglob("*")) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistaken_option_is_one_line(name, world):
    """The error, and how to get help; no usage."""
    module, line = COMMANDS[name]
    code, err = call(module, [*line.split(), "--nonsense"])
    assert code == 2
    assert len(err.splitlines()) == 1
    assert "error: unrecognized arguments: --nonsense; see python " in err
    assert err.endswith(" --help\n")


@pytest.mark.parametrize("asked, expected", [("", torch.bfloat16), ("--dtype float32", torch.float32)])
def test_a_large_model_streams_in_bf16_where_that_is_faster(asked, expected, world, monkeypatch):
    """So does its vision encoder, and the command says so."""
    monkeypatch.setattr(errors, "SAID_ONCE", set())
    monkeypatch.setattr(checkpoint, "ONEDNN_BF16", True)
    monkeypatch.setattr(weights, "LARGE", 1000)
    loaded = []

    def vision_encoder(narrator, source, dtype):
        loaded.extend([narrator.llm.dtype, dtype])
        raise BadData("enough")

    monkeypatch.setattr(Narrator, "vision_encoder", vision_encoder)
    code, err = call(stream_command, f"toys/a.mp4 --device cpu {asked}".split())
    assert code == 1 and "error: enough" in err
    assert loaded == [expected, expected]
    assert ("in bfloat16, which is faster on this processor" in err) == (asked == "")
