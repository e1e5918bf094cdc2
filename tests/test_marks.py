"""What something was made of is known by what it is: what was replaced is refused in one line that
names it, and the same in another place is taken."""
import json
import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from beyond.commands import data_command, evaluate_command, stream_command, train_command
from helpers import TOY
from support.common.errors import BadData
from support.engine import run as engine
from test_commands import call


def command(name, at):
    """A command of the table, on what lies in a folder -> the module, and its words."""
    narrator = ["--model", at / "narrator"]
    own = ["--data", at / "own"]
    return {
        "train --resume": (train_command, [*own, "--init", at / "narrator", "--output", at / "out",
                                           "--epochs", "4", "--device", "cpu", "--resume"]),
        "stream": (stream_command, [at / "own" / "a.mp4", *narrator]),
        "stream of features": (stream_command,
                               [at / "own" / "features" / "a.safetensors", *narrator]),
        "stream --state": (stream_command, [at / "own" / "a.mp4", "--model", at / "unmarked",
                                            "--state", at / "state"]),
        "evaluate --output": (evaluate_command, ["teacher", *own, "--split", "all", *narrator,
                                                 "--output", at / "kept"]),
        "encode": (data_command, ["encode", at / "own" / "a.mp4", "--vision",
                                  at / "narrator" / "vision", "--output", at / "own" / "features"]),
    }[name]


def ends(*_):
    raise BadData("the training ends after a step")


def run(name, at):
    module, words = command(name, at)
    return call(module, [*map(str, words)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder in which each command was carried out once; the training ended after a step."""
    at = tmp_path_factory.mktemp("made")
    shutil.copytree(TOY, at / "narrator")
    shutil.copytree(TOY, at / "unmarked")
    settings = json.loads((TOY / "narrator.json").read_text())
    del settings["llm_mark"], settings["vision_mark"]
    (at / "unmarked" / "narrator.json").write_text(json.dumps(settings))
    for seed, name in enumerate("ab"):
        data_command.write_toy(seed, 0.1, at / "own" / f"{name}.mp4")
    assert call(data_command, ["encode", "--data", str(at / "own"), "--model",
                               str(at / "narrator")])[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.Run, "write", ends)
        code, said = call(train_command, [*map(str, command("train --resume", at)[1][:-1])])
    assert list((at / "out").glob("*-state.safetensors")), said
    for name in ("stream --state", "evaluate --output"):
        assert run(name, at)[0] == 0
    return at


def scaled(*path):
    """Numbers a little larger, in a file of the same header."""
    def replace(at):
        file = at.joinpath(*path)
        with safe_open(file, "pt") as opened:
            header = opened.metadata()
        save_file({name: x * 1.1 for name, x in load_file(file).items()}, file, header)
    return replace


def another_rate_of_positions(at):
    config = at / "narrator" / "llm" / "config.json"
    config.write_text(config.read_text().replace("500000.0", "400000.0"))


def another_film(at):
    """Of the same name and size."""
    file = at / "own" / "a.mp4"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def features_of_another_encoder(at):
    scaled("narrator", "vision", "model.safetensors")(at)
    assert call(data_command, ["encode", "--data", str(at / "own"), "--vision",
                               str(at / "narrator" / "vision")])[0] == 0
    shutil.copytree(TOY / "vision", at / "narrator" / "vision", dirs_exist_ok=True)


LLM = scaled("narrator", "llm", "model.safetensors")
ENCODER = scaled("narrator", "vision", "model.safetensors")
FEATURES = scaled("own", "features", "a.safetensors")


@pytest.mark.parametrize("name, replace, named", [
    ("train --resume", FEATURES, "the features = "),
    ("train --resume", LLM, "language model = "),
    ("train --resume", scaled("narrator", "adapter_model.safetensors"), "--init = "),
    ("train --resume", another_film, "video = "),
    ("stream", another_rate_of_positions, "language model = "),
    ("stream", ENCODER, "vision model = "),
    ("stream of features", features_of_another_encoder, "vision model = "),
    ("stream --state", scaled("unmarked", "llm", "model.safetensors"), "llm_mark = "),
    ("stream --state", scaled("unmarked", "adapter_model.safetensors"), "narrator = "),
    ("stream --state", another_film, "source = "),
    ("evaluate --output", FEATURES, "another video a"),
    ("encode", ENCODER, "vision_mark = "),
    ("encode", another_film, "video = "),
])
def test_what_was_replaced_is_refused(made, tmp_path, no_java, name, replace, named):
    at = tmp_path / "at"
    shutil.copytree(made, at)
    replace(at)
    code, said = run(name, at)
    last = said.strip().split("\n")[-1]
    assert code == 1 and last.startswith("error: ") and named in last, said


def test_the_same_in_another_place_is_taken(made, tmp_path, no_java):
    shutil.copytree(made, tmp_path / "at")
    for name in ("encode", "stream of features", "stream --state", "evaluate --output",
                 "train --resume"):
        code, said = run(name, tmp_path / "at")
        assert code == 0, said
