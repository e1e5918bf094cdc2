#!/usr/bin/env bash
# Expected: RecurrentMemoryTransformerWrapper scores a sequence as its generate() reads it, segment after segment.
# Its forward takes each segment's XL memories and never hands them to the next one; generate() does, by default.
# So a model learns and is measured without them and writes with them: its scores are others from the second segment on.
# With memory_replay_backprop they count in the losses, but the memory tokens come from a pass without them.
# Versions: recurrent-memory-transformer-pytorch 0.7.0, torch 2.13.0; it imports packaging without asking for it.
# Who meets it: whoever trains a recurrent memory transformer and lets it write more than one segment (use_xl_memories is on).
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 recurrent-memory-transformer-pytorch==0.7.0 hyper-connections==0.4.11 \
    packaging==26.4 numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer, RecurrentMemoryTransformerWrapper

print("recurrent-memory-transformer-pytorch", version("recurrent-memory-transformer-pytorch"), "torch", torch.__version__)
torch.set_num_threads(1)
torch.manual_seed(0)
sizes = dict(num_tokens=64, dim=32, depth=2, num_memory_tokens=4, seq_len=32, dim_head=16, heads=2)
model = RecurrentMemoryTransformer(**sizes).eval()
wrapper = RecurrentMemoryTransformerWrapper(model).eval()
tokens = torch.randint(0, 64, (1, 97))
given, seen = [], {}
watch = model.register_forward_pre_hook(lambda _, a, named: given.append(bool(named.get("xl_memories"))), with_kwargs=True)
for name, run in {
    "scores": lambda: wrapper(tokens[:, :96])[0],
    "loss": lambda: wrapper(tokens, return_loss=True)[0],
    "generate": lambda: wrapper.generate(tokens[:, :80], length=81),
    "loss, replayed": lambda: wrapper(tokens, memory_replay_backprop=True),
}.items():
    given.clear()
    result = run().detach()
    seen[name] = list(given)
    print(f"{name}: XL memories go into its passes: {given}", f"{result.item():.4f}" if result.ndim == 0 else "")
    scores = result if name == "scores" else scores
watch.remove()

off = {}
with torch.no_grad():
    for kept in (False, True):
        memories, xl_memories, off[kept] = None, None, []
        for segment, score in zip(tokens[:, :96].split(32, dim=1), scores.split(32, dim=1)):
            one, memories, xl_memories = model(segment, memories, xl_memories=xl_memories if kept else None)
            off[kept].append(round((one - score).abs().max().item(), 3))
print(f"scores of three segments, spread {scores.std():.2f}, away from passes without XL memories: {off[False]}; with: {off[True]}")
if not (seen["scores"] == seen["loss"] == [False] * 3 and seen["generate"] == [False, True, True]
        and seen["loss, replayed"] == [False] * 3 + [True, True, False]
        and off[False] == [0, 0, 0] and off[True][0] == 0 and min(off[True][1:]) > 0.05):
    raise SystemExit("changed: the wrapper's forward hands XL memories on, or generate does not")
PYTHON
