#!/usr/bin/env bash
# Expected: in a causal decoder no score moves when later tokens do, and a cached step gives the scores of one pass.
# With orthog_residual or attn_orthog_projected_values they do: the projection that each token needs for itself is made once
# for all tokens of a sequence, laid end to end as one vector; "per_head" puts the heads in it, too, and changes nothing.
# A cached step makes it for its one token: other scores and other tokens, though generate() caches by default.
# Versions: x-transformers 2.31.10, torch 2.13.0.
# Who meets it: whoever trains or lets write a decoder with one of these options; scores of a text know how it goes on.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 x-transformers==2.31.10 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper
from x_transformers.x_transformers import orthog_project

print("x-transformers", version("x-transformers"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
moved, off, others = {}, {}, {}
for name in ("plain", "orthog_residual", "attn_orthog_projected_values", "attn_orthog_projected_values_per_head"):
    torch.manual_seed(0)
    kind = {} if name == "plain" else {name: True}
    decoder = Decoder(dim=64, depth=3, heads=2, attn_dim_head=32, rotary_pos_emb=True, **kind)
    model = TransformerWrapper(num_tokens=64, max_seq_len=128, attn_layers=decoder).eval()
    tokens = torch.randint(0, 64, (4, 60))
    whole = model(tokens)
    other = torch.cat((tokens[:, :40], torch.randint(0, 64, (4, 20))), dim=1)
    texts = (other, tokens[:, :40], tokens[:, :20])
    moved[name] = [(model(text)[:, :20] - whole[:, :20]).abs().max().item() for text in texts]
    _, cache = model(tokens[:, :20], return_intermediates=True)
    steps = []
    for place in range(20, 60):
        scores, cache = model(tokens[:, : place + 1], cache=cache, return_intermediates=True)
        steps.append((scores[:, -1] - whole[:, place]).abs().max().item())
    wrapper = AutoregressiveWrapper(model)
    cached, plain = (wrapper.generate(tokens[:, :20], 40, temperature=0.0, cache_kv=on) for on in (True, False))
    off[name], others[name] = max(steps), int((cached != plain).sum())
    far = ", ".join(f"{far:.3f}" for far in moved[name])
    print(f"{name}: of 60 tokens, the first 20 ones' scores move by {far} when the last 20 are others, are left off,"
          f" and the last 40 are left off; cached steps are off by {off[name]:.2f}, spread {whole.std():.2f},"
          f" and {others[name]} of 160 tokens are others")

x, y = torch.randn(1, 60, 64), torch.randn(1, 60, 64)
left = (orthog_project(x, y) * y).sum(-1).abs().max().item(), (orthog_project(x[0], y[0]) * y[0]).sum(-1).abs().max().item()
print(f"what orthog_project leaves along y: {left[0]:.2f} of a sequence of tokens, {left[1]:.2f} of rows without a batch")
kinds = list(moved)[1:]
right = max(*moved["plain"], off["plain"]) < 1e-4 and others["plain"] == 0 and left[1] < 1e-4
same = off[kinds[1]] == off[kinds[2]]
wrong = same and all(min(moved[kind]) > 1e-3 and off[kind] > 0.1 and others[kind] > 10 for kind in kinds) and left[0] > 1
if not (right and wrong):
    raise SystemExit("changed: each token is projected for itself")
PYTHON
