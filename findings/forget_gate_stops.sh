#!/usr/bin/env bash
# Expected: a decoder gives the same scores token by token, with its cache, as in one pass.
# With forget gates (attn_data_dependent_alibi) a step makes its bias from the new token alone: it is 0 for all keys.
# From the first generated token on nothing is forgotten; generate() caches by default and takes it as fit for that.
# Versions: x-transformers 2.31.10, torch 2.13.0.
# Who meets it: whoever trains a "forgetting transformer" and then lets it write; the loss in training shows nothing.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 x-transformers==2.31.10
"$place/venv/bin/python" - <<'PYTHON'
import copy
from importlib.metadata import version
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

print("x-transformers", version("x-transformers"), "torch", torch.__version__)
torch.manual_seed(0)
torch.set_grad_enabled(False)
sizes = dict(dim=32, depth=2, heads=2, attn_dim_head=16)
gates = dict(attn_data_dependent_alibi=True, attn_data_dependent_alibi_kwargs=dict(bias_init=0.0))
model = TransformerWrapper(num_tokens=64, max_seq_len=128, attn_layers=Decoder(**sizes, **gates)).eval()
gateless = copy.deepcopy(model)
for part in gateless.modules():
    if hasattr(part, "data_dependent_alibi"):
        part.data_dependent_alibi = None

tokens = torch.randint(0, 64, (1, 41))
_, cache = model(tokens[:, :40], return_intermediates=True)
whole = model(tokens)[0, -1]
step = model(tokens, cache=cache, return_intermediates=True)[0][0, -1]
ungated = gateless(tokens, cache=cache, return_intermediates=True)[0][0, -1]
writer = AutoregressiveWrapper(model)
plain, cached = (writer.generate(tokens, 60, temperature=0.0, cache_kv=kept)[0] for kept in (False, True))
others = int((plain != cached).sum())

off = (step - whole).abs().max()
print(f"scores of the 41st token, spread {whole.std():.2f}: a step is off from one pass by {off:.2f}")
print("a step equals one of the same model with its gates taken out:", torch.equal(step, ungated))
print(f"fit for a cache, it says: {model.can_cache_kv}; of 60 tokens, {others} are others with a cache than without")
if not (torch.equal(step, ungated) and off > 0.1 and others and model.can_cache_kv):
    raise SystemExit("changed: the gates now count in a step, or a cache is refused")
PYTHON
