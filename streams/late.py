"""Training videos as if they were late in a long stream (train.py --long; not in the paper): with the
memory of other videos, and with positions far beyond those of any video.
"""
from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

import narrator as nar
from support.common.devices import rank


class Past(NamedTuple):
    """What came before a video."""
    state: object              # of the memory, S_t; None: the initial one
    tokens: int                # how many were fed, and pruned, between the prompt and the video

    def positions(self, tokens: nar.Tokens) -> Tensor:
        """Those of the video's tokens [L]: the prompt's stay, all others have advanced."""
        positions = tokens.positions()
        in_prompt = [n == 0 and kind != nar.NARRATION
                     for n, kind in zip(tokens.segment, tokens.kind)]
        positions[~torch.tensor(in_prompt)] += self.tokens
        return positions


def late_in_a_stream(narrator: nar.Narrator, videos: Iterator, examples: Sequence, options,
                     step: int) -> Iterator:
    """This process's videos of a step, a fraction of them (--long) with a Past: the memory of one
    to three other videos, and positions that have advanced by 1 to 100,000 (log-uniform).

    videos, examples    train.py: Example
    options             train.py: Recipe
    """
    process, processes = rank()
    chance = random.Random(f"{options.seed} {step}")
    for i in range(options.batch):
        # drawn for the videos of other processes, too: all draw the same
        earlier = []
        tokens = 0
        if chance.random() < options.long:
            earlier = [chance.randrange(len(examples)) for _ in range(chance.randint(1, 3))]
            tokens = round(10 ** chance.uniform(0, 5))
        if i % processes != process:
            continue
        video = next(videos)
        past = None
        if earlier:
            past = Past(memory_after(narrator, [examples[j] for j in earlier]), tokens)
        yield replace(video, past=past)


@torch.no_grad()
def memory_after(narrator: nar.Narrator, videos: list):
    """The state of the memory after these videos, one after the other."""
    x = torch.cat([video.x for video in videos])
    # a memory of narrations (baselines) reads their words; frames count from each video's start
    narrations = []
    for video in videos:
        narrations += video.narrations
    return narrator.state_after(x, narrations)
