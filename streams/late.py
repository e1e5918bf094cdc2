"""Training videos as if they were late in a long stream (train.py --long; not in the paper): with
the memory of other videos, and with positions far beyond those of any video.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import narrator as nar
from train import Batches, Example, Recipe


class Past(NamedTuple):
    """What came before a video."""
    state: object              # of the memory, S_t; None: the initial one
    tokens: int                # how many were fed, and pruned, between the prompt and the video

    def positions(self, tokens: nar.Tokens) -> Tensor:
        """Those of the video's tokens [L]: the prompt's stay, all others have advanced."""
        positions = torch.arange(len(tokens))
        in_prompt = [n == 0 and kind != nar.NARRATION
                     for n, kind in zip(tokens.segment, tokens.kind)]
        positions[~torch.tensor(in_prompt)] += self.tokens
        return positions

    def hidden(self, narrator: nar.Narrator, x: Tensor, narrations: nar.Narrations) -> Tensor:
        """As `Narrator.forward`: hidden states [L, D_lm] of a video that comes after this."""
        tokens = narrator.layout.sequence(narrations)
        last, _ = narrations[-1]
        x = x[:last + 1]
        memory = narrator.read_outs(x, narrations, self.state)
        return narrator.parallel(tokens, x, memory, self.positions(tokens))

    def loss(self, narrator: nar.Narrator, x: Tensor,
             narrations: nar.Narrations) -> tuple[Tensor, int]:
        """As `Narrator.loss`."""
        labels = narrator.layout.sequence(narrations).labels()
        return narrator.loss_of(self.hidden(narrator, x, narrations), labels)


@dataclass
class LateExample(Example):
    """A training video with a Past: the memory of others, and positions that have advanced."""
    earlier: list[Example]     # in the order in which they were shown
    tokens: int

    def loss(self, narrator: nar.Narrator) -> tuple[Tensor, int]:
        past = Past(memory_after(narrator, self.earlier), self.tokens)
        return past.loss(narrator, self.x, self.narrations)


class LateBatches(Batches):
    """A fraction of the videos (--long) come after one to three others, and their positions have
    advanced by 1 to 100,000 (log-uniform).

    plain       of which batches they are taken
    """

    def __init__(
        self,
        examples: Sequence[Example],
        options: Recipe,
        plain: type[Batches] = Batches,
    ):
        super().__init__(examples, options)
        self.plain = plain(examples, options)

    def of_step(self, step: int) -> list[Callable[[], Example]]:
        chance = random.Random(f"{self.options.seed} {step}")
        videos = self.plain.of_step(step)
        for i, read in enumerate(videos):
            if chance.random() < self.options.long:
                count = len(self.examples)
                earlier = [chance.randrange(count) for _ in range(chance.randint(1, 3))]
                tokens = round(10 ** chance.uniform(0, 5))
                videos[i] = partial(self.read_late, read, earlier, tokens)
        return videos

    def read_late(self, read: Callable[[], Example], earlier: list[int],
                  tokens: int) -> LateExample:
        video = read()
        earlier = [self.examples[i] for i in earlier]
        return LateExample(video.x, video.narrations, earlier, tokens)


@torch.no_grad()
def memory_after(narrator: nar.Narrator, videos: list[Example]):
    """The state of the memory after these videos, one after the other."""
    x = torch.cat([video.x for video in videos])
    # a memory of narrations (baselines) reads their words; frames count from each video's start
    narrations = []
    for video in videos:
        narrations += video.narrations
    return narrator.state_after(x, narrations)
