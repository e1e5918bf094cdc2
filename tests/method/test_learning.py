"""What is learned, the loss and the loop (§3.5, App. B.6): labels are the next tokens, ours and those
of the authors' code; the loss is a mean of means."""
import math

import pytest
import torch

import narrator as nar
import train
from beyond.commands.train_command import Options
from helpers import tiny, video
from support.common.disk import read_jsonl
from beyond.training.run import Run
from test_golden import MODELS, load, read
from test_narrator import decode


@pytest.mark.parametrize("last_k", [None, 2])
def test_a_label_is_the_next_token(last_k):
    model = tiny(last_k=last_k)
    _, narrations = video(model)
    tokens = model.layout.sequence(narrations)
    labels = tokens.labels().tolist()
    assert len(labels) == len(tokens)
    for i in range(len(tokens) - 1):
        assert labels[i] == (tokens.ids[i + 1] if tokens.learn[i + 1] else -100), i
    assert labels[-1] == -100                   # nothing comes after the last end of text
    assert sum(label != -100 for label in labels) == sum(tokens.learn)


@pytest.mark.parametrize("name", MODELS)
def test_labels_are_those_of_the_authors_code(name):
    """The same labels in the same order, and each predicted from the same token. (Before the first
    narration, the authors' tokenizer joins "." and the newline.)
    """
    model = load(name)
    layout = model.layout
    memory_id = model.llm.config.vocab_size if layout.M else None
    frame_id = model.llm.config.vocab_size + (1 if layout.M else 0)
    placeholders = {frame_id: nar.FRAME, memory_id: nar.MEMORY}
    for case in read(name, "teacher_forced.json").values():
        narrations = [(frame, layout.encode(" " + text)) for frame, text in case["events"]]
        tokens = layout.sequence(narrations)
        pairs = zip(tokens.ids, tokens.labels().tolist())
        ours = [(token, label) for token, label in pairs if label != -100]
        ids = [placeholders.get(token, token) for token in case["input_ids"]]
        theirs = [(token, label) for token, label in zip(ids, case["labels"]) if label != -100]
        assert [label for _, label in ours] == [label for _, label in theirs]
        assert ours[1:] == theirs[1:]


def test_what_is_learned():
    """Not frame 0's trigger; for later frames [SKIP] or "]"; narrations and EOT."""
    layout = tiny().layout
    look = layout.encode(" You look.")
    wipe = layout.encode(" You wipe the sink.")
    tokens = layout.sequence([(0, look), (3, wipe)])
    before = []                     # what the triggers are predicted from
    triggers = []
    learned = []
    for i, learn in enumerate(tokens.learn):
        if not learn:
            continue
        learned.append(tokens.ids[i])
        if tokens.ids[i - 1] < 0:
            before.append(tokens.ids[i - 1])
            triggers.append(tokens.ids[i])
    assert before == [nar.FRAME] * 3
    assert triggers == [layout.skip, layout.skip, layout.close[0]]
    assert decode(layout, learned) == (
        "Assistant: You look.<|eot_id|>,,]\nAssistant: You wipe the sink.<|eot_id|>")


def test_the_loss_weighs_words_and_trigger_alike():
    """The cross entropy of all learned tokens, each predicted from the token before it."""
    model = tiny()
    x, narrations = video(model)
    loss, learned = model.loss(x, narrations)
    tokens = model.layout.sequence(narrations)
    with torch.no_grad():
        log_p = model.logits(model(x, narrations)[0]).log_softmax(-1)
    wanted = [i for i, learn in enumerate(tokens.learn) if learn]
    by_hand = -sum(log_p[i - 1, tokens.ids[i]].item() for i in wanted)
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)
    assert learned == len(wanted)


def test_the_loss_of_a_batch_is_the_mean_of_its_videos():
    """Videos of different lengths count the same; gradients accumulate."""
    model = tiny()
    videos = []
    for seed, at in enumerate([(0, 4, 9), (0, 4, 9), (0,)]):
        videos.append(train.Example(*video(model, 20, at, seed)))
    means = []
    for one in videos:
        loss, learned = model.loss(one.x, one.narrations)
        means.append(loss / learned)
    mean = sum(means) / 3
    parameters = model.trainable()
    expected = torch.autograd.grad(mean, list(parameters.values()))
    assert train.loss_of_batch(model, videos, 3) == pytest.approx(mean.item(), rel=1e-5)
    for (name, p), gradient in zip(parameters.items(), expected):
        assert torch.allclose(p.grad, gradient, atol=1e-5), name


def test_schedule():
    """5 % warm-up, then half a cosine."""
    rates = [train.schedule(step, 200, 0.05) for step in range(200)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[10] == pytest.approx(1)
    assert rates[105] == pytest.approx(0.5)
    assert rates[-1] < 1e-3
    assert rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize("size", [0.3, 40.0])
def test_the_loop_schedules_and_clips(tmp_path, monkeypatch, size):
    """What the optimizer sees at each step: the scheduled rate, and a gradient of the norm that it has,
    but of 1 at most; zero where a step has no gradient."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    seen = []
    step_of_adam = torch.optim.AdamW.step

    def watched(optimizer):
        group, = optimizer.param_groups
        seen.append((group["lr"], group["weight_decay"], weight.grad.norm().item()))
        step_of_adam(optimizer)

    def backward(step):
        if step != 3:
            (weight.sum() * size / 2).backward()       # a gradient of norm `size`
        return float(step)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    options = Options(output=str(tmp_path), warmup=0.2)
    with Run("narrator", options) as run:
        train.fit({"weight": weight}, backward, 10, 2e-4, options, run)
    rates, decays, norms = zip(*seen)
    cosine = [1e-4 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert rates == pytest.approx([1e-4, 2e-4, *cosine])
    assert set(decays) == {0.0}
    norm = min(size, 1.0)
    assert norms == pytest.approx([norm] * 3 + [0] + [norm] * 6, rel=1e-5)
    logged = [row["loss"] for row in read_jsonl(tmp_path / "narrator-log.jsonl")]
    assert logged == list(range(10))
