"""What a stream costs."""
from functools import partial

import pytest
import torch

from beyond.experiments import cost
from helpers import tiny
from test_evaluate import command

run_cost = partial(command, main=cost.main)
ONLINE = {"memory": "none", "prune": False}


@pytest.mark.parametrize("changes", [{"last_k": 2}, {"last_k": 0, "narration_memory": 4}])
def test_bytes_in_use_are_those_of_all_that_a_stream_keeps(changes, monkeypatch):
    model = tiny(**changes).merge()
    monkeypatch.setattr(cost, "WINDOW", 10)
    costs = cost.measure_stream(model, 20, lookahead=4)
    context = cost.open_stream(model, guesses=0)
    for decision in cost.stream.narrate(model, cost.random_frames(model, 20),
                                        given=cost.given_narrations(model, 20), context=context):
        tokens = decision.text_tokens + decision.visual_tokens
    sizes = model.llm.config
    head = sizes.hidden_size // sizes.num_attention_heads
    token = 2 * 4 * sizes.num_hidden_layers * sizes.num_key_value_heads * head
    used = (tokens * token + cost.state_bytes(context)) / 1e6
    assert costs["cache and state, MB"] == costs["MB after 20"] == pytest.approx(used)
    assert costs["largest cache, tokens"] >= tokens


@torch.no_grad()
def test_macs_are_those_of_the_layers():
    online = tiny(**ONLINE).merge()
    layers = sum(p.numel() for name, p in online.llm.named_parameters()
                 if "layers" in name and p.dim() == 2)
    narrations = list(cost.given_narrations(online, 8).items())
    tokens = len(online.layout.sequence(narrations)) - 1           # the last one is not fed
    counted = cost.macs(online, 8)
    assert layers * tokens < counted < 1.4 * layers * tokens
    layer = layers / online.llm.config.num_hidden_layers
    saved = counted - cost.macs(tiny(**ONLINE, mod_keep=0.2).merge(), 8)
    assert 1 < saved / (2 * layer * 8 * 8) < 1.5           # two layers skip 8 tokens of each frame


def test_the_variants_of_a_stream(monkeypatch):
    monkeypatch.setattr(cost, "EVERY", 4)
    monkeypatch.setattr(cost, "SENTENCE", 3)
    names = ("FlowNar-C", "VideoLLM-MoD")
    result = run_cost("stream", "--frames", 8, "--json")
    tokens = [result[name]["largest cache, tokens"] for name in names]
    assert tokens[0] < tokens[1]
    assert all(costs["GMACs"] > 0 and costs["frames/s"] > 0 for costs in result.values())
