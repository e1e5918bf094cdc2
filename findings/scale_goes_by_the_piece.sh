#!/usr/bin/env bash
# Expected: a causal TrimTransformer with its key-value cache gives each token what it gives it in one pass over the whole.
# Its linear attention is divided by the number of keys that are handed in, not of those that a token sees. With the cache
# that is the length of the piece: token by token, attention is 40 times that of one pass over 40 tokens.
# In one pass the future and masked padding count, too. With a scale of one's own all are equal.
# Versions: trim-transformer 0.1.3, torch 2.13.0.
# Who meets it: whoever generates as its README shows, reads a stream in pieces or pads the sequences of a batch.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 trim-transformer==0.1.3 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from trim_transformer.modules import TrimMultiheadAttention
from trim_transformer.transformer_layers import TrimTransformerEncoder, TrimTransformerEncoderLayer

print("trim-transformer", version("trim-transformer"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
cached = dict(is_causal=True, use_kv_cache=True, update_kv_cache=True)
tokens = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1))
padded = torch.cat([tokens, torch.zeros(1, 40, 32)], 1)
padding = torch.arange(80)[None] >= 40
off, factors = {}, {}
for scale in (None, 1 / 40):
    torch.manual_seed(0)
    model = TrimTransformerEncoder(TrimTransformerEncoderLayer(32, 2, 64, batch_first=True, scale=scale), 2).eval()
    whole = model(tokens, is_causal=True)
    print(f"scale={scale}: spread of the whole {whole.std():.2f}")
    for length in (1, 10, 20, 40):
        model.clear_kv_cache()
        pieces = torch.cat([model(piece, **cached) for piece in tokens.split(length, 1)], 1)
        off[scale, length] = (pieces - whole).abs().max().item()
    model.clear_kv_cache()
    off[scale, "first half"] = (model(tokens[:, :20], is_causal=True) - whole[:, :20]).abs().max().item()
    plain = model(tokens)
    off[scale, "padded"] = (model(padded, src_key_padding_mask=padding)[:, :40] - plain).abs().max().item()
    for name in (1, 10, 20, 40, "first half", "padded"):
        print(f"  {'pieces of ' if name in (1, 10, 20, 40) else ''}{name}: off by up to {off[scale, name]:.3f}")
    torch.manual_seed(0)
    attention = TrimMultiheadAttention(32, 2, batch_first=True, scale=scale).eval()
    one = attention(tokens, tokens, tokens, is_causal=True)
    steps = torch.cat([attention(t, t, t, **cached) for t in tokens.split(1, 1)], 1)
    factors[scale] = ((steps * one).sum() / (one * one).sum()).item()
    print(f"  attention token by token is {factors[scale]:.3f} times that of one pass")
wrong = [value for (scale, name), value in off.items() if scale is None and name != 40]
right = [value for (scale, name), value in off.items() if scale is not None or name == 40]
if not (min(wrong) > 0.3 and max(right) < 1e-4 and abs(factors[None] - 40) < 0.01 and abs(factors[1 / 40] - 1) < 1e-4):
    raise SystemExit("changed: the scale does not go by the keys that are handed in")
PYTHON
