"""A walk through FlowNar in seven parts, one idea a cell, to be read with the paper open.

    python docs/walk.py             to its end in less than two minutes on two cores

`# %%` begins a cell: VS Code, PyCharm, Spyder and Jupytext open this file as a notebook. The text
above the code of a cell says what to expect, and its assertions say that it came so. A cell uses
what the cells before it have made. All of it happens on toy/kitchen.mp4, with the narrator that
comes with the repository: the numbers are those of this small narrator.
"""

# %% 0. What the cells share
# The narrator, the video, and its true sentences. docs/walk_tools.py has what prints.

import sys
from pathlib import Path

import torch

HERE = Path(globals().get("__file__", "walk.py"))       # a notebook has none, and runs in docs/
ROOT = HERE.resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from narrator import load
from toy.files import toy_samples
from walk_tools import LEGEND, Watched, example_of, print_tokens, sentences_of

torch.manual_seed(0)
CHECKPOINT = ROOT / "toy" / "checkpoint"
narrator = load(str(CHECKPOINT)).merge().requires_grad_(False)  # merge: LoRA into the weights
config, layout, memory = narrator.config, narrator.layout, narrator.memory  # CLAM
encoder = narrator.vision_encoder()
video = next(toy_samples(ROOT / "toy"))                         # toy/kitchen.mp4
kitchen = example_of(video, encoder, layout)
x, narrations = kitchen.x, kitchen.narrations                   # X_t of all frames [T, J, D]
truth, = video.annotators                                       # its sentences, with their times

# %% 1. From pixels to logits (§3.1, §3.2)
# A picture becomes J = 10 tokens of width D: one for the whole picture, nine for its parts. A
# small network, the connector, takes them to D_lm, the width of the language model's words. From
# then on the model treats them as words. After the last one it says how likely each token is to
# follow.

print("1. From pixels to logits")
picture = torch.from_numpy(next(video.frames()))
x_0 = encoder(picture[None])[0]                                 # X_t
e_0 = narrator.connector(x_0)                                   # E_t = MLP(X_t)
hidden = narrator.run(e_0, positions=torch.arange(len(e_0)))
logits = narrator.logits(hidden[-1])
print(f"a picture                  {list(picture.shape)}: red, green and blue of each pixel")
print(f"X_t, its frame tokens      {list(x_0.shape)}: J tokens of width D")
print(f"E_t, after the connector   {list(e_0.shape)}: J tokens of width D_lm, here 128 as well")
print(f"the model's hidden states  {list(hidden.shape)}")
print(f"logits after the last one  {list(logits.shape)}: one for each token of the vocabulary")
assert x_0.shape == (config.J, config.width)
assert logits.shape == (len(narrator.llm.get_input_embeddings().weight),)

# %% 2. One segment by hand (§3.4; Alg. 2, lines 4 to 18)
# The order is that of a chat: system, frame 0 in brackets, user, then "Assistant: " and a sentence.
# So frame 0 sits inside the prompt; it is segment 0, and is removed after its sentence. Here is
# segment 1, in the order in which it is fed:
#
#     $ \n         end of text: it ended the last sentence, and is fed only now
#     [m...m]\n    the memory: what CLAM gave at the end of segment 0
#     [ x...x      "[" opens the frames
#     , x...x      between two frames the token [SKIP], a comma: "nothing to say yet"
#     ]\n          after the last frame: "narrate"
#     Assistant:   and the sentence
#
# Alg. 2 does not show brackets and commas. They take positions, and leave with the frames at
# line 18. What stays keeps its position: holes are left, and the next token gets the position after
# the last one ever given. (This is FlowNar-C: sentences older than ten would leave as well.) The
# segment ends when p([SKIP]) falls to the threshold: theta_low alone is compared here, as this
# segment is over within 4 s of the last sentence. `narrate` is asked for its first decision only,
# then its Context goes on by hand (its clock, `frame` and `time`, stands still).

from stream import generate, narrate

c = Watched(narrator)                                                   # lines 1-3
y0 = next(narrate(narrator, x, context=c)).narration.tokens             # segment 0
fed = layout.opening(c.segment)                         # lines 6-7: $, memory, and the first frame
for t in range(1, len(x)):                                              # line 4
    c.update_memory(x[t])                                               # line 5
    if c.trigger(c.feed(fed, x[t])) <= config.theta_low:    # 9-13: feed puts M, E_t in their places
        break
    fed = layout.frame(c.segment)                           # no line: [SKIP], and a further frame
y1 = generate(c)                                                        # line 15
c.read_memory()                                                         # line 17
tokens, positions = c.cache.tokens, c.positions
c.discard(now=c.segment + 1)                                            # line 18
print(f'\n2. One segment by hand: frames 1 to {t}, narrated "{layout.decode(y1)}"\n{LEGEND}')
print_tokens(layout, tokens, {"at position": positions, "after line 18": c.after})
assert c.cache.lengths()[1] == 0 and c.position == 1 + positions[-1] and t / config.fps <= 4

# %% 3. Training is streaming (§3.5, Fig. 4)
# The stream goes on: frame t + 1 opens segment 2, and its last token sees what is in the cache.
# In training there is no cache. All segments go through the model at once, and the row of a token
# in the mask says what it sees. For the same token these are the same positions, and the logits
# are equal up to rounding: the model streams as it was trained.

from narrator import attention_mask

streamed = c.feed(layout.opening(2), x[t + 1])
streamed_so_far = [(0, y0), (t, y1), (t + 1, [])]       # an empty one, so that frame t + 1 is used
hidden, _, tokens = narrator(x, streamed_so_far)                        # Narrator.forward
query = c.position - 1                                                  # the frame's last token
row = attention_mask(tokens, config.last_k)[query]
seen = row.nonzero()[:, 0].tolist()
difference = (narrator.logits(hidden[query]) - streamed).abs().max().item()
print(f"3. Training is streaming: what frame {t + 1}'s last token, at position {query}, sees\n")
columns = {"by the mask": seen, "in the cache": c.positions}
print_tokens(layout, tokens.select(row.tolist()), columns)
print(f"largest difference between its {len(streamed)} logits: {difference:.1e}")
assert seen == c.positions
assert difference < 1e-3

# %% 4. Take the memory away (§3.3)
# The same narrator, but its state stays S_0 = 0, so every segment opens with the same memory
# tokens. Segments end where they truly do, so that only sentences differ. It still sees each
# segment's frames and what it has written. What is lost are things out of sight that no sentence
# has named: what a closed door hides, what was on a place before. It makes them up; their sentences
# are shown. (With the memory
# two of 21 things are wrong here; three in README's run, where the narrator finds the ends itself.)
#
# This is no ablation as in §4.3: nothing was trained anew, and the toy is made so that memory
# matters. In the paper, where each memory is trained, CLAM has half a point of LM-Correctness more
# than the most recent frames (Table 5: 52.2 % and 51.7 %), and 5.5 points of CIDEr where the model
# narrates by itself (Table 3: 35.64 and 30.16).

from stream import Context


class Forgetful(Context):
    def update_memory(self, x: torch.Tensor) -> None:
        pass                                                            # no line 5


ends = {frame: None for frame, _ in narrations}         # of segments; the narrator writes sentences
remembered = sentences_of(Context(narrator), x, ends)
made_up = sentences_of(Forgetful(narrator), x, ends)
print(f"\n4. Take the memory away\n{'truth':48}{'with memory: its end':24}without: its end")
right = right_without = 0
for sentence, text, other in zip(truth, remembered, made_up):
    if sentence.memory_words:
        end, other_end = [" ".join(words.split()[-2:]) for words in (text, other)]
        print(f"{sentence.text:48}{end:24}{other_end}")
        right += sentence.text.endswith(end)
        right_without += sentence.text.endswith(other_end)
print(f"things that are right: {right} with the memory, {right_without} without it")
assert right_without < right / 2

# %% 5. What fits into the memory, and for how long (§3.3, Eq. 2)
# Each key channel forgets at its own pace: half-lives go from less than a second to half a minute.
# And a state has room for so much. The paper's S_t is D x D. Here, as in the authors' code, it is h
# blocks of c x e: D^2 / 8 numbers for h = 4. A head gives the values of about as many random keys
# back as it has key channels, and loses most of many more. So a state of width D holds O(D) pairs of
# key and value, however long the video. (What it holds of this kitchen, `python stream.py
# toy/kitchen.mp4 --explain` says.)

from math import log

import torch.nn.functional as F

print("\n5. What fits into the memory, and for how long")
_, _, log_gate = memory.project(x.flatten(0, 1))                        # [T J, h, c]
# G^n = 1/2 after n = log(1/2) / log(G) tokens; J tokens are a frame
half_life = log(0.5) / log_gate.mean(0) / config.J / config.fps         # [h, c], seconds
for head, seconds in enumerate(half_life):
    print(f"head {head}: half is forgotten after {seconds.min():.0f} to {seconds.max():.0f} s")
_, h, keys, values = memory.initial_state().shape
print(f"c = {keys} key channels, state {h} x {keys} x {values} (D = {config.width})")
found = {}
for n in (8, 16, 64, 256):
    k = F.normalize(torch.randn(n, 1, keys), dim=-1)
    v = torch.randn(n, 1, values)
    _, state = memory.absorb(k, v, log_gate=torch.zeros_like(k))        # nothing is forgotten
    distance = torch.cdist((k @ state)[:, 0], v[:, 0])                  # [n, n]
    found[n] = (distance.argmin(1) == torch.arange(n)).float().mean()   # nearest to its own value
    print(f"of {n:3} random keys in one head, {found[n]:4.0%} give back their value")
assert half_life.max() > 5 * half_life.min() and found[16] > 0.7 and found[256] < 0.2

# %% 6. The loss, token by token (§3.5)
# The model learns to predict the words, and after each frame "," ([SKIP]) or "]" (narrate now). The
# kitchen has 304 frames and 42 sentences. Frame 0 always narrates, so 41 frames learn "]"; the
# other 262 learn [SKIP]. After training the words cost little, and most of what is left of the loss
# is the trigger's. That can hardly be avoided, because the toy's annotators, drawn at random, end
# segments a frame early or late: a model that knew all else would still lose 0.97 nats a segment.

from collections import Counter

from toy.world import JITTER

hidden, labels, _ = narrator(x, narrations)
hidden, labels = hidden[labels != -100], labels[labels != -100]         # those that are learned
losses = F.cross_entropy(narrator.logits(hidden), labels, reduction="none")
names = {layout.skip: ", ([SKIP])", layout.close[0]: "] (narrate now)", layout.eot: "end of text"}
loss, number = Counter(), Counter()
for label, of_token in zip(labels.tolist(), losses.tolist()):
    loss[names.get(label, "words")] += of_token
    number[names.get(label, "words")] += 1
print("\n6. The loss, token by token")
for name in number:
    print(f"{name:16}{number[name]:4} tokens {loss[name] / loss.total():7.1%} of the loss")
trigger = loss[", ([SKIP])"] + loss["] (narrate now)"]
by_chance = -sum(share * log(share) for share in JITTER.values())       # entropy, in nats
print(f"the trigger: {trigger / 41:.2f} nats a segment, {by_chance:.2f} by the annotators' chance")
assert trigger > 0.6 * loss.total() and number["] (narrate now)"] == 41

# %% 7. A training of one minute (§3.5, App. B.6)
# A new narrator on the bundled encoder and language model, which are frozen: 200 steps of one
# video each. The loss begins above 4 and ends below 0.5. Then it narrates the first half minute: its
# segments end within a second or two of true ones, and what is done is often right. With which thing
# is still wrong, above all where only the memory knows it ("after the ..."): that takes far longer
# (docs/training.md).

from narrator import Narrator
from support.engine.frozen import load_llm
from support.engine.first_weights import start_connector, start_memory
from tqdm import trange
from train import loss_of_batch, schedule

learner = Narrator(*load_llm(str(CHECKPOINT / "llm")), config)
examples = [example_of(sample, encoder, layout) for sample in toy_samples(None, "train", limit=50)]
frames = torch.cat([example.x for example in examples])
start_memory(learner.memory, frames)
start_connector(learner.connector, frames)
optimizer = torch.optim.AdamW(learner.trainable().values(), weight_decay=0.0)
losses = []
for step in trange(200, desc="training", leave=False, disable=None):    # None: only in a terminal
    optimizer.param_groups[0]["lr"] = 2e-3 * schedule(step, 200, warmup=0.1)
    losses.append(loss_of_batch(learner, [examples[step % 50]], batch=1))   # forward and backward
    optimizer.step()
    optimizer.zero_grad()
print("\n7. A training of one minute; every 33rd loss:", *[f"{loss:.2f}" for loss in losses[::33]])
print("it narrates:", *sentences_of(Context(learner), x[:60]), sep="\n")
assert losses[-1] < 1
