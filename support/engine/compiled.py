"""--compile: CLAM and the language model of a stream by torch.compile (not in the paper). The
numbers are the same up to rounding.
"""
import torch


def compile_narrator(narrator) -> None:
    """Compile the language model's forward, and what the memory computes.

    The first pass of a stream, which makes its cache, is not compiled: it comes once.
    """
    model = narrator.llm.model
    # The forward, not the module: names of parameters stay as they are.
    plain = model.forward
    compiled = torch.compile(plain, dynamic=True)

    def forward(**options):
        cache = options.get(narrator.cache_name)
        return (compiled if getattr(cache, "buffers", None) else plain)(**options)

    model.forward = forward
    # what CLAM (clam.py) computes for each frame and each narration; other memories stay the same
    memory = narrator.memory
    if hasattr(memory, "absorb"):
        memory.absorb = torch.compile(memory.absorb, dynamic=True)
        memory.read = torch.compile(memory.read, dynamic=True)
