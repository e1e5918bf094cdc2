#!/usr/bin/env bash
# Expected: a Titans MAC transformer goes on with a cache as it does without one.
# After a prompt of more than one window its cache of keys and values is empty; all of the last window's should be in it.
# It is cut to a window's length first, and one whose length is a multiple of a window counts as full and is emptied.
# From then on its windows begin elsewhere, too: the scores stay wrong.
# Versions: titans-pytorch 0.5.5, torch 2.13.0.
# Who meets it: whoever uses sample(..., use_cache=True) on a prompt longer than a segment; short prompts are right.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 titans-pytorch==0.5.5 axial-positional-embedding==0.3.12 \
    hyper-connections==0.4.11 x-transformers==2.31.10 tensordict==0.15.3
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from titans_pytorch import MemoryAsContextTransformer

print("titans-pytorch", version("titans-pytorch"), "torch", torch.__version__)
torch.set_num_threads(1)
torch.set_grad_enabled(False)
sizes = dict(num_tokens=64, dim=32, depth=2, segment_len=16, dim_head=16, heads=2, num_longterm_mem_tokens=4)
lengths = (10, 16, 17, 30, 50)  # of a prompt
kept, off = {}, {}
for sliding in (False, True):
    torch.manual_seed(0)
    model = MemoryAsContextTransformer(**sizes, neural_memory_layers=(2,), sliding_window_attn=sliding).eval()
    for length in lengths:
        tokens = torch.randint(0, 64, (1, length + 20))
        _, cache = model(tokens[:, :length], return_cache=True)
        kept[sliding, length] = cache[1].shape[-2]
        steps = []
        while len(steps) < 20:
            scores, cache = model(tokens[:, : length + len(steps) + 1], cache=cache, return_cache=True)
            if scores is not None:  # None where a memory's place was taken, as in sample()
                whole = model(tokens[:, : length + len(steps) + 1])[0, -1]
                steps.append((scores[0, -1] - whole).abs().max().item())
        off[sliding, length] = max(steps)
        filled = (model.seq_len_with_longterm_mem(length) - 1) % 20 + 1  # places of the last window: up to 16 tokens, 4 memories
        print(f"{'sliding ' * sliding}windows of 20, a prompt of {length}: {filled} places in its last window,",
              f"{kept[sliding, length]} in the cache; of 20 steps {sum(step > 1e-3 for step in steps)} are off,",
              f"by up to {max(steps):.2f}, the last one by {steps[-1]:.2f}; spread {whole.std():.2f}")
wrong = [off[False, length] for length in lengths[2:]]
right = [off[False, length] for length in lengths[:2]] + [off[True, length] for length in lengths]
if not ([kept[False, length] for length in lengths] == [10, 16, 0, 0, 0] and min(wrong) > 0.05 and max(right) < 1e-4):
    raise SystemExit("changed: the cache keeps the last window of a long prompt")
PYTHON
