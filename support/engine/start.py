"""First weights: as published, and a connector that standardises its input (not in the paper)."""
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def first_weights(narrator: nn.Module, start: str, examples: Sequence) -> None:
    """Set the first weights of a new narrator (train.py --start).

    start       "published", or "mimetic": made from the first 128 frames of each of at most 64
                examples (their `x` [T, J, D])
    """
    if start == "published":
        narrator.start_published()
        return
    videos = range(min(64, len(examples)))
    # clones: a slice would keep all frames of its video in memory
    frames = [examples[i].x[:128].clone() for i in videos]
    narrator.initialise(torch.cat(frames))


@torch.no_grad()
def start_as_published(module: nn.Module):
    """The linear layers of a module as in the published code: N(0, 0.02), biases 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)


@torch.no_grad()
def start_connector(connector: nn.Sequential, x: Tensor, gain: float = 5.0):
    """Start the connector from training features x [T, J, D].

    Its first layer standardises its input, and enlarges by `gain` the directions in which the J
    token slots differ: the language model has to find a place before it can name what is there.
    """
    x = x.float()
    if x.shape[1] > 1:
        x = x[:, 1:]                                                   # without CLS, an outlier
    mean = x.mean((0, 1))                                              # [D]
    std = x.std((0, 1)) + 1e-6
    slots = (x.mean(0) - mean) / std                                   # [J - 1, D]
    directions = torch.linalg.svd(slots, full_matrices=False).Vh
    directions = directions[:len(slots) - 1]                           # [J - 2, D]: rank of `slots`
    enlarge = torch.eye(len(mean)) + (gain - 1) * directions.T @ directions    # [D, D]
    first = connector[0]
    orthogonal = nn.init.orthogonal_(torch.empty_like(first.weight))
    first.weight.copy_(orthogonal @ enlarge / std)
    first.bias.copy_(-first.weight @ mean)
