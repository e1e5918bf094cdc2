"""Products of large models on a processor (cpu.py): the same numbers, and what stays as it is."""
import pytest
import torch

from helpers import grouped, tiny, video
from support.engine import cpu

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
    """Loss and gradients; parameters keep their names."""
    model = tiny(llm=grouped())
    x, narrations = video(model)
    results = []
    for fast in (False, True):
        if fast:
            cpu.speed_up(model, learns=True)
            assert cpu.OneDNNLinear in kinds(model)
        model.zero_grad()
        loss, _ = model.loss(x, narrations)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.trainable().items()
                     if p.grad is not None}
        results.append((loss.detach(), gradients))
    (loss, gradients), (fast_loss, fast_gradients) = results
    assert torch.allclose(fast_loss, loss, rtol=1e-5)
    assert fast_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (fast_gradients[name] - gradient).norm() < 1e-4 * gradient.norm() + 1e-6, name


@needs_onednn
@pytest.mark.skipif(not cpu.multiplies_bf16(), reason="this processor does not multiply bf16")
def test_weights_in_bf16_are_packed_for_streams_alone(any_size):
    """A head that shares the table of words is not."""
    llm = grouped(torch.bfloat16)
    llm.lm_head.weight = llm.get_input_embeddings().weight
    model = tiny(llm=llm).eval()
    cpu.speed_up(model, learns=True)
    assert cpu.PackedLinear not in kinds(model)
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
    assert cpu.PackedLinear in kinds(model)
    assert model.llm.lm_head.weight is model.llm.get_input_embeddings().weight
    assert (after - before).norm() < 0.02 * before.norm()
