"""The visual memory (paper §3.3, Fig. 3): Cross Linear Attentive Memory, CLAM.

Every frame token updates a matrix of fixed size by a gated recurrence (Eq. 2)

    S_j = G_j * S_{j-1} + k_j^T v_j                    G in (0, 1), one decay per key channel

and M learned queries read it out whenever a segment ends: M_t = Q S_t. These M memory tokens are
all that the language model is given of the frames of earlier segments. So what is kept of these
frames has a fixed size, however long the video is.

The paper writes S as one D x D matrix. Here, as in the published code, S has h heads: the D/2 key
channels and the D value channels are divided among the heads, and each head keeps a matrix of its
own, D/2h x D/h. That is 2h times fewer numbers than D x D. G is constant along the values, so it is
stored as a vector of key channels (the diagonal, input-dependent gate of App. B.2).

Three forms of the same function, tested against each other:
    recurrent   Eq. 2 token by token, as it stands in the paper: the oracle
    chunked     training: all tokens of a segment at once, one state per read-out
    step        streaming: one frame in, the new state out; `read` after each narration

Glossary (B videos, L = T*J tokens, D feature width, h heads, c = D/2h key and e = D/h value
channels per head):
    x           frame tokens X_t, J to a frame                         [B, L, D]
    k, v        keys and values, k = W_k x, v = W_v x                  [B, L, h, c], [B, L, h, e]
    gate        decay gate G = sigmoid(W_gate x + b)                   [B, L, h, c]
    log_gate    log G, never above 0, in fp32                          [B, L, h, c]
    state       S_t, in fp32                                           [B, h, c, e]
    z, q        learned vectors Z and the queries Q made of them       [M, D], [h, M, c]
    memory      memory tokens M_t                                      [B, M, D]
    read_at     how many tokens have been absorbed at each read-out    [B, N], on the CPU

`python clam.py` works through Eq. 2 with small numbers.

Does not include: custom kernels (plain PyTorch only).
"""

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import Tensor, nn

EPS = 1e-5  # epsilon of every normalisation in this file


class SwiGLU(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        inner = 2 * 4 * width // 3                      # 2/3 of 4D,
        inner = (inner + 255) // 256 * 256              # rounded up to a multiple of 256
        # Two halves in one matrix: the first scales the second.
        self.up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scale, up = self.up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(scale) * up)


class CLAM(nn.Module):
    """Cross Linear Attentive Memory (App. B.6): self-attention over Z, gated linear cross
    attention, feed-forward.

    width       D, a multiple of 2 * heads
    M           number of memory tokens
    rank        W_gate is of low rank, D -> rank -> D/2, as in gated linear attention
    target      learn a starting vector of the self-attention for each memory token (`queries`).
                The published models have none: all start from zero, and only Z tells them apart.
    dropout     rate in the self-attention over Z, as published
    """
    # The width must be a multiple of twice the heads, and a state can be read within a frame
    # (`Config.readout`). Memories without heads work frame by frame.
    HAS_HEADS = True

    def __init__(self, width: int, M: int = 20, heads: int = 8, rank: int = 16, target: bool = True,
                 dropout: float = 0.1):
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"CLAM's width {width} is not a multiple of twice its {heads} heads")
        self.width = width
        self.M = M
        self.heads = heads
        keys = width // 2                                               # key channels, h * c
        self.z = nn.Parameter(torch.empty(M, width))
        self.target = None
        if target:
            self.target = nn.Parameter(torch.empty(M, width))

        # Z -> the queries Q
        self.self_attn = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.norm_a = nn.LayerNorm(width, eps=EPS)
        self.w_q = nn.Linear(width, keys, bias=False)

        # frame tokens -> k, v, G (Eq. 2)
        self.w_k = nn.Linear(width, keys, bias=False)
        self.w_v = nn.Linear(width, width, bias=False)
        to_rank = nn.Linear(width, rank, bias=False)
        self.w_gate = nn.Sequential(to_rank, nn.Linear(rank, keys))

        # Q S -> memory tokens
        self.w_output_gate = nn.Linear(width, width, bias=False)
        self.w_o = nn.Linear(width, width, bias=False)
        self.norm_o = nn.RMSNorm(width // heads, eps=EPS)
        self.norm_y = nn.RMSNorm(width, eps=EPS)
        self.norm_m = nn.RMSNorm(width, eps=EPS)
        self.mlp = SwiGLU(width)
        self.reset_parameters()

    # ------------------------------------------------------------------ Eq. 2, token by token

    def initial_state(self, batch: int = 1) -> Tensor:
        """S_0 = 0 [B, h, c, e]."""
        c = self.width // 2 // self.heads
        e = self.width // self.heads
        return torch.zeros(batch, self.heads, c, e, device=self.z.device)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., D] -> k [..., h, c], v [..., h, e], log_gate [..., h, c], all in fp32."""
        k = self.w_k(x).float()
        v = self.w_v(x).float()
        k = rearrange(k, "... (h c) -> ... h c", h=self.heads)
        v = rearrange(v, "... (h e) -> ... h e", h=self.heads)
        return k, v, self.log_gate(x)

    def log_gate(self, x: Tensor) -> Tensor:
        """log G of x [..., D], G = sigmoid(W_gate x + b), in fp32 [..., h, c]. W_gate is of low
        rank: D -> rank -> D / 2.

        [..., h, 1] in memories whose channels of a head share a gate (baselines/memories.py).
        """
        logits = self.w_gate(x).float()
        log_gate = F.logsigmoid(logits)                                 # log G
        return rearrange(log_gate, "... (h c) -> ... h c", h=self.heads)

    def recurrent(self, x: Tensor, read_at: Tensor,
                  state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Eq. 2 and M = Q S, token by token: the oracle for `chunked` and `step`.

        x [B, L, D], read_at [B, N] -> memory [B, N, M, D], the last state [B, h, c, e].
        """
        check(x, read_at, self.width)
        if state is None:
            state = self.initial_state(len(x))
        states = [state]                                                # S_0 .. S_L
        for x_j in x.unbind(1):                                         # [B, D]
            k, v, log_gate = self.project(x_j)
            gate = log_gate.exp()
            update = einsum(k, v, "b h c, b h e -> b h c e")            # k^T v
            state = gate[..., None] * state + update                    # Eq. 2
            states.append(state)
        states = torch.stack(states, dim=1)                             # [B, L + 1, h, c, e]
        videos = torch.arange(len(x))
        at_read_outs = states[videos[:, None], read_at]                 # [B, N, h, c, e]
        return self.read(at_read_outs), state

    # ------------------------------------------------------------------ M_t = Q S_t

    def queries(self) -> tuple[Tensor, Tensor, Tensor]:
        """The part of `read` that depends on no video: Z -> the queries q [h, M, c], the output
        gate [M, D], and the residual [M, D] that what is read is added to.

        The self-attention (App. B.6) starts from a target, a vector for each memory token: zero, as
        published, or learned (not in the paper). From zero, its values are its bias alone, and it
        adds the same vector to every memory token.
        """
        target = self.target
        if target is None:
            target = torch.zeros_like(self.z)
        with_z = target + self.z                    # of the self-attention: its queries and keys
        attended, _ = self.self_attn(with_z, with_z, target, need_weights=False)
        residual = self.norm_a(target + self.dropout(attended))         # [M, D]

        query_input = residual + self.z
        q = self.w_q(query_input)
        q = rearrange(q, "m (h c) -> h m c", h=self.heads)
        c = q.shape[2]
        q = q * c ** -0.5                                               # the scale, as published
        output_gate = F.silu(self.w_output_gate(query_input))
        return q, output_gate, residual

    def read(self, state: Tensor, queries: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """M_t = Q S_t, gated, normalised, through the feed-forward: [..., h, c, e] -> [..., M, D].

        queries     the result of `queries`; a stream computes it once
        """
        if queries is None:
            queries = self.queries()
        q, output_gate, residual = queries
        o = einsum(q.float(), state, "h m c, ... h c e -> ... m h e")   # Q S, in fp32
        # Norm, output gate and projection of gated linear attention (published; not in the paper).
        o = self.norm_o(o.to(residual.dtype))
        o = rearrange(o, "... h e -> ... (h e)")                        # [..., M, D]
        o = self.w_o(o * output_gate)
        y = self.norm_y(residual + o)
        return self.norm_m(y + self.mlp(y))

    # ------------------------------------------------------------------ Eq. 2, many tokens at once

    @staticmethod
    def absorb(k: Tensor, v: Tensor, log_gate: Tensor) -> tuple[Tensor, Tensor]:
        """L tokens -> (decay [.., h, c], update [.., h, c, e]) of a state:

            S <- decay * S + update

        k, log_gate [.., L, h, c], v [.., L, h, e]. Eq. 2 unrolled, with g = log G:

            decay = exp(sum_j g_j)
            update = sum_j exp(sum_{i > j} g_i) k_j^T v_j

        Every exponent is a sum of g <= 0: stable for any gate and any length.
        """
        decay = log_gate.sum(-3).exp()                                  # [.., h, c]
        # The sum over the tokens after each token: (1, 2, 3) -> (5, 3, 0). It is taken from the end
        # and so is exact there: a difference of prefix sums would be one of large numbers.
        of_next = log_gate.roll(-1, dims=-3)                            # (1, 2, 3) -> (2, 3, 1)
        of_next[..., -1:, :, :] = 0                                     # none comes after the last
        from_the_end = of_next.flip(-3).cumsum(-3)
        sum_after = from_the_end.flip(-3)                               # [.., L, h, c]
        decayed = k * sum_after.exp()
        update = einsum(decayed, v, "... l h c, ... l h e -> ... h c e")
        return decay, update

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """Streaming (Alg. 2, line 5): a frame x [B, L, D] -> the new state."""
        assert len(x) == len(state), "each stream has its own state"
        k, v, log_gate = self.project(x)
        decay, update = self.absorb(k, v, log_gate)
        return decay[..., None] * state + update

    def chunked(self, x: Tensor, read_at: Tensor,
                state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Training: all tokens between two read-outs at once, see `absorb`. States exist at
        read-outs only.

        x [B, L, D], read_at [B, N] -> memory [B, N, M, D], the last state [B, h, c, e].
        """
        check(x, read_at, self.width)
        if state is None:
            state = self.initial_state(len(x))
        states = []
        for x_b, read_at_b, state_b in zip(x, read_at, state, strict=True):
            states.append(self.states_of_video(x_b, read_at_b, state_b))
        states = torch.stack(states)                                    # [B, N + 1, h, c, e]
        at_read_outs = states[:, :-1]
        last = states[:, -1]
        if read_at.shape[1] == 0:                                       # read nowhere
            return x.new_zeros(len(x), 0, self.M, self.width), last
        return self.read(at_read_outs), last

    def states_of_video(self, x: Tensor, read_at: Tensor, state: Tensor) -> Tensor:
        """x [L, D], read_at [N] and the state before -> states [N + 1, h, c, e]: one at each
        read-out, and the last one.
        """
        # N + 1 pieces: one before each read-out, and the rest
        bounds = torch.tensor([0, *read_at.tolist(), len(x)])
        lengths = bounds.diff().tolist()
        k, v, log_gate = self.project(x)
        # split, not slices: the gradient of each slice would be as large as all of k
        pieces = [tensor.split(lengths) for tensor in (k, v, log_gate)]
        states = []
        for piece in zip(*pieces):
            decay, update = self.absorb(*piece)
            state = decay[..., None] * state + update                   # Eq. 2, piece by piece
            states.append(state)
        return torch.stack(states)

    forward = chunked

    # ------------------------------------------------------------------ first weights

    @torch.no_grad()
    def reset_parameters(self):
        """As the published training starts: matrices N(0, 0.02), biases 0, norms 1; the
        self-attention's in_proj is Xavier.

        A gate bias of 0 halves the state at every token, so a frame is forgotten within the next
        one. Training has to learn slower decay; `initialise` starts with slow decay.
        """
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
            else:
                weight.fill_(0 if name.endswith("bias") else 1)
        nn.init.xavier_uniform_(self.self_attn.in_proj_weight)

    @torch.no_grad()
    def initialise(self, x: Tensor):
        """A start from which CLAM learns in small trainings, too (not in the paper). It is made from
        frames x [T, J, D] of training videos, and is mimetic (Trockman et al., arXiv 2410.11135).

        Before it is trained, the memory is transparent: each memory token starts as a token of the
        average frame, asks for what looks like it, and is given that as it was.
        """
        x = x.float().to(self.z.device)
        size = x.square().mean().sqrt()
        mean = F.normalize(x.mean((0, 1)), dim=0)                       # its direction [D]
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.xavier_uniform_(weight)

        # keys and values: orthogonal projections of what is not the mean of all tokens
        for projection in (self.w_k, self.w_v):
            weight = nn.init.orthogonal_(projection.weight)
            weight -= torch.outer(weight @ mean, mean)
        self.w_q.weight.copy_(self.w_k.weight)
        self.w_o.weight.copy_(self.w_v.weight.T)
        self.start_gates()

        # memory tokens: those of the average frame, with a little noise, so that no two are equal
        average = x.mean(0)                                             # [J, D]
        slot = torch.arange(self.M, device=x.device) % len(average)
        noise = 0.1 * size * torch.randn_like(self.z)
        self.z.copy_(average[slot] + noise)
        if self.target is not None:
            self.target.copy_(self.z)

        # all in the size of frame tokens; attention over Z and feed-forward add nothing at first
        for norm in (self.norm_a, self.norm_y, self.norm_m):
            norm.weight.fill_(size)
        nn.init.normal_(self.norm_a.bias, std=size / 2)                 # marks them as memory
        self.self_attn.out_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()

        # output gate: open for every memory token, because SiLU(1.28) = 1
        _, _, residual = self.queries()                                 # [M, D]
        # (residual + z) to_one is one in each of the M rows.
        ones = torch.ones(self.M, 1, device=x.device)
        to_one = torch.linalg.pinv(residual + self.z) @ ones            # [D, 1]
        self.w_output_gate.weight.copy_(1.28 * to_one.T)                # in all of its rows

    def start_gates(self):
        """First gates of `initialise`: near 1, from 0.982 per token in the first head to 0.9997 in
        the last.
        """
        weight, bias = self.w_gate[1].parameters()
        logits = torch.linspace(4, 8, self.heads)                       # G = sigmoid(logits)
        channels = len(bias) // self.heads
        bias.copy_(repeat(logits, "h -> (h c)", c=channels))
        nn.init.normal_(weight, std=0.02)


def check(x: Tensor, read_at: Tensor, width: int):
    """Assert that x is [B, L, D], and that read_at [B, N] never decreases and stays within 0..L."""
    wanted = f"tokens [B, L, {width}] and read-outs [B, N]"
    assert x.dim() == 3 and x.shape[2] == width, f"{wanted}: tokens are {list(x.shape)}"
    assert read_at.dim() == 2, f"{wanted}: read-outs are {list(read_at.shape)}"
    assert len(x) == len(read_at), f"{wanted}: of {len(x)} and {len(read_at)} videos"
    L = x.shape[1]
    for row in read_at.tolist():
        bounds = [0, *row, L]
        assert bounds == sorted(bounds), f"read-outs must rise within 0..{L}, not {row}"


if __name__ == "__main__":
    from commands.clam import main
    main()
