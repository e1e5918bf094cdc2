#!/usr/bin/env bash
# Expected: generate, given all tokens and a cache that read 40 of them, reads those after the 40th.
# It takes the number of entries for the number of tokens read: with 20 entries removed it reads 20 old tokens once more.
# So removed tokens come back, and kept ones stand in the cache twice, at two places; nothing is said.
# A mask of ones and position_ids change nothing. For crop, which removes the last entries alone, the count is right.
# Right are the new tokens alone with a mask for all 45; a mask as long as cache and new tokens moves them to 20 and on.
# Versions: transformers 5.24.0, torch 2.13.0.
# Who meets it: whoever takes entries out of a cache (old frames, unimportant tokens) and lets generate go on with it.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$place/venv/bin/python" - <<'PYTHON'
import copy
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

print("transformers", transformers.__version__, "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2, bos_token_id=None, eos_token_id=None)).eval()
tokens = torch.randint(0, 64, (1, 45))
full = DynamicCache()
model(tokens[:, :40], cache=full)
short = copy.deepcopy(full)
for layer in short.layers:  # tokens 10 to 29 go
    layer.keys = torch.cat((layer.keys[:, :, :10], layer.keys[:, :, 30:]), 2)
    layer.values = torch.cat((layer.values[:, :, :10], layer.values[:, :, 30:]), 2)

right = model(tokens[:, 40:], cache=copy.deepcopy(short), position_ids=torch.arange(40, 45)[None],
              attention_mask=torch.ones(1, 25, dtype=torch.long)).logits[0, -1]
read = []
model.model.register_forward_pre_hook(lambda _, a, named: read.append(named["position_ids"][0].tolist()), with_kwargs=True)
ones = lambda length: torch.ones(1, length, dtype=torch.long)
places = torch.arange(45)[None]
cases = {
    "all tokens, nothing removed": (full, tokens, {}),
    "all tokens": (short, tokens, {}),
    "all tokens, a mask of 45, their positions": (short, tokens, dict(attention_mask=ones(45), position_ids=places)),
    "5 new tokens, a mask of 25 as for the cache": (short, tokens[:, 40:], dict(attention_mask=ones(25))),
    "5 new tokens, a mask of 45": (short, tokens[:, 40:], dict(attention_mask=ones(45))),
}
seen, off = [], []
for name, (cache, given, more) in cases.items():
    read.clear()
    answer = model.generate(given, cache=copy.deepcopy(cache), max_new_tokens=1, do_sample=False, return_dict_in_generate=True,
                            output_logits=True, **more)
    seen.append((len(read[0]), read[0][0], read[0][-1]))
    off.append((answer.logits[0][0] - right).abs().max().item())
    print(f"{name}: generate reads {len(read[0])} tokens at places {read[0][0]} to {read[0][-1]}"
          + (f"; the scores are off by {off[-1]:.2f}, spread {right.std():.2f}" if cache is short else ""))
again, late = (25, 20, 44), (5, 40, 44)
if not (seen == [late, again, again, (5, 20, 24), late] and min(off[1:4]) > 0.1 and off[4] < 1e-4):
    raise SystemExit("changed: generate reads no token again, or refuses such a cache")
PYTHON
