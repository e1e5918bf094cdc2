"""First weights of connector and memory: as in the authors' code, or mimetic ones (not in the
paper), from which CLAM learns in small trainings, too.

Mimetic weights (Trockman et al., arXiv 2410.11135) imitate what training would lead to. They are
made from frames x [T, J, D] of training videos.

LoRA always starts the same way: A Kaiming-uniform, B zero.
"""
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def first_weights(
    narrator: nn.Module,
    memory_start: str,
    connector_start: str,
    videos: Sequence[Callable],
) -> None:
    """Set the first weights of a new narrator (train.py --start, --connector-start).

    ..._start   "published": as in the authors' code; or "mimetic": made from the first 128 frames
                of each of at most 64 videos
    videos      functions that read a video, whose `x` are its frame tokens [T, J, D]
    """
    if "mimetic" in (memory_start, connector_start):
        # clones: a slice would keep all frames of its video in memory
        frames = [read().x[:128].clone() for read in videos[:64]]
        x = torch.cat(frames)
    if memory_start == "mimetic":
        start_memory(narrator.memory, x)
    else:
        narrator.memory.reset_parameters()
    if connector_start == "mimetic":
        start_connector(narrator.connector, x)
    else:
        for layer in narrator.connector:                               # as in the authors' code
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)


@torch.no_grad()
def start_connector(connector: nn.Sequential, x: Tensor):
    """Start the connector from training features x [T, J, D].

    Its first layer standardises its input, and enlarges by five the directions in which the J
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
    enlarge = torch.eye(len(mean)) + 4 * directions.T @ directions     # [D, D]
    first = connector[0]
    orthogonal = nn.init.orthogonal_(torch.empty_like(first.weight))
    first.weight.copy_(orthogonal @ enlarge / std)
    first.bias.copy_(-first.weight @ mean)


@torch.no_grad()
def start_memory(memory: nn.Module, x: Tensor) -> None:
    """A CLAM (clam.py), or a memory that reads as it does, is transparent at first: each memory
    token starts as a token of the average frame, asks for what looks like it, and is given that as
    it was. Other memories stay as they are.
    """
    if not memory.HAS_HEADS:
        return
    x = x.float().to(memory.z.device)
    size = x.square().mean().sqrt()
    mean = F.normalize(x.mean((0, 1)), dim=0)                       # its direction [D]
    for weight in memory.parameters():
        if weight.dim() == 2:
            nn.init.xavier_uniform_(weight)

    # keys and values: orthogonal projections of what is not the mean of all tokens
    for projection in (memory.w_k, memory.w_v):
        weight = nn.init.orthogonal_(projection.weight)
        weight -= torch.outer(weight @ mean, mean)
    memory.w_q.weight.copy_(memory.w_k.weight)
    memory.w_o.weight.copy_(memory.w_v.weight.T)

    # gates: near 1, from 0.982 per token in the first head to 0.9997 in the last
    if hasattr(memory, "w_gate"):
        weight, bias = memory.w_gate[1].parameters()
        logits = torch.linspace(4, 8, memory.heads)                 # G = sigmoid(logits)
        bias.copy_(logits.repeat_interleave(len(bias) // memory.heads))
        nn.init.normal_(weight, std=0.02)

    # memory tokens: those of the average frame, with a little noise, so that no two are equal
    average = x.mean(0)                                             # [J, D]
    slot = torch.arange(memory.M, device=x.device) % len(average)
    noise = 0.1 * size * torch.randn_like(memory.z)
    memory.z.copy_(average[slot] + noise)
    if memory.target is not None:
        memory.target.copy_(memory.z)

    # all in the size of frame tokens; attention over Z and feed-forward add nothing at first
    for norm in (memory.norm_a, memory.norm_y, memory.norm_m):
        norm.weight.fill_(size)
    nn.init.normal_(memory.norm_a.bias, std=size / 2)               # marks them as memory
    memory.self_attn.out_proj.weight.zero_()
    memory.mlp.down_proj.weight.zero_()

    # output gate: open for every memory token, because SiLU(1.28) = 1
    _, _, residual = memory.queries()                               # [M, D]
    # (residual + z) to_one is one in each of the M rows.
    ones = torch.ones(memory.M, 1, device=x.device)
    to_one = torch.linalg.pinv(residual + memory.z) @ ones          # [D, 1]
    memory.w_output_gate.weight.copy_(1.28 * to_one.T)              # in all of its rows

