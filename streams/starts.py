"""Own videos are trained as they are streamed (not in the paper): from the start of the file, and
from any frame, so that a narrator cannot learn by heart after how many frames to speak.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import narrator as nar
from data import Sample
from evaluate import measure_video, of_each, self_conditioned, to_predictions
from support.engine.run import order
from support.files.features import FromFrame
from support.files.tracks import Sentence, frame_at, time_of
from train import Read, read_example

VIDEOS = 8              # that are streamed when a training has ended


def sample_from(sample: Sample, frame: int) -> Sample:
    """A sample from another frame of its file on. As in a stream, the first frame has a sentence:
    that in which it lies, which is said again at its own time.
    """
    fps = sample.fps
    end = sample.read.first + sample.num_frames
    sentences = [sentence for sentence in sample.annotators[0]
                 if frame_at(sentence.time, fps) >= frame]
    present = sentences[0]
    if frame_at(present.time, fps) > frame:
        sentences.insert(0, Sentence(time_of(frame, fps), present.text))
    return replace(
        sample,
        annotators=[sentences],
        read=FromFrame(sample.read.features, frame),
        start=frame / fps,
        num_frames=end - frame,
    )


def draw_start(sample: Sample, chance: random.Random) -> int:
    """A frame of the file: that of the first sentence, the first one, or (half of the time) any up to
    the last sentence.
    """
    first = sample.read.first
    last, _ = sample.narrations[-1]
    anywhere = chance.randint(0, first + last)
    return chance.choice([first, 0, anywhere, anywhere])


def from_anywhere(
    samples: Sequence[Sample],
    layout: nar.Layout,
    batch: int,
    seed: int,
) -> Callable[[int], list[Read]]:
    """As `train.in_order`, each video from a frame that is drawn anew for each step."""
    def videos_of(step: int) -> list[Read]:
        chance = random.Random(f"starts {seed} {step}")
        videos = []
        for index in order(len(samples), batch, step, seed):
            sample = samples[index]
            sample = sample_from(sample, draw_start(sample, chance))
            videos.append(partial(read_example, sample, layout))
        return videos

    return videos_of


# ------------------------------------------------------ what has been learned


def streamed_f1(narrator: nar.Narrator, samples: list[Sample]) -> float | None:
    """The mean F1 of videos that are streamed from the start of their files, as stream.py does;
    None without videos.
    """
    def f1_of(sample: Sample) -> float:
        whole = replace(
            sample,
            read=FromFrame(sample.read.features, 0),
            start=0.0,
            num_frames=sample.read.first + sample.num_frames,
        )
        predicted = to_predictions(self_conditioned(narrator, whole))
        alignment, _ = measure_video(sample, predicted)
        return alignment["f1"]

    made, _ = of_each(samples[:VIDEOS], f1_of, "streaming")
    return sum(made.values()) / len(made) if made else None
