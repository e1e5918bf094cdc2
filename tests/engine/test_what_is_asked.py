"""What a model does that a narrator does not is refused by name, or told (support/engine/family.py);
what lies beside a model's files changes nothing (checkpoint.py)."""
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import errors
from safetensors.torch import load_file, save_file

from helpers import TOY, tiny, video
from narrator import load, make_config
from support.common.errors import BadData, say_once
from support.engine import family
from support.engine.checkpoint import load_llm, load_vision_model, pixel_settings, plain_name
from support.engine.reasons import reason_of_hub
from test_attention import model_of

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
         "image_size": 32, "patch_size": 8}
SLIDING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("window", [16, 4096])
@pytest.mark.parametrize("name, changes", [
    ("Mistral", {}),
    ("Phi3", {}),
    ("Starcoder2", {}),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    ("Qwen3", {"use_sliding_window": True, "max_window_layers": 1, "head_dim": 8}),
    ("Gemma3", {"layer_types": SLIDING, "head_dim": 8}),
    ("SmolLM3", {"use_sliding_window": True, "layer_types": SLIDING}),
], ids=str)
def test_windows_are_refused_or_told(name, changes, window, capsys):
    say_once.cache_clear()
    changes = changes | {"sliding_window": window}
    llm = gemma(changes) if name == "Gemma3" else model_of(name, **changes)
    if window == 16:
        with pytest.raises(BadData, match="window .sliding_window = 16"):
            family.check_family(llm)
    else:
        family.check_family(llm)
        assert re.search("window .*4096.*here they see all", capsys.readouterr().err)


def gemma(changes):
    from transformers import AutoConfig, AutoModelForCausalLM
    from test_attention import SIZES
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gemma3_text", **SIZES | {"pad_token_id": 0} | changes))


@pytest.mark.parametrize("name, changes", [
    ("Qwen2", {"sliding_window": 16}),                      # switched off, as Qwen2.5 has it
    ("Qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}),
    ("Mistral", {"sliding_window": None}),
    ("Llama", {}),
])
def test_windows_of_no_layer_are_not_told(name, changes, capsys):
    say_once.cache_clear()
    family.check_family(model_of(name, **changes))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_caps_show_although_four_tokens_do_not_reach_them(cap):
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        off = {"final_logit_softcapping": None, "attn_logit_softcapping": None}
        with pytest.raises(BadData, match="computes something else"):
            family.check_family(model_of("Gemma2", **off | {name: cap}))


@pytest.mark.parametrize("settings, most", [
    ({"max_position_embeddings": 64}, 64),
    ({"max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        "rope_theta": 1e4}}, 128),
    ({"max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 128),
])
def test_positions_are_told_once(settings, most, capsys):
    say_once.cache_clear()
    llm = model_of("Llama", **settings)
    for positions in (most, most + 1, most + 2):
        family.warn_of_positions(llm, positions, "a video")
    assert capsys.readouterr().err.count(f"more than the {most} positions") == 1


def test_a_training_video_tells_of_positions(capsys):
    say_once.cache_clear()
    model = tiny(llm=model_of("Llama", max_position_embeddings=64))
    model(*video(model))
    assert "more than the 64 positions" in capsys.readouterr().err


@pytest.mark.parametrize("wrapped", [
    "_orig_mod.{}", "module.{}", "_fsdp_wrapped_module.{}", "_forward_module.module.{}",
    "narrator.{}",
])
@pytest.mark.parametrize("name", [
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    "base_model.model.connector.0.weight",
    "base_model.model.clustering.layers.0.multihead_attn.gk_proj.1.bias",
    "base_model.model.lm_head.base_layer.weight",
])
def test_names_without_what_wrappers_add(wrapped, name):
    longer = [name, name.replace(".layers.0.", ".layers.0._checkpoint_wrapped_module."),
              name.replace("lora_A.", "lora_A.default."), name.replace("lora_A.", "lora_A.my-own."),
              name.replace("connector.", "connector.modules_to_save.default."),
              name.replace("clustering.", "clustering.modules_to_save.other._orig_mod.")]
    for each in longer:
        assert plain_name(wrapped.format(each)) == name


def test_two_adapters_in_a_file_are_refused(tmp_path):
    tiny().save(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "lora_A" in name)
    weights[name.replace("lora_A.", "lora_A.other.")] = weights[name] + 1
    save_file(weights, file)
    with pytest.raises(BadData, match="two tensors for .*lora_A"):
        load(str(tmp_path))


def test_an_adapter_beside_a_base_changes_nothing(tmp_path):
    """Also a narrator in the folder of its own base; and an adapter alone is no base."""
    model = tiny()
    shutil.copytree(TOY / "llm", tmp_path, dirs_exist_ok=True)
    model.save(tmp_path)
    alone, _ = load_llm(str(TOY / "llm"))
    beside, _ = load_llm(str(tmp_path))
    assert beside.state_dict().keys() == alone.state_dict().keys()
    load(str(tmp_path), llm=str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadData, match="it is an adapter; its language model is"):
        load_llm(str(tmp_path))


@pytest.mark.parametrize("changes, mean, std", [
    ({}, 0.5, 0.25),
    ({"do_normalize": False}, 0.0, 1.0),
    ({"do_rescale": False}, 0.5 / 255, 0.25 / 255),
    ({"rescale_factor": 1 / 127.5}, 0.25, 0.125),
    ({"do_rescale": False, "do_normalize": False}, 0.0, 1 / 255),
])
@pytest.mark.parametrize("whole", [False, True])
def test_settings_of_a_preprocessor(tmp_path, changes, mean, std, whole):
    settings = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3} | changes
    file = tmp_path / ("processor_config.json" if whole else "preprocessor_config.json")
    file.write_text(json.dumps({"image_processor": settings} if whole else settings))
    found = pixel_settings(tmp_path)
    assert found == {"image_mean": pytest.approx([mean] * 3), "image_std": pytest.approx([std] * 3)}
    settings["do_flip_channel_order"] = True
    file.write_text(json.dumps({"image_processor": settings} if whole else settings))
    with pytest.raises(BadData, match="do_flip_channel_order = True is not supported"):
        pixel_settings(tmp_path)
    # of both files, transformers takes the newer one
    other = "preprocessor_config.json" if whole else "processor_config.json"
    (tmp_path / other).write_text("{}")
    with pytest.raises(BadData, match=f"{file.name}: do_flip"):
        pixel_settings(tmp_path)


@pytest.mark.parametrize("kind, loads", [("llm", load_llm), ("vision", load_vision_model)])
@pytest.mark.parametrize("change, says", [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised .gptq"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantised"),
    ({"quantization": {"group_size": 64, "bits": 4}}, "quantised"),             # MLX
    ({"model_type": "of_tomorrow"}, "does not know the model; update"),
    ({"intermediate_size": 8}, "are of other sizes than its settings say: .*mlp"),
    ({"num_attention_heads": 3}, "cannot be loaded: .* (heads|multiple|divisible)"),
])
def test_settings_that_cannot_be_followed(tmp_path, kind, loads, change, says):
    shutil.copytree(TOY / kind, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(BadData, match=says):
        loads(str(tmp_path))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n"


@pytest.mark.parametrize("kind, loads", [("llm", load_llm), ("vision", load_vision_model)])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content, says", [
    (POINTER, "Git LFS pointer"), ("<html>log in</html>", "web page"), ("", "is empty"),
])
def test_a_file_of_a_model_that_is_something_else(tmp_path, kind, loads, name, content, says):
    shutil.copytree(TOY / kind, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(BadData, match=f"{name} is .*{says}|{name} {says}"):
        loads(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_not_finite(tmp_path, dtype):
    """NaN anywhere; or numbers that float16 does not have."""
    shutil.copytree(TOY / "llm", tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "layers.0.mlp.up" in name)
    weights[name][1, 1] = float("nan") if dtype == torch.float32 else 1e6
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadData, match=f"not finite .*{name}"):
        load_llm(str(tmp_path), dtype)


@pytest.mark.parametrize("kind, loads", [("llm", load_llm), ("vision", load_vision_model)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_weights_of_integers_without_their_scales(tmp_path, kind, loads, dtype):
    shutil.copytree(TOY / kind, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "layers.0.mlp" in name and name.endswith("weight"))
    weights[name] = (100 * weights[name].float().clamp(0, 1)).to(dtype)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadData, match=f"quantised to integers .*{name}"):
        loads(str(tmp_path))


@pytest.mark.parametrize("vision", [
    ("Siglip2Vision", {"num_patches": 16}), ("ViT", {"num_channels": 1}), ("ViT", {}),
], ids=str)
def test_a_vision_model_takes_pictures_alone(tmp_path, vision):
    """It is tried when it is loaded, not at the first picture."""
    name, changes = vision
    config = getattr(transformers, f"{name}Config")(**SMALL | changes)
    getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path)
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    if not changes:
        load_vision_model(str(tmp_path))
        return
    with pytest.raises(BadData, match="does not take colour pictures alone"):
        load_vision_model(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_download_that_did_not_come_to_its_end(tmp_path, name):
    """In a cache whose files are links, and without the file."""
    shutil.copytree(TOY / "llm", tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / "blob")
    with pytest.raises(BadData, match=f"{name} is a link to what is not there"):
        load_llm(str(tmp_path))
    (tmp_path / name).unlink()
    with pytest.raises(BadData, match="cannot be loaded"):
        load_llm(str(tmp_path))


@pytest.mark.parametrize("source, says", [
    ("llm/model.safetensors", "it is a file; give its folder, .*llm"),
    ("llm/none.gguf", "there is no such folder or file"),
    ("none.GGUF", "there is no such folder or file"),
    ("~/llm", "there is no such folder or file"),
])
def test_a_source_that_is_no_folder(tmp_path, monkeypatch, source, says):
    shutil.copytree(TOY / "llm", tmp_path / "llm")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadData, match=f"'{source}' cannot be loaded: {says}"):
        load_llm(source)


@pytest.mark.parametrize("files, says", [
    (["adapter_config.json", "adapter_model.bin"], "its weights are pickles .adapter_model.bin."),
    (["config.json", "model.safetensors"], "the folder has a model, and no narrator"),
    ([], "not the folder of a whole model"),
])
def test_a_folder_that_is_no_narrator(tmp_path, files, says):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(BadData, match=says):
        load(str(tmp_path))


def answer(Class: type, status: int) -> Exception:
    error = Class.__new__(Class)                            # its arguments differ between versions
    error.args = (f"{status} Too Many",)
    error.response = SimpleNamespace(status_code=status)
    return error


@pytest.mark.parametrize("error, says", [
    (answer(errors.GatedRepoError, 403), "https://huggingface.co/a/b .*licence.* and log in"),
    (answer(errors.RepositoryNotFoundError, 401), "there is no a/b, or .* log in"),
    (answer(errors.RepositoryNotFoundError, 404), "there is no a/b, or .* log in"),
    (answer(errors.RevisionNotFoundError, 404), "no revision 'v2'"),
    (answer(errors.HfHubHTTPError, 401), "you may not read it.* log in"),
    (answer(errors.HfHubHTTPError, 403), "you may not read it.* log in"),
    (answer(errors.HfHubHTTPError, 429), "429 Too Many .HfHubHTTPError.; try again later"),
    (answer(errors.HfHubHTTPError, 503), "503 Too Many .HfHubHTTPError.; try again later"),
    (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
    (KeyError("id"), "'id' .KeyError.*login page or a proxy"),
    (type("ConnectError", (Exception,), {})("[Errno -2] Name or service not known"), "cannot be reached"),
    (type("ProxyError", (Exception,), {})("407"), "cannot be reached"),
    (json.JSONDecodeError("no", "<html>", 0), "JSONDecodeError.*login page or a proxy"),
], ids=str)
def test_what_the_hub_says(error, says):
    assert re.search(says, reason_of_hub(error, "a/b", "v2"))
    # wrapped, as huggingface_hub does
    wrapped = errors.LocalEntryNotFoundError("cannot find the files")
    wrapped.__cause__ = error
    assert re.search(says, reason_of_hub(wrapped, "a/b", "v2"))


@pytest.mark.parametrize("name", ["memory_tokens", "lora_rank", "max_new_tokens", "width"])
def test_whole_numbers_begin_at_one(name):
    with pytest.raises(BadData, match=f"{name} .* from 1 to ") as caught:
        make_config(**{name: 0})
    assert ("memory none" in str(caught.value)) == (name == "memory_tokens")
