"""Own videos are trained as they are streamed (not in the paper): from the start of the file, and
from any frame, so that a narrator cannot learn by heart after how many frames to speak.
"""
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import narrator as nar
from beyond.training.late import VideosOf
from data import Sample
from support.files.sentences import Sentence, frame_at, time_of
from train import Example, Read, order, read_example


@dataclass
class Rest(Example):
    """What is left of a video. Its first sentence is the one before it: it is given, not learned, as
    one picture cannot tell it. (Of the share of --long it is learned: late.py has a loss of its own.)
    """
    def loss(self, narrator: nar.Narrator) -> tuple[Tensor, int]:
        hidden, labels, tokens = narrator(self.x, self.narrations)
        labels[torch.tensor(tokens.segment) == 0] = -100
        return narrator.loss_of(hidden, labels)


def sample_from(sample: Sample, frame: int) -> Sample:
    """A sample from another frame of its file on. As in a stream, the first frame has a sentence: the
    latest one, or, before the first one, that one, which is said again at its own time.
    """
    fps = sample.fps
    end = sample.first + sample.num_frames
    before = [sentence for sentence in sample.annotators[0] if frame_at(sentence.time, fps) <= frame]
    after = sample.annotators[0][len(before):]
    latest = before[-1] if before else after[0]
    return replace(
        sample,
        annotators=[[Sentence(time_of(frame, fps), latest.text), *after]],
        first=frame,
        start=frame / fps,
        num_frames=end - frame,
    )


def draw_start(sample: Sample, chance: random.Random) -> int:
    """A frame of the file: that of the first sentence, the first one, or (half of the time) any before
    the last sentence.
    """
    first = sample.first
    last, _ = sample.narrations[-1]
    anywhere = chance.randint(0, max(first, first + last - 1))
    return chance.choice([first, 0, anywhere, anywhere])


def read_rest(sample: Sample, layout: nar.Layout) -> Rest:
    video = read_example(sample, layout)
    return Rest(video.x, video.narrations)


def from_anywhere(
    samples: Sequence[Sample],
    layout: nar.Layout,
    batch: int,
    seed: int,
) -> VideosOf:
    """As `train.in_order`, each video from a frame that is drawn anew for each step."""
    def videos_of(step: int) -> list[Read]:
        chance = random.Random(f"starts {seed} {step}")
        videos = []
        for index in order(len(samples), batch, step, seed):
            sample = samples[index]
            start = draw_start(sample, chance)
            read = read_rest if start > sample.first else read_example
            videos.append(partial(read, sample_from(sample, start), layout))
        return videos

    return videos_of
