"""Base models whose files are not whole, or say more than numbers and shapes, are refused."""
import json
import shutil

import pytest
import torch

from helpers import TOY, with_entries, with_tensors, with_text
from narrator import Layout
from support.common.errors import BadData
from support.engine.frozen import (
    faster_dtype, find_model, load_llm, load_tokenizer, load_vision_model, pixel_settings,
)


def weights(change):
    return with_tensors("model.safetensors", change)


def weight_of(tensors) -> str:
    return next(name for name in tensors if "layers.0.mlp" in name and name.endswith("weight"))


def stored_as_integers(tensors):
    tensors[weight_of(tensors)] = (100 * tensors[weight_of(tensors)].float()).to(torch.int8)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n"


@pytest.mark.parametrize("damage, says", [
    (weights(lambda tensors: tensors.pop(weight_of(tensors))), "1 are missing: .*mlp"),
    (weights(lambda tensors: tensors.update({"extra": torch.zeros(2)})), "unexpected: extra"),
    (weights(lambda tensors: tensors[weight_of(tensors)].view(-1)[0].fill_(float("nan"))),
     "not finite .*mlp"),
    (weights(stored_as_integers), "mlp.* is quantised .I8."),
    (with_entries("config.json", quantization_config={"quant_method": "gptq", "bits": 4}), "cannot be loaded: .* quantised"),
    (with_text("config.json", '{"hidden_size": 8}'), "has no model_type"),
    (with_entries("config.json", intermediate_size=8), "are mismatched: .*mlp"),
    (with_entries("config.json", model_type="of_tomorrow"), "cannot be loaded: .*of_tomorrow"),
    (with_text("config.json", POINTER), "config.json: is a Git LFS pointer"),
    (with_text("model.safetensors", POINTER), "model.safetensors is a Git LFS pointer"),
    (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
     "cannot be loaded: .*model.safetensors"),
    (with_text("adapter_config.json", "{}"), "an adapter .* belongs in a folder of its own"),
])
def test_a_damaged_base_model_is_one_line(tmp_path, damage, says):
    shutil.copytree(TOY / "llm", tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(BadData, match=says) as caught:
        load_llm(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_of_another_model(tmp_path):
    shutil.copytree(TOY / "llm", tmp_path, dirs_exist_ok=True)
    tokenizer = load_tokenizer(str(TOY / "llm"))
    tokenizer.add_special_tokens({"pad_token": "<for padding>"})           # is never fed
    tokenizer.save_pretrained(tmp_path)
    load_llm(str(tmp_path))
    tokenizer.add_tokens(["<of another model>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BadData, match="gives tokens up to 519, and the model has 518"):
        load_llm(str(tmp_path))


def test_numbers_that_float16_does_not_have(tmp_path):
    shutil.copytree(TOY / "llm", tmp_path, dirs_exist_ok=True)
    weights(lambda tensors: tensors[weight_of(tensors)].fill_(1e6))(tmp_path)
    load_llm(str(tmp_path))
    with pytest.raises(BadData, match="not finite in torch.float16"):
        load_llm(str(tmp_path), torch.float16)


def without_words(folder):
    (folder / "tokenizer.json").unlink()
    with_entries("tokenizer_config.json", tokenizer_class="LlamaTokenizer")(folder)


@pytest.mark.parametrize("damage, says", [
    (lambda folder: (folder / "tokenizer_config.json").unlink(), "its tokenizer has no bos_token"),
    (without_words, "splits ','"),
])
def test_a_tokenizer_that_is_not_whole(tmp_path, damage, says):
    shutil.copytree(TOY / "llm", tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(BadData, match=says):
        Layout(load_tokenizer(str(tmp_path)), J=1, M=1)


CODE = """
from transformers import PretrainedConfig
open({mark!r}, "w").close()
class Own(PretrainedConfig):
    model_type = "own"
"""


@pytest.mark.parametrize("kind, loads", [("llm", load_llm), ("llm", load_tokenizer),
                                         ("llm", faster_dtype), ("vision", load_vision_model)])
def test_code_of_a_model_is_never_run(tmp_path, kind, loads, monkeypatch):
    """A folder whose auto_map names a Python file: nobody is asked, it is refused in one line."""
    shutil.copytree(TOY / kind, tmp_path, dirs_exist_ok=True)
    mark = tmp_path / "code has run"
    (tmp_path / "own.py").write_text(CODE.format(mark=str(mark)))
    names = {"AutoConfig": "own.Own", "AutoModel": "own.Own", "AutoModelForCausalLM": "own.Own",
             "AutoTokenizer": ["own.Own", None]}
    with_entries("config.json", model_type="own", auto_map=names)(tmp_path)
    if kind == "llm":
        with_entries("tokenizer_config.json", tokenizer_class="Own", auto_map=names)(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody is asked"))
    with pytest.raises(BadData, match="cannot be loaded"):
        loads(find_model(str(tmp_path), kind))
    assert not mark.exists()


@pytest.mark.parametrize("kind, loads", [("llm", load_llm), ("vision", load_vision_model)])
@pytest.mark.parametrize("kernel", ["owner/kernel", "flash_attention_2"])
def test_kernels_that_settings_name_are_not_used(tmp_path, kind, loads, kernel, monkeypatch):
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention",
                        lambda *_, **options: pytest.fail("a kernel is loaded"))
    shutil.copytree(TOY / kind, tmp_path, dirs_exist_ok=True)
    names = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
    with_entries("config.json", **dict.fromkeys(names, kernel), auto_map={"AutoModel": "own.Own"},
                 use_kernels=True)(tmp_path)
    model, *_ = loads(str(tmp_path))
    assert model.config._attn_implementation == ("eager" if kind == "llm" else "sdpa")
    if kind == "llm":
        faster_dtype(find_model(str(tmp_path), kind))


@pytest.mark.parametrize("changes, says", [
    ({}, None),
    ({"do_resize": True, "do_convert_rgb": None, "rescale_factor": 0.00392156862745098}, None),
    ({"do_normalize": False}, "scaled by 1/255 and normalised"),
    ({"rescale_factor": 1 / 127.5}, "scaled by 1/255 and normalised"),
    ({"image_mean": "abc"}, "image_mean and image_std of 3 numbers"),
], ids=str)
@pytest.mark.parametrize("whole", [False, True])
def test_settings_of_a_preprocessor(tmp_path, changes, says, whole):
    settings = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3} | changes
    file = tmp_path / ("processor_config.json" if whole else "preprocessor_config.json")
    file.write_text(json.dumps({"image_processor": settings} if whole else settings))
    other = tmp_path / ("preprocessor_config.json" if whole else "processor_config.json")
    other.write_text("{}")
    if says is None:
        mean, std = pixel_settings(tmp_path)
        assert mean.tolist() == [0.5] * 3 and std.tolist() == [0.25] * 3
        return
    with pytest.raises(BadData, match=f"{file.name}: .*{says}"):
        pixel_settings(tmp_path)
