#!/usr/bin/env bash
# Expected: a streaming Transformer that is fed several steps at once answers as step by step, and as in one pass.
# Its ring of keys has as many places as the window, and all keys of a piece are written before its first query reads: in a
# window of 16, the first of 8 steps sees 9, the first of 16 itself alone. Step by step all is exact, and the first window.
# Versions: moshi 0.2.13, torch 2.13.0. It asks for a torch below 2.10, so it is installed without its dependencies.
# Who meets it: whoever hands a stream on in pieces longer than one step, to be faster.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 einops==0.8.2 numpy==2.2.6 safetensors==0.7.0 sentencepiece==0.2.1 \
    huggingface-hub==0.36.0
"$place/venv/bin/pip" install --quiet --no-deps moshi==0.2.13
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from moshi.modules.transformer import StreamingTransformer

print("moshi", version("moshi"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
steps = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(1))
sizes = dict(d_model=32, num_heads=2, dim_feedforward=64, causal=True, context=16, positional_embedding="rope")


def fed(model, steps, length):
    with model.streaming(1):
        return torch.cat([model(piece) for piece in steps.split(length, dim=1)], dim=1)


off, sees = {}, {}
for layers in (1, 2):
    torch.manual_seed(0)
    model = StreamingTransformer(num_layers=layers, **sizes).eval()
    whole = model(steps)
    print(f"{layers} layer{'s' * (layers > 1)}, window 16, spread {whole.std():.2f}:")
    for length in (1, 2, 8, 16):
        apart = (fed(model, steps, length) - whole).abs().amax((0, 2))
        off[layers, length] = apart[:16].max().item(), apart[16:].max().item()
        print(f"  pieces of {length}: off by {off[layers, length][0]:.0e} in the first window, by up to",
              f"{off[layers, length][1]:.3f} later")
    if layers > 1:
        continue
    for length in (64, 1, 8, 16):
        before, seen = fed(model, steps, length) if length < 64 else whole, torch.zeros(64, dtype=torch.int)
        for place in range(17, 48):
            other = steps.clone()
            other[:, place] = steps[:, place - 17]
            after = fed(model, other, length) if length < 64 else model(other)
            seen += (after - before).abs().amax((0, 2)) > 1e-5
        sees[length] = seen[32:48].tolist()
        print(f"  in {'one pass' if length == 64 else f'pieces of {length}'} steps 32 to 47 see", *sees[length])
exact = [value for (_, length), values in off.items() for value in (values if length == 1 else values[:1])]
if not (max(exact) < 1e-4 and min(values[1] for (_, length), values in off.items() if length > 1) > 0.03
        and sees[64] == sees[1] == [16] * 16 and sees[8] == [9, 10, 11, 12, 13, 14, 15, 16] * 2
        and sees[16] == list(range(1, 17))):
    raise SystemExit("changed: each step of a piece sees its window")
PYTHON
