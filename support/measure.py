"""What a piece of code costs: time, memory kept for the backward pass, distance from an oracle."""
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from support.common import synchronise


def profile(function: Callable, module: nn.Module, x: Tensor, repeats: int, *more) -> dict:
    """A function of x (and more) that uses the module's weights: seconds for forward + backward (best of `repeats`),
    bytes kept for the backward pass, its first output, the weights' gradients."""
    seconds, kept = [], {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for _ in range(repeats):
        module.zero_grad()
        kept.clear()
        synchronise(x)
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output, _ = function(x, *more)
        (output * torch.linspace(-1, 1, output.numel(), device=x.device).view_as(output)).sum().backward()
        synchronise(x)
        seconds.append(time.perf_counter() - start)
    weights = sum(p.untyped_storage().nbytes() for p in module.parameters() if p.untyped_storage().data_ptr() in kept)
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"seconds": min(seconds), "bytes": sum(kept.values()) - weights, "output": output.detach(),
            "grads": gradients}


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()
