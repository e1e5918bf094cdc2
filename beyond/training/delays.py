"""What no score of §4.1 tells of long streams (not in the paper): sentences that are said again, and
sentences that come late.
"""
from itertools import pairwise

from evaluate import TAU, average, overlaps, segments
from support.files.sentences import NarratedVideo, Sentence


# of each predicted sentence, whether it is repeated; of matched true ones, the delays [s]
Course = tuple[list[bool], list[float]]


def course_of(truth: NarratedVideo, predicted: list[Sentence]) -> Course:
    """Whether each predicted sentence is repeated: it is equal to the one before it, and the truth
    is not. And the delays [s] of those true sentences that are matched.

    The truth is equal, too, if the sentences of an annotator that fit the two best (GIoU) are two and
    equal. So who narrates like an annotator repeats nothing, and who says twice what happens once
    does. A delay (< 0: before the true end) is that of the best segment (GIoU), if that matches (IoU
    of at least TAU).
    """
    repeated = [False for _ in predicted]
    for n, (before, now) in enumerate(pairwise(predicted), 1):
        repeated[n] = now.text == before.text
    delays = []
    streamed = segments([sentence.time for sentence in predicted], truth.origin)
    for sentences in truth.annotators:
        if not sentences or not predicted:
            continue
        true = segments([sentence.time for sentence in sentences], truth.origin)
        iou, giou = overlaps(true, streamed)                                        # [N, P]
        for n, (before, now) in enumerate(pairwise(giou.argmax(axis=0)), 1):
            if before != now and sentences[before].text == sentences[now].text:
                repeated[n] = False
        for sentence, best, overlap in zip(sentences, giou.argmax(axis=1), iou):
            if overlap[best] >= TAU:
                delays.append(predicted[best].time - sentence.time)
    return repeated, delays


def means_of_courses(courses: list[Course]) -> dict[str, float | None]:
    """Over all sentences of some videos; None where there is nothing to measure."""
    repeated = []
    delays = []
    for of_video, delays_of_video in courses:
        repeated += of_video
        delays += delays_of_video
    return {"delay_s": average(delays), "repeated": average(repeated)}
