#!/usr/bin/env bash
# Expected: what a mask hides, and what comes later in a causal model, does not change the outputs of the tokens before it.
# Performer's mask sets the values of hidden tokens to zero and leaves their keys in the sum that is divided by. So each
# output is a mean over the padding, too: a sentence that is padded to four times its length has about a quarter of it.
# The softmax kernel of the keys subtracts the largest number of all tokens, later ones too, and then adds 0.0001. So one
# later key of twice or four times the length moves all earlier outputs, to nearly the even mean of the values so far.
# With generalized_attention=True later tokens do not count; padding does.
# Versions: performer-pytorch 1.1.4, torch 2.13.0.
# Who meets it: whoever reads sentences or films of unequal length in one batch, or trains a causal Performer.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 performer-pytorch==1.1.4 einops==0.8.2 local-attention==1.11.2 \
    axial-positional-embedding==0.3.12 hyper-connections==0.4.11 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
import torch
from performer_pytorch import FastAttention, SelfAttention

print("performer-pytorch", version("performer-pytorch"), "torch", torch.__version__)
torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(0)
film, padding = torch.randn(2, 50, 64), torch.randn(64)  # one vector, as of a padding token
share, later = {}, {}
for general in (False, True):
    attention = SelfAttention(64, heads=4, dim_head=16, generalized_attention=general, attn_out_bias=False).eval()
    alone = attention(film)
    for length in (50, 100, 200):
        padded = torch.cat([film, padding.expand(2, length - 50, 64)], dim=1)
        mask = (torch.arange(length) < 50).expand(2, length)
        masked = attention(padded, mask=mask)[:, :50]
        share[general, length] = ((masked * alone).sum() / (alone * alone).sum()).item()
        print(f"{'generalized' if general else 'softmax'} kernel: 50 tokens, masked to be alone in {length}:",
              f"the outputs are {share[general, length]:.3f} of those without padding")

for general in (False, True):
    with redirect_stdout(StringIO()):  # it says that it has no CUDA code
        attention = FastAttention(32, causal=True, generalized_attention=general)
    queries, keys, values = torch.randn(4, 2, 256, 32), torch.randn(4, 2, 256, 32), torch.randn(4, 2, 256, 32)
    even = (values.cumsum(2) / torch.arange(1, 257)[:, None])[:, :, :200]
    alone = attention(queries[:, :, :200], keys[:, :, :200], values[:, :, :200])
    for factor in (1, 2, 4):
        scaled = keys.clone()
        scaled[:, :, 255] *= factor  # the last of 256 tokens; the first 200 are looked at
        found = attention(queries, scaled, values)[:, :, :200]
        later[general, factor] = ((found - alone).norm() / alone.norm()).item()
        print(f"{'generalized' if general else 'softmax'} kernel, causal: the first 200 of 256 tokens, the last key",
              f"{factor} times as long: off by {later[general, factor]:.1%}; from an even mean by",
              f"{((found - even).norm() / even.norm()).item():.1%}")
as_said = (all(abs(share[general, 50] - 1) < 1e-5 and share[general, 100] < 0.7 and share[general, 200] < 0.4
               for general in (False, True))
           and later[False, 1] > 0.02 and later[False, 2] > 0.1 and later[False, 4] > 0.3
           and max(later[True, factor] for factor in (1, 2, 4)) < 1e-4)
if not as_said:
    raise SystemExit("changed: hidden and later tokens do not count")
PYTHON
