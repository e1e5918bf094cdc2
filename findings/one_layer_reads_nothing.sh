#!/usr/bin/env bash
# Expected: a recurrent network's answer to the last word depends on the words before it.
# PyxLSTM pairs each layer with a dropout layer, of which there is one fewer, so the last layer is never run. With
# num_layers=1 nothing recurrent is: after 30 other words the answers are the same to the bit, the states are empty lists,
# and all weights in `lstm` stay without a gradient. Trained to say the word before, one of 8, it stays at 0.12 and 0.13;
# a torch.nn.LSTM gets 1.00. With num_layers=2 it raises an error.
# Versions: PyxLSTM 1.0.1, torch 2.13.0.
# Who meets it: whoever tries an xLSTM from PyPI for streams and compares it with other memories.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$place/venv/bin/pip" install --quiet --no-deps PyxLSTM==1.0.1
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from xLSTM import xLSTM

print("PyxLSTM", version("PyxLSTM"), "torch", torch.__version__)
torch.set_num_threads(1)


class Usual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm = torch.nn.Embedding(8, 32), torch.nn.LSTM(32, 32, batch_first=True)
        self.scores = torch.nn.Linear(32, 8)

    def forward(self, words):
        read, states = self.lstm(self.words(words))
        return self.scores(read), states


found = {}
for kind in ("slstm", "mlstm", "torch.nn.LSTM"):
    torch.manual_seed(0)
    model = Usual() if kind == "torch.nn.LSTM" else xLSTM(8, 32, 32, num_layers=1, num_blocks=2, lstm_type=kind)
    words = torch.randint(8, (16, 31))
    others = torch.cat([torch.randint(8, (16, 30)), words[:, 30:]], dim=1)
    scores, states = model(words)
    moved = (scores - model(others)[0])[:, 30].abs().max().item()
    scores.sum().backward()
    inner = [weight for name, weight in model.named_parameters() if "lstm" in name]
    without = sum(weight.grad is None for weight in inner)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        words = torch.randint(8, (32, 16))
        loss = torch.nn.functional.cross_entropy(model(words)[0][:, 1:].flatten(0, 1), words[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    words = torch.randint(8, (256, 16))
    right = (model(words)[0][:, 1:].argmax(-1) == words[:, :-1]).float().mean().item()
    found[kind] = moved, without, len(inner), right
    print(f"{kind}: 30 other words before move the last answer by {moved:.3f}; {without} of {len(inner)} recurrent weights",
          f"without a gradient; the word before is learned to {right:.2f}", "" if kind == "torch.nn.LSTM" else states)
try:
    xLSTM(8, 32, 32, num_layers=2, num_blocks=2)(words)
    error = None
except RuntimeError as failure:
    error = str(failure)
print("num_layers=2:", error)
moved, without, count, right = found.pop("torch.nn.LSTM")
if not (all(values[0] == 0 and values[1] == values[2] > 0 and values[3] < 0.2 for values in found.values())
        and moved > 1e-3 and without == 0 and right > 0.95 and error):
    raise SystemExit("changed: a single layer is run")
PYTHON
