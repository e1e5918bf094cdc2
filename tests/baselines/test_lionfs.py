"""LION-FS: the router by hand, training = streaming, checkpoints, two encoders, the stand-in and the toy's training."""
import argparse
import json
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

import narrator as nar
import train
from baselines.lionfs import Aggregation, TwoEncoders, motion
from baselines.variants import load_narrator
from commands import evaluate as evaluate_command, train as train_command
from helpers import ROOT, TOY, grouped, narrate, tiny, video
from streams.fast import open_stream
from support.common.errors import BadData
from support.engine.passes import PassInput
from support.files.features import encode_pictures, open_frames, pairs
from support.files.video import Video
from test_evaluate import assert_segments_go_on
from test_passes import assert_same, lively, trace
from test_stream import assert_same as assert_training_is_streaming, both_ways
from test_train import epic
from toy import stages, train as toy_train, world

LION = {"memory": "none", "prune": False, "width_second": 12}
PARTS = ("connector", "router")


def decided(seed=0, llm=None, **changes) -> nar.Narrator:
    """A narrator whose routers, in the layers too, have a will: their last weights start at zero, or nearly."""
    model = tiny(seed, llm, **LION | changes)
    nn.init.normal_(model.aggregation.router[2].weight, std=1.0)
    for name, p in model.trainable().items():
        if "layers" in name and "router" in name:
            nn.init.normal_(p, std=0.1)
    return model


def connectors(model) -> tuple[nn.Sequential, nn.Sequential]:
    """The connectors of the first and of the second encoder."""
    return model.connector, model.aggregation.connector


# ------------------------------------------------------------------ the router

@torch.no_grad()
def test_the_router_by_hand():
    """Each token is a mixture of its two embeddings; the shares are those of its place, from the general CLS token."""
    model = decided()
    x, _ = video(model, frames=3)
    found, one, two, (first, second) = model.embed_frames(x), *connectors(model), x.split([20, 12], dim=-1)
    for t in range(3):
        scores = model.aggregation.router(one(first[t, 0])).view(10, 2)
        for j in range(10):
            a, b = (scores[j].exp() / scores[j].exp().sum()).tolist()
            assert (found[t, j] - a * one(first[t, j]) - b * two(second[t, j])).abs().max() < 1e-5
    shares = model.aggregation.shares(one(first))
    assert shares.std(0).min() > 0.01 and shares.std(1).min() > 0.01           # they differ by frame and by place
    assert torch.allclose(model.embed_frames(x.flatten(0, 1)), found.flatten(0, 1))   # as several streams are joined


def test_equal_shares_at_first():
    router = Aggregation(6, 8, 10)
    e, x = torch.randn(2, 10, 8), torch.randn(2, 10, 20)
    assert torch.allclose(router(e, x), (e + router.connector(x[..., 14:])) / 2)


@torch.no_grad()
def test_memory_tokens_go_through_the_first_half():
    model = decided(memory="clam", prune=True)
    memory = torch.randn(2, 10, 32)
    e = model.embed_visual(memory)
    memory[..., 20:] = 0
    assert torch.equal(model.embed_visual(memory), e) and torch.equal(e, model.connector(memory[..., :20]))


@pytest.mark.parametrize("start", ["published", "statistics"])
def test_first_weights(start):
    """Both connectors start alike, and so does the router where it starts as published."""
    model = decided()
    if start == "published":
        model.start_published()
        layers = [m for m in [*model.connector, *model.aggregation.modules()] if isinstance(m, nn.Linear)]
        assert len(layers) == 6 and not any(layer.bias.any() for layer in layers)
        assert all(0.015 < layer.weight.std() < 0.025 for layer in layers)
    else:
        x = 3 + 2 * torch.randn(200, 10, 32)
        model.initialise(x)
        for connector, part in zip(connectors(model), x[:, 1:].split([20, 12], dim=-1)):
            assert connector[0](part).mean((0, 1)).abs().max() < 0.5 and connector[0].bias.abs().sum() > 0


# ------------------------------------------------------------------ training = streaming

@pytest.mark.parametrize("changes", [{}, {"mod_keep": 0.5}, {"mod_keep": 0.5, "seed": 1, "grid": 1},
                                     {"memory": "clam", "prune": True, "last_k": 2},
                                     {"memory": "recent", "prune": True}, {"llm": grouped}], ids=" ".join)
def test_training_is_streaming(changes):
    changes = changes | ({"llm": changes["llm"]()} if "llm" in changes else {})
    model = decided(**changes)
    assert_training_is_streaming(model, *both_ways(model, seed=changes.get("seed", 0)))


@pytest.mark.parametrize("changes", [{}, {"mod_keep": 0.5}], ids=str)
def test_lookahead_and_merging_change_nothing(changes):
    model, x = lively(**LION | changes)
    nn.init.normal_(model.aggregation.router[2].weight, std=1.0)
    once = trace(model, x)
    assert sum(bool(row[-1]) for row in once[1]) > 5
    model.merge()
    for lookahead in (1, 4):
        assert_same(once, trace(model, x, lookahead), 1e-4)


@torch.no_grad()
def test_streams_that_share_a_pass():
    """The decoder joins the frames of several streams; each mixes its own."""
    model = decided().merge()
    x, parts = torch.randn(3, 10, 32), []
    for frames in (x[:1], x[1:]):
        context = open_stream(model)
        ids = [nar.FRAME] * 10 * len(frames)
        plan = torch.tensor([ids, range(len(ids)), context.cache.reserve(len(ids)).tolist()])
        parts.append(partial(PassInput, plan, frames, None, context.cache, slice(-1, None)))
    together = model.decoder([part() for part in parts])
    alone = [model.decoder([part()])[0] for part in parts]
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(together, alone))


@torch.no_grad()
def test_segments_go_on_under_teacher_forcing():
    model = decided(mod_keep=0.5)
    x, narrations = video(model, frames=30, at=(0, 3, 9, 15, 16, 22))
    assert_segments_go_on(model, x, narrations)


# ------------------------------------------------------------------ learning, checkpoints, refusals

def test_all_of_it_learns():
    model = decided(mod_keep=0.5)
    model.loss(*video(model))[0].backward()
    assert all(p.grad.abs().sum() > 0 for p in model.aggregation.parameters())


def test_saved_and_loaded(tmp_path):
    model = decided()
    model.save(tmp_path)
    names = {name: p.shape for name, p in model.trainable().items() if "aggregation" in name}
    assert set(names) == {f"base_model.model.aggregation.{part}.{layer}.{kind}" for part in PARTS for layer in (0, 2)
                          for kind in ("weight", "bias")}
    adapter = json.loads((tmp_path / "adapter_config.json").read_text())
    assert adapter["modules_to_save"] == ["connector", "aggregation"]
    again, (x, narrations) = load_narrator(str(tmp_path)), video(model)
    assert again.config.width_second == 12
    with torch.no_grad():
        assert torch.equal(model(x, narrations)[0], again(x, narrations)[0])
    with pytest.raises(BadData, match="has unexpected 8 tensors: base_model.model.aggregation"):
        load_narrator(str(tmp_path), width_second=0)


def test_a_narrator_without_it_has_nothing_of_it():
    model = tiny()
    assert not [name for name in model.trainable() if "aggregation" in name]
    x = torch.randn(2, 10, 32)
    assert torch.equal(model.embed_frames(x), model.connector(x.flatten(0, 1)).view(2, 10, -1))


@pytest.mark.parametrize("changes, message", [({"width_second": 32}, "leave none"), ({"width_second": -1}, "from 0"),
                                              ({"width_second": 1.5}, "cannot be"),
                                              ({"vision_second": 3}, "cannot be")])
def test_settings_are_refused(changes, message):
    with pytest.raises(BadData, match=message):
        nar.Config(**LION | {"width": 32} | changes)


def test_without_a_second_encoder_only_features_are_read():
    model = tiny(**LION | {"width": 256, "width_second": 128})
    with pytest.raises(BadData, match="features of both its encoders") as caught:
        model.vision_encoder(str(TOY / "vision"))
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ two encoders, and the stand-in

def test_pairs():
    """Each picture with the one before it; the same array again only where both are the same."""
    a, b = (np.full((2, 2, 3), k, np.uint8) for k in (1, 2))
    found = list(pairs([a, b, b, b, a]))
    assert [(y[0, 0, 0], y[0, 0, 3]) for y in found] == [(1, 1), (2, 1), (2, 2), (2, 2), (1, 2)]
    assert found[3] is found[2] is not found[1] and list(pairs([])) == []


def test_motion_by_hand():
    now, before = torch.tensor([[30, 60, 90], [0, 0, 0]]), torch.tensor([[10, 10, 10], [255, 255, 255]])
    assert motion(torch.cat([now, before], -1).to(torch.uint8)).tolist() == [[60, 10, 152], [0, 255, 0]]


def test_two_encoders_are_each_alone():
    """Of several videos at once, whose sizes differ, too."""
    one = nar.VisionEncoder(str(TOY / "vision"))
    both = TwoEncoders(one, one)
    videos = [torch.randint(0, 256, (2, *size, 6), dtype=torch.uint8) for size in ((96, 96), (48, 96))]
    assert (both.width, both.image_size) == (256, 96)
    for x, v in zip(both.encode_batches(videos), videos):
        assert torch.allclose(x, torch.cat([one(v[..., :3]), one(motion(v))], -1), atol=1e-5)


def test_a_video_file_gives_pairs():
    both, config = TwoEncoders(*[nar.VisionEncoder(str(TOY / "vision"))] * 2), nar.Config(width=256, width_second=128)
    found, _, _ = open_frames(str(ROOT / "toy" / "kitchen.mp4"), config, both, 4)
    expected = list(encode_pictures(pairs(islice(Video(str(ROOT / "toy" / "kitchen.mp4"), 2.0), 4)), both))
    assert torch.allclose(torch.stack(list(islice(found, 4))), torch.stack(expected), atol=1e-5)


def test_the_stand_in_learns_only_what_hands_do():
    heads, x = stages.HandHeads(8), torch.randn(4, 10, 8)
    labels = torch.from_numpy(world.Kitchen(0, 2).labels()[:4]).long()
    weights = [torch.ones(size) for size in world.SIZES]
    loss, others = heads.loss(x, labels, weights), labels.clone()
    others[..., [world.TYPE, world.COLOUR, world.DOOR, world.OTHER]] = 0
    assert torch.equal(heads.loss(x, others, weights), loss)
    for i in (world.EFFECT, world.HAND, world.HELD):
        others = labels.clone()
        others[..., i] = (others[..., i] + 1) % world.SIZES[i]
        assert not torch.isclose(heads.loss(x, others, weights), loss)


# ------------------------------------------------------------------ the toy's training

def test_the_toy_is_trained_evaluated_and_moved(tmp_path, monkeypatch):
    """--width-second: the stage egocentric, then all others with features of both; evaluate.py sees the same."""
    monkeypatch.setattr(stages, "STEPS", {"look": 1, "remember": 1, "recall": 1})
    monkeypatch.setattr(stages, "egocentric", partial(stages.egocentric, steps=2, batch=2, videos=2, each=2))
    real, ran, seen = train.fit, [], []
    for module in (toy_train, train):
        monkeypatch.setattr(module, "fit",
                            lambda stage, *more, **given: (ran.append(stage), real(stage, *more, **given)))
    scenes = stages.scenes
    monkeypatch.setattr(stages, "scenes", lambda *given: seen.append(scenes(*given)) or seen[-1])
    given = {"data": "toy", "limit": 2, "batch": 2, "epochs": 1.0, "lora_rank": 4, "llm": str(TOY / "llm"),
             "vision": str(TOY / "vision"), "memory": "none", "no_prune": True, "mod_keep": 0.5, "width_second": 8}
    with pytest.raises(BadData, match="multiple of 4"):
        train_command.train(train.Options(**given | {"width_second": 6}, output=str(tmp_path / "odd")))
    train_command.train(train.Options(**given, output=str(tmp_path / "out")))
    assert ran == ["egocentric", "look", "recall", "narrator"]
    assert {"vision_second", "features_second.safetensors"} <= {path.name for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out").rename(tmp_path / "moved")
    model = load_narrator(str(tmp_path / "moved"))
    assert (model.config.width, model.config.width_second) == (136, 8)
    assert model.config.vision_second == str(tmp_path / "moved" / "vision_second")
    args = argparse.Namespace(data="toy", root=None, split="train", limit=1, world="plain", vision=None, device="cpu",
                              dtype="auto", vision_dtype=None)
    sample = next(evaluate_command.samples(args, model))
    x = torch.stack(list(sample.tokens(evaluate_command.load_vision(args, model), 16)))
    assert x.shape[1:] == (10, 136) and (x - seen[0][0].x).abs().max() < 0.05             # kept in half precision
    assert len(list(narrate(model, x[:6]))) >= 6
    more = train.Options(data="toy", init=str(tmp_path / "moved"), output=str(tmp_path / "more"), limit=1, batch=1)
    train_command.train(more)
    assert load_narrator(str(tmp_path / "more")).config.vision_second == model.config.vision_second


def test_features_of_two_encoders_are_trained_on(tmp_path):
    epic(tmp_path / "root")
    given = dict(data="ek100", root=str(tmp_path / "root"), output=str(tmp_path / "out"), llm=str(TOY / "llm"),
                 lora_rank=2, batch=2, epochs=1.0, lr=1e-2, val_limit=0, device="cpu", memory="none", no_prune=True)
    train_command.train(train.Options(**given, width_second=6))
    model = load_narrator(str(tmp_path / "out"))
    assert model.connector[0].in_features == 10 and model.aggregation.connector[0].in_features == 6
    assert model.config.vision_second is None
