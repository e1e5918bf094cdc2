#!/usr/bin/env bash
# Expected: a causal convolution that is fed a stream in pieces gives each piece back at its length, equal to one pass.
# With a kernel of one step pytorch-tcn's buffer, "the last 0 steps", is all there is: pieces of 2 come out as 2, 4, 6 ...
# 24 steps, each time from the beginning, and the buffer grows without end. With padding_mode "replicate" and "reflect" one
# pass pads as named, the stream with zeros: the first kernel - 1 steps are others. With a stride of 2, twelve pieces of one
# step give 12 steps, pieces of three 8, one pass 6. Kernels of 2 and more with zeros and a stride of 1 are exact.
# Versions: pytorch-tcn 1.2.3, torch 2.13.0.
# Who meets it: whoever streams with TemporalConv1d, which is offered as a drop-in for Conv1d, also for 1 x 1 layers.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$place/venv/bin/pip" install --quiet --no-deps pytorch-tcn==1.2.3
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from pytorch_tcn import TemporalConv1d

print("pytorch-tcn", version("pytorch-tcn"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
torch.manual_seed(0)
steps = torch.randn(1, 4, 24)


def stream(layer, length):
    layer.reset_buffer()
    return [layer(piece, inference=True) for piece in steps.split(length, dim=-1)]


layer = TemporalConv1d(4, 4, kernel_size=1).eval()
lengths = [piece.shape[-1] for piece in stream(layer, 2)]
print("kernel 1, pieces of 2 steps come out as", *lengths, f"steps; the buffer holds {layer.buffer.shape[-1]}")
again = (layer(steps, inference=True)[..., :24] - layer(steps)).abs().max().item()
apart = {}
for kernel, mode in ((2, "zeros"), (3, "zeros"), (3, "replicate"), (3, "reflect")):
    layer = TemporalConv1d(4, 4, kernel_size=kernel, padding_mode=mode).eval()
    apart[kernel, mode] = (torch.cat(stream(layer, 2), dim=-1) - layer(steps)).abs().amax((0, 1))
    print(f"kernel {kernel}, {mode}: off from one pass by", *[f"{value:.2f}" for value in apart[kernel, mode][:4].tolist()],
          f"in the first four steps, {apart[kernel, mode][4:].max():.0e} later")
steps = steps[..., :12]
layer = TemporalConv1d(4, 4, kernel_size=3, stride=2).eval()
strides = {length: sum(piece.shape[-1] for piece in stream(layer, length)) for length in (1, 2, 3)}
print(f"stride 2, 12 steps: one pass gives {layer(steps).shape[-1]}, pieces of 1, 2 and 3", *strides.values())
if not (lengths == list(range(2, 26, 2)) and again < 1e-6 and max(apart[2, "zeros"].max(), apart[3, "zeros"].max()) < 1e-6
        and all(apart[3, mode][:2].min() > 0.05 and apart[3, mode][2:].max() < 1e-6 for mode in ("replicate", "reflect"))
        and layer(steps).shape[-1] == 6 and list(strides.values()) == [12, 6, 8]):
    raise SystemExit("changed: the stream is as one pass")
PYTHON
