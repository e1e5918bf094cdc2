"""VideoLLM-MoD: routers beside a dense oracle, training = streaming, cache, what routers learn."""
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn

import narrator as nar
from beyond.baselines.mod import MoDLayer
from narrator import load
from beyond.commands import train_command
from beyond.commands.train_command import options_from
from helpers import grouped, small, tiny, video
from support.common.errors import BadData
from test_equalities import assert_same, both_ways, streamed_logits
from test_train import given_for

ONLINE = {"memory": "none", "prune": False}
MOD = ONLINE | {"mod_keep": 0.2}


def routers(model: nar.Narrator) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.trainable().items() if "router" in name}


def decided(llm=None, seed=0, **changes) -> nar.Narrator:
    model = tiny(seed, llm=llm, **MOD | changes)
    for p in routers(model).values():
        nn.init.normal_(p, std=0.1)
    return model


def dense(model: nar.Narrator, ids: list[int]):
    """The oracle of MoDLayer.forward: token by token, and with nothing left out."""
    J = model.config.J
    k = max(1, round(model.config.mod_keep * J))
    is_frame = [i == nar.FRAME for i in ids]
    frame_starts = [i for i in range(len(ids)) if is_frame[i] and not is_frame[i - 1]]

    def forward(self, h, attention_mask, **options):
        scores = [self.router.weight[0] @ row / row.square().mean().sqrt() for row in h[0]]
        keep = torch.tensor([not frame for frame in is_frame])
        for start in frame_starts:
            best_first = sorted(range(start, start + J), key=lambda i: -scores[i])
            keep[best_first[:k]] = True
        mask = torch.ones(len(ids), len(ids)).tril().bool() & keep
        after = self.inner(h, attention_mask=mask[None, None], **options)
        g = torch.ones(len(ids), 1)
        for i, score in enumerate(scores):
            if is_frame[i]:
                g[i] = 2 * score.sigmoid()
        return torch.where(keep[:, None], h + g * (after - h), h)

    return forward


@pytest.mark.parametrize("changes", [
    {}, {"mod_keep": 0.01}, {"grid": 1, "mod_keep": 0.5},
], ids=str)
@torch.no_grad()
def test_layers_are_those_of_the_oracle(changes):
    model = decided(**changes)
    x, narrations = video(model)
    hidden, _, tokens = model(x, narrations)
    forward = dense(model, tokens.ids)
    assert [isinstance(layer, MoDLayer) for layer in model.llm.model.layers] == [0, 1, 0, 1]
    for layer in model.llm.model.layers[1::2]:
        layer.forward = MethodType(forward, layer)
    expected, _, _ = model(x, narrations)
    assert (hidden - expected).abs().max() < 1e-4


@pytest.mark.parametrize("changes", [
    {}, {"mod_keep": 0.5, "seed": 1}, {"llm": grouped},
    {"llm": partial(small, "Qwen3")},           # norms of queries and keys
])
def test_training_is_streaming(changes):
    llm = changes.get("llm")
    model = decided(**changes | {"llm": llm and llm()})
    assert_same(model, *both_ways(model, seed=changes.get("seed", 0)))


def test_the_cache_holds_what_is_predicted():
    """Of a frame, two of ten tokens in half of the layers: 0.6 of VideoLLM-online's keys."""
    x, narrations = video(decided(), frames=40, at=(0, 20, 39))
    sizes = []
    for model in (tiny(**ONLINE), decided()):
        _, steps, context = streamed_logits(model, x, narrations)
        assert steps[-1].text_tokens + steps[-1].visual_tokens == context.position
        sizes.append(context.cache.bytes())
    token = 2 * 128 * 4                             # key and value of one layer [bytes]
    frame = 4 * 10 * token
    assert sizes[0] == 4 * token * context.position
    assert sizes[0] - sizes[1] == frame * len(x) * 4 // 10
    for layer, keys in context.cache.keys.items():
        left_out = 8 * len(x) if layer in (1, 3) else 0         # of ten tokens, two are kept
        assert keys.shape[2] == context.position - left_out


def test_routers_learn_through_the_tokens_that_they_keep():
    model = decided()
    x, narrations = video(model)
    scores = []                                     # of each router [L, 1]

    def note(module, inputs, output):
        output.retain_grad()
        scores.append(output)

    for layer in model.llm.model.layers[1::2]:
        layer.router.register_forward_hook(note)
    loss, _ = model.loss(x, narrations)
    loss.backward()
    frame = torch.tensor(model.layout.sequence(narrations).ids) == nar.FRAME
    learning = []
    for output in scores:
        best = output[frame].view(16, 10).topk(2).indices
        kept = torch.zeros(len(frame)).bool()
        kept[frame] = torch.zeros(16, 10).bool().scatter(1, best, True).flatten()
        learns = output.grad[:, 0] != 0
        assert not learns[~kept].any()
        learning.append(int(learns.sum()))
    assert learning[0] == 2 * 16
    # in the last layer only the frames' last tokens learn, from p([SKIP])
    assert 0 < learning[1] < learning[0]
    assert all(p.grad.abs().sum() > 0 for p in model.trainable().values())


def test_a_narrator_with_routers_is_trained(tmp_path):
    given = given_for(tmp_path, **MOD, lr=1e-2, epochs=1.0)
    of_no_memory = {name: given[name] for name in given.keys() - {"memory_heads", "memory_tokens"}}
    train_command.check_and_train(options_from(**of_no_memory))
    model = load(str(tmp_path / "out"))
    assert model.config.mod_keep == 0.2 and len(routers(model)) == 2
    start = 0.02 * 128 ** -0.5
    assert all(p.std() > 2 * start for p in routers(model).values())


def test_a_model_without_room_for_routers():
    llm = grouped()
    del llm.model.layers[1]
    with pytest.raises(BadData, match="one layer"):
        tiny(llm=llm, **MOD)
