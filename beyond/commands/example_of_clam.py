"""python clam.py: work through Eq. 2 with small numbers."""
import torch
from torch import Tensor

from clam import CLAM
from support.common.options import Parser


def written(matrix: Tensor) -> str:
    """A matrix, row by row; or a vector."""
    rows = []
    for row in torch.atleast_2d(matrix).tolist():
        numbers = [f"{number:g}" for number in row]
        rows.append(" ".join(numbers))
    return "[" + " ; ".join(rows) + "]"


def worked_example():
    """Eq. 2 with a state of 2 x 2 and three tokens: one head, keys and values of two channels."""
    k = torch.tensor([[1.0, 0.0],
                      [0.0, 1.0],
                      [1.0, 0.0]])
    v = torch.tensor([[4.0, 2.0],
                      [0.0, 8.0],
                      [2.0, 2.0]])
    gate = torch.tensor([[0.5, 0.5],
                         [0.5, 1.0],
                         [0.5, 0.5]])

    print("S_j = G_j * S_{j-1} + k_j^T v_j; a matrix is written row by row; "
          "G decays its rows, the key channels")
    state = torch.zeros(2, 2)
    for j, (k_j, v_j, gate_j) in enumerate(zip(k, v, gate), start=1):
        decayed = gate_j[:, None] * state                               # G_j * S_{j-1}
        added = torch.outer(k_j, v_j)                                   # k_j^T v_j
        state = decayed + added
        print(f"S_{j} = {written(gate_j)} * S_{j - 1} + {written(k_j)}^T {written(v_j)}")
        print(f"    = {written(decayed)} + {written(added)}")
        print(f"    = {written(state)}")

    q = torch.eye(2)
    memory = q @ state
    print(f"M = Q S_3 with Q = {written(q)}: {written(memory)}")
    print("Query (1 0) reads what keys (1 0) stored: "
          "a quarter of v_1 (after two gates of 1/2) and all of v_3.")
    print("Query (0 1) reads what key (0 1) stored: half of v_2 (after one gate of 1/2).")

    # `absorb` has a dimension for the heads, of which there is one here: [3, 1, 2]
    decay, update = CLAM.absorb(k[:, None], v[:, None], gate.log()[:, None])
    print(f"The three tokens at once (`absorb`): decay {written(decay)}, "
          f"update {written(update[0])}")


def main():
    Parser(description="Work through Eq. 2 with small numbers.").parse_args()
    worked_example()
