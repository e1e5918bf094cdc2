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
    of_videos, learned = real_parts.losses(narrator, examples)
    loss = (of_videos / learned).mean()
    loss.backward()
    assert loss.item() == pytest.approx(one_by_one, rel=1e-5)
    for name, p in narrator.trainable().items():
        assert (p.grad - gradients[name]).norm() <= 1e-4 * gradients[name].norm() + 1e-7, name


def test_sentences_are_read_where_the_true_ones_stand():
    narrator = tiny()
    example, _ = examples_for(narrator)
    tokens = narrator.layout.sequence(example.narrations)
    next_ids = tokens.ids[1:] + [0]
    assert real_parts.sentences(narrator.layout, tokens, next_ids) == [t.strip() for t in TEXTS]


def test_measures_of_words_on_held_out_videos(monkeypatch, tmp_path):
    """With the true words as the likeliest, all sentences and memory words are right."""
    monkeypatch.setattr(real_parts, "FOLDER", tmp_path)
    narrator = tiny()
    held_out = Held(examples_for(narrator))
    for sample, example in zip(held_out.samples, held_out):
        rows = [{"time": frame + 0.5, "text": narrator.layout.decode(ids), "memory": ["open"]}
                for frame, ids in example.narrations]
        write_json(tmp_path / real_parts.KITCHENS / f"{sample.name}.json", {"narrations": rows})
    measured = real_parts.measured_words(narrator, held_out, batch=2)
    of_videos, learned = real_parts.losses(narrator, held_out)
    assert measured["val_loss"] == pytest.approx((of_videos.sum() / learned.sum()).item(), rel=1e-5)
    assert measured["exact"] == measured["memory_words"] == 0

    def labels_alone(hidden):
        """Logits whose largest is the label's."""
        learned = torch.cat([tokens.labels() for tokens in all_tokens])
        return F.one_hot(learned[learned != -100], len(narrator.layout.tokenizer)).float()

    all_tokens = [narrator.layout.sequence(example.narrations) for example in held_out]
    monkeypatch.setattr(narrator, "logits", labels_alone)
    measured = real_parts.measured_words(narrator, held_out, batch=2)
    assert measured["exact"] == 1
    assert measured["memory_words"] == 2 / 5        # of five sentences, two have the word "open"


class Held(list):
    """Examples with their samples."""

    def __init__(self, examples):
        super().__init__(examples)
        self.samples = [SimpleNamespace(name=str(i)) for i in range(len(examples))]


def test_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(real_parts, "PACKAGES", ("no_such_package",))
    with pytest.raises(BadData, match="^no_such_package: not installed; pip install [^\n]*$"):
        real_parts.file_inside("no_such_package", "*.gguf")


def test_rows_with_results_are_not_trained_again(monkeypatch, tmp_path):
    """The rate is that with the least loss of both rows; all of a complete file is shown."""
    monkeypatch.setattr(real_parts, "FILE", tmp_path / "real.jsonl")
    monkeypatch.setattr(real_parts, "train_row", None)
    for row in real_parts.RATE_ROWS:
        for lr in real_parts.RATES:
            what = real_parts.training(row, 0, lr, real_parts.RATE_STEPS)
            loss = 1 + abs(lr - real_parts.RATES[2])
            line = {"result": "training", **asdict(what), "looks": [{"step": 59, "val_loss": loss}]}
            runs.add_line(real_parts.FILE, line)
    assert real_parts.best_rate("cpu") == real_parts.RATES[2]
