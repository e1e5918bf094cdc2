"""Attention segment by segment (§3.5): outputs and gradients are those of the mask of Fig. 4."""
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import narrator as nar
from helpers import Sizes, grouped, small, tiny, video
from support.engine import attention
from test_equalities import assert_both_forms_are_one, close, hidden_and_gradients

def test_a_llama_like_model(monkeypatch):
    assert_both_forms_are_one(tiny(llm=small("Qwen3", num_key_value_heads=1)), monkeypatch)


@pytest.mark.parametrize("last_k", [None, 0, 3])
def test_rows_of_segments_are_those_of_the_mask(last_k):
    at = (0, 3, 9, 15, 16, 22, 24, 26)      # segments of one to six frames, some of them alike
    narrations = [(frame, [5] * (1 + frame % 3)) for frame in at]
    tokens = tiny(memory_tokens=2).layout.sequence(narrations)
    mask = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    model = grouped()                       # four heads of queries share two of keys
    seen = nar.visible(tokens, torch.arange(tokens.segment[-1] + 1)[:, None], last_k)
    segments = attention.Segments(tokens.segment, seen, model)
    queries = torch.arange(len(tokens)).split(segments.rows)
    keys = segments.all_keys.split(segments.keys)
    for of_segment, seen_keys, hidden in zip(queries, keys, segments.masks):
        first, second = hidden[0, 0, ::2], hidden[0, 0, 1::2]
        assert torch.equal(first, second)
        mask[of_segment[:, None], seen_keys] = first == 0
    assert torch.equal(mask, nar.attention_mask(tokens, last_k))


@pytest.mark.parametrize("variant", [{}, {"memory": "none", "prune": False}], ids=str)
def test_no_tensor_grows_with_the_square(variant):
    model = tiny(**variant)
    x, narrations = video(model, 80, tuple(range(0, 80, 8)))
    L = len(model.layout.sequence(narrations))
    with Sizes() as sizes:
        loss, _ = model.loss(x, narrations)
        loss.backward()
    assert 0 < sizes.largest < L * L / 2


def attention_in_one_call(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None,
                          window_size=(-1, -1), last_rows=True):
    """`varlen_attn` of torch 2.11 in plain PyTorch; `last_rows`: queries are those of their keys."""
    assert window_size == (-1, 0)
    attended = []
    shared = query.shape[1] // key.shape[1]
    lengths, keys = (ends.diff().tolist() for ends in (cu_seq_q, cu_seq_k))
    assert (max_q, max_k) == (max(lengths), max(keys))
    for q, k, v in zip(query.split(lengths), key.split(keys), value.split(keys)):
        scores = torch.einsum("qhc,khc->hqk", q, k.repeat_interleave(shared, 1)) * (scale or q.shape[2] ** -0.5)
        sees = torch.ones(scores.shape[1:]).tril(len(k) - len(q) if last_rows else 0)
        weights = scores.masked_fill(sees == 0, -torch.inf).softmax(-1)
        attended.append(torch.einsum("hqk,khc->qhc", weights, v.repeat_interleave(shared, 1)))
    return torch.cat(attended)


def newer(query, key, value, *places, enable_gqa=False, **options):
    assert enable_gqa or query.shape[1] == key.shape[1]
    return attention_in_one_call(query, key, value, *places, **options)


def put_in_place(monkeypatch, function):
    """As if on a GPU: a processor has no such call, and its import takes seconds."""
    module = SimpleNamespace(varlen_attn=function)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    monkeypatch.setattr(attention, "GPUS", ("cpu",))


@pytest.mark.parametrize("function", [attention_in_one_call, newer])
@pytest.mark.parametrize("changes", [{}, {"last_k": 0}, {"last_k": 3, "memory": "none"}], ids=str)
def test_one_call_is_the_loop(function, changes, monkeypatch):
    model = tiny(llm=grouped(), **changes)
    x, narrations = video(model, 60, (0, 1, 3, 44, 45, 52, 59))
    monkeypatch.setattr(nar, "LARGEST_MASK", 0)
    expected, expected_gradients = hidden_and_gradients(model, x, narrations)
    put_in_place(monkeypatch, function)
    hidden, gradients = hidden_and_gradients(model, x, narrations)
    assert attention.TRIED[model.llm]
    assert close(hidden, expected, 1e-5)
    for name, gradient in expected_gradients.items():
        assert close(gradients[name], gradient, 1e-5), name


def without_kernel(*args, **options):
    raise RuntimeError("no kernel")


@pytest.mark.parametrize("function, is_right", [
    (attention_in_one_call, True), (newer, True), (without_kernel, False),
    (partial(attention_in_one_call, last_rows=False), False),
])
def test_one_call_is_tried(function, is_right, monkeypatch):
    put_in_place(monkeypatch, function)
    assert attention.one_call_is_right(grouped()) == is_right


class Uncomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(key)
        return query.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *[torch.zeros_like(key) for key in ctx.saved_tensors * 2]


class Operators(TorchDispatchMode):
    """Within it, counts the operators that PyTorch starts."""
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_step_starts_few_operators(monkeypatch):
    """50 segments, in 16 layers: beside VideoLLM-online, which has one call anyway."""
    put_in_place(monkeypatch, lambda q, k, v, *bounds, **options: Uncomputed.apply(q, k, v))
    monkeypatch.setattr(attention, "one_call_is_right", lambda llm: True)

    def operators(**settings):
        of_layers = []
        for layers in (1, 2):
            model = tiny(llm=small("Llama", num_hidden_layers=layers), **settings)
            x, narrations = video(model, 200, tuple(range(0, 200, 4)))
            with Operators() as counted:
                loss, _ = model.loss(x, narrations)
                loss.backward()
            of_layers.append(counted.count)
        return of_layers[0] + 15 * (of_layers[1] - of_layers[0])

    online = operators(memory="none", prune=False)
    assert max(operators(), operators(last_k=10)) < 1.35 * online
