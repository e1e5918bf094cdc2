"""Frozen weights, each read once into its place (support/engine/weights.py)."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, SiglipConfig, SiglipModel

from baselines.variants import load_narrator
from helpers import TOY, tiny
from support.common import devices, errors
from support.common.errors import BadData
from support.engine import checkpoint, lora, weights
from support.engine.checkpoint import load_llm, load_vision_model

LLM = str(TOY / "llm")


def in_shards(folder):
    """The language model in two files with an index."""
    shutil.copytree(LLM, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {}
    for n in range(2):
        file = f"model-{n}.safetensors"
        part = dict(list(tensors.items())[n::2])
        save_file(part, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


def in_two_formats(folder):
    """A norm in fp32, everything else in bf16: transformers reads it."""
    shutil.copytree(LLM, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("made", [lambda folder: LLM, in_shards, in_two_formats])
def test_the_same_weights_as_transformers(made, dtype, tmp_path):
    source = made(tmp_path / "llm")
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    ours = load_llm(source, dtype)[0]
    assert ours.dtype == ours.config.dtype == dtype and not ours.training
    assert ours.lm_head.weight is ours.get_input_embeddings().weight
    expected = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    found = dict(ours.named_parameters()) | dict(ours.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert all(found[name].dtype == expected[name].dtype for name in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_half_that_reads_texts_is_never_read(dtype, tmp_path, monkeypatch):
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 2}
    config = SiglipConfig(vision_config=size | {"image_size": 32, "patch_size": 16},
                          text_config=size | {"vocab_size": 99})
    SiglipModel(config).to(torch.bfloat16).save_pretrained(tmp_path)
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    read = []
    one = weights.WeightFiles.read
    monkeypatch.setattr(weights.WeightFiles, "read",
                        lambda self, name, mapped: read.append(name) or one(self, name, mapped))
    model = load_vision_model(str(tmp_path), dtype)[0]
    assert read and not any("text" in name for name in read)
    pixels = torch.rand(1, 3, 32, 32).to(torch.float32 if dtype == torch.int8 else dtype)
    assert model(pixel_values=pixels).pooler_output.shape == (1, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_is_merged_layer_by_layer(dtype, monkeypatch):
    """W + scale * B A, in one piece or in several; a head that LoRA does not change stays tied."""
    monkeypatch.setattr(lora, "ROWS", 10)
    model = tiny(llm=load_llm(LLM, dtype)[0])
    torch.nn.init.zeros_(model.llm.lm_head.lora_B.weight)
    layer = model.llm.model.layers[0].mlp.up_proj
    W, A, B = (y.weight.float() for y in (layer.base_layer, layer.lora_A, layer.lora_B))
    embeddings = model.llm.get_input_embeddings().weight
    lora.merge_lora(model.llm)
    merged = model.llm.model.layers[0].mlp.up_proj.weight
    assert merged.dtype == dtype
    assert torch.allclose(merged.float(), W + layer.scale * B @ A, rtol=1e-2, atol=1e-5)
    assert model.llm.lm_head.weight is embeddings
    assert not lora.layers_with_lora(model.llm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_too_little_memory_is_refused_before_reading(dtype, monkeypatch):
    monkeypatch.setattr(weights, "free_memory", lambda device: 500_000)
    monkeypatch.setattr(weights.WeightFiles, "place", lambda *_: pytest.fail("was read"))
    with pytest.raises(BadData, match="GB of memory, and 0.0 GB are free") as error:
        load_narrator(str(TOY), dtype=dtype)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(weights, "free_memory", lambda device: 50_000)
    with pytest.raises(BadData, match="GB of memory, and 0.0 GB are free"):
        load_vision_model(str(TOY / "vision"), dtype)
    monkeypatch.undo()
    monkeypatch.setattr(weights, "free_memory", lambda device: None)
    load_narrator(str(TOY), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_too_little_memory_of_a_device_is_refused_before_reading(dtype, monkeypatch):
    free = {"cpu": 10 ** 12, "cuda:0": 50_000}
    monkeypatch.setattr(weights, "free_memory", free.get)
    monkeypatch.setattr(weights.WeightFiles, "place", lambda *_: pytest.fail("was read"))
    with pytest.raises(BadData, match="and 0.0 GB are free on cuda:0"):
        load_narrator(str(TOY), dtype=dtype, device="cuda:0")
    with pytest.raises(BadData, match="and 0.0 GB are free on cuda:0"):
        load_vision_model(str(TOY / "vision"), dtype, "cuda:0")


def test_free_memory(monkeypatch):
    free = devices.free_memory()
    whole = devices.whole_memory()
    assert free is None or 0 < free < 1e15
    assert whole is None or 0 < whole < 1e15
    # a system without /proc, as macOS
    monkeypatch.setattr(devices, "Path", lambda path: Path("/nowhere" + path))
    assert devices.free_memory() == whole
    monkeypatch.setattr(devices.torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert devices.free_memory("cuda:0") == 123


def test_free_memory_in_a_container(tmp_path, monkeypatch):
    """Copies of files make room when memory is needed: they are free."""
    (tmp_path / "memory.max").write_text("16000\n")
    (tmp_path / "memory.current").write_text("15500\n")
    (tmp_path / "memory.stat").write_text("anon 500\nactive_file 5000\ninactive_file 10000\n")
    monkeypatch.setattr(devices, "CONTAINER", tmp_path)
    if devices.whole_memory() is not None and Path("/proc/meminfo").exists():
        assert devices.free_memory() == 15_500
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.free_memory() != 15_500


def test_a_process_of_torchrun_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for device in ("auto", "cuda"):
        assert devices.device_and_dtype(device)[0] == "cuda:1"
    assert devices.device_and_dtype("cuda:0")[0] == "cuda:0"


def test_advice_for_large_models_only(monkeypatch, capsys):
    monkeypatch.setattr(errors, "SAID_ONCE", set())
    llm = load_llm(LLM)[0]
    weights.advise(llm, "auto")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(weights, "LARGE", 1000)
    weights.advise(llm, "float32")
    assert capsys.readouterr().err == ""
    weights.advise(llm, "auto")
    assert "in float32, which is exact; --dtype int8" in capsys.readouterr().err
    weights.advise(llm.bfloat16(), "auto")
    assert "in bfloat16, which is faster" in capsys.readouterr().err


@pytest.mark.parametrize("multiplies_bf16, large, expected", [
    (True, 1000, torch.bfloat16),
    (True, 10 ** 8, torch.float32),
    (False, 1000, torch.float32),
])
def test_what_is_faster_on_a_processor(multiplies_bf16, large, expected, monkeypatch):
    monkeypatch.setattr(checkpoint, "ONEDNN_BF16", multiplies_bf16)
    monkeypatch.setattr(weights, "LARGE", large)
    assert checkpoint.faster_dtype(LLM) == expected
    assert load_narrator(str(TOY), dtype=None).llm.dtype == expected


def test_what_is_faster_for_a_missing_model():
    with pytest.raises(BadData, match="language model './nowhere' cannot be loaded"):
        checkpoint.faster_dtype("./nowhere")
