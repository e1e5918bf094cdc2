#!/usr/bin/env bash
# Expected: a decoder with shift_tokens=1 gives the same scores token by token, with its cache, as in one pass.
# Half of what goes into each attention and feedforward is the token before's. A cached step has one token, and the cache has
# none of the one before: the half is zeros at each step, two thirds with shift_tokens=2. generate() caches by default.
# Versions: x-transformers 2.31.10, torch 2.13.0.
# Who meets it: whoever lets a model with shifted tokens write; training, one pass and cache_kv=False are right.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 x-transformers==2.31.10 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

print("x-transformers", version("x-transformers"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
sizes = dict(dim=64, depth=3, heads=2, attn_dim_head=32, rotary_pos_emb=True)
most, others, zeros = {}, {}, {}
for shift in (0, 1, 2):
    torch.manual_seed(0)
    model = TransformerWrapper(num_tokens=64, max_seq_len=128, attn_layers=Decoder(**sizes, shift_tokens=shift)).eval()
    tokens = torch.randint(0, 64, (4, 60))
    whole = model(tokens)
    _, cache = model(tokens[:, :20], return_intermediates=True)
    inner = [layer[1].fn if shift else layer[1] for layer in model.attn_layers.layers]  # the attentions and feedforwards
    given = []
    watch = [layer.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0])) for layer in inner]
    off = []
    for place in range(20, 60):
        scores, cache = model(tokens[:, : place + 1], cache=cache, return_intermediates=True)
        off.append((scores[:, -1] - whole[:, place]).abs().max().item())
    for hook in watch:
        hook.remove()
    zeros[shift] = sum((x[..., : 64 // (shift + 1) * (shift + 1)] == 0).float().mean().item() for x in given) / len(given)
    wrapper = AutoregressiveWrapper(model)
    cached, plain = (wrapper.generate(tokens[:, :20], 40, temperature=0.0, cache_kv=on) for on in (True, False))
    most[shift], others[shift] = max(off), int((cached != plain).sum())
    print(f"shift_tokens={shift}: cached steps are off by up to {most[shift]:.2f}, spread {whole.std():.2f}; of what goes"
          f" into attention and feedforward {zeros[shift]:.2f} is 0; of 160 tokens {others[shift]} are others with it")
if not (most[0] < 1e-4 and others[0] == 0 and zeros[0] < 0.01 and min(most[1], most[2]) > 0.3
        and others[1] > 40 and others[2] > 40 and zeros[1] > 0.49 and zeros[2] > 0.65):
    raise SystemExit("changed: a cached step shifts the features of the token before, or generate() does not cache")
PYTHON
