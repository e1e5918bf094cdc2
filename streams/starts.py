"""Own videos are trained as they are streamed (not in the paper): from the start of the file, and
from any frame, so that a narrator cannot learn by heart after how many frames to speak.
"""
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import narrator as nar
from data import Sample
from evaluate import measure_video, of_each, self_conditioned, to_predictions
from support.common.processes import my_share, sum_of
from support.engine.run import order
from support.files.features import FromFrame
from support.files.tracks import Sentence, frame_at, time_of
from train import Batches, Example, Examples

VIDEOS = 8              # that are looked at, of each split, when a training has ended
BY_HEART = 3.0          # times the loss on training videos


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


class BatchesFromAnywhere(Batches):
    """Own videos, each from a frame that is drawn anew for each step."""
    examples: Examples

    def of_step(self, step: int) -> list[Callable[[], Example]]:
        seed = self.options.seed
        chance = random.Random(f"starts {seed} {step}")
        videos = []
        for index in order(len(self.examples), self.options.batch, step, seed):
            sample = self.examples.samples[index]
            sample = sample_from(sample, draw_start(sample, chance))
            videos.append(partial(self.examples.example_of, sample))
        return videos


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


@torch.no_grad()
def loss_of_trigger(narrator: nar.Narrator, examples: Examples) -> float:
    """The mean loss of the trigger alone, [SKIP] or the end of the segment after each frame."""
    def of_this_process() -> tuple[float, int]:
        total = 0.0
        number = 0
        for i in my_share(range(min(VIDEOS, len(examples)))):
            example = examples[i]
            hidden, labels, tokens = narrator(example.x, example.narrations)
            followed_by = torch.tensor([*tokens.kind[1:], nar.PROMPT])
            labels = torch.where(followed_by == nar.VISUAL, labels, -100)
            loss, learned = narrator.loss_of(hidden, labels)
            total += loss.item()
            number += learned
        return total, number

    total, number = sum_of(of_this_process)
    return total / max(1, number)


def what_is_learned(narrator: nar.Narrator, examples: Examples, held_out: Examples) -> list[str]:
    """Lines about a trained narrator: F1 of its streams, and whether it has learned by heart when
    to speak.
    """
    lines = []
    f1 = streamed_f1(narrator, held_out.samples)
    if f1 is not None:
        lines.append(f"streamed from the start of the files, the held-out videos have F1 {f1:.3f}")
    known = loss_of_trigger(narrator, examples)
    new = loss_of_trigger(narrator, held_out)
    if len(held_out) and new > BY_HEART * known + 0.01:
        lines.append(f"when to speak is learned by heart: the trigger's loss is {known:.3f} on "
                     f"training videos and {new:.3f} on held-out ones. Can the end of a segment be "
                     f"seen in the pictures? Otherwise more videos are needed, or fewer --epochs")
    return lines
