"""Other memories behind CLAM's interface (Tables 3, 5 and 9)."""
import torch
from torch import Tensor

from clam import NoMemory, check


class RecentFrames(NoMemory):
    """The last M // J frames as they are ("recent"); zeros before there were any."""

    def initial_state(self, batch: int = 1) -> Tensor:
        return torch.zeros(batch, self.M, self.width)

    def step(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.cat([state.to(x), x], dim=1)[:, x.shape[1]:]

    def forward(self, x: Tensor, read_at: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state = self.initial_state(len(x)) if state is None else state
        check(x, read_at, self.width)
        seen = torch.cat([state.to(x), x], dim=1)                               # [B, M + L, D]
        window = (read_at[..., None] + torch.arange(self.M)).to(x.device)       # [B, N, M]
        memory = torch.stack([row[index] for row, index in zip(seen, window)])  # [B, N, M, D]
        return memory, seen[:, x.shape[1]:]
