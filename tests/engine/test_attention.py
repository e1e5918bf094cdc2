"""Attention segment by segment (§3.5): outputs and gradients are those of the mask of Fig. 4."""
import pytest
import torch
import transformers

import narrator as nar
from helpers import Sizes, grouped, tiny, video
from support.engine import attention
from test_equalities import assert_both_forms_are_one

AT = (0, 3, 9, 15, 16, 22, 24, 26)          # segments of one to six frames, some of them alike


SIZES = {"vocab_size": 640, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 1}


def model_of(name, **changes):
    """A small language model of one of transformers' families, random weights."""
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    return model_class(config_class(**SIZES | {"pad_token_id": 0} | changes))


def test_a_llama_like_model(monkeypatch):
    assert_both_forms_are_one(tiny(llm=model_of("Qwen3", head_dim=8)), monkeypatch)


@pytest.mark.parametrize("last_k", [None, 0, 3])
def test_rows_of_segments_are_those_of_the_mask(last_k):
    narrations = [(frame, [5] * (1 + frame % 3)) for frame in AT]
    tokens = tiny(memory_tokens=2).layout.sequence(narrations)
    mask = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    model = grouped()                       # four heads of queries share two of keys
    seen = nar.visible(tokens, torch.arange(tokens.segment[-1] + 1)[:, None], last_k)
    segments = attention.Segments(tokens.segment, seen, model)
    queries = torch.arange(len(tokens)).split([rows // 2 for rows in segments.rows])
    keys = segments.all_keys.split(segments.keys)
    for of_segment, seen_keys, hidden in zip(queries, keys, segments.masks):
        first, second = hidden[0, 0, ::2], hidden[0, 0, 1::2]
        assert torch.equal(first, second)
        mask[of_segment[:, None], seen_keys] = first == 0
    assert torch.equal(mask, nar.attention_mask(tokens, last_k))


@pytest.mark.parametrize("variant", [{}, {"memory": "none", "prune": False}], ids=str)
def test_no_tensor_grows_with_the_square(variant):
    """Forward and backward of a training step: the largest tensor is far smaller than [L, L]."""
    model = tiny(**variant)
    x, narrations = video(model, 80, tuple(range(0, 80, 8)))
    L = len(model.layout.sequence(narrations))
    with Sizes() as sizes:
        loss, _ = model.loss(x, narrations)
        loss.backward()
    assert 0 < sizes.largest < L * L / 2
