"""Attention in rectangles (§3.5): outputs and gradients are those of the dense mask."""
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import transformers

import narrator as nar
import stream
from baselines.variants import load_narrator
from helpers import TOY, grouped, record_plain, tiny, video
from support.common.errors import BadData
from support.engine import attention, flex, family
from support.engine.checkpoint import load_tokenizer

AT = (0, 3, 9, 15, 16, 22, 24, 26)          # segments of one to six frames, some of them alike


@contextmanager
def dense(model, tokens):
    """The oracle: inside, the parallel form is given the mask of Fig. 4 as it is drawn."""
    mask = nar.attention_mask(tokens, model.config.last_k, model.config.prune)[None, None]

    def with_mask(module, args, kwargs):
        return args, kwargs | {"rectangles": None, "attention_mask": mask}

    hook = model.llm.model.register_forward_pre_hook(with_mask, with_kwargs=True)
    yield
    hook.remove()


def hidden_and_gradients(model, x, narrations):
    model.zero_grad()
    hidden, _, tokens = model(x, narrations)
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    (hidden * weight).sum().backward()
    gradients = {name: p.grad for name, p in model.trainable().items() if p.grad is not None}
    return tokens, hidden.detach(), gradients


def assert_as_the_dense_mask(model, x, narrations):
    tokens, hidden, gradients = hidden_and_gradients(model, x, narrations)
    with dense(model, tokens):
        _, expected_hidden, expected_gradients = hidden_and_gradients(model, x, narrations)
    assert (hidden - expected_hidden).abs().max() < 1e-5
    assert len(gradients) > 20
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        difference = (gradients[name] - expected).abs().max()
        assert difference < 1e-5 * (1 + expected.abs().max()), name


@pytest.mark.parametrize("variant", [
    {}, {"last_k": 0}, {"last_k": 2}, {"memory": "none"}, {"keep_newline": True},
    {"last_k": 0, "narration_memory": 4}, {"memory": "none", "prune": False},
], ids=str)
@pytest.mark.parametrize("kept", [0, attention.KEPT])
def test_rectangles_are_the_mask(kept, variant, monkeypatch):
    """Outputs and gradients, of rectangles that are kept and of those that are computed again. Four
    heads of queries share two of keys."""
    monkeypatch.setattr(attention, "KEPT", kept)
    model = tiny(llm=grouped(), **variant)
    assert_as_the_dense_mask(model, *video(model, 30, AT))


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
    ("Mistral", {"sliding_window": 16}),
    ("SmolLM3", {}),
])
def test_any_llama_like_model(name, changes):
    model = tiny(llm=model_of(name, **changes))
    assert_as_the_dense_mask(model, *video(model, 30, AT))


@pytest.mark.parametrize("last_k", [None, 0, 1, 3])
def test_rows_of_segments_are_those_of_the_mask(last_k):
    narrations = [(frame, [5] * (1 + frame % 3)) for frame in AT]
    tokens = tiny(memory_tokens=2).layout.sequence(narrations)
    L = len(tokens)
    mask = torch.zeros(L, L, dtype=torch.bool)
    rows = nar.segment_rows(tokens, last_k)
    for queries, keys in rows:
        mask[queries[:, None], keys] = keys <= queries[:, None]
    assert torch.equal(mask, nar.attention_mask(tokens, last_k))

    # some segments share a rectangle, and are padded, but only a little
    rectangles = attention.rectangles(rows, L, "cpu")
    assert sum(len(queries) for queries, _, _ in rectangles) == len(rows)
    assert len(rectangles) < len(rows)
    assert any((keys == L).any() for _, keys, _ in rectangles)
    pairs = sum(len(queries) * len(keys) for queries, keys in rows)
    padded_pairs = sum(queries.numel() * keys.shape[1] for queries, keys, _ in rectangles)
    assert padded_pairs <= attention.PADDED * pairs
    with mock.patch.object(attention, "MOST_PAIRS", 1):
        assert len(attention.rectangles(rows, L, "cpu")) == len(rows)       # each has its own


@pytest.mark.parametrize("variant", [{}, {"last_k": 2}, {"memory": "none", "prune": False}],
                         ids=str)
def test_no_tensor_grows_with_the_square(variant):
    """Forward and backward of a training step: the largest tensor is far smaller than [L, L]."""
    model = tiny(**variant)
    x, narrations = video(model, 170, tuple(range(0, 170, 8)))
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for output in result if isinstance(result, tuple | list) else [result]:
                if isinstance(output, torch.Tensor):
                    sizes.append(output.numel())
            return result

    L = len(model.layout.sequence(narrations))
    with Sizes():
        loss, _ = model.loss(x, narrations)
        loss.backward()
    assert max(sizes) < L * L / 2


@pytest.mark.parametrize("last_k", [None, 1])
def test_flex_attention_is_the_rectangles(last_k):
    """Forwards; PyTorch has no gradients of it on a processor: those are in test_cuda.py."""
    model = tiny(llm=grouped(), last_k=last_k)
    x, narrations = video(model, frames=30)
    with torch.no_grad():
        expected, _, _ = model(x, narrations)
        model.rectangles = flex.block_mask
        hidden, _, _ = model(x, narrations)
    assert (hidden - expected).abs().max() < 1e-4 * expected.abs().max()


def test_what_cannot_be_computed_is_refused():
    """Dropout in attention, and models that do not let their attention be replaced."""
    model = tiny()
    model.llm.model.layers[0].self_attn.attention_dropout = 0.1
    x, narrations = video(model)
    with pytest.raises(BadData, match="dropout"):
        model.train()(x, narrations)

    class Fixed(transformers.LlamaForCausalLM):
        def set_attn_implementation(self, name):
            pass

    with pytest.raises(BadData, match="Llama-like"):
        attention.install(Fixed(transformers.LlamaConfig(**SIZES)))


@pytest.mark.parametrize("name", ["StableLm", "Nemotron"])
def test_models_that_drop_the_mask_are_refused(name):
    """Their layers do not hand `rectangles` on: they would be trained on frames that streaming
    removes. Where nothing is removed, they can be used, and training is streaming."""
    with pytest.raises(BadData, match=f"{name}ForCausalLM does not hide .* Llama-like") as caught:
        tiny(llm=model_of(name))
    assert "\n" not in str(caught.value)
    model = tiny(llm=model_of(name), memory="none", prune=False)
    x, narrations = video(model)
    with torch.no_grad():
        hidden, _, _ = model(x, narrations)
        parallel = model.logits(hidden)
        streamed = record_plain(model)
        list(stream.narrate(model, x[:16], given=dict(narrations)))
    assert (torch.stack(streamed) - parallel[:-1]).abs().max() < 1e-3 * parallel.std()


@pytest.mark.parametrize("pruned", [True, False])
@pytest.mark.parametrize("name", ["GPT2LMHead", "OPT", "GPTNeoX", "BioGpt", "FalconH1", "Jamba",
                                  "RecurrentGemma", "ModernBertDecoder"])
def test_other_families_are_one_line(name, pruned):
    """Built differently, or with a past that is in no cache of keys and values."""
    if name == "GPT2LMHead":
        sizes = transformers.GPT2Config(vocab_size=640, n_embd=32, n_layer=1, n_head=4)
        llm = transformers.GPT2LMHeadModel(sizes)
    elif name == "Jamba":
        llm = model_of(name, use_mamba_kernels=False, num_experts=2)
    else:
        llm = model_of(name)
    changes = {} if pruned else {"memory": "none", "prune": False}
    with pytest.raises(BadData, match="use a Llama-like language model") as caught:
        tiny(llm=llm, **changes)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_with_a_model_of_another_family(tmp_path):
    sizes = transformers.GPT2Config(vocab_size=640, n_embd=32, n_layer=1, n_head=4)
    transformers.GPT2LMHeadModel(sizes).save_pretrained(tmp_path)
    load_tokenizer(str(TOY / "llm")).save_pretrained(tmp_path)
    with pytest.raises(BadData, match="GPT2LMHeadModel is built differently"):
        load_narrator(str(TOY), llm=str(tmp_path))


def test_rotations_that_depend_on_the_length_are_named_once(capsys):
    family.warn.cache_clear()
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for _ in range(2):
        tiny(llm=model_of("Llama", max_position_embeddings=128, rope_parameters=dynamic))
    assert capsys.readouterr().err.splitlines() == [
        "warning: the rotations of LlamaForCausalLM (dynamic) depend on the length of the context: "
        "beyond position 128, streaming differs from training"]
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    tiny(llm=model_of("Phi3", max_position_embeddings=512, rope_parameters=longrope,
                      original_max_position_embeddings=64))
    warning = capsys.readouterr().err
    assert "(longrope)" in warning
    assert "beyond position 64," in warning
    tiny(llm=model_of("Llama"))
    assert capsys.readouterr().err == ""
