"""Weights in int8 (support/engine/int8.py): how exact they are, and where they are refused."""
import pytest
import torch
import torch.nn.functional as F

import narrator as nar
from baselines.variants import load_narrator
from helpers import TOY, tiny, video
from stream import narrate
from streams.bounds import open_stream
from support.common import devices
from support.common.errors import BadData
from support.engine import int8
from support.engine.checkpoint import load_llm


@pytest.fixture(params=[False] + int8.VNNI * [True], ids=["fbgemm", "onednn"])
def products(request, monkeypatch):
    """Products of 7 bits by FBGEMM, and of 8 bits by oneDNN where the processor has VNNI."""
    monkeypatch.setattr(int8, "VNNI", request.param)
    monkeypatch.setattr(int8, "LEVELS", 127 if request.param else 63)


@pytest.mark.parametrize("device", ["cpu", "elsewhere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product(device, dtype, products, monkeypatch):
    """On a processor, and as on other devices, also of a weight in several pieces."""
    torch.manual_seed(0)
    monkeypatch.setattr(int8, "PIECE", 64 * 256)
    x, weight, bias = torch.randn(7, 3, 256).to(dtype), torch.randn(192, 256), torch.randn(192)
    exact = F.linear(x.float(), weight, bias)
    small = int8.into_int8(weight.split(32), "cpu")
    assert len(small) == 192 and len(small.pieces) == 3
    if device == "elsewhere":
        small = int8.into_int8(weight.split(32), "meta")
        assert small.product(x.to("meta"), bias.to("meta", dtype)).shape == exact.shape
        return
    y = small.product(x, bias.to(dtype))
    assert y.dtype == dtype and (y - exact).norm() < 0.03 * exact.norm()


def test_a_large_row_does_not_blur_the_others(products):
    """Nor do rows of zeros divide by zero."""
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    x = torch.randn(3, 256)
    rows = torch.stack([x[0], 1e4 * x[1], torch.zeros(256)])
    y = int8.into_int8([weight], "cpu").product(rows, None)
    exact = F.linear(rows, weight)
    assert ((y - exact).norm(dim=1)[:2] < 0.03 * exact.norm(dim=1)[:2]).all()
    assert (y[2] == 0).all()


@pytest.mark.skipif(not int8.OUR_BYTES, reason="PyTorch chooses the bytes")
@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 256), (256,)])
@pytest.mark.parametrize("two_parts", [False, True])
def test_steps_of_the_inputs(shape, two_parts, products):
    """Inputs are exact to half a step, of two parts or of one: only weights lose more."""
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    scale = int8.largest(weight) / 127
    rounded = (weight / scale).round() * scale
    x = torch.randn(shape)
    y = int8.into_int8([weight], "cpu", two_parts).product(x, None)
    exact = F.linear(x, rounded)
    assert y.shape == exact.shape
    step = 1 / int8.LEVELS
    if two_parts:
        step = step / (2 * int8.LEVELS)
    furthest = x.abs().max() * step / 2 * rounded.abs().sum(1).max()
    assert (y - exact).abs().max() <= furthest + 1e-4


@pytest.mark.parametrize("two_parts", [False, int8.OUR_BYTES])
def test_no_sum_overflows(two_parts, products):
    """Numbers of one sign, the largest there are: their sums need the most bits."""
    ones = torch.ones(16, 512)
    y = int8.into_int8([ones], "cpu", two_parts).product(ones, None)
    assert (y - 512).abs().max() < 512 * 0.02


def test_narrations_are_nearly_those_of_fp32():
    """On the bundled narrator: given the same sentences, p([SKIP]) differs little."""
    x, found = None, {}
    for dtype in (torch.float32, torch.int8):
        model = load_narrator(str(TOY), dtype=dtype).merge()
        assert model.slow_because is None
        if x is None:
            generator = torch.Generator().manual_seed(0)
            size = 12, 96, 96, 3
            pictures = torch.randint(0, 255, size, dtype=torch.uint8, generator=generator)
            x = model.vision_encoder()(pictures)
            ids = model.layout.encode(" You look.")
        steps = narrate(model, x, given={0: ids, 7: ids}, context=open_stream(model, guesses=0))
        found[dtype] = torch.tensor([step.p_skip or 0.0 for step in steps])
    assert (found[torch.float32] - found[torch.int8]).abs().max() < 0.1


def test_a_language_model_in_fp32_files(tmp_path):
    """Whose head shares the embeddings: they are in bf16 beside int8, its layers are read from
    fp32."""
    llm, tokenizer = load_llm(str(TOY / "llm"))
    llm.save_pretrained(tmp_path / "llm")
    tokenizer.save_pretrained(tmp_path / "llm")
    model = tiny(llm=llm)
    model.config.llm = str(tmp_path / "llm")
    model.save(tmp_path)
    x, narrations = video(model)
    with torch.no_grad():
        exact, _, _ = model(x, narrations)
        hidden, _, _ = load_narrator(str(tmp_path), dtype=torch.int8)(x, narrations)
    assert (hidden - exact).norm() < 0.1 * exact.norm()


def test_a_vision_encoder():
    pictures = torch.randint(0, 255, (2, 96, 96, 3), dtype=torch.uint8)
    exact, small = (nar.VisionEncoder(str(TOY / "vision"), dtype=dtype)(pictures)
                    for dtype in (torch.float32, torch.int8))
    assert small.dtype == torch.float32 and F.cosine_similarity(exact, small, -1).min() > 0.99


def test_plain_passes_and_the_parallel_form(tmp_path):
    """Other language models than Llama-like ones, and evaluate.py, ask the modules themselves."""
    tiny().save(tmp_path)
    model = load_narrator(str(tmp_path), dtype=torch.int8)
    exact = load_narrator(str(tmp_path))
    x, narrations = video(model)
    with torch.no_grad():
        hidden, theirs = model(x, narrations)[0], exact(x, narrations)[0]
    assert (hidden - theirs).norm() < 0.1 * theirs.norm()
    with pytest.raises(ValueError, match="no LoRA to save"):
        model.save(tmp_path)


def test_where_int8_cannot_be(monkeypatch):
    assert devices.device_and_dtype("cpu", "int8") == ("cpu", torch.int8)
    with pytest.raises(BadData, match="int8 is for narrators that stream"):
        load_llm(str(TOY / "llm"), torch.int8)
    monkeypatch.setattr(int8, "VNNI", False)
    monkeypatch.setattr(int8, "MAKE", "a function that is gone")
    for load in (lambda: load_narrator(str(TOY), dtype=torch.int8),
                 lambda: nar.VisionEncoder(str(TOY / "vision"), dtype=torch.int8)):
        with pytest.raises(BadData, match="no products of int8") as caught:
            load()
        assert "\n" not in str(caught.value)
