"""LION-FS: the router by hand, training = streaming, checkpoints, training on features."""
import pytest
import torch
from torch import nn

import narrator as nar
from baselines.lionfs import Aggregation
from baselines.variants import load_narrator, make_config
from commands import train_command
from commands.train_command import options_from
from helpers import tiny, video
from support.common.errors import BadData
from test_equalities import assert_same, both_ways
from test_train import given_for

LION = {"memory": "none", "prune": False, "width_second": 12}


def decided(seed=0, llm=None, **changes) -> nar.Narrator:
    """A narrator whose routers, in the layers too, prefer some tokens. (Their last weights start at
    zero, or nearly.)"""
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
    """Each token is a mixture of its two embeddings; the shares are those of its place, from the
    general CLS token."""
    model = decided()
    x, _ = video(model, frames=3)
    mixed = model.embed_frames(x)
    general, egocentric = connectors(model)
    x_general, x_egocentric = x.split([20, 12], dim=-1)
    for t in range(3):
        scores = model.aggregation.router(general(x_general[t, 0])).view(10, 2)
        for j in range(10):
            share, other_share = (scores[j].exp() / scores[j].exp().sum()).tolist()
            expected = share * general(x_general[t, j])
            expected += other_share * egocentric(x_egocentric[t, j])
            assert (mixed[t, j] - expected).abs().max() < 1e-5
    # shares differ by frame and by place
    shares = model.aggregation.shares(general(x_general))
    assert shares.std(0).min() > 0.01
    assert shares.std(1).min() > 0.01


def test_equal_shares_at_first():
    router = Aggregation(6, 8, 10)
    e = torch.randn(2, 10, 8)
    x = torch.randn(2, 10, 20)
    assert torch.allclose(router(e, x), (e + router.connector(x[..., 14:])) / 2)


@torch.no_grad()
def test_memory_tokens_go_through_the_first_half():
    model = decided(memory="clam", prune=True)
    memory = torch.randn(2, 10, 32)
    e = model.embed_visual(memory)
    memory[..., 20:] = 0
    assert torch.equal(model.embed_visual(memory), e)
    assert torch.equal(model.connector(memory[..., :20]), e)


def test_published_first_weights():
    """Both connectors and the router start alike."""
    model = decided()
    model.start_published()
    modules = [*model.connector, *model.aggregation.modules()]
    layers = [module for module in modules if isinstance(module, nn.Linear)]
    assert len(layers) == 6
    for layer in layers:
        assert not layer.bias.any()
        assert 0.015 < layer.weight.std() < 0.025


def test_first_weights_from_statistics():
    """Both connectors standardise their part of the features."""
    model = decided()
    x = 3 + 2 * torch.randn(200, 10, 32)
    model.initialise(x)
    parts = x[:, 1:].split([20, 12], dim=-1)
    for connector, part in zip(connectors(model), parts):
        assert connector[0](part).mean((0, 1)).abs().max() < 0.5
        assert connector[0].bias.abs().sum() > 0


# ------------------------------------------------------------------ training = streaming

@pytest.mark.parametrize("changes", [
    {},
    {"mod_keep": 0.5},
    {"mod_keep": 0.5, "seed": 1, "grid": 1},
    {"memory": "clam", "prune": True, "last_k": 2},
], ids=str)
def test_training_is_streaming(changes):
    model = decided(**changes)
    assert_same(model, *both_ways(model, 20, changes.get("seed", 0)))


# ------------------------------------------------------------------ learning, checkpoints, refusals

def test_all_of_it_learns():
    model = decided(mod_keep=0.5)
    loss, _ = model.loss(*video(model))
    loss.backward()
    for name, p in model.aggregation.named_parameters():
        assert p.grad.abs().sum() > 0, name


@pytest.mark.parametrize("changes, message", [
    ({"width_second": 32}, "leave none"),
    ({"width_second": -1}, "from 1"),
    ({"width_second": 1.5}, "cannot be"),
])
def test_settings_are_refused(changes, message):
    with pytest.raises(BadData, match=message):
        make_config(**LION | {"width": 32} | changes)


def test_only_features_are_read():
    with pytest.raises(BadData, match="features of two vision encoders"):
        tiny(**LION).vision_encoder()


def test_features_of_two_encoders_are_trained_on(tmp_path):
    given = given_for(tmp_path, **LION | {"width_second": 6})
    train_command.check_and_train(options_from(**given))
    model = load_narrator(str(tmp_path / "out"))
    assert model.connector[0].in_features == 10
    assert model.aggregation.connector[0].in_features == 6
