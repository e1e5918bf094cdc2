"""experiments/real_parts.py, on the toy's language model: several videos in one pass."""
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train
from experiments import real_parts, runs
from helpers import tiny, video
from support.common.disk import write_json
from support.common.errors import BadData

TEXTS = (" You look around.", " You open the fridge.", " You take the red cup.")


def examples_for(narrator) -> list[train.Example]:
    """Two videos, one with a sentence more than the other."""
    examples = []
    for frames, ends in ((9, (0, 3, 8)), (6, (0, 5))):
        x, _ = video(narrator, frames=frames)
        narrations = [(end, narrator.layout.encode(text)) for end, text in zip(ends, TEXTS)]
        examples.append(train.Example(x, narrations))
    return examples


@pytest.mark.parametrize("changes", [{"last_k": 1}, {"memory": "recent"},
                                     {"memory": "none", "prune": False}], ids=str)
def test_one_pass_gives_the_loss_and_gradients_of_train_py(changes):
    narrator = tiny(**changes)
    examples = examples_for(narrator)
    one_by_one = train.loss_of_batch(narrator, examples, len(examples))
    gradients = {name: p.grad.clone() for name, p in narrator.trainable().items()}
    narrator.zero_grad()
    loss = real_parts.batch_loss(narrator, examples)
    loss.backward()
    assert loss.item() == pytest.approx(one_by_one, rel=1e-5)
    for name, p in narrator.trainable().items():
        assert (p.grad - gradients[name]).norm() <= 1e-4 * gradients[name].norm() + 1e-7, name


def test_words_for_things_on_held_out_videos(tmp_path, monkeypatch):
    """The cup of "cupboard" is no thing."""
    narrator = tiny()
    texts = (" You look around.", " You check the cupboard.", " You wash the red cup.",
             " You tap the drawer hiding the blue pan.")
    x, _ = video(narrator, frames=9)
    narrations = [(frame, narrator.layout.encode(text)) for frame, text in zip((0, 3, 5, 8), texts)]
    held_out = Held([train.Example(x, narrations)])
    rows = [{"time": 0.5, "text": text.strip()} for text in texts]
    rows[3]["memory"] = ["blue", "pan"]
    write_json(tmp_path / "0.json", {"narrations": rows})
    measured = real_parts.measured_words(narrator, held_out, tmp_path, batch=2)
    total, learned = narrator.loss(x, narrations)
    assert measured["val_loss"] == pytest.approx((total / learned).item(), rel=1e-5)
    assert measured["seen_words"] == measured["hidden_words"] == 0

    red, blue, pan = (narrator.layout.encode(word)[0] for word in (" red", " blue", " pan"))
    labels = narrator.layout.sequence(narrations).labels()
    labels = labels[labels != -100]

    def knows_two(hidden):
        """Logits of one who knows blue and pan, and takes all else for red."""
        guesses = torch.where((labels == blue) | (labels == pan), labels, red)
        return F.one_hot(guesses, len(narrator.layout.tokenizer)).float()

    monkeypatch.setattr(narrator, "logits", knows_two)
    measured = real_parts.measured_words(narrator, held_out, tmp_path, batch=2)
    assert (measured["seen_words"], measured["hidden_words"]) == (1 / 2, 1)


class Held(list):
    """Examples with their samples."""

    def __init__(self, examples):
        super().__init__(examples)
        self.samples = [SimpleNamespace(name=str(i)) for i in range(len(examples))]


def test_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(real_parts, "PACKAGES", ("no_such_package",))
    with pytest.raises(BadData, match="^no_such_package: not installed; pip install [^\n]*$"):
        real_parts.file_inside("no_such_package", "*.gguf")


def test_results_are_found_and_shown(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(real_parts, "FILE", tmp_path / "real.jsonl")
    what = real_parts.training("clam")
    line = {"result": "training", **asdict(what), "looks": [{"step": 59, "val_loss": 0.25}]}
    runs.add_line(real_parts.FILE, line)
    assert what.result("training")["looks"][0]["val_loss"] == 0.25
    assert real_parts.training("none").result("training") is None
    real_parts.print_rows()
    assert "0.250" in capsys.readouterr().out
