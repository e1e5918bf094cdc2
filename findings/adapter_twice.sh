#!/usr/bin/env bash
# Expected: a merged model, saved whole, is read as it was saved.
# If its folder also holds the adapter that was merged into it, from_pretrained puts that adapter on once more.
# This happens without a warning, and only where peft is installed: one folder is two models on two machines.
# Versions: transformers 5.24.0, torch 2.13.0, peft 0.21.2.
# Who meets it: whoever trains with LoRA at home and saves the merged model beside its adapter.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
"$place/venv/bin/python" - "$place/model" <<'PYTHON' 2> "$place/words" || { cat "$place/words"; exit 1; }
import sys
import peft, torch, transformers

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
torch.nn.init.zeros_(model.model.layers[0].self_attn.q_proj.weight)
model = peft.get_peft_model(model, peft.LoraConfig(r=1, lora_alpha=1, target_modules=["q_proj"]))
for name, weight in model.named_parameters():
    if "lora_" in name:
        torch.nn.init.ones_(weight)
model.save_pretrained(sys.argv[1])
model.merge_and_unload().save_pretrained(sys.argv[1])
PYTHON
cat > "$place/read.py" <<'PYTHON'
import sys, torch, transformers

transformers.utils.logging.disable_progress_bar()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
query = model.model.layers[0].self_attn.q_proj
print(query(torch.eye(32))[0, 0].item())
PYTHON
"$place/venv/bin/pip" freeze | grep -E '^(torch|transformers|peft)='
with=$("$place/venv/bin/python" "$place/read.py" "$place/model" 2> "$place/words")
"$place/venv/bin/pip" uninstall --quiet --yes peft
without=$("$place/venv/bin/python" "$place/read.py" "$place/model" 2>> "$place/words")
echo "the merged weight was saved as 1.0; read with peft: $with, without: $without"
echo "warnings: $(cat "$place/words")"
if [ "$with $without" != "2.0 1.0" ] || [ -s "$place/words" ]; then
  echo "changed: it reads other weights, or warns"
  exit 1
fi
