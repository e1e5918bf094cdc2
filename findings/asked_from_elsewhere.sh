#!/usr/bin/env bash
# Expected: rotated keys know distances alone, so a press keeps the same tokens of a piece, wherever in a text it stands.
# ChunkPress rotates each chunk's last queries for the last places of the whole text (SnapKV, TOVA). A text of eight times
# the same chunk: of what TOVA keeps of the last one it keeps half in the others, which is chance. ExpectedAttention takes
# each chunk for the first one. KnormPress, which has no queries, keeps the same everywhere.
# DecodingPress with ExpectedAttention expects the next queries at the length of its buffer, however far a stream is: the
# same tokens 4,000 places later leave other keys, and from there on their scores are others.
# Versions: kvpress 0.5.5, transformers 5.2.0, torch 2.13.0.
# Who meets it: whoever compresses a long context chunk by chunk, or a cache while it grows, with these presses.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 kvpress==0.5.5 transformers==5.2.0 huggingface_hub==1.33.0 \
    tokenizers==0.22.2 peft==0.20.0 accelerate==1.15.0 datasets==5.2.0 pandas==2.3.3 numpy==2.4.6
"$place/venv/bin/python" - 2> "$place/words" <<'PYTHON' || { cat "$place/words"; exit 1; }
from importlib.metadata import version
import torch
from kvpress import ChunkPress, DecodingPress, ExpectedAttentionPress, KnormPress, SnapKVPress, TOVAPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

print(", ".join(f"{name} {version(name)}" for name in ("kvpress", "transformers", "torch")))
torch.set_grad_enabled(False)
torch.set_num_threads(1)
torch.manual_seed(0)
sizes = dict(vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, initializer_range=0.1)).eval()


def places(kept, whole):  # of the kept keys or values of each head, those in the whole text
    far = torch.cdist(kept[0], whole[0], compute_mode="donot_use_mm_for_euclid_dist").min(-1)
    assert far.values.max() < 1e-4
    return far.indices


piece = torch.randint(0, 512, (1, 256))
whole, alike = DynamicCache(), {}
model.model(piece.repeat(1, 8), past_key_values=whole)
for press in (KnormPress(0.5), SnapKVPress(0.5, window_size=32), TOVAPress(0.5), ExpectedAttentionPress(0.5, n_sink=0)):
    chunks = []
    for times in (1, 8):
        cache = DynamicCache()
        with ChunkPress(press, chunk_length=256)(model):
            model.model(piece.repeat(1, times), past_key_values=cache)
        chunks += places(cache.layers[0].keys, whole.layers[0].keys).view(2, times, 128).unbind(1)
    alone, *chunks = [{(head, place % 256) for head in (0, 1) for place in chunk[head].tolist()} for chunk in chunks]
    name = type(press).__name__
    alike[name] = [len(chunk & alone) for chunk in chunks]
    print(f"ChunkPress({name}): of 256 keys that it keeps of one chunk, eight times the same chunk keeps {alike[name]}")

tokens, places_of = torch.randint(0, 512, (1, 400)), torch.arange(400).split([100] + [1] * 300)
whole, same, off = DynamicCache(), {}, {}
model.model(tokens, past_key_values=whole)
for inner in (SnapKVPress, ExpectedAttentionPress):
    seen = []
    for start in (0, 4000):
        cache, scores = DynamicCache(), []
        press = DecodingPress(inner(), compression_interval=150, target_size=100, hidden_states_buffer_size=128)
        with press(model):  # 100 tokens at once, then 300 one by one: the cache is cut to 100 after 250 and after 400
            for at in places_of:
                outputs = model(tokens[:, at], past_key_values=cache, position_ids=at[None] + start)
                scores.append(outputs.logits[0, -1])
        kept = places(cache.layers[0].values, whole.layers[0].values)
        seen.append(({(head, place) for head in (0, 1) for place in kept[head].tolist()}, torch.stack(scores)))
    (first, low), (later, high) = seen
    name, far = inner.__name__, (high - low).abs().amax(-1)
    same[name], off[name] = len(first & later) / len(first), (far[:150].max().item(), far.max().item())
    print(f"DecodingPress({name}): 4,000 places later it keeps {len(first & later)} of {len(first)} keys; scores off by up"
          f" to {off[name][0]:.4f} before the first cut, {off[name][1]:.4f} in all, spread {low.std():.2f}")
norm, snap, tova, expected = alike.values()
right = min(norm) > 250 and snap[7] == tova[7] == expected[0] == 256 and same["SnapKVPress"] > 0.95
wrong = max(snap[:7]) < 200 and max(tova[:7]) < 180 and max(expected[1:]) < 250 and same["ExpectedAttentionPress"] < 0.85
if not (right and wrong and off["ExpectedAttentionPress"][0] < 0.01 and off["ExpectedAttentionPress"][1] > 1):
    raise SystemExit("changed: a press asks from the place of the chunk, or from that of the stream")
PYTHON
