#!/usr/bin/env bash
# Expected: training a CompressiveTransformer teaches all of its weights, as long as it lasts.
# For the reconstruction loss, SelfAttention detaches the weight of its keys and values in place (detach_), which freezes the
# parameter itself: in the first segment whose memory is compressed, each to_kv gets requires_grad False and never a gradient
# again, in later sequences, too. So keys and values learn from the first segment of the first sequence alone.
# And while the memory fills, a token's distance to itself is another row of pos_emb in each segment: 15, 31, 35 of 0 to 35.
# Versions: compressive-transformer-pytorch 0.4.0, torch 2.13.0.
# Who meets it: whoever trains one on sequences longer than a segment and its memory.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 compressive-transformer-pytorch==0.4.0 mogrifier==0.0.5 einops==0.8.2 \
    numpy==2.4.6
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from compressive_transformer_pytorch import AutoregressiveWrapper, CompressiveTransformer
from compressive_transformer_pytorch.compressive_transformer_pytorch import shift

print("compressive-transformer-pytorch", version("compressive-transformer-pytorch"), "torch", torch.__version__)
torch.set_num_threads(1)
torch.manual_seed(0)
net = CompressiveTransformer(num_tokens=64, dim=32, seq_len=16, mem_len=16, cmem_len=4, depth=2, heads=2)
model = AutoregressiveWrapper(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
learned, rows = [], []
for sequence in range(3):
    for segment, (loss, aux_loss, _) in enumerate(model(torch.randint(0, 64, (2, 65)), return_loss=True)):
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        optimizer.zero_grad()
        (loss + aux_loss).backward()
        optimizer.step()
        moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
        learned.append(sum("to_kv" in name for name in moved))
        seen = net.pos_emb.grad.abs().sum((0, 2)).nonzero().flatten()
        itself = shift(seen.float().expand(1, 1, 16, -1))[0, 0].diagonal(len(seen) - 16).unique().int().tolist()
        rows.append(itself)
        print(f"sequence {sequence}, segment {segment}: of 2 to_kv {learned[-1]} learn, of all {len(before)} weights",
              f"{len(moved)}; rows in use {seen[0]} to {seen[-1]}, to itself {itself}")
frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
print("frozen for good:", *frozen)
if not (learned == [2] + [0] * 11 and len(frozen) == 2 and all("to_kv" in name for name in frozen)
        and rows[:4] == [[15], [31], [35], [35]]):
    raise SystemExit("changed: keys and values learn on, or a distance has one row of pos_emb")
PYTHON
