"""Attention segment by segment (§3.5): outputs and gradients are those of the mask of Fig. 4."""
import pytest
import torch
import transformers

import narrator as nar
from narrator import load
from helpers import TOY, Sizes, grouped, tiny, video
from support.common.errors import BadData
from support.engine import attention
from support.engine.checkpoint import load_tokenizer
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


@pytest.mark.parametrize("name, changes", [
    ("Llama", {"num_key_value_heads": 4}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 8}),
    ("Mistral", {"sliding_window": 4096}),
    ("SmolLM3", {}),
])
def test_any_llama_like_model(name, changes, monkeypatch):
    assert_both_forms_are_one(tiny(llm=model_of(name, **changes)), monkeypatch)


@pytest.mark.parametrize("last_k", [None, 0, 1, 3])
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


@pytest.mark.parametrize("variant", [{}, {"last_k": 2}, {"memory": "none", "prune": False}],
                         ids=str)
def test_no_tensor_grows_with_the_square(variant):
    """Forward and backward of a training step: the largest tensor is far smaller than [L, L]."""
    model = tiny(**variant)
    x, narrations = video(model, 170, tuple(range(0, 170, 8)))
    L = len(model.layout.sequence(narrations))
    with Sizes() as sizes:
        loss, _ = model.loss(x, narrations)
        loss.backward()
    assert 0 < sizes.largest < L * L / 2


@pytest.mark.parametrize("name", ["StableLm", "Nemotron"])
def test_models_that_drop_the_mask_are_refused(name):
    """Their layers do not hand `segments` on: they would be trained on frames that streaming
    removes."""
    with pytest.raises(BadData, match=f"{name}ForCausalLM .* Llama-like") as caught:
        tiny(llm=model_of(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["GPT2LMHead", "OPT", "GPTNeoX", "BioGpt", "FalconH1", "Jamba",
                                  "RecurrentGemma", "ModernBertDecoder"])
def test_other_families_are_one_line(name):
    """Built differently, or with a past that is in no cache of keys and values."""
    if name == "GPT2LMHead":
        sizes = transformers.GPT2Config(vocab_size=640, n_embd=32, n_layer=1, n_head=4)
        llm = transformers.GPT2LMHeadModel(sizes)
    elif name == "Jamba":
        llm = model_of(name, use_mamba_kernels=False, num_experts=2)
    else:
        llm = model_of(name)
    with pytest.raises(BadData, match="use a Llama-like language model") as caught:
        tiny(llm=llm)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, changes", [
    ("Granite", {"logits_scaling": 8.0}),               # scaled logits
    ("Gemma2", {"final_logit_softcapping": 0.1}),       # capped logits
    ("Gemma2", {"attn_logit_softcapping": 0.01, "initializer_range": 0.5}),
    ("Cohere", {}),
])
def test_models_that_compute_something_else_are_refused(name, changes):
    with pytest.raises(BadData, match=f"{name}ForCausalLM computes something else"):
        tiny(llm=model_of(name, **changes))


def test_a_checkpoint_with_a_model_of_another_family(tmp_path):
    sizes = transformers.GPT2Config(vocab_size=640, n_embd=32, n_layer=1, n_head=4)
    transformers.GPT2LMHeadModel(sizes).save_pretrained(tmp_path)
    load_tokenizer(str(TOY / "llm")).save_pretrained(tmp_path)
    with pytest.raises(BadData, match="GPT2LMHeadModel is built differently"):
        load(str(TOY), llm=str(tmp_path))
