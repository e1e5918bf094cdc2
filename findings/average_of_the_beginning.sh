#!/usr/bin/env bash
# Expected: KarrasEMA averages weights as sigma_rel says, a share of the training, however rarely update_every lets it.
# Its decay is that of one step, (1 - 1 / step)^(gamma + 1); it is applied at each update_every-th step alone.
# So with the default of 100 the exponent is in effect a hundredth, and the average is that of the training's beginning.
# PostHocEMA builds on it; what it makes from its files for another sigma_rel is off as well.
# Versions: ema-pytorch 0.8.3, torch 2.13.0.
# Who meets it: whoever uses KarrasEMA or PostHocEMA with the default (100) or with the 10 of its own example.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 ema-pytorch==0.8.3 numpy==2.4.6
cd "$place"
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from ema_pytorch import KarrasEMA, PostHocEMA
from ema_pytorch.post_hoc_ema import sigma_rel_to_gamma

print("ema-pytorch", version("ema-pytorch"), "torch", torch.__version__)
torch.set_num_threads(1)
steps = 5000
def train(average, weight):
    """Training that moves its one weight from 0 to 1 in even steps: the average is the mean time, a share of it."""
    for step in range(steps):
        weight.data.fill_(step / steps)
        average.update()

means = {}
for sigma_rel in (0.05, 0.10, 0.28):
    gamma = sigma_rel_to_gamma(sigma_rel)
    for named in (dict(update_every=1), dict(update_every=10), dict()):
        model = torch.nn.Linear(1, 1, bias=False).double()
        average = KarrasEMA(model, sigma_rel=sigma_rel, **named)
        train(average, model.weight)
        means.setdefault(sigma_rel, []).append(average.ema_model.weight.item())
    means[sigma_rel].append((gamma + 1) / (gamma + 2))
    print(f"sigma_rel {sigma_rel}: mean time with update_every 1, 10, by default:",
          *(f"{mean:.3f}" for mean in means[sigma_rel][:3]), f"asked for: {means[sigma_rel][3]:.3f}")
made = []
for every in (1, 10):
    model = torch.nn.Linear(1, 1, bias=False)
    both = PostHocEMA(model, sigma_rels=(0.05, 0.28), update_every=every, checkpoint_every_num_steps=500,
                      checkpoint_dtype=torch.float32, checkpoint_folder=f"files{every}")
    train(both, model.weight)
    made.append(both.synthesize_ema_model(sigma_rel=0.15).ema_model.weight.item())
wanted = 1 - 1 / (sigma_rel_to_gamma(0.15) + 2)
print("PostHocEMA, from 0.05 and 0.28 to 0.15: mean time with update_every 1, 10:",
      *(f"{mean:.3f}" for mean in made), f"asked for: {wanted:.3f}")
if not (all(abs(one - asked) < 0.01 and ten < 0.7 * asked and default < 0.25 * asked
            for one, ten, default, asked in means.values())
        and abs(made[0] - wanted) < 0.02 and made[1] < 0.7 * wanted):
    raise SystemExit("changed: update_every leaves the average as sigma_rel says")
PYTHON
