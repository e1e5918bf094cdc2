#!/usr/bin/env bash
# Expected: a LocalTransformer gives the same scores token by token, with its cache, as in one pass.
# A step rotates the keys for their positions and caches them rotated; the next step rotates them again.
# From the second generated token on the scores are others; with xPos by almost their spread. generate() caches by default.
# With qk_rmsnorm the first step is off, too: one pass scales by qk_scale (8), a step by 1 / sqrt(dim_head).
# Versions: local-attention 1.11.2, torch 2.13.0.
# Who meets it: whoever lets such a model write; training and one pass are right, and so is a dynamic bias of positions.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 local-attention==1.11.2 hyper-connections==0.4.11 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from local_attention import LocalTransformer

print("local-attention", version("local-attention"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
sizes = dict(num_tokens=64, max_seq_len=256, dim=32, depth=2, heads=2, dim_head=64, local_attn_window_size=32)
off, kept = {}, []
for name in ("plain", "use_xpos", "qk_rmsnorm", "use_dynamic_pos_bias"):
    torch.manual_seed(0)
    model = LocalTransformer(**sizes, **({} if name == "plain" else {name: True})).eval()
    tokens = torch.randint(0, 64, (1, 60))
    whole = model(tokens)[0]
    _, cache = model(tokens[:, :40], return_cache=True)
    off[name] = []
    for place in range(40, 60):
        if name == "plain" and place < 44:
            kept.append(cache.cache_kv[0][0][0, 0, 39 - place])  # the 40th token's key in the first layer
        scores, cache = model(tokens[:, : place + 1], cache=cache, return_cache=True)
        off[name].append((scores[0, -1] - whole[place]).abs().max().item())
    steps = ", ".join(f"{off[name][step]:.3f}" for step in (0, 1, 2, 19))
    cached, plain = (model.generate(tokens[:, :40], 40, temperature=0.0, use_kv_cache=on) for on in (True, False))
    print(f"{name}: spread {whole.std():.2f}; steps 1, 2, 3, 20 are off by {steps};",
          f"of 40 tokens, {int((cached != plain).sum())} are others with the cache")

turned = [(key - kept[0]).norm().item() for key in kept]
print("the cached key of one token after 0, 1, 2, 3 steps, away from what it was:", ", ".join(f"{far:.2f}" for far in turned))
right = max(off["use_dynamic_pos_bias"])
if not (turned[1] > 0.1 and turned[2] > 0.1 and off["plain"][0] < 1e-5 < 0.01 < max(off["plain"]) and max(off["use_xpos"]) > 0.3
        and off["qk_rmsnorm"][0] > 0.05 and right < 1e-5):
    raise SystemExit("changed: keys are cached as they were, or a step scales as one pass does")
PYTHON
