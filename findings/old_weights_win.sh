#!/usr/bin/env bash
# Expected: a model saved into a folder again is the model that is read from there.
# save_pretrained in shards removes older shards, but leaves an older model.safetensors; from_pretrained prefers that one.
# So the weights of the first saving come back, without a warning: index and shards of the second are never opened.
# Versions: transformers 5.24.0, torch 2.13.0.
# Who meets it: whoever saves a training over an earlier one, now with max_shard_size for a small machine.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
"$place/venv/bin/python" - "$place/model" <<'PYTHON' 2> "$place/words" || { cat "$place/words"; exit 1; }
import os, sys
import torch, transformers

transformers.utils.logging.disable_progress_bar()
folder = sys.argv[1]
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
for value, size in ((1.0, "1GB"), (2.0, "20KB")):
    torch.nn.init.constant_(model.model.norm.weight, value)
    model.save_pretrained(folder, max_shard_size=size)
weights = sorted(name for name in os.listdir(folder) if "safetensors" in name)
read = transformers.AutoModelForCausalLM.from_pretrained(folder).model.norm.weight[0].item()

print("transformers", transformers.__version__, "torch", torch.__version__)
print("in the folder:", *weights)
print("saved first: 1.0, saved last: 2.0, read:", read)
if read != 1.0 or len(weights) != 8:
    raise SystemExit("changed: it reads or leaves other files than before")
PYTHON
echo "warnings: $(cat "$place/words")"
if [ -s "$place/words" ]; then
  echo "changed: it warns"
  exit 1
fi
