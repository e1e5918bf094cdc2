#!/usr/bin/env bash
# Expected: a state that is handed to the next piece of a stream gives what one pass gives, in an S5 with `liquid=True`, too.
# A liquid state is kept by a factor that the input moves. s5-pytorch keeps the state handed on by the factor without the
# input: pieces are off where they begin, and fed step by step a liquid S5 answers as the same weights with liquid=False:
# off by up to 1.0 at a spread of 2.1, while forward_rnn and the formula are exact. Without `liquid` all ways agree.
# Versions: s5-pytorch 0.2.1, torch 2.13.0.
# Who meets it: whoever trains a liquid S5 on whole films or sounds and then lets it follow a stream.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 scipy==1.15.3 setuptools==80.9.0 wheel==0.45.1
"$place/venv/bin/pip" install --quiet --no-deps --no-build-isolation s5-pytorch==0.2.1
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from s5 import S5

print("s5-pytorch", version("s5-pytorch"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
torch.manual_seed(0)
liquid = S5(8, 16, liquid=True, dt_min=0.05, dt_max=0.5).eval()
usual = S5(8, 16, liquid=False, dt_min=0.05, dt_max=0.5).eval()
usual.load_state_dict(liquid.state_dict())
steps = 3 * torch.randn(1, 48, 8)


def fed(model, length):
    state, answers = torch.zeros(1, 16, dtype=torch.complex64), []
    for piece in steps.split(length, dim=1):
        answer, state = model(piece, state=state, return_state=True)
        answers.append(answer)
    return torch.cat(answers, dim=1)


def by_hand(model, moved):
    inputs, outputs = model.seq.get_BC_tilde()
    factor, inputs = model.seq.discretize(model.seq.Lambda, inputs, torch.exp(model.seq.log_step))
    state, answers = torch.zeros(16, dtype=torch.complex64), []
    for step in steps[0]:
        new = inputs @ step.to(torch.complex64)
        state = (factor + new if moved else factor) * state + new
        answers.append((outputs @ state).real + model.seq.D * step)
    return torch.stack(answers)[None]


def by_rnn(model):
    state, answers = torch.zeros(16, dtype=torch.complex64), []
    for step in steps[0]:
        answer, state = model.seq.forward_rnn(step, state)
        answers.append(answer)
    return torch.stack(answers)[None]


off = {}
for name, model in (("liquid", liquid), ("usual", usual)):
    whole = model(steps)
    off[name] = {length: (fed(model, length) - whole).abs().max().item() for length in (48, 12, 1)}
    off[name]["rnn"] = (by_rnn(model) - whole).abs().max().item()
    off[name]["hand"] = (by_hand(model, name == "liquid") - whole).abs().max().item()
    print(f"{name}, spread {whole.std():.2f}: off from one pass by",
          *[f"{value:.0e} ({way})" for way, value in off[name].items()])
same = (fed(liquid, 1) - usual(steps)).abs().max().item()
print(f"liquid step by step is {same:.0e} from liquid=False in one pass")
exact = [off["liquid"][way] for way in (48, "rnn", "hand")] + list(off["usual"].values())
if not (max(exact) < 1e-3 and same < 1e-4 and min(off["liquid"][12], off["liquid"][1]) > 0.1):
    raise SystemExit("changed: a liquid state goes on in pieces")
PYTHON
