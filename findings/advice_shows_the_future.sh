#!/usr/bin/env bash
# Expected: a prompt in pieces of at most a sliding window, as the error for longer ones advises, has the scores of one pass.
# From the second window on it has them token by token alone. A piece takes the places of the oldest keys in a ring, and the
# mask goes by places in the ring: it shows each token the rest of its piece. The keys that a piece took the places of are
# gone for its first tokens, too: in pieces of a window, where all layers slide, a first token sees nothing of the past.
# Versions: litgpt 0.5.13, torch 2.13.0.
# Who meets it: whoever reads more than a window of a text or a stream in pieces with Gemma 3, Phi 3 or Mathstral.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 litgpt==0.5.13 lightning==2.6.6 numpy==2.4.6
"$place/venv/bin/python" - 2> "$place/words" <<'PYTHON' || { cat "$place/words"; exit 1; }
from importlib.metadata import version
import torch
from litgpt import GPT, Config

print("litgpt", version("litgpt"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
sizes = dict(n_layer=4, n_embd=64, n_head=4, head_size=16, n_query_groups=2, vocab_size=64, padded_vocab_size=64,
             intermediate_size=64, block_size=64, sliding_window_size=8)


def read(tokens, length):
    model.clear_kv_cache()
    model.set_kv_cache(batch_size=1)
    return torch.cat([model(tokens[:, places], places) for places in torch.arange(48).split(length)], dim=1)[0]


seen = []
for name in ("Mathstral-7B-v0.1", "Phi-3-mini-4k-instruct", "Gemma-3-1b-it"):
    layers = dict(sliding_window_indices=[1, 0, 1, 0], rope_indices=[1, 0, 1, 0]) if name.startswith("Gemma") else {}
    torch.manual_seed(0)
    model = GPT(Config.from_name(name, **sizes, **layers)).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.1)
    tokens = torch.randint(0, 64, (1, 48))
    whole = model(tokens)[0]
    try:
        read(tokens, 12)
    except ValueError as error:
        print(f"{name}, windows of 8, pieces of 12: {str(error).split('. ')[-1]}")
    for length in (1, 2, 8):
        scores, moved = read(tokens, length), []
        far = (scores - whole).abs().amax(-1)
        first, later = far[:8].max().item(), far[8:].max().item()
        for place in (7, 8 + length - 1):  # the token before the second window, the last one of that window's first piece
            other = tokens.clone()
            other[0, place] = (other[0, place] + 1) % 64
            moved.append((read(other, length) - scores)[8].abs().max().item())
        seen.append((length, bool(layers), first, later, *moved))
        print(f"{name}, pieces of {length}: the first 8 tokens are off by {first:.5f}, later ones by up to {later:.2f},"
              f" spread {whole.std():.2f}; token 8 moves by {moved[0]:.2f} with token 7,"
              f" by {moved[1]:.2f} with token {7 + length}")
exact = all(first < 1e-3 and (later < 1e-3 or length > 1) for length, _, first, later, _, _ in seen)
wrong = all(later > 0.5 and future > 0.05 for length, _, _, later, _, future in seen if length > 1)
if not (exact and wrong and [past == 0 for length, mixed, _, _, past, _ in seen if length == 8 and not mixed] == [True] * 2):
    raise SystemExit("changed: a piece of more than one token sees its window, or it is an error")
PYTHON
