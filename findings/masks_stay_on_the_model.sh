#!/usr/bin/env bash
# Expected: a cache that AdaKVPress compressed stays compressed, whatever else the model reads before it goes on.
# AdaKVPress leaves all keys in the cache and notes on the model's layers which of them to hide. The next prompt clears the
# note, or writes its own: the cache answers as if never compressed, to the bit, or with the other prompt's places hidden.
# KnormPress alone takes the keys out of the cache; its answers stay.
# Versions: kvpress 0.5.5, transformers 5.2.0, torch 2.13.0.
# Who meets it: whoever keeps two streams, or compares a compressed cache with a whole one and reads both prompts first.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 kvpress==0.5.5 transformers==5.2.0 huggingface_hub==1.33.0 \
    tokenizers==0.22.2 peft==0.20.0 accelerate==1.15.0 datasets==5.2.0 pandas==2.3.3 numpy==2.4.6
"$place/venv/bin/python" - 2> "$place/words" <<'PYTHON' || { cat "$place/words"; exit 1; }
from copy import deepcopy
from importlib.metadata import version
import torch
from kvpress import AdaKVPress, KnormPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

print(", ".join(f"{name} {version(name)}" for name in ("kvpress", "transformers", "torch")))
torch.set_grad_enabled(False)
torch.set_num_threads(1)
torch.manual_seed(0)
sizes = dict(vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, initializer_range=0.05)).eval()
context, other, question = torch.randint(0, 512, (1, 600)), torch.randint(0, 512, (1, 300)), torch.randint(0, 512, (1, 20))


def read(tokens, press=None):
    cache = DynamicCache()
    if press is None:
        model.model(tokens, past_key_values=cache)
    else:
        with press(model):
            model.model(tokens, past_key_values=cache)
    return cache


def answer(cache):
    return model(question, past_key_values=deepcopy(cache), position_ids=torch.arange(600, 620)[None]).logits[0]


off = {}
for press in (KnormPress(0.5), AdaKVPress(KnormPress(0.5))):
    name, whole = type(press).__name__, answer(read(context))
    cache = read(context, press)
    own = answer(cache)
    read(other)
    after = answer(cache)
    read(other, press)
    mixed = answer(cache)
    pairs = ((own, whole), (after, own), (after, whole), (mixed, own), (mixed, whole))
    off[name] = [(a - b).abs().max().item() for a, b in pairs]
    print(f"{name}: {cache.get_seq_length()} keys in the cache, answers {off[name][0]:.4f} away from the whole context's,"
          f" spread {whole.std():.2f}")
    for words, far in (("another prompt was read", off[name][1:3]), ("it was read and compressed", off[name][3:])):
        print(f"    after {words}: {far[0]:.4f} away from its own answers, {far[1]:.4f} from the whole context's")
norm, ada = off.values()
if not (min(norm[0], ada[0]) > 0.1 and norm[1] == norm[3] == 0 and ada[2] == 0 and min(ada[1], ada[3], ada[4]) > 0.1):
    raise SystemExit("changed: a cache keeps what AdaKVPress hides")
PYTHON
