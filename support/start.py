"""First weights from statistics of training features (not in the paper): small models do not learn from random ones.

No labels are used.
"""
import torch
from einops import rearrange, repeat
from torch import Tensor, nn


@torch.no_grad()
def start_memory(clam: nn.Module, x: Tensor):
    """Start CLAM from training features x [T, J, D]: a memory token begins as a picture of the past.

    From random weights CLAM hardly learns: content is lost among a thousand tokens before the queries know where
    to look, and what they read means nothing to the language model. So here keys say where and values say what:
    W_k tells the J token slots apart (least squares) and query m addresses slot m mod J; W_v keeps the principal
    directions of what varies within a slot and ignores its usual appearance; W_o maps them back. Memory token m
    then starts as the usual appearance of its slot plus what varied there lately, much like a frame token. Gates
    start near 1, from 0.982 per token in the first head to 0.9997 in the last; all other matrices are Xavier. Where
    there is one slot (words; frames of one token), keys and queries address content at random.
    """
    for weight in clam.parameters():
        if weight.dim() == 2:
            nn.init.xavier_uniform_(weight)
    (frames, slots, width), heads = x.shape, clam.heads
    x, c, e = x.float().to(clam.z.device), width // 2 // heads, width // heads
    address = torch.randn(heads, max(slots, c), c, device=x.device)
    address = rearrange(torch.linalg.qr(address).Q[:, :slots] * c ** 0.5, "h j c -> j (h c)")   # [J, D / 2]
    tokens = rearrange(x, "t j d -> (t j) d")
    if slots > 1:
        ridge = 1e-3 * len(tokens) * tokens.var() * torch.eye(width, device=x.device)
        clam.w_k.weight.copy_(torch.linalg.solve(tokens.T @ tokens + ridge, tokens.T @ address.repeat(frames, 1)).T)

    usual = x.median(dim=0).values                                                # [J, D]
    blind = torch.linalg.qr(usual.T).Q                                            # [D, J]
    varied = rearrange(x - usual, "t j d -> (t j) d")
    varied = varied - varied @ blind @ blind.T
    _, axes = torch.linalg.eigh(varied.T @ varied / len(varied))
    what = axes[:, -e:].T                                                         # [e, D], orthonormal
    clam.w_v.weight.copy_(repeat(what, "e d -> (h e) d", h=heads))
    typical = (varied @ what.T).square().mean() ** 0.5
    clam.w_o.weight.copy_(repeat(typical / heads * what, "e d -> d (h e)", h=heads))

    which = torch.arange(clam.M, device=x.device) % slots
    size = tokens.square().mean() ** 0.5
    for norm in (clam.norm_a, clam.norm_y, clam.norm_m):
        norm.weight.fill_(size)
    clam.norm_a.bias.copy_(size * width ** 0.5 / 2 * axes[:, 0])  # marks memory: features do not vary here
    for branch in (clam.self_attn.out_proj, clam.mlp.down_proj):                  # these add nothing at first
        branch.weight.zero_()
    if clam.target is not None:
        clam.target.copy_(usual[which])
    a = clam.queries()[0]
    inverse = torch.linalg.pinv(clam.w_q.weight)                                  # [D, D / 2]
    wanted = address[which] if slots > 1 else torch.randn(clam.M, width // 2, device=x.device)
    clam.z.copy_(wanted @ inverse.T - a @ (inverse @ clam.w_q.weight).T)  # W_q (a + z) = address
    u = a + clam.z
    one = torch.linalg.pinv(u) @ torch.ones(clam.M, 1, device=x.device)      # u @ one = 1 for every token
    clam.w_output_gate.weight.mul_(0.1).add_(1.28 * one.T)  # SiLU(1.28) = 1: an open gate
    clam.start_gates()


@torch.no_grad()
def start_connector(connector: nn.Sequential, x: Tensor, gain: float = 5.0):
    """Start the connector from training features x [T, J, D].

    Its input is standardised, and the directions in which the J token slots differ are enlarged by `gain`: the language
    model has to find a place before it can say what is there.
    """
    x = x.float()
    x = x[:, 1:] if x.shape[1] > 1 else x                                       # the patches; CLS is an outlier
    mean, std = x.mean((0, 1)), x.std((0, 1)) + 1e-6
    slots = (x.mean(0) - mean) / std                                            # [J - 1, D]
    span = torch.linalg.svd(slots, full_matrices=False).Vh[:len(slots) - 1]     # [J - 2, D], orthonormal
    enlarge = torch.eye(len(mean)) + (gain - 1) * span.T @ span
    first = connector[0]
    first.weight.copy_(nn.init.orthogonal_(torch.empty_like(first.weight)) @ enlarge / std)
    first.bias.copy_(-first.weight @ mean)
