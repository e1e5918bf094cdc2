"""What several tests use: small narrators on the toy's language model, random videos, where things lie."""
import random
from pathlib import Path

import torch

import narrator as nar

ROOT = Path(__file__).parent.parent
TOY = ROOT / "toy" / "checkpoint"
GOLDEN = ROOT.parent / "shared" / "golden"


def tiny(seed: int = 0, **changes) -> nar.Narrator:
    """A narrator with the toy's language model and random weights everywhere else, LoRA included."""
    torch.manual_seed(seed)
    options = {"width": 32, "memory_tokens": 10, "memory_heads": 2, "memory_dropout": 0.0, "lora_rank": 4, "lora_alpha": 8,
               "lora_dropout": 0.0} | changes
    llm = str(TOY / "llm")
    model = nar.Narrator(*nar.load_llm(llm), nar.Config(llm=llm, **options))
    for name, p in model.trainable().items():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    return model.eval()


def video(model: nar.Narrator, frames: int = 20, at: tuple[int, ...] = (0, 3, 9, 15), seed: int = 0):
    """Random frame tokens [T, J, D] and random narrations at the given frames."""
    generator, numbers = torch.Generator().manual_seed(seed), random.Random(seed)
    x = torch.randn(frames, model.config.J, model.config.width, generator=generator)
    vocabulary = len(model.layout.tokenizer)
    return x, [(frame, [numbers.randrange(2, vocabulary) for _ in range(numbers.randint(1, 8))]) for frame in at]
