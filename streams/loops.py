"""What goes wrong in long streams, and no score of §4.1 tells (not in the paper): sentences that are
said again and again, and sentences that come late.

Of videos of any data set, from true and predicted sentences alone.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

import numpy as np

from evaluate import TAU, average, overlaps, segments
from support.files.tracks import NarratedVideo, Sentence

PERIODS = (1, 2)                               # of loops: A A, and A B A B


class Course(NamedTuple):
    """What is measured of one video, or of several one after the other."""
    minutes: list[str]                         # of each narration: see `minutes_of`
    repeated: list[bool]                       # and whether it is
    delays: list[float]                        # of each matched narration [s]


def course_of(truth: NarratedVideo, predicted: list[Sentence]) -> Course:
    minutes = [minutes_of(sentence.time - truth.start) for sentence in predicted]
    return Course(minutes, are_repeated(truth, predicted), delays_of(truth, predicted))


def fits(
    truth: NarratedVideo,
    predicted: list[Sentence],
) -> Iterator[tuple[list[Sentence], np.ndarray, np.ndarray]]:
    """The sentences of each annotator who has any, and IoU and GIoU of their segments with the
    predicted ones [N, P].
    """
    streamed = segments([sentence.time for sentence in predicted], truth.origin)
    for sentences in filter(None, truth.annotators):
        true = segments([sentence.time for sentence in sentences], truth.origin)
        yield sentences, *overlaps(true, streamed)


def are_repeated(truth: NarratedVideo, predicted: list[Sentence]) -> list[bool]:
    """Whether each narration is part of a loop: it says what the narration before it said (A A); or
    it and the one before it say what the two before them said (A B A B).

    Unless it may say so, because the truth does (`may_be_said_again`). So who narrates like an
    annotator has no loops, and who says twice what happens once has one.
    """
    said = [sentence.text for sentence in predicted]
    true_sentences = []                        # of each annotator: the best one for each narration
    if predicted:
        for sentences, _, giou in fits(truth, predicted):
            true_sentences.append([sentences[n] for n in giou.argmax(axis=0)])

    repeated = []
    for n, text in enumerate(said):
        is_loop = False
        for period in PERIODS:
            earlier = n - period
            latest = said[earlier + 1:n + 1]
            before = said[earlier - period + 1:earlier + 1]       # at the start, of another length
            if latest != before:
                continue
            allowed = [may_be_said_again(text, true[earlier], true[n]) for true in true_sentences]
            if not any(allowed):
                is_loop = True
        repeated.append(is_loop)
    return repeated


def may_be_said_again(text: str, earlier: Sentence, now: Sentence) -> bool:
    """Whether a narration may say what an earlier one said, where these two true sentences of an
    annotator fit the two best (GIoU).

    They are two, and either the truth repeats itself, too, in whatever words, or the text is right.
    """
    if now is earlier:
        return False
    return now.text == earlier.text or now.text == text


def delays_of(truth: NarratedVideo, predicted: list[Sentence]) -> list[float]:
    """By how many seconds narrations come after the true ends of their segments (< 0: before).

    Of the true sentences whose best segment (GIoU) matches (IoU of at least TAU).
    """
    delays = []
    if predicted:
        for sentences, iou, giou in fits(truth, predicted):
            for sentence, best, of_sentence in zip(sentences, giou.argmax(axis=1), iou):
                if of_sentence[best] >= TAU:
                    delays.append(predicted[best].time - sentence.time)
    return delays


def minutes_of(seconds: float) -> str:
    """The minutes of a stream in which a time is: 1, 2, 3-4, 5-8, 9-16, ..."""
    minute = max(1, ceil(seconds / 60))
    last = 1 << (minute - 1).bit_length()
    first = last // 2 + 1
    return f"{first}-{last}" if first < last else str(last)


def summary_of_course(courses: list[Course]) -> dict[str, float | None]:
    """Of all narrations of some videos together; None where there is nothing to measure.

    repeated                    share of the narrations that are (`are_repeated`)
    repeated_in_minutes_3-4     the same of those in these minutes; and so on
    delay_s, delay_s_95         mean and 95 % quantile of `delays_of`
    """
    repeated = []
    delays = []
    by_minutes = defaultdict(list)
    for course in courses:
        repeated += course.repeated
        delays += course.delays
        for minutes, is_repeated in zip(course.minutes, course.repeated):
            by_minutes[minutes].append(is_repeated)

    summary = {
        "delay_s": average(delays),
        "delay_s_95": float(np.quantile(delays, 0.95)) if delays else None,
        "repeated": average(repeated),
    }
    in_order = sorted(by_minutes, key=lambda minutes: int(minutes.split("-")[0]))
    for minutes in in_order:
        summary[f"repeated_in_minutes_{minutes}"] = average(by_minutes[minutes])
    return summary
