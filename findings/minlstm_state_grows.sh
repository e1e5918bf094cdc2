#!/usr/bin/env bash
# Expected: a minLSTM that is handed the state of a piece of a sequence goes on as if the sequence were one.
# A piece of two or more tokens sends the state through log_g, which is for new values: log(state + 0.5). So the state is
# 0.5 larger at each piece. Token by token it is right, and so is minGRU, which takes the logarithm alone.
# Versions: minGRU-pytorch 0.2.1, torch 2.13.0.
# Who meets it: whoever reads a long sequence in pieces, or a prompt in one pass after another one.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 minGRU-pytorch==0.2.1
"$place/venv/bin/python" - 2> "$place/words" <<'PYTHON' || { cat "$place/words"; exit 1; }
from importlib.metadata import version
import torch
from minGRU_pytorch.minGRU import minGRU
from minGRU_pytorch.minLSTM import minLSTM

print("minGRU-pytorch", version("minGRU-pytorch"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
off = {}
for kind in (minLSTM, minGRU):
    torch.manual_seed(0)
    layer = kind(32)
    x = torch.randn(1, 60, 32)
    whole = layer(x)
    for length in (1, 2, 10, 30):
        state, pieces = None, []
        for piece in x.split(length, dim=1):
            out, state = layer(piece, state, return_next_prev_hidden=True)
            pieces.append(out)
        first = [(piece[:, 0] - whole[:, length * i]).mean().item() for i, piece in enumerate(pieces)]
        off[kind, length] = (torch.cat(pieces, 1) - whole).abs().max().item()
        print(f"{kind.__name__}, pieces of {length}: off by up to {off[kind, length]:.3f}, spread {whole.std():.3f};",
              f"the first token of the second piece by {first[1]:+.3f} in the mean")
right = [off[minLSTM, 1]] + [off[minGRU, length] for length in (1, 2, 10, 30)]
wrong = [off[minLSTM, length] for length in (2, 10, 30)]
if not (max(right) < 1e-4 and min(wrong) > 0.2):
    raise SystemExit("changed: a state goes on as it is")
PYTHON
