#!/usr/bin/env bash
# Expected: a linear attention that is fed a stream in pieces, with its cache, answers as in one pass; a token more at the
# end leaves all earlier answers as they are.
# tptt saves its state as (batch, heads, d, d) and takes only (batch, heads, order, d, d): at order 1 a piece answers to the
# bit as if alone. Of 48 tokens a Llama with it says 38 others when it reads token by token, 24 in pieces of 12.
# A chunk is as long as the largest divisor of the length up to 64, and the answer depends on it: a 64th token moves none
# before it, the 65th all behind the 13th, the 67th all behind the first.
# Versions: tptt 0.12.1, torch 2.13.0, transformers 5.24.0, peft 0.21.2.
# Who meets it: whoever gives a pretrained model a linear memory of tptt, to read long films or texts in bounded memory.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 einops==0.8.2 numpy==2.2.6 \
    psutil==7.0.0
"$place/venv/bin/pip" install --quiet --no-deps tptt==0.12.1
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from tptt import LinearAttention, get_tptt_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

print("tptt", version("tptt"), "torch", torch.__version__, "transformers", version("transformers"))
torch.set_grad_enabled(False)
torch.set_num_threads(1)
rule = dict(order=1, alpha_gate="c", beta_gate="k", linear=True, trick="dt")
torch.manual_seed(0)
attention = LinearAttention(32, 4, recurrent_config=rule, max_chunk_size=12).eval()
steps = torch.randn(1, 67, 32)
first, second = steps[:, :12], steps[:, 12:24]
whole = attention(steps[:, :24])[:, 12:]
attention(first, use_cache=True)
saved = attention.linear_cache[0]["recurrent_state"]
after = attention(second, use_cache=True)
attention.linear_cache.reset()
alone = attention(second, use_cache=True)
lost, apart = (after - alone).abs().max().item(), (after - whole).abs().max().item()
print(f"second of two pieces: {lost} from the piece alone, {apart:.2f} from one pass (spread {whole.std():.2f}); the state",
      f"saved is {tuple(saved.shape)}, its largest number {saved.abs().max():.2f}")
attention.linear_operator.max_chunk_size, moved = 64, {}
for length in (64, 65, 67):
    before = attention(steps[:, :length - 1])
    apart_by = (attention(steps[:, :length])[:, :-1] - before).abs().amax((0, 2))
    moved[length] = (apart_by > 1e-3).nonzero().flatten().tolist()
    print(f"token {length} moves {len(moved[length])} of the {length - 1} before it, by up to {apart_by.max():.0e}",
          f"(spread {before.std():.2f}), from place {moved[length][0] if moved[length] else None} on")

torch.manual_seed(0)
sizes = LlamaConfig(vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, initializer_range=0.3)
tokens, others = torch.randint(60, (1, 48)), {}
model = LlamaForCausalLM(sizes).eval()
for name in ("Llama", "Llama with tptt"):
    if name != "Llama":
        model, memory = get_tptt_model(model, sizes, recurrent_config=rule)
        model.eval()
    once = model(tokens, use_cache=False).logits.argmax(-1)
    for length in (1, 12):
        if name != "Llama":
            memory.reset()
        cache = DynamicCache(config=sizes)
        read = [model(piece, past_key_values=cache, use_cache=True).logits for piece in tokens.split(length, dim=1)]
        others[name, length] = (torch.cat(read, dim=1).argmax(-1) != once).sum().item()
        print(f"{name} in pieces of {length}: {others[name, length]} of 48 tokens are others than in one pass")
if not (lost == 0 and apart > 0.3 and saved.abs().max() > 0.01 and not moved[64] and moved[65] == list(range(13, 64))
        and moved[67] == list(range(1, 66)) and others["Llama", 1] == others["Llama", 12] == 0
        and min(others["Llama with tptt", 1], others["Llama with tptt", 12]) > 10):
    raise SystemExit("changed: what was before counts, and what comes later does not")
PYTHON
