"""Checkpoints: saved and loaded, the published names, and what is wrong with a bad one."""
import json
import shutil
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

import narrator as nar
from narrator import load
from helpers import ROOT, TOY, grouped, tiny, video, with_entries, with_tensors, with_text
from support.common.errors import BadData
from support.engine.checkpoint import open_checkpoint
from support.engine.frozen import load_llm, load_tokenizer, load_vision_model, token_ids


ONLINE = {"memory": "none", "prune": False}


@pytest.mark.parametrize("changes, modules, other, says", [
    ({"last_k": 3, "lora_rank": 6, "readout": "cls"}, ["clustering"], {"lora_rank": 5}, "wrong shape"),
    ({"narration_memory": 4, "last_k": 0, "memory_heads": 8}, ["clustering", "narration_memory"],
     {"last_k": 3}, "last_k = 3"),
    (ONLINE | {"mod_keep": 0.2}, [], {"mod_keep": 2.0}, "mod_keep of a narrator must be"),
    ({"memory": "tokenmlp"}, ["clustering"], {"memory": "clam"},
     "(lacks|unexpected|the wrong shape for) .*clustering"),
], ids=str)
def test_saved_and_loaded_is_the_same(tmp_path, changes, modules, other, says):
    model = tiny(**changes)
    model.save(tmp_path)
    assert not list(tmp_path.glob(".*")), "temporary files are left"
    adapter = json.loads((tmp_path / "adapter_config.json").read_text())
    assert adapter["modules_to_save"] == sorted(["connector", *modules])
    again = load(str(tmp_path))
    assert again.config.llm_mark
    assert asdict(again.config) | {"llm_mark": None} == asdict(model.config)
    x, narrations = video(model)
    with torch.no_grad():
        assert torch.equal(model(x, narrations)[0], again(x, narrations)[0])
    with pytest.raises(BadData, match=says):
        load(str(tmp_path), **other)


CONNECTOR = "base_model.model.connector.0.weight"


def with_a_wrapper(tensors):
    """The name of an adapter, as PEFT has it in a model; its files have plain names."""
    for name in [name for name in tensors if "lora_A" in name]:
        tensors[name.replace("lora_A.", "lora_A.default.")] = tensors.pop(name)


def weights(change):
    return with_tensors("adapter_model.safetensors", change)


@pytest.mark.parametrize("damage, message", [
    (weights(lambda tensors: tensors.pop(CONNECTOR)), f"lacks 1 tensors: {CONNECTOR}"),
    (weights(lambda tensors: tensors.update(extra=torch.zeros(2))), "has unexpected 1 tensors: extra"),
    (weights(with_a_wrapper), "lacks .*lora_A.weight"),
    (weights(lambda tensors: tensors.update({CONNECTOR: tensors[CONNECTOR][:, 1:].contiguous()})),
     "wrong shape"),
    (weights(lambda tensors: tensors.update({CONNECTOR: tensors[CONNECTOR].to(torch.int8)})),
     f"{CONNECTOR} is quantised .I8."),
    (weights(lambda tensors: tensors[CONNECTOR].fill_(float("nan"))), "no finite numbers in 1 tensors"),
    (with_text("adapter_model.safetensors", "no tensors"), "a whole .safetensors file is read"),
    (with_text("narrator.json", "{"), "expected JSON"),
    (with_text("narrator.json", '{"theta": 0.5, "thta": 1}'), "thta"),
    (with_text("narrator.json", '{"memory_tokens": "20"}'), "memory_tokens"),
    (with_text("narrator.json", '{"memory": "clamm"}'), "clamm"),
    (with_text("adapter_config.json", "[1]"), "an object"),
    # only plain LoRA is read
    (with_entries("adapter_config.json", lora_alpha=None), "lora_alpha of a narrator cannot be None"),
    (with_entries("adapter_config.json", use_rslora=True), "use_rslora = True"),
    (with_entries("adapter_config.json", rank_pattern={"q_proj": 4}), "rank_pattern"),
    (with_entries("adapter_config.json", of_a_later_peft=True), "of_a_later_peft"),
    (with_entries("adapter_config.json", peft_type="IA3"), "peft_type = IA3"),
])
def test_a_bad_checkpoint(tmp_path, damage, message):
    tiny().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(BadData, match=message) as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("load", [load, load_llm, load_vision_model], ids=lambda load: load.__name__)
def test_models_of_the_hub(load, monkeypatch):
    asked = []

    def refuse(name, revision, allow_patterns, **options):
        assert "*.bin" not in allow_patterns and "*.py" not in allow_patterns
        asked.append((name, revision))
        raise OSError("404 no such\nrepository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    for source in ("owner/name@v1.0", "owner/name"):
        with pytest.raises(BadData, match="the hub does not give it: 404 no such .*"
                           "licence.*https://huggingface.co/owner/name,.*`hf auth login`") as caught:
            load(source)
        assert "\n" not in str(caught.value)
    assert asked == [("owner/name", "v1.0"), ("owner/name", None)]
    for source in ("./owner/name", "~/name", __file__):
        with pytest.raises(BadData, match="there is no such folder"):
            load(source)


@pytest.mark.parametrize("llm, base, revision", [
    ("owner/name@v1", "owner/name", "v1"), ("owner/name", "owner/name", None), ("llm@2", "llm@2", None),
])
def test_a_base_and_its_revision_are_apart_as_peft_has_them(tmp_path, llm, base, revision):
    (tmp_path / "llm@2").mkdir()
    model = tiny(llm=grouped())
    model.config.llm = llm
    model.save(tmp_path)
    adapter = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (base, revision)
    config = open_checkpoint(tmp_path).config
    assert config.llm == (str(tmp_path / llm) if llm == "llm@2" else llm)


def test_models_inside_a_checkpoint_are_found_and_given_ones_stay(tmp_path):
    for name in ("llm", "eyes"):
        (tmp_path / name).mkdir()
    model = tiny()
    model.config.llm = "llm"
    model.config.vision = "eyes"
    model.save(tmp_path)
    config = open_checkpoint(tmp_path).config
    assert (config.llm, config.vision) == (str(tmp_path / "llm"), str(tmp_path / "eyes"))
    config = open_checkpoint(tmp_path, "llm", vision="eyes").config
    assert (config.llm, config.vision) == ("llm", "eyes")


def test_the_number_format_of_a_checkpoint(tmp_path):
    model = tiny()
    for dtype, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        model.save(tmp_path, dtype)
        weights = load_file(tmp_path / "adapter_model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {expected}


def test_a_merged_narrator_is_neither_saved_nor_trained(tmp_path):
    model = tiny(llm=grouped()).merge()
    with pytest.raises(BadData, match="LoRA is merged cannot be saved"):
        model.save(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(BadData, match="LoRA is merged cannot be trained"):
        model.train()
    assert not model.eval().training


@pytest.mark.parametrize("folder, text", [
    (TOY / "llm", "You take \ud800."),
    (ROOT / "tests/golden/llm", "Zebra"),
])
def test_what_a_tokenizer_cannot_encode_is_one_line(folder, text):
    tokenizer = load_tokenizer(str(folder))
    with pytest.raises(BadData, match="cannot encode") as caught:
        token_ids(tokenizer, text)
    assert str(caught.value).isascii() and "\n" not in str(caught.value)
    assert token_ids(tokenizer, " You wash")


def test_a_special_token_in_a_sentence_is_text():
    """As other language models leave them: none of them ends a narration while it is learned."""
    tokenizer = load_tokenizer(str(TOY / "llm"))
    for token in tokenizer.all_special_tokens:
        for text in (f" You wash.{token}", f" You {token} wash.", f"{token}You wash."):
            ids = token_ids(tokenizer, text)
            assert not {*ids} & {*tokenizer.all_special_ids}
            assert tokenizer.decode(ids) == text


def test_a_model_that_does_without_a_first_token(tmp_path):
    """As Qwen: its settings name one, and its tokenizer says that it has none."""
    shutil.copytree(TOY / "llm", tmp_path, dirs_exist_ok=True)
    with_entries("tokenizer_config.json", bos_token=None)(tmp_path)
    assert nar.Layout(load_tokenizer(str(tmp_path)), 1, 1).prompt[0] != 0


def test_a_checkpoint_that_has_lost_its_settings_is_said(tmp_path, capsys):
    """Its two other files are what is left if only the adapter is copied."""
    tiny(memory="none").save(tmp_path)
    load(tmp_path)
    assert "missing" not in capsys.readouterr().err
    (tmp_path / "narrator.json").unlink()
    load(tmp_path)
    assert "narrator.json, which is missing" in capsys.readouterr().err
    weights(lambda tensors: tensors.pop(CONNECTOR))(tmp_path)
    with pytest.raises(BadData, match="not a FlowNar checkpoint"):
        load(tmp_path)
