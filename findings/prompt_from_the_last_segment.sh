#!/usr/bin/env bash
# Expected: Infini-attention's generate reads a long prompt segment by segment and keeps what it read in its memories.
# It begins with the segment in which the prompt ends and without memories: all segments before it are never read.
# Of a prompt of 513 tokens it reads one, of 1,000 it reads 488; two prompts with the same end are continued alike.
# In training the wrapper goes through all segments and hands the memories on.
# Versions: infini-transformer-pytorch 0.2.1, torch 2.13.0.
# Who meets it: whoever asks a model of endless context about a text that is longer than one segment (512 by default).
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 infini-transformer-pytorch==0.2.1 rotary-embedding-torch==0.9.1
"$place/venv/bin/python" - 2> "$place/progress" <<'PYTHON' || { cat "$place/progress"; exit 1; }
from importlib.metadata import version
import torch
from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper

print("infini-transformer-pytorch", version("infini-transformer-pytorch"), "torch", torch.__version__)
torch.set_num_threads(1)
torch.manual_seed(0)
model = InfiniTransformer(num_tokens=64, dim=64, depth=2, dim_head=32, heads=4).eval()
wrapper = InfiniTransformerWrapper(model)  # segments of 512
for layer in model.layers:
    layer[0].fastweight_mem.head_gates.data.zero_()  # half of each answer from the memories, as a trained gate may have it
calls = []
watch = model.register_forward_pre_hook(lambda _, given, named: calls.append((given[0].shape[1], "past_memories" in named
                                        and named["past_memories"] is not None)), with_kwargs=True)
read = []
for length in (512, 513, 1000, 1025):
    calls.clear()
    wrapper.generate(prompt=torch.randint(0, 64, (1, length)), seq_len=length + 1)
    wrapper(torch.randint(0, 64, (1, length + 1)))
    read.append(calls[0])
    print(f"a prompt of {length}: generate reads {calls[0][0]} tokens, with memories: {calls[0][1]};",
          f"training reads {sum(count for count, _ in calls[1:])}, with memories: {calls[-1][1]}")
watch.remove()

prompt = torch.randint(0, 64, (1, 513))
other = torch.full_like(prompt, 7)
other[:, 512:] = prompt[:, 512:]
texts, scores = [], []
for tokens in (prompt, other):
    torch.manual_seed(1)
    texts.append(wrapper.generate(prompt=tokens, seq_len=563))
    with torch.no_grad():
        memories = model(tokens[:, :512], return_new_memories=True)[2]
        scores.append(model(tokens[:, 512:], past_memories=memories)[0][0, -1])
alike, apart = torch.equal(*texts), (scores[0] - scores[1]).abs().max().item()
print(f"two prompts of 513 that have the last token in common: generate goes on alike: {alike};",
      f"read by segments their next scores are {apart:.2f} apart, spread {scores[0].std():.2f}")
if not (read == [(512, False), (1, False), (488, False), (1, False)] and alike and apart > 0.05):
    raise SystemExit("changed: generate reads the earlier segments, or a prompt of more than one is refused")
PYTHON
