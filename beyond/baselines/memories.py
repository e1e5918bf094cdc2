"""The memories that CLAM is compared with (Table 5; Tables 3 and 9), behind its interface.

All have a state of fixed size and give M memory tokens. The paper names them and the works that
they come from, but not their details. Each is defined here as near to its source as a stream
allows.

    memory    state, fp32         numbers, D = 1024, M = 20    learned
    recent    [M, D]              20,480                       nothing
    kmeans    [M, D + 1]          20,500                       nothing
    moviechat [M, D + 1]          20,500                       nothing
    tokenmlp  [M, D]              20,480                       which tokens to keep
    retnet    [h, D/2h, D/h]      65,536                       keys, values, queries
    clam      [h, D/2h, D/h]      65,536                       and a gate for each key channel
    tied      [h, D/2h, D/h]      65,536                       the same as clam
    writing   [h, D/2h, D/h]      65,536                       and how much a head writes
    delta     [h, D/2h, D/h]      65,536                       and how much a head replaces

So equally many memory tokens are not equally large states.

Does not include: a state that grows (Q-Former, App. B.2).
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from clam import CLAM

Projected = tuple[Tensor, Tensor, Tensor]       # k, v and log G of tokens, or what stands for it


class TokenBank(nn.Module):
    """M tokens that each frame changes, with the methods of CLAM (clam.py).

    `update` gives the new state [B, M, D] after a frame x [B, J, D]. Training takes the same steps
    as streaming, from read-out to read-out. Places are zero until there is something to put there.
    In a COUNTED bank a last column says how many tokens each of the M stands for.
    """
    HAS_HEADS = False
    READ_WITHIN_FRAMES = False
    COUNTED = False

    def __init__(self, width: int, M: int = 0, J: int = 1):
        super().__init__()
        self.width = width
        self.M = M
        self.J = J                      # tokens of a frame

    @classmethod
    def from_config(cls, config) -> TokenBank:
        """The memory that a narrator's settings describe (narrator.py: Config)."""
        return cls(config.width, config.memory_tokens, J=config.J)

    def reset_parameters(self) -> None:
        """First weights as in the authors' code. Parameters unknown to it keep their values."""

    def queries(self) -> None:
        """What `read` needs besides the state, and is the same for the whole stream."""

    def read(self, state: Tensor, queries: None = None) -> Tensor:
        """The memory tokens [B, M, D] that the next segment opens with."""
        return state

    def initial_state(self, batch: int = 1) -> Tensor:
        columns = self.width + 1 if self.COUNTED else self.width
        return torch.zeros(batch, self.M, columns)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """Absorb the tokens x [B, L, D] of one frame or several (Alg. 2, line 5). ValueError unless
        these are whole frames.
        """
        if x.shape[1] % self.J:
            raise ValueError(f"expected frames of {self.J} tokens, got {x.shape[1]} tokens")
        frames = x.float().unflatten(1, (-1, self.J))                   # [B, T, J, D]
        for frame in frames.unbind(1):
            state = self.update(frame, state)
        return state

    def forward(self, x: Tensor, read_at: Tensor,
                state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All read-outs of x [B, L, D] after read_at [B, N] tokens: the memory tokens [B, N, M, D],
        and the last state.
        """
        assert len(x) == len(read_at), "each video has its own read-outs"
        if state is None:
            state = self.initial_state(len(x)).to(x.device)
        ends = read_at.unique()                                         # of all videos, in order
        states = []
        for piece in x.tensor_split(ends.tolist(), dim=1):
            state = self.step(piece, state)
            states.append(state)
        memory = self.read(torch.stack(states))                         # [ends + 1, B, M, D]
        videos = torch.arange(len(x))[:, None]
        return memory[torch.searchsorted(ends, read_at), videos], state


class NoMemory(TokenBank):
    """No memory tokens, and nothing to remember."""

    @classmethod
    def from_config(cls, config) -> NoMemory:
        return cls(config.width, J=config.J)

    def update(self, x: Tensor, state: Tensor) -> Tensor:
        return state


class RecentFrames(TokenBank):
    """The last M tokens as they are ("recent"): M / J frames."""

    def update(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.cat([state, x], dim=1)[:, self.J:]


class KMeans(TokenBank):
    """Online K-Means (Zhou et al., 2024): M centres and how many tokens each is the mean of.

    The first M tokens are the first centres. After that, centres, weighted by their counts, and the
    tokens of a frame are clustered anew, starting from the centres: two iterations, as in the
    original. A centre that loses its tokens stays where it is, with count 0.
    """
    COUNTED = True
    ITERATIONS = 2

    def update(self, x: Tensor, state: Tensor) -> Tensor:
        # tokens become centres of their own as long as there are free places
        tokens_before = state[..., -1].sum(1, keepdim=True).long()                  # [B, 1]
        place = tokens_before + torch.arange(self.J, device=x.device)               # [B, J]
        has_place = (place < self.M).float()[..., None]                             # [B, J, 1]
        index = place.clamp_max(self.M - 1)[..., None].expand(-1, -1, self.width + 1)
        counted = F.pad(x, (0, 1), value=1)                                         # [B, J, D + 1]
        filled = state.scatter_add(1, index, counted * has_place)                   # [B, M, D + 1]

        # the others are clustered with the centres
        centres, count = filled.split([self.width, 1], dim=-1)
        points = torch.cat([centres, x], dim=1)                                     # [B, M + J, D]
        weight = torch.cat([count, 1 - has_place], dim=1)                           # [B, M + J, 1]
        for _ in range(self.ITERATIONS):
            # by differences: products of large vectors would round small distances away
            distance = torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")
            nearest = distance.argmin(-1)
            share = (F.one_hot(nearest, self.M) * weight).mT                        # [B, M, M + J]
            count = share.sum(-1, keepdim=True)                                     # [B, M, 1]
            means = share / count.clamp_min(1) @ points
            centres = torch.where(count > 0, means, centres)
        clustered = torch.cat([centres, count], dim=-1)
        only_filled = has_place.all(1, keepdim=True)                                # of each video
        return torch.where(only_filled, filled, clustered)

    def read(self, state: Tensor, queries: None = None) -> Tensor:
        return state[..., :-1]


class MovieChat(TokenBank):
    """MovieChat (Song et al., 2024): of the M tokens and a new one, the two most similar neighbours
    are merged.

    The state holds the sum of the tokens that were merged, and their number, in order of time. The
    memory tokens are the means. Similarity is the cosine. Empty places stand in front, and are
    merged with their neighbours first. (The original merges whole frames by plain means, of which
    there would be two here, each soon only its latest frames.)
    """
    COUNTED = True

    def update(self, x: Tensor, state: Tensor) -> Tensor:
        for token in F.pad(x, (0, 1), value=1).unbind(1):
            bank = torch.cat([state, token[:, None]], dim=1)                    # [B, M + 1, D + 1]
            sums = bank[..., :-1]
            count = bank[..., -1]
            similarity = F.cosine_similarity(sums[:, :-1], sums[:, 1:], dim=-1)         # [B, M]
            is_empty = count[:, :-1] == 0
            similarity = similarity.masked_fill(is_empty, 2)                    # above any cosine
            first = similarity.argmax(1, keepdim=True)                          # of the two merged
            # all places behind the first of the two move up by one
            old_place = torch.arange(self.M + 1, device=x.device)
            new_place = old_place - (old_place > first).long()                  # [B, M + 1]
            index = new_place[..., None].expand_as(bank)
            state = torch.zeros_like(state).scatter_add(1, index, bank)
        return state

    def read(self, state: Tensor, queries: None = None) -> Tensor:
        return state[..., :-1] / state[..., -1:].clamp_min(1)


class TokenMLP(TokenBank):
    """TokenLearner's summary (Ryoo et al., 2021) as a memory (Token Turing Machines, 2023):

        M_t = W [M_{t-1}; X_t]

    Every new token is a weighted mean of the old tokens and the frame's tokens. An MLP gives each
    of these its M weights, before a softmax over them.
    """

    def __init__(self, width: int, M: int = 20, J: int = 1, inner: int = 64):
        super().__init__(width, M, J)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, inner),
            nn.GELU(),
            nn.Linear(inner, M),
        )

    def update(self, x: Tensor, state: Tensor) -> Tensor:
        tokens = torch.cat([state, x], dim=1)                                       # [B, M + J, D]
        weights = self.mlp(tokens).softmax(dim=1)                                   # [B, M + J, M]
        return weights.mT @ tokens


class RetNet(CLAM):
    """Refactored RetNet (Sun et al., 2023): CLAM with RetNet's fixed decay in place of its gates.

    G is 1 - 2^-n for all tokens, n from 5 in the first head to 12 in the last. So it is fixed how
    long a head remembers: with 8 heads, half of a token is forgotten after 22, 44, 88, 177, 355,
    709, 1419 and 2839 tokens (2 to 284 frames of ten). Keys are not rotated by their position,
    because the learned queries have no position.
    """

    def __init__(self, width: int, M: int = 20, heads: int = 8, **options):
        super().__init__(width, M, heads, **options)
        del self.w_gate

    def project(self, x: Tensor) -> Projected:
        """k, v and log G [..., h, 1]."""
        k = rearrange(self.w_k(x).float(), "... (h c) -> ... h c", h=self.heads)
        v = rearrange(self.w_v(x).float(), "... (h e) -> ... h e", h=self.heads)
        n = torch.linspace(5, 12, self.heads, device=x.device)
        log_decay = torch.log1p(-torch.exp2(-n))                                    # [h]
        return k, v, log_decay[:, None].expand(*x.shape[:-1], -1, -1)


class TiedCLAM(CLAM):
    """CLAM with an input gate that is tied to its decay gate (not in the paper), as in HGRN2 (Qin et
    al., 2024, arXiv 2404.07904) and the minimal gated unit (Zhou et al., 2016, arXiv 1603.09420):

        S_j = G_j * S_{j-1} + ((1 - G_j) * k_j)^T v_j

    A key channel takes in as much as it gives up. No weight is added.
    """

    def project(self, x: Tensor) -> Projected:
        """(1 - G) k, v and log G."""
        k, v, log_gate = super().project(x)
        input_gate = -torch.expm1(log_gate)                             # 1 - G
        return input_gate * k, v, log_gate


class WritingCLAM(CLAM):
    """CLAM with the delta rule's way of writing, but without its erasing (not in the paper): keys of
    norm 1, and a write strength.

        S_j = G_j * S_{j-1} + beta_j k_j^T v_j                  beta = sigmoid(W_beta x + b)

    beta is one number a head, between 0 (the token writes nothing) and 1.
    """

    def __init__(self, width: int, M: int = 20, heads: int = 8, **options):
        super().__init__(width, M, heads, **options)
        self.w_beta = nn.Linear(width, heads)
        self.reset_parameters()

    def project(self, x: Tensor) -> Projected:
        """beta k, v and log G."""
        k, v, log_gate = super().project(x)
        beta = self.w_beta(x).float().sigmoid()                         # [..., h]
        return beta[..., None] * F.normalize(k, dim=-1), v, log_gate


class DeltaNet(CLAM):
    """The delta rule (Yang et al., 2024, arXiv 2406.06484): what the state holds at a key is
    erased, and the new value written there. Per head, with keys of norm 1,

        S_j = S_{j-1} + beta_j k_j^T (v_j - k_j S_{j-1})        beta = sigmoid(W_beta x + b)

    beta is one number a head, between 0 (the token changes nothing) and 1 (its key holds v_j
    alone). Nothing fades. Queries and read-out are CLAM's, whose G is 1 here.
    """
    def __init__(self, width: int, M: int = 20, heads: int = 8, **options):
        super().__init__(width, M, heads, **options)
        del self.w_gate
        self.w_beta = nn.Linear(width, heads)
        self.reset_parameters()

    def project(self, x: Tensor) -> Projected:
        """[..., D] -> k of norm 1 [..., h, c], v [..., h, e], beta [..., h, 1], in fp32."""
        k = rearrange(self.w_k(x).float(), "... (h c) -> ... h c", h=self.heads)
        v = rearrange(self.w_v(x).float(), "... (h e) -> ... h e", h=self.heads)
        beta = self.w_beta(x).float().sigmoid()[..., None]
        return F.normalize(k, dim=-1), v, beta

    @staticmethod
    def recurrence(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        held = (k[..., None] * state).sum(-2)                           # k S [B, h, e]
        written = beta * (v - held)
        return state + k[..., None] * written[..., None, :]

    @staticmethod
    def absorb(k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """L tokens, k [.., L, h, c], v [.., L, h, e], beta [.., L, h, 1] -> k [.., h, L, c], own
        [.., h, L, e] and held [.., h, L, c] of

            S <- S + k^T (own - held S)

        What each token writes depends on what those before it wrote: with S the state before all L,
        the u_i = beta_i (v_i - k_i S_{i-1}) solve

            u_i + beta_i sum_{j < i} (k_i k_j) u_j = beta_i (v_i - k_i S)

        and are linear in v and in k S. The new state is S + sum_j k_j^T u_j.
        """
        k, v, beta = (tensor.transpose(-3, -2) for tensor in (k, v, beta))      # [.., h, L, ..]
        system = (beta * (k @ k.mT)).tril(-1)                           # with ones on the diagonal
        wanted = beta * torch.cat([v, k], dim=-1)
        u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        own, held = u.split([v.shape[-1], k.shape[-1]], dim=-1)
        return k, own, held

    @staticmethod
    def advance(state: Tensor, k: Tensor, own: Tensor, held: Tensor) -> Tensor:
        """What `absorb` says of tokens: the new state [.., h, c, e]."""
        return state + k.mT @ (own - held @ state)


MEMORIES = {
    "clam": CLAM,
    "tied": TiedCLAM,
    "writing": WritingCLAM,
    "delta": DeltaNet,
    "retnet": RetNet,
    "tokenmlp": TokenMLP,
    "moviechat": MovieChat,
    "kmeans": KMeans,
    "recent": RecentFrames,
    "none": NoMemory,
}
