#!/usr/bin/env bash
# Expected: all weights of a layer that the optimizer was given are learned.
# AFTLocal of aft-pytorch makes its position biases anew as a parameter in each call: the optimizer keeps those of before the
# first call, which no call uses and which get no gradient. After 200 steps of Adam none of the biases within the window has
# changed, while all other weights have; AFTFull learns its biases. A task by place alone (say the step before) ends at a
# loss of 0.89 for AFTFull's 0.01.
# Versions: aft-pytorch 0.2.2, torch 2.13.0.
# Who meets it: whoever trains the local kind of this attention without a matrix, which costs less for long sequences.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$place/venv/bin/pip" install --quiet --no-deps aft-pytorch==0.2.2
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import warnings
import torch
from aft_pytorch import AFTFull, AFTLocal

print("aft-pytorch", version("aft-pytorch"), "torch", torch.__version__)
warnings.simplefilter("ignore")
torch.set_num_threads(1)
place = torch.arange(12)
window = (place[:, None] - place).abs() < 4
found = {}
for name, kind in (("AFTFull", AFTFull), ("AFTLocal", lambda *sizes: AFTLocal(*sizes, s=4))):
    torch.manual_seed(0)
    layer = kind(12, 8, 16)
    first = {key: value.clone() for key, value in layer.state_dict().items()}
    given = dict(layer.named_parameters())
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    for _ in range(200):
        steps = torch.randn(64, 12, 8)
        loss = (layer(steps)[:, 1:] - steps[:, :-1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moved = {key: (value - first[key]).abs() for key, value in layer.state_dict().items()}
    biases = (moved.pop("wbias")[window] > 0).float().mean().item()
    others = min((value > 0).float().mean().item() for value in moved.values())
    held = given["wbias"] is layer.wbias
    found[name] = biases, others, held, given["wbias"].grad is None, loss.item()
    print(f"{name}: {biases:.0%} of the biases in the window and at least {others:.0%} of the other weights have changed;",
          f"the optimizer holds the layer's biases: {held}; a gradient reaches those it holds: {not found[name][3]};",
          f"last loss {loss.item():.2f}")
full, local = found["AFTFull"], found["AFTLocal"]
if not (full[0] > 0.9 and full[2] and not full[3] and local[0] == 0 and local[1] > 0.9 and not local[2] and local[3]):
    raise SystemExit("changed: the biases of AFTLocal are learned")
PYTHON
