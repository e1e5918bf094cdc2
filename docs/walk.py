"""A walk through FlowNar in ten cells, one idea each, to be read with the paper open.

    python docs/walk.py             to its end in less than two minutes on two cores

`# %%` begins a cell: VS Code, PyCharm, Spyder and Jupytext open this file as a notebook. The text
above the code of a cell says what to expect, and its assertions say that it came so. A cell uses
what the cells before it have made. All of it happens on toy/kitchen.mp4, with the narrator that
comes with the repository: the numbers are those of this small narrator.
"""

# %% 0. What the cells share
# The narrator, the video, and what counts and prints. Skip it, and come back where a name is new.

import sys
from collections import Counter
from itertools import compress
from math import exp, hypot, log
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import trange

HERE = Path(globals().get("__file__", "walk.py"))       # a notebook has none, and runs in docs/
ROOT = HERE.resolve().parents[1]
sys.path.insert(0, str(ROOT))

from baselines.variants import load_narrator
from commands.narrator import spell
from data import Sample, load_dataset
from evaluate import N_GRAMS, cider, ngrams, overlaps, segments
from narrator import Narrator, Tokens, attention_mask, visible
from stream import Context, generate, narrate
from support.engine.checkpoint import load_llm
from support.files.narrations import Sentence
from toy.read_out import in_words, load_read_out
from toy.words import recall_of_words
from toy.world import JITTER
from train import Example, loss_of_batch, schedule

torch.manual_seed(0)
CHECKPOINT = ROOT / "toy" / "checkpoint"
narrator = load_narrator(str(CHECKPOINT)).merge()       # merge: LoRA into the weights
narrator.requires_grad_(False)
encoder = narrator.vision_encoder()
layout = narrator.layout
config = narrator.config
memory = narrator.memory                                # CLAM
read_out = load_read_out(str(CHECKPOINT))


def example_of(sample: Sample) -> Example:
    """Frame tokens [T, J, D] of a video, and its true narrations (frame, token ids)."""
    x = torch.stack(list(sample.tokens(encoder, batch=16)))
    narrations = [(frame, layout.encode(" " + text)) for frame, text in sample.narrations]
    return Example(x, narrations)


video = next(load_dataset("toy", root=ROOT / "toy"))    # toy/kitchen.mp4
kitchen = example_of(video)
x = kitchen.x                                           # X_t of all frames [T, J, D]
truth = []                                              # the true narrations
for (frame, text), memory_words in zip(video.narrations, video.memory_words):
    truth.append(Sentence((frame + 1) / config.fps, text, memory_words))


class Watched(Context):
    """A stream's Context that also notes the position of each token in its cache."""

    def __init__(self, narrator: Narrator):
        super().__init__(narrator)
        self.positions = []

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> Tensor:
        self.positions += range(self.position, self.position + len(tokens))
        return super().feed(tokens, x)

    def discard(self, now: int) -> int:
        stays = visible(*self.cache.tokens.for_rule(), now, config.last_k)
        self.positions = list(compress(self.positions, stays))
        return super().discard(now)


LEGEND = """\
x: a token of a frame; m: of the memory; $: end of text. After a frame: [SKIP], or ] if it narrates.
Line 18 of Alg. 2 removes the tokens that have no position in the third line. (The positions that
the second line leaves out were those of frame 0, which was removed in the same way.)
"""


def print_tokens(tokens: Tokens, label: str, positions: list[int], later: str, left: list[int]):
    """Three lines: tokens; their positions; those of the tokens that are left."""
    runs = []                           # [name, first position, last position]: equal neighbours
    for name, position in zip(spell(layout, tokens, prompt="prompt"), positions):
        name = name.strip() or "space"
        if runs and runs[-1][0] == name and runs[-1][2] == position - 1:
            runs[-1][2] = position
        else:
            runs.append([name, position, position])
    columns = []
    for name, first, last in runs:
        span = f"{first}-{last}" if last > first else f"{first}"
        columns.append((name, span, span if first in left else ""))
    while columns:
        lines = [f"{text:15}" for text in ("token", label, later)]
        while columns and len(lines[0]) < 90:
            column = columns.pop(0)
            width = 2 + max(len(cell) for cell in column)
            lines = [line + cell.ljust(width) for line, cell in zip(lines, column)]
        print("\n".join(line.rstrip() for line in lines), end="\n\n")


def sentences_of(context: Context, planted: tuple[int, str] | None = None) -> list[str]:
    """What is written of the kitchen, whose segments end where they truly do.

    planted     (n, text): fed as narration n in place of the narrator's own
    """
    given = {frame: None for frame, _ in video.narrations}              # None: it writes itself
    if planted:
        n, text = planted
        frame, _ = video.narrations[n]
        given[frame] = layout.encode(" " + text)
    decisions = narrate(narrator, x, given=given, context=context)
    return [decision.narration.text for decision in decisions if decision.narration]


EXACT, OF_MEMORY = "sentences exactly right", "right words of those that need memory"


def scores_of(texts: list[str]) -> dict[str, float]:
    """Of the kitchen's sentences: two shares, and the mean CIDEr-D."""
    shares = recall_of_words(list(zip(truth, texts)))
    each = cider([(sentence.text, text) for sentence, text in zip(truth, texts)])
    mean = sum(each) / len(each)
    return {EXACT: shares["exact"], OF_MEMORY: shares["memory_words"], "CIDEr-D": mean}


def print_scores(scores: dict[str, float], label: str, others: dict[str, float], other: str):
    """Each score of two kinds of sentences."""
    for name, score in scores.items():
        print(f"{name:40}{score:.3f} {label}, {others[name]:.3f} {other}")


def told_of(text: str, state: Tensor) -> str:
    """What the memory tokens tell of the place in a sentence, "drawer: red apple (0.97, 7 s)": a
    linear map reads them (toy/read_out.py), which the narrator never uses."""
    places = in_words(read_out, memory.read(state)[0]).split("; ")
    return "".join(place for place in places if place.split(":")[0] in text)


def found_again(n: int) -> float:
    """n random keys [c] with values [e] in one head's state [c, e]: the share of the keys that read
    what is nearer to their own value than to any other one."""
    _, _, c, e = memory.initial_state().shape
    k = F.normalize(torch.randn(n, 1, c), dim=-1)
    v = torch.randn(n, 1, e)
    _, state = memory.absorb(k, v, log_gate=torch.zeros_like(k))        # nothing is forgotten
    distance = torch.cdist((k @ state)[:, 0], v[:, 0])                  # [n, n]
    return (distance.argmin(1) == torch.arange(n)).float().mean().item()


def weights_of(text: str, n: int, sentences: list[str]) -> dict[tuple, float]:
    """CIDEr-D's weight of each n-gram of a text: the larger, the fewer of the sentences have it."""
    weights = {}
    for gram, count in ngrams(text.split(), n).items():
        have_it = sum(gram in ngrams(sentence.split(), n) for sentence in sentences)
        weights[gram] = count * log(len(sentences) / max(1, have_it))
    return weights


# How often an annotation strays by -1, 0, 1 frames is known; when is not. An entropy, in nats:
STRAY = -sum(share * log(share) for share in JITTER.values())


# %% 1. From pixels to logits (§3.1, §3.2)
# A picture becomes J = 10 tokens of width D: one for the whole picture, nine for its parts. A
# small network, the connector, takes them to D_lm, the width of the language model's words. From
# then on the model treats them as words. After the last one it says how likely each token is to
# follow.

print("1. From pixels to logits")
picture = torch.from_numpy(next(video.frames()))
x_0 = encoder(picture[None])[0]                                 # X_t
e_0 = narrator.embed_visual(x_0)                                # E_t = MLP(X_t)
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
# Segment 0 is frame 0 and its sentence. Here is segment 1. Its frames are fed until p([SKIP])
# falls to the threshold. The sentence is written, and CLAM is read. Then line 18 removes the
# segment's frames from the cache, and the memory tokens before them. What stays keeps its
# position: holes are left, and the next token gets the position after the last one that was ever
# given.

c = Watched(narrator)                                                   # lines 1-3
y0 = next(narrate(narrator, x, context=c)).narration.tokens             # segment 0
for t in range(1, len(x)):                                              # line 4
    c.update_memory(x[t])                                               # line 5
    fed = c.opening if t == 1 else layout.frame(1)                      # lines 6-8
    if c.trigger(c.feed(fed, x[t])) <= config.theta_low:                # lines 9-13
        break
y1 = generate(c)                                                        # line 15
c.read_memory()                                                         # line 17
tokens, positions = c.cache.tokens, c.positions
c.discard(now=2)                                                        # line 18
print(f'\n2. One segment by hand: frames 1 to {t}, narrated "{layout.decode(y1)}"\n{LEGEND}')
print_tokens(tokens, "at position", positions, "after line 18", c.positions)
assert c.cache.visual == 0 and c.position == 1 + positions[-1]

# %% 3. Training is streaming (§3.5, Fig. 4)
# The stream goes on: frame t + 1 opens segment 2, and its last token sees what is in the cache.
# In training there is no cache. All segments go through the model at once, and the row of a token
# in the mask says what it sees. For the same token these are the same positions, and the logits
# are equal up to rounding: the model streams as it was trained.

streamed = c.feed(layout.opening(2), x[t + 1])
narrations = [(0, y0), (t, y1), (t + 1, [])]                            # segment 2 is left open
hidden, _, tokens = narrator(x, narrations)                             # Narrator.forward
query = c.position - 1                                                  # the frame's last token
row = attention_mask(tokens, config.last_k)[query]
seen = row.nonzero()[:, 0].tolist()
difference = (narrator.logits(hidden[query]) - streamed).abs().max().item()
print(f"3. Training is streaming: what frame {t + 1}'s last token, at position {query}, sees\n")
print_tokens(tokens.select(row.tolist()), "by the mask", seen, "in the cache", c.positions)
print(f"largest difference between its {len(streamed)} logits: {difference:.1e}")
assert seen == c.positions
assert difference < 1e-3

# %% 4. Take the memory away (§3.3)
# The same narrator, but its state stays S_0 = 0, so every segment opens with the same memory
# tokens. It still sees each segment's frames and what it has written. What is lost are things out
# of sight that no sentence has named: what a closed door hides, what was on a place before. It
# cannot know them, and makes them up. That is what CLAM is for.


class Forgetful(Context):
    def update_memory(self, x: Tensor) -> None:
        pass                                                            # no line 5


remembered = sentences_of(Context(narrator))
made_up = sentences_of(Forgetful(narrator))
print(f"\n4. Take the memory away: what is told of things out of sight\n{'with memory':48}without")
for sentence, text, other in zip(truth, remembered, made_up):
    if sentence.memory_words and sentence.time < 60:
        print(f"{text:48}{other}")
with_memory, without = scores_of(remembered), scores_of(made_up)
print_scores(with_memory, "with memory", without, "without")
assert with_memory[OF_MEMORY] > without[OF_MEMORY] + 0.3

# %% 5. Renumber the positions after pruning (App. B.3, Fig. 7, top right)
# Without the counter, positions would follow from the length of the cache. New tokens would get
# positions that others have already, and distances that training never had: sentences get worse.
# A wrong sentence in the context is another matter (§4.2, error propagation). One is planted as
# the sixth, and few later ones change: what is told comes from frames and memory.


class Renumbered(Watched):
    def discard(self, now: int) -> int:
        removed = super().discard(now)
        self.position = len(self.cache.tokens)
        return removed


c = Renumbered(narrator)
renumbered = scores_of(sentences_of(c))
print("\n5. Renumber the positions after pruning: at the end "
      f"{len(c.positions)} tokens share {len(set(c.positions))} positions")
print_scores(with_memory, "with the counter", renumbered, "without")
wrong = sentences_of(Context(narrator), planted=(5, "You wash the white bowl."))
others = [other for text, other in zip(remembered, wrong) if text != other]
changed = len(others) - 1                                               # without the planted one
print(f'"{wrong[5]}" in place of "{remembered[5]}": {changed} of 36 later sentences change')
assert renumbered[EXACT] < with_memory[EXACT] and changed < 6

# %% 6. What a state of fixed size holds (§3.3, Eq. 2)
# Each key channel of CLAM forgets at its own pace: half-lives go from seconds to minutes. So the
# memory tokens that open a segment can tell what is behind a door before the sentence does. How
# much fits? A head with c = 16 key channels gives the values of about as many random keys back,
# and loses most of many more. So a state of width D holds O(D) pairs of key and value, however
# long the video.

_, _, log_gate = memory.project(x.flatten(0, 1))                        # [T J, h, c]
half_life = log(0.5) / log_gate.mean(0) / config.J / config.fps         # [h, c], seconds
print("\n6. What a state of fixed size holds (how sure, how long ago)")
for head, seconds in enumerate(half_life):
    print(f"head {head}: half is forgotten after {seconds.min():.0f} to {seconds.max():.0f} s")
right = []
for (frame, _), sentence in zip(kitchen.narrations, truth[1:]):         # end of the one before
    if "hiding" in sentence.text:
        state = narrator.state_after(x[:frame + 1], kitchen.narrations)
        told = told_of(sentence.text, state)
        right.append(" ".join(sentence.memory_words) in told)
        print(f"read from memory: {told:34}then to be told: {sentence.text}")
for n in (8, 16, 64, 256):
    print(f"of {n:3} random keys in one head, {found_again(n):4.0%} give back their value")
assert half_life.max() > 5 * half_life.min() and sum(right) >= len(right) / 2

# %% 7. The loss, token by token (§3.5)
# The model learns to predict the words, and after each frame "," ([SKIP]) or "]" (narrate now).
# After training the words cost little, and most of what is left of the loss is the trigger's. That
# can hardly be avoided: as people do, the toy's annotators stray by a frame. A model that knew all
# but when they do would still lose 0.97 nats a segment.

hidden, labels, _ = narrator(x, kitchen.narrations)
hidden, labels = hidden[labels != -100], labels[labels != -100]         # those that are learned
losses = F.cross_entropy(narrator.logits(hidden), labels, reduction="none")
names = {layout.skip: ", ([SKIP])", layout.close[0]: "] (narrate now)", layout.eot: "end of text"}
loss, number = Counter(), Counter()
for label, of_token in zip(labels.tolist(), losses.tolist()):
    loss[names.get(label, "words")] += of_token
    number[names.get(label, "words")] += 1
print("\n7. The loss, token by token")
for name in number:
    print(f"{name:16}{number[name]:4} tokens {loss[name] / loss.total():7.1%} of the loss")
trigger = loss[", ([SKIP])"] + loss["] (narrate now)"]
print(f"the trigger: {trigger / (len(truth) - 1):.2f} nats a segment, "
      f"{STRAY:.2f} because people end segments a frame too early or too late")
assert trigger > 0.6 * loss.total()

# %% 8. The trigger, frame by frame (§3.2, Eq. 1)
# p([SKIP]) along the longest segment of the video: near 1 until its end, where it falls. For 4 s
# after a sentence the threshold is theta_low, so that the next one does not come at once, then
# theta.

decisions = list(narrate(narrator, x))
ends = [decision.frame for decision in decisions if decision.narration]
lengths = [end - start for start, end in zip(ends, ends[1:])]
start = ends[lengths.index(max(lengths))]
segment = decisions[start + 1:start + max(lengths) + 1]
print("\n8. The trigger, frame by frame: seconds since the last sentence, p([SKIP]); | threshold")
for decision in segment:
    bar = list("#" * round(50 * decision.p_skip) + " " * 50)
    bar[round(50 * decision.theta)] = "|"
    seconds = (decision.frame - start) / config.fps
    print(f"{seconds:4.1f} s  {decision.p_skip:.3f}  {''.join(bar).rstrip()}")
print(f'the segment ends: "{segment[-1].narration.text}"')
assert segment[-1].p_skip < min(decision.p_skip for decision in segment[:-1])
assert segment[0].theta == config.theta_low and segment[-1].theta == config.theta

# %% 9. An evaluation by hand (§4.1, App. B.5)
# Eight true segments and those of cell 8: a true one is found where its IoU with a predicted one
# is 0.5 or more. Then sentences are compared: here the last of the eight with what cell 4 made up
# without memory. In CIDEr-D an n-gram weighs the more, the fewer true sentences have it: "You"
# and "the" are in all eight and weigh log(8 / 8) = 0. The score is 10 times the mean cosine of the
# weights over n, and less if the lengths differ.

iou, _ = overlaps(segments([sentence.time for sentence in truth[:8]]),
                  segments([(end + 1) / config.fps for end in ends[:8]]))
print("\n9. An evaluation by hand: IoU in %, true segments in rows, predicted ones in columns")
print((100 * iou).round().astype(int))
true = [sentence.text for sentence in truth[:8]]
cosines = []
for n in N_GRAMS:
    r, s = weights_of(true[7], n, true), weights_of(made_up[7], n, true)
    both = {" ".join(gram): r[gram] for gram in r if gram in s and r[gram] > 0}
    cosines.append(hypot(*both.values()) ** 2 / hypot(*r.values()) / hypot(*s.values()))
    print(f"n = {n}: cosine {cosines[-1]:.3f}; in both: {', '.join(both)}")
longer = len(made_up[7].split()) - len(true[7].split())
score = 10 * sum(cosines) / 4 * exp(-longer ** 2 / (2 * 6 ** 2))
print(f'CIDEr-D {score:.3f}: "{made_up[7]}" for "{true[7]}"')
assert abs(score - cider(list(zip(true, made_up)))[7]) < 1e-6

# %% 10. A training of one minute (§3.5, App. B.6)
# A new narrator on the bundled encoder and language model, which are frozen: 200 steps of one
# video each. The loss begins above 4 and ends below 0.5. By then it writes sentences, knows when,
# and often what is done. Things take longer, and the use of the memory far longer
# (docs/training.md).

learner = Narrator(*load_llm(str(CHECKPOINT / "llm")), config)
examples = [example_of(sample) for sample in load_dataset("toy", split="train", limit=50)]
learner.initialise(torch.cat([example.x for example in examples]))
optimizer = torch.optim.AdamW(learner.trainable().values(), weight_decay=0.0)
losses = []
for step in trange(200, desc="training", leave=False):
    optimizer.param_groups[0]["lr"] = 2e-3 * schedule(step, 200, warmup=0.1)
    losses.append(loss_of_batch(learner, [examples[step % 50]], batch=1))   # forward and backward
    optimizer.step()
    optimizer.zero_grad()
print("\n10. A training of one minute; every 33rd loss:", *[f"{loss:.2f}" for loss in losses[::33]])
written = [decision.narration for decision in narrate(learner, x[:48]) if decision.narration]
for narration, sentence in zip(written, truth):
    print(f"{narration.end:4} s  {narration.text:48}true: {sentence.text}")
assert losses[-1] < 1 and all(narration.text.endswith(".") for narration in written)
