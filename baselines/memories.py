"""The memories that CLAM is compared with (Table 5; Tables 3 and 9), behind its interface (`Memory`).

All have a state of fixed size and give M memory tokens. The paper names them and the works that they come from, but not
their details; each is defined here as near to its source as a stream allows.

    memory    state, fp32         numbers, D = 1024, M = 20    learned
    recent    [M, D]              20,480                       nothing
    kmeans    [M, D + 1]          20,500                       nothing
    moviechat [M, D + 1]          20,500                       nothing
    tokenmlp  [M, D]              20,480                       which tokens to keep
    retnet    [h, D/2h, D/h]      65,536                       keys, values, queries
    scalar    [h, D/2h, D/h]      65,536                       and a gate for each head
    clam      [h, D/2h, D/h]      65,536                       and a gate for each key channel

So equally many memory tokens are not equally large states. Does not include: a state that grows (Q-Former, App. B.2).
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clam import CLAM, check


class Memory(nn.Module):
    """Interface of all memories: a state, one tensor, that absorbs tokens and is read out as M tokens.

    CLAM (clam.py) has the same methods.
    """
    HAS_HEADS = False

    def __init__(self, width: int, M: int = 0, J: int = 1):
        super().__init__()
        self.width = width
        self.M = M
        self.J = J                      # tokens of a frame

    def reset_parameters(self) -> None:
        """Initialise as the published code does. Parameters that it does not have keep their values."""

    def initialise(self, x: Tensor) -> None:
        """First weights from the statistics of training features x [T, J, D], where a memory can use them."""

    def initial_state(self, batch: int = 1) -> Tensor:
        """S_0, before the first frame."""
        raise NotImplementedError

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """Absorb the tokens x [B, L, D] of one frame or several (Alg. 2, line 5)."""
        raise NotImplementedError

    def queries(self) -> None:
        """What `read` needs besides the state, and is the same for the whole stream."""

    def read(self, state: Tensor, queries: None = None) -> Tensor:
        """The memory tokens [B, M, D] that the next segment opens with."""
        return state

    def forward(self, x: Tensor, read_at: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All read-outs of x [B, L, D] after read_at [B, N] tokens -> memory [B, N, M, D], the last state."""
        raise NotImplementedError


class NoMemory(Memory):
    """No memory tokens, and nothing to remember."""

    def initial_state(self, batch: int = 1) -> Tensor:
        return torch.zeros(batch, 0, self.width)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        return state

    def forward(self, x: Tensor, read_at: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x.new_zeros(*read_at.shape, 0, self.width), self.initial_state(len(x))


class TokenBank(Memory):
    """M tokens that each frame changes: `update` gives the new state [B, M, D] after one frame x [B, J, D].

    Training takes the same steps as streaming, from read-out to read-out. Places are zero until there is something to
    put there. In a COUNTED bank a last column says how many tokens each of the M stands for.
    """
    COUNTED = False

    def initial_state(self, batch: int = 1) -> Tensor:
        return torch.zeros(batch, self.M, self.width + self.COUNTED)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        """ValueError unless x [B, L, D] holds whole frames."""
        if x.shape[1] % self.J:
            raise ValueError(f"expected frames of {self.J} tokens, got {x.shape[1]} tokens")
        for frame in x.float().unflatten(1, (-1, self.J)).unbind(1):
            state = self.update(frame, state)
        return state

    def forward(self, x: Tensor, read_at: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check(x, read_at, self.width)
        state = self.initial_state(len(x)).to(x.device) if state is None else state
        ends, states = read_at.unique(), []
        for piece in x.tensor_split(ends.tolist(), dim=1):                            # the last one is not read
            state = self.step(piece, state)
            states.append(state)
        memory = self.read(torch.stack(states))                                       # [ends + 1, B, M, D]
        return memory[torch.searchsorted(ends, read_at), torch.arange(len(x))[:, None]], state


class RecentFrames(TokenBank):
    """The last M tokens as they are ("recent"): M / J frames."""

    def update(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.cat([state, x], dim=1)[:, self.J:]


class KMeans(TokenBank):
    """Online K-Means (Zhou et al., 2024): M centres and how many tokens each is the mean of.

    The first M tokens are the first centres. After that, centres, weighted by their counts, and the tokens of a frame
    are clustered anew, starting from the centres: two iterations, as in the original. A centre that loses its tokens
    stays where it is, with count 0.
    """
    COUNTED, ITERATIONS = True, 2

    def update(self, x: Tensor, state: Tensor) -> Tensor:
        place = state[..., -1].sum(1, keepdim=True).long() + torch.arange(self.J, device=x.device)   # token j's, [B, J]
        new = (place < self.M).float()[..., None]                                     # 1: there is room for it
        index = place.clamp_max(self.M - 1)[..., None].expand(-1, -1, self.width + 1)
        filled = state.scatter_add(1, index, F.pad(x, (0, 1), value=1) * new)
        centres, count = filled.split([self.width, 1], dim=-1)
        points, weight = torch.cat([centres, x], dim=1), torch.cat([count, 1 - new], dim=1)           # [B, M + J, ..]
        for _ in range(self.ITERATIONS):
            near = torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)
            share = (F.one_hot(near, self.M) * weight).mT                             # [B, M, M + J]
            count = share.sum(-1, keepdim=True)
            centres = torch.where(count > 0, share / count.clamp_min(1) @ points, centres)
        return torch.where(new.all(1, keepdim=True), filled, torch.cat([centres, count], dim=-1))

    def read(self, state: Tensor, queries: None = None) -> Tensor:
        return state[..., :-1]


class MovieChat(TokenBank):
    """MovieChat (Song et al., 2024): of the M tokens and a new one, the two most similar neighbours are merged.

    The state holds the sum of the tokens that were merged, and their number, in order of time; the memory tokens are
    the means. Similarity is the cosine. Empty places stand in front, and are merged with their neighbours first. (The
    original merges whole frames by plain means, of which there would be two here, each soon only its latest frames.)
    """
    COUNTED = True

    def update(self, x: Tensor, state: Tensor) -> Tensor:
        for token in F.pad(x, (0, 1), value=1).unbind(1):
            bank = torch.cat([state, token[:, None]], dim=1)                          # [B, M + 1, D + 1]
            alike = F.cosine_similarity(bank[:, :-1, :-1], bank[:, 1:, :-1], dim=-1)  # of neighbours, [B, M]
            first = alike.masked_fill(bank[:, :-1, -1] == 0, 2).argmax(1, keepdim=True)
            old = torch.arange(self.M + 1, device=x.device)
            new = (old - (old > first).long())[..., None].expand_as(bank)
            state = torch.zeros_like(state).scatter_add(1, new, bank)
        return state

    def read(self, state: Tensor, queries: None = None) -> Tensor:
        return state[..., :-1] / state[..., -1:].clamp_min(1)


class TokenMLP(TokenBank):
    """TokenLearner's summary (Ryoo et al., 2021) as a memory (Token Turing Machines, 2023): M_t = W [M_{t-1}; X_t].

    Every new token is a weighted mean of the old ones and the frame's. An MLP gives each of these its M weights, before
    a softmax over them.
    """

    def __init__(self, width: int, M: int = 20, J: int = 1, inner: int = 64):
        super().__init__(width, M, J)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, M))

    def update(self, x: Tensor, state: Tensor) -> Tensor:
        tokens = torch.cat([state, x], dim=1)                                         # [B, M + J, D]
        return self.mlp(tokens).softmax(dim=1).mT @ tokens


class RetNet(CLAM):
    """Refactored RetNet (Sun et al., 2023): CLAM with RetNet's decay, which is fixed, in place of its gates.

    G is 1 - 2^-n for all tokens, n from 5 in the first head to 12 in the last: it is fixed how long a head remembers.
    With 8 heads, half of a token is forgotten after 22, 44, 88, 177, 355, 709, 1419 and 2839 tokens, 2 to 284 frames of
    ten. Keys are not rotated by their position, as the learned queries have none.
    """

    def __init__(self, width: int, M: int = 20, heads: int = 8, **options):
        super().__init__(width, M, heads, **options)
        del self.w_gate

    def log_gate(self, x: Tensor) -> Tensor:
        n = torch.linspace(5, 12, self.heads, device=x.device)
        return torch.log1p(-torch.exp2(-n))[:, None].expand(*x.shape[:-1], -1, -1)

    def start_gates(self):
        pass


class ScalarGate(CLAM):
    """Between RetNet and CLAM: one gate for each head, as in Mamba-2 (App. B.2), made of the token as CLAM's are."""

    def __init__(self, width: int, M: int = 20, heads: int = 8, rank: int = 16, **options):
        super().__init__(width, M, heads, rank, **options)
        self.w_gate = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, heads))
        self.reset_parameters()
