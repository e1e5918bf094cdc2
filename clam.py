"""The visual memory (paper §3.3, Fig. 3): Cross Linear Attentive Memory, CLAM.

Every frame token updates a matrix of fixed size by a gated recurrence (Eq. 2)

    S_j = G_j * S_{j-1} + k_j^T v_j                    G in (0, 1), one decay per key channel

and M learned queries read it out whenever a segment ends: M_t = Q S_t. These M memory tokens are
all that the language model is given of the frames of earlier segments. So what is kept of these
frames has a fixed size, however long the video is.

The paper writes S as one D x D matrix. Here, as in the authors' code, S has h heads: the D/2 key
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

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn

# of this file: linear layers have no bias unless it says so, and all norms have one epsilon
EPS = 1e-5
LONGEST = 128               # tokens of a piece (`in_pieces`)
Linear = partial(nn.Linear, bias=False)
RMSNorm = partial(nn.RMSNorm, eps=EPS)


class SwiGLU(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        inner = 2 * 4 * width // 3                      # 2/3 of 4D,
        inner = (inner + 255) // 256 * 256              # rounded up to a multiple of 256
        # Two halves in one matrix: the first scales the second.
        self.up_proj = Linear(width, 2 * inner)
        self.down_proj = Linear(inner, width)

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
                The authors' models have none: all start from zero, and only Z tells them apart.
    dropout     rate in the self-attention over Z, as in the authors' code
    """
    HAS_HEADS = True            # the width must be a multiple of twice their number
    READ_WITHIN_FRAMES = True   # after any token (`Config.readout`); others: after whole frames

    def __init__(
        self,
        width: int,
        M: int = 20,
        heads: int = 8,
        rank: int = 16,
        target: bool = True,
        dropout: float = 0.1,
    ):
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
        self.w_q = Linear(width, keys)

        # frame tokens -> k, v, G (Eq. 2)
        self.w_k = Linear(width, keys)
        self.w_v = Linear(width, width)
        self.w_gate = nn.Sequential(
            Linear(width, rank),
            Linear(rank, keys, bias=True),
        )

        # Q S -> memory tokens
        self.w_output_gate = Linear(width, width)
        self.w_o = Linear(width, width)
        self.norm_o = RMSNorm(width // heads)
        self.norm_y = RMSNorm(width)
        self.norm_m = RMSNorm(width)
        self.mlp = SwiGLU(width)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config) -> "CLAM":
        """The memory that a narrator's settings describe (narrator.py: Config)."""
        return cls(
            config.width,
            config.memory_tokens,
            heads=config.memory_heads,
            target=config.memory_target,
            dropout=config.memory_dropout,
        )

    @torch.no_grad()
    def reset_parameters(self):
        """First weights as in the authors' code: matrices N(0, 0.02), biases 0, norms 1; the
        self-attention's in_proj is Xavier.

        A gate bias of 0 halves the state at every token, so a frame is forgotten within the next
        one. Training has to learn slower decay. (support/engine/first_weights.py has another
        start.)
        """
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
            elif name.endswith("bias"):
                weight.fill_(0)
            else:
                weight.fill_(1)
        nn.init.xavier_uniform_(self.self_attn.in_proj_weight)

    # ------------------------------------------------------------------ Eq. 2, token by token

    def initial_state(self, batch: int = 1) -> Tensor:
        """S_0 = 0 [B, h, c, e]."""
        c = self.width // 2 // self.heads
        e = self.width // self.heads
        return torch.zeros(batch, self.heads, c, e, device=self.z.device)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., D] -> k [..., h, c], v [..., h, e] and log G [..., h, c], all in fp32."""
        k = self.w_k(x).float()
        v = self.w_v(x).float()
        log_gate = F.logsigmoid(self.w_gate(x).float())     # G = sigmoid(W_gate x + b)
        k = rearrange(k, "... (h c) -> ... h c", h=self.heads)
        v = rearrange(v, "... (h e) -> ... h e", h=self.heads)
        log_gate = rearrange(log_gate, "... (h c) -> ... h c", h=self.heads)
        return k, v, log_gate

    @staticmethod
    def recurrence(state: Tensor, k: Tensor, v: Tensor, log_gate: Tensor) -> Tensor:
        """Eq. 2: S_j of S_{j-1}, k_j [B, h, c], v_j [B, h, e] and log G_j [B, h, c]."""
        gate = log_gate.exp()
        update = einsum(k, v, "b h c, b h e -> b h c e")                # k^T v
        return gate[..., None] * state + update

    def recurrent(
        self,
        x: Tensor,
        read_at: Tensor,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Eq. 2 and M = Q S, token by token: the oracle for `chunked` and `step`.

        x [B, L, D], read_at [B, N] -> memory [B, N, M, D], the last state [B, h, c, e].
        """
        if state is None:
            state = self.initial_state(len(x))
        states = [state]                                                # S_0 .. S_L
        for x_j in x.unbind(1):                                         # [B, D]
            state = self.recurrence(state, *self.project(x_j))
            states.append(state)

        states = torch.stack(states, dim=1)                             # [B, L + 1, h, c, e]
        videos = torch.arange(len(x))
        at_read_outs = states[videos[:, None], read_at]                 # [B, N, h, c, e]
        return self.read(at_read_outs), state

    # ------------------------------------------------------------------ M_t = Q S_t

    def queries(self) -> tuple[Tensor, Tensor, Tensor]:
        """The part of `read` that depends on no video: Z -> the queries q [h, M, c], the output
        gate [M, D], and the residual [M, D] that what is read is added to.

        The self-attention (App. B.6) starts from a target, a vector for each memory token: zero in
        the authors' code, or learned (not in the paper). From zero, its values are its bias alone,
        and it adds the same vector to every memory token.
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
        q = q * c ** -0.5                                   # the scale, as in the authors' code
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
        # Norm, output gate and projection of gated linear attention, as in the authors' code (not
        # in the paper).
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
        of_later = F.pad(log_gate, (0, 0, 0, 0, 0, 1))[..., 1:, :, :]   # (1, 2, 3) -> (2, 3, 0)
        from_the_end = of_later.flip(-3).cumsum(-3)
        sum_after = from_the_end.flip(-3)                               # [.., L, h, c]
        decayed = k * sum_after.exp()
        update = einsum(decayed, v, "... l h c, ... l h e -> ... h c e")
        return decay, update

    @staticmethod
    def advance(state: Tensor, decay: Tensor, update: Tensor) -> Tensor:
        """S <- decay * S + update (Eq. 2), what `absorb` says of tokens."""
        return decay[..., None] * state + update

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """Streaming (Alg. 2, line 5): a frame x [B, L, D] -> the new state."""
        assert x.shape[:-2] == state.shape[:1], "each stream has its own state"
        effect = self.absorb(*self.project(x))                          # decay and update
        return self.advance(state, *effect)

    def chunked(
        self,
        x: Tensor,
        read_at: Tensor,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Training: the tokens before each read-out are one piece, or several if there are many
        (`in_pieces`). What each piece does to the state is computed for all at once, see `absorb`.

        x [B, L, D], read_at [B, N] -> memory [B, N, M, D], the last state [B, h, c, e].
        """
        if state is None:
            state = self.initial_state(len(x))
        assert len(x) == len(read_at) == len(state), "each video has its own read-outs and state"
        states = []                             # of each video: one at each read-out, and the last
        for x_b, ends, state_b in zip(x, read_at.tolist(), state):
            ends.append(len(x_b))
            pieces, bounds = in_pieces(self.project(x_b), ends)
            after = [state_b]                                           # S at each bound
            for effect in zip(*self.absorb(*pieces)):                   # decay and update
                after.append(self.advance(after[-1], *effect))          # Eq. 2, piece by piece
            states.append(torch.stack([after[bounds.index(end)] for end in ends]))
        states = torch.stack(states)                                    # [B, N + 1, h, c, e]
        at_read_outs = states[:, :-1]
        return self.read(at_read_outs), states[:, -1]

    forward = chunked


def in_pieces(tensors: tuple[Tensor, ...], ends: list[int]) -> tuple[list[Tensor], list[int]]:
    """Cut tokens into P pieces: tensors [L, ..] -> [P, l, ..], padded with zeros to one length.

    ends        of the stretches in which the tokens lie, in order; the last is L. A long stretch is
                cut again, so that less than LONGEST tokens are padded for each, whatever the lengths

    Returns also the bounds of the pieces [P + 1]. A padded token has k = 0 and log G = 0: it writes
    nothing, and nothing is forgotten.
    """
    assert ends == sorted(ends), "read-outs come in order, and none after the last token"
    bounds = []
    for begin, end in pairwise([0, *ends]):
        bounds += range(begin, end, LONGEST)
    bounds.append(ends[-1])
    lengths = torch.tensor(bounds).diff()
    longest = max(lengths.tolist(), default=0)                          # l; no tokens have no piece
    is_token = torch.arange(longest) < lengths[:, None]                 # [P, l]
    padded = []
    for tokens in tensors:
        piece = tokens.new_zeros(*is_token.shape, *tokens.shape[1:])
        piece[is_token] = tokens
        padded.append(piece)
    return padded, bounds


if __name__ == "__main__":
    from beyond.commands.example_of_clam import main
    from support.common.errors import command_line
    command_line(main)
