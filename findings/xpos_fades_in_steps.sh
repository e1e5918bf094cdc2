#!/usr/bin/env bash
# Expected: a query at the end, turned beside the cached keys, meets them with the scores of one pass over all.
# With xPos both sides are scaled around the middle of their own length: 1024 for 2049 cached keys, 0 for one new query.
# All scores of a step shrink by that distance: a token with itself gives 32 in one pass, and ever less in a step.
# Versions: rotary-embedding-torch 0.9.1, torch 2.13.0. Without use_xpos both are equal.
# Who meets it: whoever trains with xPos (as RetNet does) and generates by the method that the README has for a cache.
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
found = []
for length in (65, 513, 2049, 8193):
    tokens = torch.ones(1, 1, length, 32)
    query, keys = RotaryEmbedding(dim=32, use_xpos=True).rotate_queries_and_keys(tokens, tokens)
    one_pass = (query[0, 0, -1] * keys[0, 0, -1]).sum().item()
    rotary = RotaryEmbedding(dim=32, use_xpos=True)
    query, keys = rotary.rotate_queries_with_cached_keys(tokens[:, :, -1:], tokens)
    step = (query[0, 0, -1] * keys[0, 0, -1]).sum().item()
    found.append((round(one_pass, 1), round(step, 1)))
    print(f"the last of {length:4} tokens with itself: {one_pass:5.2f} in one pass, {step:5.2f} in a step")
if found != [(32.0, 30.9), (32.0, 24.8), (32.0, 13.7), (32.0, 4.0)]:
    raise SystemExit("changed: these are other scores than before")
PYTHON
