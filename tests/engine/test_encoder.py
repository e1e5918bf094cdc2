"""A vision encoder on a processor (support/engine/encoder.py) computes what transformers' model does.
"""
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModel

import narrator as nar
from helpers import TOY
from support.engine import encoder, linear

needs_bf16 = pytest.mark.skipif(not linear.ONEDNN_BF16, reason="this processor cannot multiply bf16")


def toy_vision(dtype):
    return AutoModel.from_pretrained(TOY / "vision", dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearly_the_same_output(dtype):
    """In fp32 as the plain model; in bf16 no farther from it than the plain model in bf16, or hardly.
    """
    torch.manual_seed(0)
    pixels = torch.randn(3, 3, 96, 96)
    with torch.no_grad():
        exact = toy_vision(torch.float32)(pixel_values=pixels)
        plain = toy_vision(dtype)(pixel_values=pixels.to(dtype))
        fast = toy_vision(dtype)
        encoder.speed_up_encoder(fast, dtype)
        ours = fast(pixel_values=pixels.to(dtype))
    for name in ("last_hidden_state", "pooler_output"):
        truth = exact[name]
        distance = (ours[name].float() - truth).norm()
        if dtype == torch.float32:
            assert distance < 1e-5 * truth.norm()
        else:
            assert distance < 1.5 * (plain[name].float() - truth).norm()


def test_gelu_in_place():
    """The same numbers, for both kinds; its inputs are changed."""
    for activation in ("gelu", "gelu_pytorch_tanh"):
        from transformers.activations import ACT2FN
        x = torch.randn(5, 7)
        model = nn.Sequential(nn.Identity(), ACT2FN[activation])
        theirs = model(x)
        encoder.replace_gelu(model)
        given = x.clone()
        ours = model(given)
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() == given.data_ptr()


def test_only_known_activations_are_replaced():
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    encoder.replace_gelu(model)
    assert [type(module) for module in model] == [nn.ReLU, nn.Tanh]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("few", [1, 3, 1000])
def test_attention_of_few_heads(few, dtype, monkeypatch):
    """As PyTorch's own, however many heads at a time; keys and scores may be large."""
    torch.manual_seed(0)
    B, heads, L, c = 2, 4, 30, 16
    monkeypatch.setattr(encoder, "SCORES", few * L * L)
    q, k, v = torch.randn(3, B, heads, L, c)
    k = k + 20 * torch.randn(heads, 1, c)           # the same for all keys: scores of more than 100
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.25)
    given = [y.to(dtype) for y in (q, k, v)]
    ours, weights = encoder.few_heads_at_a_time(None, *given, None, scaling=0.25)
    assert weights is None
    assert ours.dtype == dtype
    assert ours.shape == (B, L, heads, c)
    error = (ours.transpose(1, 2) - exact).norm() / exact.norm()
    plain = F.scaled_dot_product_attention(*(y.bfloat16() for y in (q, k, v)), scale=0.25)
    assert error < 1.2 * (plain - exact).norm() / exact.norm()


def test_attention_with_a_mask_is_that_of_pytorch():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    mask = torch.zeros(1, 1, 5, 5)
    mask[..., 3:] = -torch.inf
    module = nn.Module()
    module.is_causal = False
    ours, _ = encoder.few_heads_at_a_time(module, q, k, v, mask, scaling=0.5)
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)
    torch.testing.assert_close(ours, exact.transpose(1, 2))


@needs_bf16
def test_which_encoders_attend_so():
    """Those whose format is bf16 or int8; fp32 is the reference."""
    for dtype, name in ((torch.float32, "sdpa"), (torch.bfloat16, encoder.NAME),
                        (torch.int8, encoder.NAME)):
        vision = nar.VisionEncoder(str(TOY / "vision"), dtype=dtype)
        assert vision.model.config._attn_implementation == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_one_query(dtype):
    """Of SigLIP's pooling head: as PyTorch's own, without its copies."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.MultiheadAttention(64, 4, batch_first=True).to(dtype)])
    nn.init.normal_(model[0].in_proj_bias)
    query, pictures = torch.randn(3, 1, 64).to(dtype), torch.randn(3, 50, 64).to(dtype)
    with torch.no_grad():
        theirs = model[0](query, pictures, pictures)[0]
        encoder.replace_pooling(model)
        ours = model[0](query, pictures, pictures)[0]
    assert type(model[0]) is encoder.OneQuery
    assert (ours - theirs).norm() < (1e-5 if dtype == torch.float32 else 0.02) * theirs.norm()


def test_large_pictures_are_encoded_in_parts(monkeypatch):
    """As many as fit into 32 MB; the frame tokens are the same."""
    large = SimpleNamespace(image_size=384, patch_size=16, hidden_size=1024, intermediate_size=4096)
    huge = SimpleNamespace(image_size=1024, patch_size=8, hidden_size=2048)
    assert encoder.pictures_at_once(large, torch.device("cpu")) == 3
    assert encoder.pictures_at_once(huge, torch.device("cpu")) == 1
    assert encoder.pictures_at_once(large, torch.device("cuda")) > 1000

    vision = nar.VisionEncoder(str(TOY / "vision"))
    assert encoder.pictures_at_once(vision.model.config, torch.device("cpu")) > 100
    torch.manual_seed(0)
    pictures = torch.randint(0, 255, (5, 96, 96, 3), dtype=torch.uint8)
    at_once = vision(pictures)
    monkeypatch.setattr(nar, "pictures_at_once", lambda config, device: 2)
    torch.testing.assert_close(vision(pictures), at_once)
