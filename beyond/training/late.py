"""Training videos as if they were late in a long stream (train.py --long; not in the paper): with
the memory of other videos, and with positions far beyond those of any video.
"""
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import narrator as nar
from train import Example, Read


VideosOf = Callable[[int], list[Read]]          # the number of a step -> its videos


class Past(NamedTuple):
    """What came before a video."""
    state: object              # of the memory, S_t; None: the initial one
    tokens: int                # how many were fed, and pruned, between the prompt and the video

    def hidden(self, narrator: nar.Narrator, x: Tensor, narrations: nar.Narrations) -> Tensor:
        """As `Narrator.forward`: hidden states [L, D_lm] of a video that comes after this."""
        tokens = narrator.layout.sequence(narrations)
        last, _ = narrations[-1]
        x = x[:last + 1]
        memory = narrator.read_outs(x, narrations, self.state)
        positions = torch.arange(len(tokens))               # the prompt's stay, all others advance
        has_advanced = [n > 0 or kind == nar.NARRATION
                        for n, kind in zip(tokens.segment, tokens.kind)]
        positions[torch.tensor(has_advanced)] += self.tokens
        return narrator.parallel(tokens, x, memory, positions)

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


def late(
    videos_of: VideosOf,
    videos: Sequence[Read],
    share: float,
    seed: int,
) -> VideosOf:
    """`videos_of`, of whose videos a share (--long) come after one to three others of `videos`, and
    whose positions have advanced by 1 to 100,000 (log-uniform).
    """
    def late_videos_of(step: int) -> list[Read]:
        chance = random.Random(f"{seed} {step}")
        of_step = videos_of(step)
        for i, read in enumerate(of_step):
            if chance.random() < share:
                count = chance.randint(1, 3)
                earlier = [videos[chance.randrange(len(videos))] for _ in range(count)]
                tokens = round(10 ** chance.uniform(0, 5))
                of_step[i] = partial(read_late, read, earlier, tokens)
        return of_step

    return late_videos_of


def read_late(read: Read, earlier: list[Read], tokens: int) -> LateExample:
    video = read()
    shown = [read_earlier() for read_earlier in earlier]
    return LateExample(video.x, video.narrations, shown, tokens)


@torch.no_grad()
def memory_after(narrator: nar.Narrator, videos: list[Example]):
    """The state of the memory after these videos, one after the other."""
    x = torch.cat([video.x for video in videos])
    # a memory of narrations (baselines) reads their words; frames count from each video's start
    narrations = []
    for video in videos:
        narrations += video.narrations
    return narrator.state_after(x, narrations)
