#!/usr/bin/env bash
# Expected: LoRA trains its small matrices with the gradients of the loss; the frozen weights pass them on to earlier layers.
# lora-pytorch runs each frozen layer under no_grad, so gradients go back through the small matrices alone, and these begin
# at zero: in the first step all layers but the last get exactly 0, later ones another gradient than that of the loss.
# The outputs are right.
# Versions: lora-pytorch 0.2.0, torch 2.13.0.
# Who meets it: whoever adapts a model of more than one layer; the loss falls, so nothing looks wrong.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 lora-pytorch==0.2.0 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from lora_pytorch import LoRA
from torch import nn
from torch.func import functional_call

print("lora-pytorch", version("lora-pytorch"), "torch", torch.__version__)
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
plain = {name: weight.detach().clone() for name, weight in model.named_parameters()}
adapted = LoRA.from_module(model, rank=2)
inputs, wanted = torch.randn(256, 16), torch.randn(256, 1)
layers = [adapted.module[place] for place in (0, 2, 4)]
small = [matrix for layer in layers for matrix in layer.lora_module.parameters()]


def written_out(matrices):  # the same model, each weight being the frozen one plus the product of its small matrices
    weights = dict(plain)
    for number, place in enumerate((0, 2, 4)):
        weights[f"{place}.weight"] = plain[f"{place}.weight"] + (matrices[2 * number] @ matrices[2 * number + 1]).T
    return functional_call(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)),
                           weights, inputs)


def gradients(outputs):
    found = torch.autograd.grad(((outputs - wanted) ** 2).mean(), small)
    return [torch.cat([one.flatten() for one in found[start : start + 2]]) for start in (0, 2, 4)]


seen = []
for moment in ("before the first step", "with trained matrices"):
    difference = (adapted(inputs) - written_out(small)).abs().max().item()
    theirs, right = gradients(adapted(inputs)), gradients(written_out(small))
    lengths = [f"{got.norm():.4f} for {want.norm():.4f}" for got, want in zip(theirs, right)]
    likeness = [torch.cosine_similarity(got, want, dim=0).item() for got, want in zip(theirs, right)]
    print(f"{moment}: outputs differ by {difference:.0e}; gradients of the three layers {'; '.join(lengths)};",
          "cosines", *(f"{one:.2f}" for one in likeness))
    seen.append((difference, [one.norm().item() for one in theirs], [one.norm().item() for one in right], likeness))
    with torch.no_grad():
        for matrix in small:
            matrix += 0.1 * torch.randn_like(matrix)
first, later = seen
as_said = (first[1][:2] == [0, 0] and min(first[2]) > 0.005 and first[3][2] > 0.999 and later[3][2] > 0.999
           and max(later[3][:2]) < 0.9 and max(first[0], later[0]) < 1e-5)
if not as_said:
    raise SystemExit("changed: gradients go through the frozen weights")
PYTHON
