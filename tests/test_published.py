"""The published format with the full vocabulary: gradients, probabilities and PEFT, against what
the published implementation computed. What needs no licensed tokenizer is in method/test_golden.py.
"""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from baselines.variants import load_narrator
from helpers import GOLDEN, ROOT, TOY, published, tiny, video
from support.common.errors import BadData

golden = pytest.mark.skipif(not GOLDEN.exists(), reason="../shared/golden is not there")


def load(name):
    options = {"last_k": 2, "keep_newline": True} if name == "flownar_c" else {}
    return load_narrator(str(GOLDEN / name / "checkpoint"), llm=str(GOLDEN / "base_llm"), **options)


@golden
@pytest.mark.parametrize("name", ["flownar", "flownar_c", "videollm"])
def test_loss_and_gradients(name):
    """With the published tokens and mask, dropout off: the loss, and the gradient of every
    trainable tensor.

    The logits agree to 4e-6, but a fp32 softmax over 128,256 words is only right to 7e-4, and where
    the model is 98 % sure that is 3 % of a gradient; averaged over rows, 1 % is left.
    """
    model = load(name)
    folder = GOLDEN / name
    case = json.loads((folder / "teacher_forced.json").read_text())["video_101/true"]
    x = load_file(folder / "features.safetensors")["video_101"][:case["num_frames"]]
    hidden, labels, _ = published(model, x, case)
    learned = labels >= 0
    logits = model.logits(hidden[learned])
    loss = torch.nn.functional.cross_entropy(logits.double(), labels[learned])
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-4)
    expected = load_file(folder / "gradients.safetensors")
    compared = 0
    for key, p in model.trainable().items():
        if key in expected:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            assert (gradient - expected[key]).norm() < 0.02 * expected[key].norm() + 1e-9, key
            compared += 1
    assert compared == len(expected)


# ---------------------------------------------------------------------- PEFT

def test_our_checkpoints_load_in_peft(tmp_path):
    """PEFT's own LoRA around the language model computes our logits; connector and CLAM are its
    modules_to_save."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM
    model = tiny()
    model.save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["connector", "clustering"]
    assert config["peft_type"] == "LORA"
    lora_alone = config | {"modules_to_save": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(lora_alone))
    llm = AutoModelForCausalLM.from_pretrained(TOY / "llm", dtype=torch.float32)
    of_peft = peft.PeftModel.from_pretrained(llm, str(tmp_path)).eval()
    e = torch.randn(1, 12, 128)
    with torch.no_grad():
        logits = model.logits(model.llm.model(inputs_embeds=e).last_hidden_state)
        assert torch.allclose(of_peft(inputs_embeds=e).logits, logits, atol=1e-4)


def test_a_hub_id_is_fetched(tmp_path, monkeypatch):
    """owner/name that is not a folder is fetched from the hub; an error of the hub becomes one
    line."""
    model = tiny()
    model.save(tmp_path)
    names = []

    def download(name, **options):
        names.append(name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    loaded = load_narrator("zeyun-zhong/flownar-1B-ego4d")
    x, narrations = video(model)
    with torch.no_grad():
        assert torch.equal(loaded(x, narrations)[0], model(x, narrations)[0])
    assert names == ["zeyun-zhong/flownar-1B-ego4d"]

    def refuse(name, **options):
        raise OSError("404 no such\nrepository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(BadData, match="could it be fetched") as error:
        load_narrator("nobody/nothing")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["flownar", "flownar_c"])
def test_a_copied_head_is_ignored(name, tmp_path):
    """PEFT >= 0.12 may also store a copy of the head's base weight."""
    weights = load_file(ROOT / "tests" / "golden" / name / "adapter_model.safetensors")
    head = {"base_model.model.lm_head.base_layer.weight": torch.zeros(4, 4)}
    save_file(weights | head, tmp_path / "adapter_model.safetensors")
    shutil.copy(ROOT / "tests" / "golden" / name / "adapter_config.json", tmp_path)
    model = load_narrator(str(tmp_path), llm=str(ROOT / "tests" / "golden" / "llm"))
    for key, p in model.trainable().items():
        assert torch.equal(p, weights[key]), key
