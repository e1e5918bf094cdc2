"""CUDA: the numbers of the processor (`pytest -m cuda`, where there is a GPU)."""
import random

import pytest
import torch

import narrator as nar
from helpers import ROOT, TOY, small, tiny, video
from stream import narrate
from beyond.streams.bounds import open_stream
from support.engine import attention
from support.files.features import open_frames
from support.files.sources import source_of
from test_golden import CUT, MODELS, features, load, read

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", MODELS)
def test_published_narrations(name):
    model = load(name).to("cuda").merge()
    case = read(name, "streaming.json")["two_threshold_0.8_0.5"]
    steps = list(narrate(model, features()))
    narrated = [step for step in steps if step.narration]
    assert [step.frame for step in narrated] == case["narration_frames"]
    assert [step.narration.tokens + [model.layout.eot] for step in narrated] == case["output_ids"]
    probabilities = [step.p_skip for step in steps if step.frame]
    assert probabilities[:len(case["skip_prob"])] == pytest.approx(case["skip_prob"], abs=CUT)


@pytest.mark.parametrize("lookahead", [1, 4])
@pytest.mark.parametrize("source", ["pictures", "features"])
def test_the_bundled_narrator(source, lookahead):
    sentences = []
    for device in ("cpu", "cuda"):
        model = nar.load(str(TOY), device=device).merge()
        kitchen = source_of(str(ROOT / "toy" / "kitchen.mp4"))
        frames = open_frames(kitchen, model.config, model.vision_encoder(), 4)[0]
        x = [frame for frame, _ in zip(frames, range(60))]
        if source == "features":                # of a file: on the processor
            x = [frame.cpu() for frame in x]
        steps = list(narrate(model, x, context=open_stream(model, lookahead=lookahead)))
        sentences.append([(step.frame, step.narration.text) for step in steps if step.narration])
    assert sentences[0] == sentences[1] and len(sentences[0]) > 5


@pytest.mark.parametrize("largest_mask", [0, 10 ** 9])
@pytest.mark.parametrize("changes", [
    {"last_k": 1}, {}, {"memory": "none", "prune": False, "mod_keep": 0.5},
    {"last_k": 0, "narration_memory": 4},
], ids=str)
def test_loss_and_gradients(changes, largest_mask, monkeypatch):
    monkeypatch.setattr(nar, "LARGEST_MASK", largest_mask)
    results = []
    for device in ("cpu", "cuda"):
        model = tiny(**changes).to(device)
        x, narrations = video(model)
        loss, learned = model.loss(x, narrations)
        (loss / learned).backward()
        gradients = {name: p.grad.cpu() for name, p in model.trainable().items()
                     if p.grad is not None}
        results.append((loss.item(), learned, gradients))
    (loss, learned, gradients), (loss_gpu, learned_gpu, gradients_gpu) = results
    assert loss_gpu == pytest.approx(loss, rel=1e-4)
    assert learned_gpu == learned
    assert gradients_gpu.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradients_gpu[name], gradient, atol=1e-4, rtol=1e-3), name


@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (9, 3)])
def test_all_segments_in_one_call(heads, kv_heads):
    model = small("Llama", hidden_size=64 * heads, num_attention_heads=heads,
                  num_key_value_heads=kv_heads, head_dim=64).to("cuda", torch.bfloat16)
    chance = random.Random(0)
    for _ in range(20):
        lengths = [chance.randint(1, 150) for _ in range(chance.randint(1, 12))]
        segment = [n for n, length in enumerate(lengths) for _ in range(length)]
        seen = torch.rand(len(lengths), len(segment)) < chance.random()
        seen |= torch.tensor(segment) == torch.arange(len(lengths))[:, None]
        segments = attention.Segments(segment, seen, model)
        assert segments.in_one_call
        inputs = [torch.randn(1, n, len(segment), 64, device="cuda", dtype=torch.bfloat16,
                              requires_grad=True) for n in (heads, kv_heads, kv_heads)]
        results = []
        for segments.in_one_call in (False, True):
            attended, _ = attention.by_mask_or_segments(model, *inputs, None, segments)
            results.append([attended, *torch.autograd.grad(attended.square().sum(), inputs)])
        for loop, one_call in zip(*results):
            assert (one_call - loop).norm() < 0.02 * loop.norm()
