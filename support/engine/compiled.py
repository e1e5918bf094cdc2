"""--compile: CLAM and the language model of a stream by torch.compile (not in the paper). The
numbers are the same up to rounding.
"""
import torch


def compile_narrator(narrator) -> None:
    """Compile the language model's forward, and what the memory computes."""
    model = narrator.llm.model
    # The forward, not the module: names of parameters stay as they are.
    model.forward = torch.compile(model.forward, dynamic=True)
    # what CLAM (clam.py) computes for each frame and each narration; other memories stay the same
    memory = narrator.memory
    if hasattr(memory, "absorb"):
        memory.absorb = torch.compile(memory.absorb, dynamic=True)
        memory.read = torch.compile(memory.read, dynamic=True)
