#!/usr/bin/env bash
# Expected: KNNMemory returns the keys and values that its search finds; of more than max_memories the oldest are lost.
# Past max_memories the index is emptied and counts from 0 again; the table of keys and values goes on where it was.
# So a search gives other entries than those found, for the rest of the stream; older ones are out of reach, and the piece
# that was one too many is found by no search before the next one is in.
# If the pieces fill the table without a rest, this begins at the second time it is emptied: one piece goes uncounted.
# at_batch_indices moves the table's place of all rows, the index of those rows alone: another row reads zeros at once.
# Versions: memorizing-transformers-pytorch 0.4.1, faiss-cpu 1.15.1 (in place of faiss-gpu), torch 2.13.0.
# Who meets it: whoever reads a stream longer than max_memories (MemorizingTransformer: 250,000), or fills rows in turns.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 faiss-cpu==1.15.1 numpy==2.4.6 einops==0.8.2 einops-exts==0.0.4 \
    joblib==1.6.0 filelock==4.3.1
"$place/venv/bin/pip" install --quiet --no-deps memorizing-transformers-pytorch==0.4.1
cd "$place"
"$place/venv/bin/python" - <<'PYTHON'
from contextlib import nullcontext
from importlib.metadata import version
import torch
from memorizing_transformers_pytorch import KNNMemory

print("memorizing-transformers-pytorch", version("memorizing-transformers-pytorch"), "faiss-cpu", version("faiss-cpu"))
torch.set_num_threads(1)
torch.manual_seed(0)

def found(length, pieces, rows=1, alone=False):
    """The share of a piece's keys that a search with these keys gives back, right after they were put in."""
    memory, shares = KNNMemory(dim=32, max_memories=1000, num_indices=rows, multiprocessing=False), []
    for piece in range(pieces):
        keys = torch.nn.functional.normalize(torch.randn(rows, length, 32), dim=-1)
        pairs = torch.stack((keys, keys), dim=-2)
        for row in range(rows) if alone else [slice(None)]:
            with memory.at_batch_indices([row]) if alone else nullcontext():
                memory.add(pairs[[row]] if alone else pairs)
        got, there = memory.search(keys, 1)
        right = (got[:, :, 0, 0] - keys).abs().amax(-1) < 1e-5
        of_rows = zip(right.float().mean(1).tolist(), there.any(-1).any(-1))
        shares.append([round(share, 2) if some else None for share, some in of_rows])
    return [list(row) for row in zip(*shares)]

[uneven], [even] = found(96, 25), found(100, 35)
together, turns = found(96, 4, rows=2), found(96, 4, rows=2, alone=True)
print("1,000 memories, pieces of 96: share of the keys that come back (None: no memory at all):", uneven)
print("pieces of 100:", even)
print("two rows filled at once:", together, "in turns by at_batch_indices:", turns)
if not (min(uneven[:10]) > 0.99 and uneven[10] is None and max(share or 0 for share in uneven[11:]) < 0.1
        and min(even[:10] + even[11:20]) > 0.99 and even[10] is None and max(share or 0 for share in even[22:]) < 0.1
        and min(together[0] + together[1]) > 0.99 and min(turns[0][:1]) > 0.99 and max(turns[1]) < 0.1):
    raise SystemExit("changed: what is found is what comes back")
PYTHON
