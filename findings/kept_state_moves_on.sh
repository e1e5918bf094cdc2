#!/usr/bin/env bash
# Expected: from one state of a stream two sentences can be tried; each is as if it were the only one.
# xLSTM's step writes into the state it is given: the dictionary gets the new states, and even of a copy of it the inputs of
# the convolution are moved on in place. A second sentence tried from there begins with the inputs of the first: its first
# step is off by up to 2.2 from the dictionary, 2.0 from the copy, at a spread of 1.0. From a deep copy it is exact.
# Versions: xlstm 2.0.6, torch 2.13.0.
# Who meets it: whoever tries several sentences from one place, or goes back to a place in a stream.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 packaging==25.0
"$place/venv/bin/pip" install --quiet --no-deps xlstm==2.0.6
"$place/venv/bin/python" - <<'PYTHON'
from copy import deepcopy
from importlib.metadata import version
import torch
from xlstm import mLSTMBlockConfig, mLSTMLayerConfig, xLSTMBlockStack, xLSTMBlockStackConfig

print("xlstm", version("xlstm"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
torch.manual_seed(0)
layer = mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4)
model = xLSTMBlockStack(xLSTMBlockStackConfig(mlstm_block=mLSTMBlockConfig(mlstm=layer), context_length=32, num_blocks=2,
                                              embedding_dim=32, slstm_at=[])).eval()
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=0.3)
film, one, other = (torch.randn(1, length, 32) for length in (12, 5, 5))


def read(steps, state=None):
    answers = []
    for step in steps.split(1, dim=1):
        answer, state = model.step(step, state=state)
        answers.append(answer)
    return torch.cat(answers, dim=1), state


answers, state = read(film)
right = model(torch.cat([film, other], dim=1))[:, 12:]
off = {}
for way, keep in (("as it is", lambda kept: kept), ("a copy of both dictionaries", lambda kept: {
        block: dict(states) for block, states in kept.items()}), ("a deep copy", deepcopy)):
    kept = deepcopy(state)
    read(one, keep(kept))
    off[way] = (read(other, keep(kept))[0] - right).abs().amax((0, 2))
    print(f"{way}: the second sentence is off by", *[f"{value:.2f}" for value in off[way].tolist()])
stepped = (answers - model(film)).abs().max().item()
print(f"spread {right.std():.2f}; step by step, one sentence alone is {stepped:.0e} from one pass")
if not (stepped < 1e-3 and off["a deep copy"].max() < 1e-3 and off["as it is"][0] > 0.1
        and off["a copy of both dictionaries"][0] > 0.1):
    raise SystemExit("changed: a kept state stays as it is")
PYTHON
