#!/usr/bin/env bash
# Expected: a continual Transformer answers each frame of a stream as its forward() answers the window that ends there.
# Of the ring that keeps the residual, n places for a window of n frames, the index counts round n - 1: one place is never
# written again and keeps frame n - 1 for the rest of the stream. The answers are others from frame 2n - 1 on, for good.
# So is an encoder of two layers, converted from PyTorch's too. Also, activation="gelu" is ReLU.
# Versions: continual-inference 1.2.4, torch 2.13.0.
# Who meets it: whoever runs a Transformer of two layers (its first is retroactive) over a camera or a film, frame by frame.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 continual-inference==1.2.4 numpy==2.4.6
"$place/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version
import torch
import continual as co
from torch import nn

print("continual-inference", version("continual-inference"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
n, frames = 8, torch.randn(1, 16, 200, generator=torch.Generator().manual_seed(1))
sizes = dict(d_model=16, nhead=2, dim_feedforward=32, dropout=0.0)
windows = range(n, frames.shape[2] + 1)
torch.manual_seed(0)
one, two = (nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), k).eval() for k in (1, 2))
layer = co.RetroactiveTransformerEncoderLayer(**sizes, sequence_len=n).eval()
nets = {
    "1 layer": (co.TransformerEncoder.build_from(one, n).eval(), lambda x: one(x.mT)[:, -1]),
    "2 layers": (co.TransformerEncoder.build_from(two, n).eval(), lambda x: two(x.mT)[:, -1]),
    "retroactive layer": (layer, layer.forward),
}
off = {}
for name, (net, whole) in nets.items():
    answers = [net.forward_step(frames[:, :, t]) for t in range(frames.shape[2])]
    wanted = [whole(frames[:, :, t - n:t]) for t in windows]
    off[name] = [(answers[t - 1] - w).abs().max().item() for t, w in zip(windows, wanted)]
    print(f"{name}: frames {n} to {2 * n - 2} off by at most {max(off[name][:n - 1]):.0e}, of the {len(windows) - n + 1}",
          f"later ones {sum(o > 0.01 for o in off[name][n - 1:])} by up to {max(off[name]):.2f};",
          f"spread {torch.stack(wanted).std():.2f}")
residual = layer[0][0]
print("frames that the residual's ring holds after 200:", sorted({
    t + 1 for t in range(200) for kept in residual.state_buffer if torch.equal(kept, frames[:, :, t])}))

same = {}
for activation in ("relu", "gelu"):
    torch.manual_seed(0)
    factory = co.TransformerEncoderLayerFactory(**sizes, sequence_len=n, activation=activation)
    same[activation] = co.TransformerEncoder(factory, 1).eval()(frames[:, :, :n])
relu, gelu = same.values()
print(f'activation="gelu" is "relu" to the bit: {torch.equal(relu, gelu)}')
late = {name: sum(o > 0.01 for o in offs[n - 1:]) for name, offs in off.items()}
if not (max(max(offs[:n - 1]) for offs in off.values()) < 1e-4 and late == {
        "1 layer": 0, "2 layers": 186, "retroactive layer": 186} and torch.equal(relu, gelu)):
    raise SystemExit("changed: the stream is answered as its windows are, or gelu is another activation")
PYTHON
