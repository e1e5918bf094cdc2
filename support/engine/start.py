"""First weights from statistics of training features (not in the paper): small models do not learn
from random weights.

No labels are used. In the comments: h heads, j token slots, e width of a head's values.
"""
import torch
from einops import rearrange, repeat
from torch import Tensor, nn


@torch.no_grad()
def start_memory(clam: nn.Module, x: Tensor):
    """Start CLAM from training features x [T, J, D].

    From random weights CLAM hardly learns. Content is lost among a thousand tokens before the
    queries know where to look, and the language model cannot interpret the tokens that are read.
    Therefore keys are made to say where, and values to say what:

    W_k     tells the J token slots apart (least squares); query m addresses slot m mod J
    W_v     keeps the principal directions of the changes within a slot, and ignores its usual
            appearance
    W_o     maps these directions back
    gates   start near 1, from 0.982 per token in the first head to 0.9997 in the last

    Memory token m then starts as a picture of the past: the usual appearance of its slot plus its
    recent changes, much like a frame token. All other matrices are Xavier. With a single slot
    (words; frames of one token), keys and queries address content at random.
    """
    for weight in clam.parameters():
        if weight.dim() == 2:
            nn.init.xavier_uniform_(weight)

    frames, slots, width = x.shape
    heads = clam.heads                                                 # h
    key_width = width // 2 // heads                                    # c, of a head
    value_width = width // heads                                       # e, of a head
    x = x.float().to(clam.z.device)

    # W_k: a frame token has its slot's address as its key; addresses are orthogonal in each head
    random_keys = torch.randn(heads, max(slots, key_width), key_width, device=x.device)
    orthonormal = torch.linalg.qr(random_keys).Q[:, :slots]            # [h, J, c]
    address = orthonormal * key_width ** 0.5
    address = rearrange(address, "h j c -> j (h c)")                   # [J, D / 2]
    tokens = rearrange(x, "t j d -> (t j) d")                          # [T * J, D]
    if slots > 1:
        ridge = 1e-3 * len(tokens) * tokens.var()
        ridge = ridge * torch.eye(width, device=x.device)
        targets = address.repeat(frames, 1)                            # [T * J, D / 2]
        w_k = torch.linalg.solve(tokens.T @ tokens + ridge, tokens.T @ targets)
        clam.w_k.weight.copy_(w_k.T)

    # W_v and W_o: the principal directions of the changes that are orthogonal to usual appearances
    usual = x.median(dim=0).values                                     # [J, D]
    usual_span = torch.linalg.qr(usual.T).Q                            # [D, J], orthonormal
    changes = rearrange(x - usual, "t j d -> (t j) d")
    changes = changes - changes @ usual_span @ usual_span.T
    covariance = changes.T @ changes / len(changes)                    # [D, D]
    _, directions = torch.linalg.eigh(covariance)                      # by variance, rising
    principal = directions[:, -value_width:].T                         # [e, D], orthonormal
    clam.w_v.weight.copy_(repeat(principal, "e d -> (h e) d", h=heads))
    typical = (changes @ principal.T).square().mean() ** 0.5
    back = typical / heads * principal                                 # of each head
    clam.w_o.weight.copy_(repeat(back, "e d -> d (h e)", h=heads))

    # norms: outputs have the size of frame tokens
    size = tokens.square().mean() ** 0.5
    for norm in (clam.norm_a, clam.norm_y, clam.norm_m):
        norm.weight.fill_(size)
    # features do not change in the first direction, so it is free to mark memory tokens
    mark = size * width ** 0.5 / 2
    clam.norm_a.bias.copy_(mark * directions[:, 0])
    # these branches add nothing at first
    clam.self_attn.out_proj.weight.zero_()
    clam.mlp.down_proj.weight.zero_()

    # queries: z is chosen such that W_q (a + z) is the address of each memory token's slot
    slot_of = torch.arange(clam.M, device=x.device) % slots            # [M]
    if clam.target is not None:
        clam.target.copy_(usual[slot_of])
    _, _, a = clam.queries()                                           # [M, D]
    w_q = clam.w_q.weight
    inverse = torch.linalg.pinv(w_q)                                   # [D, D / 2]
    if slots > 1:
        query = address[slot_of]                                       # [M, D / 2]
    else:
        query = torch.randn(clam.M, width // 2, device=x.device)
    clam.z.copy_(query @ inverse.T - a @ (inverse @ w_q).T)

    # output gate: open for every memory token, because SiLU(1.28) = 1
    u = a + clam.z                                                     # [M, D]
    ones = torch.ones(clam.M, 1, device=x.device)
    to_one = torch.linalg.pinv(u) @ ones                               # [D, 1]: u @ to_one = 1
    clam.w_output_gate.weight.mul_(0.1).add_(1.28 * to_one.T)
    clam.start_gates()


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
