"""Which models are taken: docs/training.md's table, row by row, with tiny random models."""
import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from helpers import tiny, video
from narrator import VisionEncoder
from support.common.errors import BadData
from support.engine import family

SIZES = {"vocab_size": 640, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 0,
         "eos_token_id": 1, "pad_token_id": 0}
FULL = {"layer_types": ["full_attention"] * 2}
LLAMA_4 = FULL | {"moe_layers": [], "attn_temperature_tuning": False}
HEADS = {"mamba_n_heads": 8, "mamba_d_head": 8}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
SEES, SCALES, MATRICES = "do not see all tokens", "scales its logits, or caps them", "LoRA would leave out"
BUILT, TEMPERATURE = "is built differently", "no attribute 'get_seq_length'"

LANGUAGE_MODELS = [         # kind, changes, why it is refused; "": it is taken
    ("mistral", {"sliding_window": None}, ""), ("cohere", {"logit_scale": 1.0}, ""),
    ("stablelm", {}, ""), ("qwen2", {"sliding_window": 16}, ""),        # a window that is switched off
    ("mistral", {}, f"{SEES} .sliding_window"), ("granite", {"logits_scaling": 8.0}, SCALES),
    ("llama4_text", LLAMA_4 | {"attn_temperature_tuning": True, "no_rope_layers": [1, 0]}, TEMPERATURE),
    ("gemma2", FULL | {"final_logit_softcapping": None}, "asked for softcap"), ("opt", {}, BUILT),
    ("llama", DYNAMIC, "depend on the length of the context .dynamic"), ("mixtral", {}, MATRICES),
]
ALL_OTHERS = [
    *[(kind, {}, "") for kind in (
        "llama", "qwen2", "qwen3", "gemma", "smollm3", "olmo", "olmo2", "glm", "glm4", "ministral3",
        "exaone", "ernie4_5", "hunyuan_v1_dense", "seed_oss", "apertus", "arcee", "helium", "jais2",
        "diffllama", "internlm3", "bitnet", "nemotron")],
    *[(kind, FULL, "") for kind in ("gemma3_text", "olmo3", "exaone4", "cwm", "qwen3_5_text")],
    ("gemma4_text", FULL | {"hidden_size_per_layer_input": 0}, ""), ("llama4_text", LLAMA_4, ""),
    ("granite", {"logits_scaling": 1.0}, ""), ("phi3", {"sliding_window": None}, ""),
    ("qwen3_next", FULL | {"mlp_only_layers": [0, 1]}, ""), ("cohere2", FULL | {"logit_scale": 1.0}, ""),
    *[(kind, {}, SEES) for kind in (
        "gemma2", "gemma3_text", "gpt_oss", "ministral", "exaone4", "olmo3", "cwm", "cohere2", "afmoe",
        "qwen3_5_text", "jamba", "falcon_h1", "kimi_linear", "recurrent_gemma", "nemotron_h", "lfm3",
        "minimax", "olmo_hybrid")],
    ("bamba", HEADS, SEES), ("granitemoehybrid", HEADS, SEES), ("lfm2", {}, MATRICES),
    ("phi3", {"sliding_window": 2047}, SEES), ("starcoder2", {"sliding_window": 4096}, SEES),
    *[(kind, {}, SCALES) for kind in ("cohere", "nanochat")], ("gemma2", FULL, SCALES),
    ("vaultgemma", FULL, SCALES), ("hyperclovax", {"logits_scaling": 8.0}, SCALES),
    *[(kind, {}, MATRICES) for kind in ("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "phimoe", "phi",
                                        "ernie4_5_moe")],
    ("starcoder2", {"sliding_window": None}, MATRICES), ("llama4_text", FULL, MATRICES),
    *[(kind, {}, BUILT) for kind in ("gpt2", "gpt_neox", "gptj", "gpt_bigcode", "bloom", "mpt", "mamba",
                                     "falcon_mamba", "rwkv", "xlstm")],
    *[(kind, {}, "cannot be a narrator: ") for kind in ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu",
                                                     "xglm", "persimmon", "doge")],
]
SLOW = [pytest.param(*row, marks=pytest.mark.slow) for row in ALL_OTHERS]


def of_kind(kind, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | changes)
    llm = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in llm.parameters():          # no norm is missed at its usual values
        noise = 0.3 * torch.randn_like(parameter)
        parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    return llm.to(dtype)


@pytest.mark.parametrize("kind, changes, says", LANGUAGE_MODELS + SLOW, ids=str)
@torch.no_grad()
def test_language_models(kind, changes, says, capsys):
    llm = of_kind(kind, **changes)
    e = 0.5 * torch.randn(1, 30, 32)
    if says:
        with pytest.raises(BadData, match=f"^{type(llm).__name__} .*{says}.*use a Llama-like"):
            tiny(llm=llm)
        return
    own = llm(inputs_embeds=e).logits[0]
    model = tiny(llm=llm)
    for name, weight in model.trainable().items():
        if "lora_B" in name:
            weight.zero_()
    logits = model.logits(model.run(e[0], torch.arange(30)))
    assert (logits - own).norm() < 1e-4 * own.norm()
    assert model.by_segments == (kind not in ("nemotron", "stablelm"))
    assert capsys.readouterr().err.count("by one mask of all tokens") == (not model.by_segments)


@pytest.mark.parametrize("kind, changes, says", [
    ("stablelm", {}, ""), ("granite", {"logits_scaling": 1.01}, SCALES), ("mistral", {}, SEES),
    ("gemma2", FULL | {"attn_logit_softcapping": None}, SCALES)], ids=str)
def test_in_bfloat16_as_exactly(kind, changes, says):
    with pytest.raises(BadData, match=says) if says else nullcontext():
        assert not tiny(llm=of_kind(kind, torch.bfloat16, **changes)).by_segments


def test_one_mask_is_right_where_layers_know_no_segments(monkeypatch):
    model = tiny(llm=of_kind("stablelm"))
    x, narrations = video(model)
    expected, _ = model.loss(x, narrations)
    monkeypatch.setattr("narrator.LARGEST_MASK", 0)
    assert torch.equal(model.loss(x, narrations)[0], expected)


class Rounded(nn.Linear):
    """As a layer that quantises its weights in each forward."""


@pytest.mark.parametrize("name", ["lm_head", "model.layers.1.mlp.up_proj"])
def test_linear_layers_of_another_kind_are_refused(name):
    llm = of_kind("llama")
    llm.get_submodule(name).__class__ = Rounded
    with pytest.raises(BadData, match=f"{MATRICES} .{name}, Rounded"):
        tiny(llm=llm)


def test_in_training_what_is_frozen_is_not():
    """Seed-OSS has a dropout of its own; LoRA's is at work, and so is --checkpointing."""
    llm = of_kind("seed_oss", residual_dropout=0.5, attention_dropout=0.5)
    model = tiny(llm=llm).train()
    x, narrations = video(model)
    first, second = (model.loss(x, narrations)[0].item() for _ in range(2))
    assert first == second
    assert all(layer.training for layer in llm.model.layers)
    for dropout in (0.5, 0.0):
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.dropout.p = dropout
        assert (model.loss(x, narrations)[0].item() == first) == (dropout == 0)
    assert not any(module.training for module in model.eval().modules())


@pytest.mark.parametrize("rope, most", [
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    ({"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32,
      "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 64),
])
def test_positions_beyond_those_of_a_model_are_told(rope, most, capsys):
    llm = of_kind("llama", max_position_embeddings=64, rope_parameters=rope | {"rope_theta": 1e4})
    for positions in (most, most + 1):
        family.warn_of_positions(llm, positions, "a video")
    assert capsys.readouterr().err.count(f"a video needs more than the {most} positions") == 1


SMALL = {name: SIZES[name] for name in list(SIZES)[1:5]} | {"image_size": 32, "patch_size": 8}
TEXT = SMALL | {"vocab_size": 600, "pad_token_id": 0, "cross_attention_layers": []}
BOTH = {"vision_config": SMALL, "text_config": TEXT}
VIDEO = SMALL | {"num_frames": 2, "tubelet_size": 2}
NO_POOLED, NO_PATCHES, NO_PICTURES = "no pooled output", "no token for each patch", "encode single pictures"

VISION_MODELS = [
    ("siglip", BOTH, ""), ("videomae", VIDEO, NO_PICTURES), ("vit_msn", SMALL, NO_POOLED),
]
ALL_OTHER_VISION_MODELS = [
    *[(kind, BOTH, "") for kind in ("clip", "metaclip_2", "altclip", "chinese_clip", "kosmos-2", "aimv2",
                                    "blip", "owlvit", "clipseg")],
    *[(kind, SMALL, "") for kind in ("mlcd_vision_model", "dinov2", "dinov2_with_registers", "dinov3_vit",
                                     "vit", "dpt", "deit", "beit")],
    *[(kind, SMALL, NO_POOLED) for kind in ("data2vec-vision", "ijepa", "pixtral")],
    *[(kind, BOTH, NO_POOLED) for kind in ("smolvlm", "idefics2", "idefics3")],
    *[(kind, BOTH, NO_PICTURES) for kind in ("mllama", "xclip", "siglip2")],
    *[(kind, BOTH, "no attribute 'vision_model'") for kind in ("sam", "glm4v", "qwen2_5_vl", "llava")],
    ("vit_mae", SMALL, NO_PATCHES), ("groupvit", BOTH, NO_PATCHES), ("timesformer", VIDEO, NO_PICTURES),
]
SLOW = [pytest.param(*row, marks=pytest.mark.slow) for row in ALL_OTHER_VISION_MODELS]


@pytest.mark.parametrize("kind, changes, says", VISION_MODELS + SLOW, ids=str)
def test_vision_models(kind, changes, says, tmp_path):
    model = AutoModel.from_config(AutoConfig.for_model(kind, **changes), attn_implementation="eager")
    model.save_pretrained(tmp_path)
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    if says:
        with pytest.raises(BadData, match=says):
            VisionEncoder(str(tmp_path))
        return
    encoder = VisionEncoder(str(tmp_path))
    pictures = torch.randint(255, (3, 48, 64, 3)).byte()
    x = encoder(pictures)
    assert x.shape == (3, 10, 32)
    assert torch.allclose(encoder(pictures[1:2]), x[1:2], 1e-4, 1e-4)
