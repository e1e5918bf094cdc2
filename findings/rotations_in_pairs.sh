#!/usr/bin/env bash
# Expected: each token is turned by its own place; one call does not change the next.
# Places are counted in the type of the queries: bfloat16 has even numbers alone after 256, each fourth after 512...
# The angles are kept for all later calls, float32 ones too: one run in bfloat16 spoils the module for good.
# Versions: rotary-embedding-torch 0.9.1, torch 2.13.0.
# Who meets it: whoever trains or runs in bfloat16, or under autocast, with more than 256 tokens, pictures or samples.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 rotary-embedding-torch==0.9.1
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from rotary_embedding_torch import RotaryEmbedding

print("rotary-embedding-torch", version("rotary-embedding-torch"), "torch", torch.__version__)
torch.set_grad_enabled(False)
tokens, project = torch.ones(1, 1, 4096, 32), torch.nn.Linear(32, 32)


def different(rotary):
    """How many of 4096 equal tokens in float32 are turned to something else than all others."""
    return len(rotary.rotate_queries_or_keys(tokens)[0, 0].unique(dim=0))


fresh, used = RotaryEmbedding(dim=32), RotaryEmbedding(dim=32)
with torch.autocast("cpu", torch.bfloat16):
    used.rotate_queries_or_keys(project(tokens))
turned = used.rotate_queries_or_keys(tokens)[0, 0]
alike = [row for row in range(255, 263) if torch.equal(turned[row], turned[row + 1])]
print("different rotations of 4096 tokens, fresh module:     ", different(fresh))
print("the same, float32, after one call under autocast:     ", different(used))
print("from token 255 to 263, turned as the one after it:    ", alike)
if different(fresh) != 4096 or different(used) != 769 or alike != [256, 259, 260]:
    raise SystemExit("changed: other tokens share their rotation than before")
PYTHON
