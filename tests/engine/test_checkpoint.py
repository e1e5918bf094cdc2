"""Checkpoints (checkpoint.py): saved and loaded, the published names, and what is wrong with a bad one."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from baselines.variants import load_narrator
from helpers import GOLDEN, ROOT, TOY, tiny, video
from support.common.errors import BadData
from support.engine.checkpoint import load_llm, load_tokenizer, load_vision_model, parse_model_name, token_ids


def test_saved_and_loaded_is_the_same(tmp_path):
    model = tiny(last_k=3, lora_rank=6, readout="cls")
    model.save(tmp_path)
    again = load_narrator(str(tmp_path))
    x, narrations = video(model)
    with torch.no_grad():
        assert torch.equal(model(x, narrations)[0], again(x, narrations)[0])
    assert again.config.last_k == 3 and again.config.lora_rank == 6 and again.config.readout == "cls"
    assert not list(tmp_path.glob(".*")), "temporary files are left"


def test_names_are_those_of_the_published_adapters():
    names = set(tiny(memory_target=False).trainable())
    assert "base_model.model.clustering.layers.0.multihead_attn.gk_proj.1.bias" in names
    assert "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight" in names
    assert "base_model.model.lm_head.lora_B.weight" in names
    if GOLDEN.exists():
        published = load_file(GOLDEN / "flownar" / "checkpoint" / "adapter_model.safetensors")
        model = load_narrator(str(GOLDEN / "flownar" / "checkpoint"), llm=str(GOLDEN / "base_llm"))
        assert set(model.trainable()) == set(published)


def test_a_narration_memory_in_a_checkpoint(tmp_path):
    """Under names of its own, a module for PEFT."""
    model = tiny(narration_memory=4, last_k=0, memory_heads=8)
    model.save(tmp_path)
    names = {name for name in model.trainable() if name.startswith("base_model.model.narration_memory.")}
    assert "base_model.model.narration_memory.w_gate.1.bias" in names
    assert len(names) == len(list(model.narration_memory.parameters()))
    adapter = json.loads((tmp_path / "adapter_config.json").read_text())
    assert adapter["modules_to_save"] == ["connector", "clustering", "narration_memory"]
    again = load_narrator(str(tmp_path))
    assert (again.config.narration_memory, again.config.last_k) == (4, 0)
    x, narrations = video(model)
    with torch.no_grad():
        assert torch.equal(model(x, narrations)[0], again(x, narrations)[0])
    with pytest.raises(BadData, match="last_k = 3"):
        load_narrator(str(tmp_path), last_k=3)


def damage(folder, kind):
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    name = "base_model.model.connector.0.weight"
    if kind == "lacks":
        del weights[name]
    if kind == "unexpected":
        weights["base_model.model.extra.weight"] = torch.zeros(2)
    if kind == "wrong shape":
        weights[name] = weights[name][:, :-1].contiguous()
    save_file(weights, file)
    if kind == "damaged":
        file.write_bytes(file.read_bytes()[:1000])
    if kind == "missing":
        file.unlink()
    if kind == "json":
        (folder / "narrator.json").write_text("{")
    if kind == "unknown entries":
        (folder / "narrator.json").write_text('{"theta": 0.5, "thta": 1}')
    if kind == "wrong value":
        (folder / "narrator.json").write_text('{"memory_tokens": "20"}')
    if kind == "unknown memory":
        (folder / "narrator.json").write_text('{"memory": "clamm"}')
    if kind == "no alpha":
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": None}))
    if kind in ("use_rslora", "use_dora", "rank_pattern"):
        config = json.loads((folder / "adapter_config.json").read_text())
        config[kind] = {"q_proj": 4} if kind == "rank_pattern" else True
        (folder / "adapter_config.json").write_text(json.dumps(config))
    if kind == "list":
        (folder / "adapter_config.json").write_text("[1]")


@pytest.mark.parametrize("kind, message", [
    ("lacks", "lacks 1 tensors: base_model.model.connector.0.weight"), ("unexpected", "unexpected"),
    ("wrong shape", "wrong shape"), ("damaged", "is damaged"), ("missing", "is missing"), ("json", "is not JSON"),
    ("unknown entries", "thta"), ("wrong value", "memory_tokens"), ("unknown memory", "clamm"), ("list", "an object"),
    ("no alpha", "lacks lora_alpha"), ("use_rslora", "use_rslora"), ("use_dora", "use_dora"),
    ("rank_pattern", "rank_pattern")])
def test_bad_checkpoints_say_what_is_wrong(tmp_path, kind, message):
    tiny().save(tmp_path)
    damage(tmp_path, kind)
    with pytest.raises(BadData, match=message) as caught:
        load_narrator(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_no_checkpoint_at_all(tmp_path):
    for source in (str(tmp_path / "nothing"), str(tmp_path), __file__):
        with pytest.raises(BadData):
            load_narrator(source)


def test_pickled_weights_are_refused(tmp_path):
    """pytorch_model.bin can run code when it is loaded: safetensors or .gguf only."""
    shutil.copytree(TOY / "llm", tmp_path / "llm")
    weights = load_file(tmp_path / "llm" / "model.safetensors")
    (tmp_path / "llm" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "llm" / "pytorch_model.bin")
    with pytest.raises(BadData, match="cannot be loaded"):
        load_llm(str(tmp_path / "llm"))


def test_revisions_can_be_pinned(tmp_path, monkeypatch):
    """owner/name@revision asks the hub for that revision, of narrators, language and vision models alike."""
    tiny().save(tmp_path)
    asked = []
    fetch = lambda name, revision, **_: asked.append((name, revision)) or str(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    load_narrator("owner/name@v1.0")
    assert asked == [("owner/name", "v1.0")]
    assert parse_model_name("owner/name@abc") == ("owner/name", {"revision": "abc"})
    assert parse_model_name("owner/name") == ("owner/name", {})
    assert parse_model_name("a/b.gguf") == ("a", {"gguf_file": "b.gguf"})
    (tmp_path / "b@c").mkdir()
    assert parse_model_name(str(tmp_path / "b@c")) == (str(tmp_path / "b@c"), {})


@pytest.mark.parametrize("folder, text", [(TOY / "llm", "You take \ud800."), (ROOT / "tests/golden/llm", "Zebra")])
def test_what_a_tokenizer_cannot_encode_is_one_line(folder, text):
    """JSON can hold half a surrogate pair; a small vocabulary has no token for an unknown word."""
    tokenizer = load_tokenizer(str(folder))
    with pytest.raises(BadData, match="cannot encode") as caught:
        token_ids(tokenizer, text)
    assert str(caught.value).isascii() and "\n" not in str(caught.value)
    assert token_ids(tokenizer, " You wash")


def altered(folder, file, change):
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | change))


def with_another_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.extra"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def without_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights[next(name for name in weights if "layers.1" in name)]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind, load, damage, says", [
    ("llm", load_llm, without_a_weight, "1 are missing"),
    ("vision", load_vision_model, without_a_weight, "1 are missing"),
    ("llm", load_llm, with_another_weight, "1 are unexpected: model.extra"),
    ("llm", load_llm, lambda folder: altered(folder, "config.json", {"vocab_size": 7}), "cannot be loaded"),
    ("vision", load_vision_model, lambda folder: altered(folder, "preprocessor_config.json", {"image_mean": "x"}),
     "image_mean must be"),
    ("vision", load_vision_model, lambda folder: altered(folder, "preprocessor_config.json", {"image_std": [1, 1, 0]}),
     "image_std must be")])
def test_a_damaged_base_model_is_one_line(tmp_path, kind, load, damage, says):
    """transformers fills missing weights with random ones and says so in a warning only."""
    shutil.copytree(TOY / kind, tmp_path / kind)
    load(str(tmp_path / kind))
    damage(tmp_path / kind)
    with pytest.raises(BadData, match=says) as caught:
        load(str(tmp_path / kind))
    assert "\n" not in str(caught.value)


def test_a_damaged_gguf_is_one_line(tmp_path):
    shutil.copytree(TOY / "llm", tmp_path / "llm")
    (tmp_path / "llm" / "bad.gguf").write_bytes(b"GGUFxxxx")
    with pytest.raises(BadData, match="cannot be loaded"):
        load_llm(str(tmp_path / "llm" / "bad.gguf"))


CODE = """
from transformers import PretrainedConfig
open({mark!r}, "w").close()
class Own(PretrainedConfig):
    model_type = "own"
"""


@pytest.mark.parametrize("kind, load", [("llm", load_llm), ("llm", load_tokenizer),
                                        ("vision", load_vision_model)])
def test_code_of_a_checkpoint_is_never_run(tmp_path, kind, load, monkeypatch):
    """A folder whose auto_map names a Python file: nobody is asked, it is refused in one line."""
    shutil.copytree(TOY / kind, tmp_path / kind)
    mark = tmp_path / "code has run"
    (tmp_path / kind / "own.py").write_text(CODE.format(mark=str(mark)))
    names = {"AutoConfig": "own.Own", "AutoModel": "own.Own", "AutoModelForCausalLM": "own.Own",
             "AutoTokenizer": ["own.Own", None]}
    altered(tmp_path / kind, "config.json", {"model_type": "own", "auto_map": names})
    if kind == "llm":
        own = {"tokenizer_class": "Own", "auto_map": names}
        altered(tmp_path / kind, "tokenizer_config.json", own)
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    with pytest.raises(BadData, match="cannot be loaded") as caught:
        load(str(tmp_path / kind))
    assert "\n" not in str(caught.value) and not asked and not mark.exists()


@pytest.mark.parametrize("file, change", [
    ("adapter_config.json", {"r": 100_000}), ("narrator.json", {"memory_tokens": 10 ** 7}),
    ("narrator.json", {"width": 10 ** 6}),
    ("narrator.json", {"memory": "tokenmlp", "memory_tokens": 10 ** 7}),
    ("narrator.json", {"last_k": 0, "narration_memory": 10 ** 7}),
    ("narrator.json", {"width": 10 ** 6, "width_second": 10 ** 6 - 32})])
def test_sizes_are_compared_before_anything_is_built(tmp_path, file, change):
    """Settings beside whose tensors the narrator would take gigabytes."""
    tiny(memory_heads=8).save(tmp_path)
    altered(tmp_path, file, change)
    largest = [0]

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.device.type != "meta":
                largest.append(result.numel())
            return result

    with Sizes(), pytest.raises(BadData, match="adapter_model.safetensors (lacks|has)") as caught:
        load_narrator(str(tmp_path))
    assert "\n" not in str(caught.value) and max(largest) < 10 ** 6
