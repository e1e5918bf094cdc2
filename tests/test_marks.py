"""What something was made of is known by what it is, wherever it lies."""
import json
import random
import shutil
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from beyond.commands import data_command, evaluate_command, stream_command, train_command
from helpers import TOY, with_entries, with_tensors
from support.common import marks
from support.common.errors import BadData
from support.files.features import read_header
from beyond.training import run as engine
from test_commands import call, outcome


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
    assert call(data_command, ["encode", "--data", str(at / "own"), "--model", str(at / "narrator")])[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.Run, "write", Mock(side_effect=BadData("it ends after a step")))
        code, said = call(train_command, [*map(str, command("train --resume", at)[1][:-1])])
    assert list((at / "out").glob("*-state.safetensors")), said
    for name in ("stream --state", "evaluate --output"):
        assert run(name, at)[0] == 0
    return at


def scaled(file):
    return with_tensors(file, lambda tensors: [x.mul_(1.1) for x in tensors.values()])


def with_one(name, file):
    def change(tensors):
        rows = tensors[name]
        rows[len(rows) // 3].view(-1)[1] += 1
    return with_tensors(file, change)


def another_rate_of_positions(at):
    config = at / "narrator" / "llm" / "config.json"
    config.write_text(config.read_text().replace("500000.0", "400000.0"))


def another_film(at):
    file = at / "own" / "a.mp4"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def features_of_another_encoder(at):
    ENCODER(at)
    assert call(data_command, ["encode", "--data", str(at / "own"), "--vision",
                               str(at / "narrator" / "vision")])[0] == 0
    shutil.copytree(TOY / "vision", at / "narrator" / "vision", dirs_exist_ok=True)


LLM = scaled("narrator/llm/model.safetensors")
ENCODER = scaled("narrator/vision/model.safetensors")
FEATURES = scaled("own/features/a.safetensors")
FRAME = with_one("features", "own/features/a.safetensors")
WORD = with_one("model.embed_tokens.weight", "narrator/llm/model.safetensors")


@pytest.mark.parametrize("name, replace, named", [
    ("train --resume", FEATURES, "the features = "),
    ("train --resume", FRAME, "the features = "),
    ("stream", WORD, "language model = "),
    ("stream", with_entries("narrator/llm/tokenizer_config.json", bos_token="<|eot_id|>"),
     "language model = "),
    ("stream", with_entries("narrator/narrator.json", vision_mark="81c95822782a"),
     "of another version of this program"),
    ("stream --state", with_entries("unmarked/adapter_config.json", lora_alpha=150), "narrator = "),
    ("train --resume", LLM, "language model = "),
    ("train --resume", scaled("narrator/adapter_model.safetensors"), "--init = "),
    ("train --resume", another_film, "video = "),
    ("stream", another_rate_of_positions, "language model = "),
    ("stream", ENCODER, "vision model = "),
    ("encode", with_entries("narrator/vision/preprocessor_config.json", image_mean=[0.4, 0.5, 0.5]),
     "vision_mark = "),
    ("stream of features", features_of_another_encoder, "vision model = "),
    ("stream --state", scaled("unmarked/llm/model.safetensors"), "llm_mark = "),
    ("stream --state", scaled("unmarked/adapter_model.safetensors"), "narrator = "),
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
    for name in ("encode", "stream of features", "stream --state", "evaluate --output", "train --resume"):
        code, said = run(name, tmp_path / "at")
        assert code == 0, said


def test_what_says_nothing_is_told_once(made, tmp_path, no_java):
    at = tmp_path / "at"
    shutil.copytree(made, at)
    said = call(stream_command, [str(at / "own" / "a.mp4"), "--model", str(at / "unmarked")])[1]
    assert said.count("does not say which language model") == 1
    assert said.count("does not say which vision model") == 1
    words = ["--data", str(at / "own"), "--init", str(at / "unmarked"), "--epochs", "1", "--output",
             str(at / "new")]
    assert call(train_command, words)[0] == 0
    learned = json.loads((at / "new" / "narrator.json").read_text())
    assert learned["llm_mark"] and learned["vision_mark"]


@pytest.mark.parametrize("whole", [0, 1e9])
def test_features_of_a_set_of_any_size(made, tmp_path, monkeypatch, capsys, whole):
    monkeypatch.setattr(marks, "WHOLE", whole)
    shutil.copytree(made, tmp_path / "at")
    file = tmp_path / "at" / "own" / "features" / "a.safetensors"
    sample = SimpleNamespace(features=read_header(file))
    before = marks.digest_of_features([sample], finite=True)
    FEATURES(tmp_path / "at")
    assert marks.digest_of_features([sample], finite=True) != before
    assert ("sizes and dates" in capsys.readouterr().err) == (whole == 0)


def test_changed_thresholds_are_told(made, tmp_path):
    shutil.copytree(made, tmp_path / "at")
    module, words = command("stream --state", tmp_path / "at")
    code, said = call(module, [*map(str, words), "--theta", "0.7", "--static"])
    assert code == 0 and "was saved with theta = 0.8, here 0.7" in said
    assert "static = False, here True" in said


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_changed_byte_is_refused_or_without_effect(made, tmp_path, seed):
    """In any file that a stream reads which goes on from its state."""
    chance = random.Random(seed)
    at = tmp_path / "at"
    shutil.copytree(made, at)
    module, words = command("stream --state", at)
    plain = [*map(str, words[:3])]
    right = outcome(module, plain)[1]
    files = [file for file in [*(at / "unmarked").rglob("*"), at / "own" / "a.mp4", at / "state"]
             if file.is_file()]
    counts = Counter()
    for _ in range(50):
        file = chance.choice(files)
        content = file.read_bytes()
        place = chance.randrange(len(content))
        other = bytes([content[place] ^ chance.randrange(1, 256)])
        file.write_bytes(content[:place] + other + content[place + 1:])
        code, _, said = outcome(module, [*map(str, words)])
        if code == 0 and "was saved with" not in said:
            assert outcome(module, plain)[1] == right, (file, place)
        counts["refused" if code else "told" if "was saved with" in said else "without effect"] += 1
        assert "Traceback" not in said, (file, place)
        file.write_bytes(content)
    print(dict(counts))
