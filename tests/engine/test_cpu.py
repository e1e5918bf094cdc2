"""Products of large models on a processor (cpu.py): the same numbers, and what stays as it is."""
import pytest
import torch

from helpers import grouped, tiny, video
from support.engine import cpu
from test_equalities import hidden_and_gradients

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


def kinds(model):
    return {type(module) for module in model.modules()}


@pytest.fixture
def any_size(monkeypatch):
    """Small models count as large ones."""
    monkeypatch.setattr(cpu, "LARGE", 1)


def test_small_models_stay_as_they_are():
    model = tiny()
    before = kinds(model)
    cpu.speed_up(model)
    assert kinds(model) == before


@needs_onednn
def test_a_training_step_in_fp32(any_size):
    """Outputs and gradients; parameters keep their names."""
    model = tiny(llm=grouped())
    hidden, gradients = hidden_and_gradients(model, *video(model))
    cpu.speed_up(model, learns=True)
    assert cpu.OneDNNLinear in kinds(model)
    fast_hidden, fast_gradients = hidden_and_gradients(model, *video(model))
    assert (fast_hidden - hidden).norm() < 1e-5 * hidden.norm()
    assert fast_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (fast_gradients[name] - gradient).norm() < 1e-4 * gradient.norm() + 1e-6, name


packs = pytest.mark.skipif(not cpu.multiplies_bf16(), reason="this processor does not multiply bf16")


@needs_onednn
@pytest.mark.parametrize("dtype, kind, tolerance", [
    (torch.float32, cpu.OneDNNLinear, 1e-5),
    pytest.param(torch.bfloat16, cpu.PackedLinear, 0.02, marks=packs),
])
def test_the_numbers_of_a_stream_stay(any_size, dtype, kind, tolerance):
    """A head that shares the table of words keeps its weight."""
    llm = grouped(dtype)
    llm.lm_head.weight = llm.get_input_embeddings().weight
    model = tiny(llm=llm).eval()
    if kind is cpu.PackedLinear:                # for streams alone
        cpu.speed_up(model, learns=True)
        assert kind not in kinds(model)
    for module in model.modules():
        if hasattr(module, "lora_B"):
            torch.nn.init.zeros_(module.lora_B.weight)
    model.merge()
    ids = torch.arange(30)
    mask = torch.ones(30, 30, dtype=torch.bool).tril()
    with torch.no_grad():
        before = model.logits(model.run(model.embed(ids), ids, mask))
        cpu.speed_up(model)
        after = model.logits(model.run(model.embed(ids), ids, mask))
    assert kind in kinds(model)
    assert model.llm.lm_head.weight is model.llm.get_input_embeddings().weight
    assert (after - before).norm() < tolerance * before.norm()
