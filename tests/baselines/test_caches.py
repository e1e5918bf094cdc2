"""beyond/baselines/caches.py: positions that are compacted after a narration, and a sliding window."""
from argparse import ArgumentTypeError

import pytest
import torch

from beyond.baselines import context_class
from beyond.baselines.caches import Compacted, Windowed, compared_stream, kind_of_cache
from helpers import TOY, assert_same_stream, narrate, tiny, video
from narrator import FRAME, VISUAL
from stream import Cache, Context
from support.common.errors import BadData
from test_evaluate import command

AT = (0, 3, 5, 9, 12)
ONLINE = {"memory": "none", "prune": False}


def kept_keys(model, context, positions, x) -> torch.Tensor:
    """The first layer's keys of the tokens in a cache, fed again at given positions. (Those of other
    layers depend on tokens that have left.)"""
    ids = context.cache.tokens.ids
    frames = ids.count(FRAME) // model.config.J
    e = model.embed(ids, x[len(x) - frames:] if frames else None)
    cache = Cache()
    model.run(e, positions, cache=cache)
    return cache.keys[0]


@pytest.mark.parametrize("changes, rotate", [
    ({}, False), ({"last_k": 2}, True), ({"memory": "recent", "last_k": 0}, False),
    ({"last_k": 0, "narration_memory": 4}, True),
], ids=str)
@torch.no_grad()
def test_positions_are_compacted_after_each_narration(changes, rotate):
    """The counter goes on behind the tokens that are left. Their keys have the rotation of where
    they are then, or of where they were fed."""
    model = tiny(**changes)
    x, narrations = video(model, 14, at=AT)
    context = context_class(model, Compacted)(model, rotate=rotate)
    for step in narrate(model, x, given=dict(narrations), context=context):
        if step.narration:
            left = len(context.cache.tokens)
            assert context.position == left
            expected = torch.arange(left) if rotate else context.positions
            keys = kept_keys(model, context, expected, x)
            assert torch.allclose(context.cache.keys[0], keys, atol=1e-4)
            assert rotate == torch.equal(context.positions, torch.arange(left))


def test_where_nothing_leaves_nothing_changes():
    model = tiny(**ONLINE)
    x, narrations = video(model, 14, at=AT)
    contexts = [Context(model), Compacted(model, rotate=True), Windowed(model, 10_000)]
    plain, *others = [list(narrate(model, x, given=dict(narrations), context=context))
                      for context in contexts]
    for steps in others:
        assert_same_stream(steps, plain)


@torch.no_grad()
def test_a_window_holds_the_latest_frames():
    """And the prompt, and the latest ten sentences; whole frames leave, and no more than must."""
    window = 233
    model = tiny(**ONLINE)
    x, narrations = video(model, frames=36, at=tuple(range(0, 36, 3)))
    context = Windowed(model, window)
    fullest = 0
    for step in narrate(model, x, given=dict(narrations), context=context):
        tokens = context.cache.tokens
        assert len(tokens) <= window
        fullest = max(fullest, step.most_tokens)
        texts = {number for number, kind in zip(tokens.number, tokens.kind) if number >= 0}
        assert texts >= set(range(max(0, context.segment - Windowed.NARRATIONS), context.segment))
        assert min(texts) >= context.segment - Windowed.NARRATIONS - 1
        assert tokens.ids.count(FRAME) % model.config.J == 0
    assert fullest > window - 2 * (model.config.J + 1)
    assert tokens.kind.count(VISUAL) and context.position == len(tokens)
    keys = kept_keys(model, context, torch.arange(len(tokens)), x)
    assert torch.allclose(context.cache.keys[0], keys, atol=1e-4)


def test_refusals():
    def stream(cache, **changes):
        return compared_stream(tiny(**changes), cache)

    with pytest.raises(BadData, match="--cache 300: a window is for a narrator that keeps every"):
        stream("300")
    for cache in ("compacted", "300"):
        with pytest.raises(BadData, match="--cache: layers of VideoLLM-MoD hold different tokens"):
            stream(cache, **ONLINE, mod_keep=0.2)
    model = tiny(**ONLINE)
    x, narrations = video(model)
    with pytest.raises(BadData, match="--cache 40: prompt and sentences leave no room for a frame"):
        list(narrate(model, x, given=dict(narrations), context=Windowed(model, 40)))


def test_the_command(tmp_path):
    """Predictions of one kind are not those of another."""
    line = ("stream", "--data", "toy", "--limit", 1, "--model", TOY, "--output", tmp_path / "kept")
    rotated = command(*line, "--cache", "rotated", "--json")
    assert rotated["f1"] == 1 and rotated["repeated"] == 0
    assert "cache" in command(*line, ok=False)


def test_kinds_are_named():
    assert kind_of_cache("rotated") == "rotated"
    assert kind_of_cache("0316") == "316"
    for text in ("foo", "0"):
        with pytest.raises(ArgumentTypeError, match="compacted, rotated, or a number of tokens"):
            kind_of_cache(text)
