"""What docs/walk.py prints with: tokens in columns, and a stream that notes positions."""
from itertools import groupby

import torch
from torch import Tensor

from beyond.commands.drawing import spell
from data import Sample
from narrator import NARRATION, Layout, Narrator, Tokens, VisionEncoder, visible
from stream import Context, narrate
from train import Example


def example_of(sample: Sample, encoder: VisionEncoder, layout: Layout) -> Example:
    """Frame tokens [T, J, D] of a video, and its true narrations (frame, token ids)."""
    x = torch.stack(list(sample.tokens(encoder, batch=16)))
    narrations = layout.encode_narrations(sample.narrations)
    return Example(x, narrations)


class Watched(Context):
    """A stream's Context that also notes the position of each token in its cache."""

    def __init__(self, narrator: Narrator):
        super().__init__(narrator)
        self.positions = []
        self.after = []     # of the tokens before the latest line 18: positions; None: removed

    def feed(self, tokens: Tokens, x: Tensor | None = None) -> Tensor:
        self.positions += range(self.position, self.position + len(tokens))
        return super().feed(tokens, x)

    def discard(self, now: int) -> int:
        stays = visible(self.cache.tokens, now, self.narrator.config.last_k).tolist()
        self.after = [p if stay else None for p, stay in zip(self.positions, stays)]
        self.positions = [p for p in self.after if p is not None]
        return super().discard(now)


LEGEND = """\
x: a token of a frame; m: a memory token; $: end of text; [SKIP]: a comma. "]" closes the memory;
after a frame it means "narrate". What has no position in the last column is removed at line 18.
(The positions that the first column leaves out were those of frame 0, removed in the same way.)
"""


def print_tokens(layout: Layout, tokens: Tokens, columns: dict[str, list[int | None]]) -> None:
    """A line for each run of like tokens, with its first and last position in each column."""
    names = spell(layout, tokens, prompt="user")
    names[:len(layout.prompt)] = ["system"] * len(layout.prompt)

    def likeness(i: int):
        """Neighbours that are like each other: equal names, or the text of one sentence."""
        if tokens.kind[i] == NARRATION:
            return tokens.segment[i], tokens.number[i]
        return names[i]

    heads = "".join(f"{head:18}" for head in columns)
    print(f"{'tokens':48}{heads}".rstrip())
    for _, run in groupby(range(len(tokens)), likeness):
        run = list(run)
        name = names[run[0]]
        if tokens.kind[run[0]] == NARRATION:
            name = "".join(names[i] for i in run)
        line = f"{name:48}"
        for positions in columns.values():
            first, last = positions[run[0]], positions[run[-1]]
            span = "" if first is None else f"{first}-{last}"
            line += f"{span:18}"
        print(line.rstrip())
    print()


def sentences_of(
    context: Context,
    x: Tensor,
    given: dict[int, list[int] | None] | None = None,
) -> list[str]:
    """The sentence of each segment of a video x [T, J, D].

    given       the ends of segments, if the narrator does not choose them: {frame: None}
    """
    decisions = narrate(context.narrator, x, given=given, context=context)
    return [decision.narration.text for decision in decisions if decision.narration]
