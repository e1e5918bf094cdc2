"""Checkpoints: saved and loaded, the published names, and what is wrong with a bad one."""
import json
import shutil
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file

import narrator as nar
from narrator import load
from helpers import GOLDEN, ROOT, TOY, Sizes, tiny, video
from support.common.errors import BadData
from support.engine.checkpoint import (
    load_llm, load_tokenizer, load_vision_model, token_ids,
)
from support.common.seal import digest_of_model as digest


ONLINE = {"memory": "none", "prune": False}
CLAM = {"memory": "clam"}
ANOTHER = "(lacks|unexpected|the wrong shape for) .*clustering"


@pytest.mark.parametrize("changes, modules, other, says", [
    ({"last_k": 3, "lora_rank": 6, "readout": "cls"}, ["clustering"], {"lora_rank": 5}, "wrong shape"),
    ({"narration_memory": 4, "last_k": 0, "memory_heads": 8}, ["clustering", "narration_memory"],
     {"last_k": 3}, "last_k = 3"),
    (ONLINE | {"mod_keep": 0.2}, [], {"mod_keep": 2.0}, "mod_keep of a narrator must be"),
    (CLAM, ["clustering"], {"memory": "kmeans"}, ANOTHER),
    ({"memory": "scalar"}, ["clustering"], CLAM, ANOTHER),
    ({"memory": "retnet"}, ["clustering"], CLAM, ANOTHER),
    ({"memory": "tokenmlp"}, ["clustering"], CLAM, ANOTHER),
    ({"memory": "moviechat"}, [], CLAM, ANOTHER),
    ({"memory": "kmeans"}, [], CLAM, ANOTHER),
    ({"memory": "recent"}, [], CLAM, ANOTHER),
], ids=str)
def test_saved_and_loaded_is_the_same(tmp_path, changes, modules, other, says):
    """All that learns beside LoRA is a module for PEFT. Settings that the tensors contradict are
    refused, by the tensors' names."""
    model = tiny(**changes)
    model.save(tmp_path)
    assert not list(tmp_path.glob(".*")), "temporary files are left"
    adapter = json.loads((tmp_path / "adapter_config.json").read_text())
    assert adapter["modules_to_save"] == ["connector", *modules]
    again = load(str(tmp_path))
    assert asdict(again.config) == asdict(model.config)
    x, narrations = video(model)
    with torch.no_grad():
        assert torch.equal(model(x, narrations)[0], again(x, narrations)[0])
    with pytest.raises(BadData, match=says):
        load(str(tmp_path), **other)


def test_names_are_those_of_the_published_adapters():
    names = set(tiny(memory_target=False).trainable())
    assert "base_model.model.clustering.layers.0.multihead_attn.gk_proj.1.bias" in names
    assert "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight" in names
    assert "base_model.model.lm_head.lora_B.weight" in names
    names = tiny(narration_memory=4, last_k=0, memory_heads=8).trainable()
    assert "base_model.model.narration_memory.w_gate.1.bias" in names
    if GOLDEN.exists():
        published = load_file(GOLDEN / "flownar" / "checkpoint" / "adapter_model.safetensors")
        model = load(str(GOLDEN / "flownar" / "checkpoint"), llm=str(GOLDEN / "base_llm"))
        assert set(model.trainable()) == set(published)


def altered(file, **changes):
    """Change entries of a JSON file."""
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | changes))


def with_tensors(file, change):
    """Rewrite a safetensors file after change(tensors)."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


CONNECTOR = "base_model.model.connector.0.weight"


def cut_connector(tensors):
    tensors[CONNECTOR] = tensors[CONNECTOR][:, :-1].contiguous()


@pytest.mark.parametrize("damage, message", [
    (lambda tensors: tensors.pop(CONNECTOR), f"lacks 1 tensors: {CONNECTOR}"),
    (lambda tensors: tensors.update(extra=torch.zeros(2)), "unexpected"),
    (cut_connector, "wrong shape"),
    (lambda tensors: tensors.update({CONNECTOR: (9 * tensors[CONNECTOR]).to(torch.int8)}),
     f"no finite numbers in 1 tensors: {CONNECTOR}"),
    (lambda tensors: tensors[CONNECTOR].fill_(float("nan")), "no finite numbers in 1 tensors"),
])
def test_tensors_of_a_bad_checkpoint(tmp_path, damage, message):
    tiny().save(tmp_path)
    with_tensors(tmp_path / "adapter_model.safetensors", damage)
    with pytest.raises(BadData, match=message) as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file, text, message", [
    ("adapter_model.safetensors", "no tensors", "is text, and begins with 'no tensors'"),
    ("narrator.json", "{", "is not JSON"),
    ("narrator.json", '{"theta": 0.5, "thta": 1}', "thta"),
    ("narrator.json", '{"memory_tokens": "20"}', "memory_tokens"),
    ("narrator.json", '{"memory": "clamm"}', "clamm"),
    ("adapter_config.json", "[1]", "an object"),
])
def test_files_of_a_bad_checkpoint(tmp_path, file, text, message):
    tiny().save(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(BadData, match=message) as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, value, message", [
    ("lora_alpha", None, "lora_alpha of a narrator cannot be None"),
    ("use_rslora", True, "use_rslora = True"),
    ("use_dora", True, "use_dora = True"),
    ("rank_pattern", {"q_proj": 4}, "rank_pattern"),
    ("bias", "all", "bias = all"),
    ("init_lora_weights", "pissa_niter_4", "init_lora_weights = pissa_niter_4"),
    ("trainable_token_indices", [5], "trainable_token_indices"),
    ("of_a_later_peft", True, "of_a_later_peft"),
    ("peft_type", "IA3", "peft_type = IA3"),
])
def test_only_plain_lora_is_read(tmp_path, name, value, message):
    tiny().save(tmp_path)
    altered(tmp_path / "adapter_config.json", **{name: value})
    with pytest.raises(BadData, match=message):
        load(str(tmp_path))


def test_no_checkpoint_at_all(tmp_path):
    tiny().save(tmp_path / "without weights")
    (tmp_path / "without weights" / "adapter_model.safetensors").unlink()
    for source in (tmp_path / "nothing", tmp_path, tmp_path / "without weights", __file__):
        with pytest.raises(BadData):
            load(str(source))


def test_pickled_weights_are_refused(tmp_path):
    """pytorch_model.bin can run code when it is loaded: safetensors or .gguf only."""
    shutil.copytree(TOY / "llm", tmp_path / "llm")
    weights = load_file(tmp_path / "llm" / "model.safetensors")
    (tmp_path / "llm" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "llm" / "pytorch_model.bin")
    with pytest.raises(BadData, match="cannot be loaded"):
        load_llm(str(tmp_path / "llm"))


@pytest.mark.parametrize("load", [load, load_llm, load_tokenizer, load_vision_model],
                         ids=lambda load: load.__name__)
def test_models_of_the_hub(load, monkeypatch):
    """owner/name@revision is fetched in that revision, of all kinds of models, without pickles; an
    error of the hub is one line."""
    asked = []

    def refuse(name, revision, allow_patterns, **options):
        assert "*.bin" not in allow_patterns and "*.py" not in allow_patterns
        asked.append((name, revision))
        raise OSError("404 no such\nrepository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    for source in ("owner/name@v1.0", "owner/name"):
        with pytest.raises(BadData, match="the hub does not give it: 404 no such") as caught:
            load(source)
        assert "\n" not in str(caught.value)
    assert asked == [("owner/name", "v1.0"), ("owner/name", None)]
    with pytest.raises(BadData, match="no such folder"):
        load("./owner/name")


@pytest.mark.parametrize("folder, text", [
    (TOY / "llm", "You take \ud800."),
    (ROOT / "tests/golden/llm", "Zebra"),
])
def test_what_a_tokenizer_cannot_encode_is_one_line(folder, text):
    """JSON can hold half a surrogate pair; a small vocabulary has no token for an unknown word."""
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


def without_a_weight(folder):
    with_tensors(folder / "model.safetensors",
                 lambda tensors: tensors.pop(next(name for name in tensors if "layers.1" in name)))


def with_another_weight(folder):
    with_tensors(folder / "model.safetensors",
                 lambda tensors: tensors.update({"model.extra": torch.zeros(2)}))


def with_another_vocabulary(folder):
    altered(folder / "config.json", vocab_size=7)


def with_fewer_layers(folder):
    altered(folder / "config.json", num_hidden_layers=3)


def with_layers_without_end(folder):
    altered(folder / "config.json", num_hidden_layers=10 ** 9)


def without_heads(folder):
    altered(folder / "config.json", num_attention_heads=0)


def without_special_tokens(folder):
    """What a .gguf beside tokenizer.json has."""
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").unlink(missing_ok=True)


def with_a_word_as_mean(folder):
    altered(folder / "preprocessor_config.json", image_mean="x")


def without_contrast(folder):
    altered(folder / "preprocessor_config.json", image_std=[1, 1, 0])


@pytest.mark.parametrize("kind, load, damage, says", [
    ("llm", load_llm, without_a_weight, "1 are missing"),
    ("vision", load_vision_model, without_a_weight, "1 are missing"),
    ("llm", load_llm, with_another_weight, "1 are unexpected: model.extra"),
    ("llm", load_llm, with_fewer_layers, "9 are unexpected: model.layers.3"),
    ("llm", load_llm, with_layers_without_end, "num_hidden_layers = 1000000000"),
    ("llm", load_llm, without_heads, "cannot be loaded"),
    ("llm", load_llm, without_special_tokens, "has no bos_token, which its settings number 0"),
    ("vision", load_vision_model, with_layers_without_end, "num_hidden_layers = 1000000000"),
    ("vision", load_vision_model, without_heads, "cannot be loaded"),
    ("llm", load_llm, with_another_vocabulary, "cannot be loaded"),
    ("vision", load_vision_model, with_a_word_as_mean, "image_mean must be"),
    ("vision", load_vision_model, without_contrast, "image_std must be"),
])
def test_a_damaged_base_model_is_one_line(tmp_path, kind, load, damage, says):
    """transformers fills missing weights with random ones and says so in a warning only."""
    shutil.copytree(TOY / kind, tmp_path / kind)
    load(str(tmp_path / kind))
    damage(tmp_path / kind)
    with pytest.raises(BadData, match=says) as caught:
        load(str(tmp_path / kind))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [
    "LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer", "GemmaTokenizer", "TokenizersBackend", None,
])
def test_a_model_without_its_tokenizer_file_is_refused(tmp_path, kind):
    """transformers makes a tokenizer of some kinds without words, which turns texts into nothing."""
    shutil.copytree(TOY / "llm", tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    if kind is None:
        (tmp_path / "tokenizer_config.json").unlink()
    else:
        altered(tmp_path / "tokenizer_config.json", tokenizer_class=kind)
    with pytest.raises(BadData, match="tokenizer.json") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_model_that_does_without_a_first_token(tmp_path):
    """As Qwen: its settings name one, and its tokenizer says that it has none."""
    shutil.copytree(TOY / "llm", tmp_path, dirs_exist_ok=True)
    altered(tmp_path / "tokenizer_config.json", bos_token=None)
    assert nar.Layout(load_tokenizer(str(tmp_path)), 1, 1).prompt[0] != 0


def with_other_products(folder):
    with_tensors(folder / "model.safetensors",
                 lambda tensors: next(w for n, w in tensors.items() if "q_proj.weight" in n).neg_())


def with_other_heads(folder):
    altered(folder / "config.json", num_attention_heads=2)


def with_another_mean(folder):
    altered(folder / "preprocessor_config.json", image_mean=[0.4, 0.5, 0.5])


@pytest.mark.parametrize("change", [with_other_products, with_other_heads, with_another_mean],
                         ids=lambda change: change.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_digest_tells_vision_models_apart(tmp_path, change, dtype):
    """Kept predictions are of the encoder that made them."""
    shutil.copytree(TOY / "vision", tmp_path, dirs_exist_ok=True)
    before = digest(nar.VisionEncoder(str(tmp_path), dtype=dtype))
    assert digest(nar.VisionEncoder(str(TOY / "vision"), dtype=dtype)) == before
    change(tmp_path)
    assert digest(nar.VisionEncoder(str(tmp_path), dtype=dtype)) != before


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
    altered(tmp_path / kind / "config.json", model_type="own", auto_map=names)
    if kind == "llm":
        altered(tmp_path / kind / "tokenizer_config.json", tokenizer_class="Own", auto_map=names)
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    with pytest.raises(BadData, match="cannot be loaded") as caught:
        load(str(tmp_path / kind))
    assert "\n" not in str(caught.value)
    assert not asked
    assert not mark.exists()


@pytest.mark.parametrize("kind, load", [("llm", load_llm), ("vision", load_vision_model)])
def test_kernels_of_the_hub_are_not_used(tmp_path, kind, load):
    """A model's settings can name one, which is code."""
    shutil.copytree(TOY / kind, tmp_path, dirs_exist_ok=True)
    altered(tmp_path / "config.json", attn_implementation="owner/kernel")
    model, _ = load(str(tmp_path))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("file, change", [
    ("adapter_config.json", {"r": 100_000}),
    ("narrator.json", {"memory_tokens": 10 ** 7}),
    ("narrator.json", {"width": 10 ** 6}),
    ("narrator.json", {"memory": "tokenmlp", "memory_tokens": 10 ** 7}),
    ("narrator.json", {"last_k": 0, "narration_memory": 10 ** 7}),
])
def test_sizes_are_compared_before_anything_is_built(tmp_path, file, change):
    """Settings beside whose tensors the narrator would take gigabytes."""
    tiny(memory_heads=8).save(tmp_path)
    altered(tmp_path / file, **change)
    with (Sizes() as sizes,
          pytest.raises(BadData, match="adapter_model.safetensors (lacks|has)") as caught):
        load(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert sizes.largest < 10 ** 6


def test_a_checkpoint_that_has_lost_its_settings_is_said(tmp_path, capsys):
    """Its two other files are what is left if only the adapter is copied."""
    tiny(memory="none").save(tmp_path)
    load(tmp_path)
    assert capsys.readouterr().err == ""
    (tmp_path / "narrator.json").unlink()
    load(tmp_path)
    assert "narrator.json, which is missing" in capsys.readouterr().err
