#!/usr/bin/env bash
# Expected: a Transformer-XL with memories reads a text in pieces and remembers those before, as far as its memory reaches.
# memory-transformer-xl fills its memories by pieces at least as long as the memory alone: with mem_len=17 or 32 and pieces
# of seq_len=16 the short and the long memory stay empty, and the fourth piece is answered to the bit as if it were alone.
# With mem_len=8 and 16, 48 other tokens before move its answer by 0.03 and 0.04.
# Versions: memory-transformer-xl 0.1.0, torch 2.13.0.
# Who meets it: whoever gives a model a memory longer than its window, which is what the memory is for.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 einops==0.8.2
"$place/venv/bin/pip" install --quiet --no-deps memory-transformer-xl==0.1.0 mogrifier==0.0.5
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from memory_transformer_xl import MemoryTransformerXL

print("memory-transformer-xl", version("memory-transformer-xl"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
text = torch.randint(50, (1, 64), generator=torch.Generator().manual_seed(1))
other = torch.cat([torch.randint(50, (1, 48), generator=torch.Generator().manual_seed(2)), text[:, 48:]], dim=1)


def read(model, tokens):
    memories, sizes = None, []
    for piece in tokens.split(16, dim=1):
        answer, memories = model(piece, memories=memories)
        sizes.append((memories.short.shape[2], memories.long.shape[1]))
    return answer, sizes


found = {}
for length in (8, 16, 17, 32):
    torch.manual_seed(0)
    model = MemoryTransformerXL(num_tokens=50, dim=32, seq_len=16, depth=2, heads=2, mem_len=length, lmem_len=8).eval()
    answer, sizes = read(model, text)
    moved = (answer - read(model, other)[0]).abs().max().item()
    from_alone = (answer - model(text[:, 48:])[0]).abs().max().item()
    found[length] = sizes, moved, from_alone
    print(f"seq_len 16, mem_len {length}: memories of (short, long)", *sizes, "after pieces of 16; 48 other tokens before",
          f"move the last piece by {moved:.3f}; it is {from_alone:.3f} from the piece alone")
if not (all(found[length][0] == [(length, 8)] * 4 and found[length][1] > 0.01 for length in (8, 16))
        and all(found[length] == ([(0, 0)] * 4, 0, 0) for length in (17, 32))):
    raise SystemExit("changed: a memory longer than a piece is filled")
PYTHON
