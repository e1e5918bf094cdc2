"""Evaluation (paper §4.1, App. B.5): alignment in time, caption scores, teacher forcing.

    python evaluate.py score      predictions and ground truth, both from files
    python evaluate.py stream     self-conditioned: the model narrates a split of a data set, then
                                  `score`
    python evaluate.py teacher    teacher-forced: true narrations and segment ends are given, and
                                  the model predicts the next token

Every narration closes a segment that began at the narration before it. Segments give precision,
recall and F1. The sentence of every true segment is compared with the sentence of the predicted
segment that fits it best (GIoU), by caption scores. Videos without a true narration are left out,
and their number is reported.

Glossary (P predicted, N true segments):
    segments    (start, end) in seconds                                   [P or N, 2]
    iou, giou   of every true with every predicted segment                [N, P]

Does not include: what streaming costs and what narrations attend to (beyond/experiments/cost.py,
beyond/experiments/attention.py).
"""
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import narrator as nar
from data import Sample
from stream import Cache, Context, narrate
from support.common.errors import BadData
from support.common.java import meteor
from support.common.processes import in_shares, my_share
from support.common.progress import progress, say
from support.files.sentences import NarratedVideo, Sentence

TAU = 0.5                     # IoU from which two segments match


# ------------------------------------------------------ temporal alignment (App. B.5)


def segments(times: list[float], start: float = 0.0) -> np.ndarray:
    """Narration times -> segments (previous time, time), the first from `start` [P, 2].

    Reversed bounds are swapped.
    """
    rows = []
    for time in times:
        rows.append(sorted([start, time]))
        start = time
    return np.array(rows, dtype=float).reshape(-1, 2)


def overlaps(truth: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """IoU and generalised IoU of true [N, 2] with predicted [P, 2] segments -> [N, P] each.

        IoU  = intersection / union
        GIoU = IoU - gap, the share of the segment that encloses both which neither covers
    """
    true_start, true_end = truth.T[:, :, None]                              # [N, 1] each
    start, end = predicted.T[:, None, :]                                    # [1, P] each
    later_start = np.maximum(true_start, start)                             # [N, P]
    earlier_end = np.minimum(true_end, end)
    intersection = np.maximum(earlier_end - later_start, 0)
    true_length = true_end - true_start
    length = end - start
    union = np.maximum(true_length + length - intersection, 1e-8)
    earlier_start = np.minimum(true_start, start)
    later_end = np.maximum(true_end, end)
    enclosing = np.maximum(later_end - earlier_start, 1e-8)
    iou = intersection / union
    gap = (enclosing - union) / enclosing
    return iou, iou - gap


def precision_recall_f1(iou: np.ndarray) -> dict[str, float]:
    """Precision, recall and F1 at IoU 0.5 (TAU) of one video from iou [N, P]; all 0 where nothing
    is predicted. `evaluate` takes the mean over videos.
    """
    if iou.size == 0:
        return {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    matches = iou >= TAU                            # [N, P]
    is_right = matches.any(axis=0)                  # predicted segments that match a true one
    is_found = matches.any(axis=1)                  # true segments that match a predicted one
    precision = is_right.mean().item()
    recall = is_found.mean().item()
    f1 = 2 * precision * recall / max(precision + recall, 1e-8)
    return {"precision": precision, "recall": recall, "f1": f1}


def measure_video(
    truth: NarratedVideo,
    predicted: list[Sentence],
) -> tuple[dict[str, float | None], list[tuple[Sentence, str]]]:
    """Precision, recall and F1 of one video, its pace (Fig. 9), and its pairs (true sentence,
    predicted text).

    The video has a true narration. Each true sentence is paired with the predicted sentence of
    highest GIoU, however small, or with "" if nothing is predicted. Each annotator's narrations make
    their own segments.

    The pace is narrations a minute, and the mean length of segments in seconds. If the length of the
    video is not known (`score`), it is the span of the true narrations. The true number is the mean
    over annotators.
    """
    annotators = [annotator for annotator in truth.annotators if annotator]
    sentences = sum(annotators, [])
    true = np.concatenate([segments([sentence.time for sentence in annotator], truth.origin)
                           for annotator in annotators])
    streamed = segments([sentence.time for sentence in predicted], truth.origin)
    iou, giou = overlaps(true, streamed)
    pairs = []
    for n, sentence in enumerate(sentences):
        text = ""
        if predicted:
            best = giou[n].argmax()
            text = predicted[best].text
        pairs.append((sentence, text))

    minutes = (truth.seconds or true.max() - truth.origin) / 60
    pace = {
        "narrations_per_minute": None,
        "segment_s": average(np.diff(streamed)),
        "true_narrations_per_minute": None,
        "true_segment_s": average(np.diff(true)),
    }
    if minutes > 0:
        pace["narrations_per_minute"] = len(streamed) / minutes
        pace["true_narrations_per_minute"] = len(true) / len(annotators) / minutes
    return precision_recall_f1(iou) | pace, pairs


class Evaluation(NamedTuple):
    """The measures of a set of videos, by name, and what they are of."""
    result: dict[str, float | None]                     # of all videos together
    each: dict[str, dict[str, float | None]]            # of each video
    pairs: dict[str, list[tuple[Sentence, str]]]        # by video: (true sentence, predicted text)


def evaluate(
    truths: dict[str, NarratedVideo],
    predictions: dict[str, list[Sentence]],
    with_meteor: bool = False,
) -> Evaluation:
    """All measures of a set of videos.

    Temporal alignment and pace are means over videos. Captions are scored over the pairs of all
    videos; METEOR, which needs Java and seconds, is None unless `with_meteor` asks for it and it can
    be computed. As in the authors' code, a video without any true narration is left out; BadData if
    no video is left.
    """
    each = {}
    pairs = {}
    for name, truth in truths.items():
        if any(truth.annotators):
            each[name], pairs[name] = measure_video(truth, predictions[name])
    if not pairs:
        raise BadData("there is nothing to score: no video has a true narration")

    texts = []                              # of all pairs: the true sentence, the predicted one
    for matched in pairs.values():
        texts += [(sentence.text, text) for sentence, text in matched]
    corpus, captions = caption_scores(texts, with_meteor)

    result = {
        "videos": len(pairs),
        "without_truth": len(truths) - len(pairs),
        "narrations": len(texts),
        "predicted": sum(len(predictions[name]) for name in pairs),
    }
    result |= corpus
    result.setdefault("meteor", None)
    first_video = next(iter(each.values()))     # all have the same measures
    for measure in first_video:
        result[measure] = average([measures[measure] for measures in each.values()])
    begin = 0                                  # of the video's pairs among those of all videos
    for name, matched in pairs.items():
        end = begin + len(matched)
        each[name]["narrations"] = len(matched)
        for score, values in captions.items():
            each[name][score] = average(values[begin:end])
        begin = end
    return Evaluation(result, each, pairs)


def average(values) -> float | None:
    """The mean of those that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


def by_duration(minutes: dict[str, float]) -> list[tuple[str, list[str]]]:
    """Videos grouped by length as in the paper's duration tables (Tables 6, 7); groups without
    videos are left out.
    """
    groups = {"<= 2 min": [], "2 - 4 min": [], "4 - 8 min": [], ">= 8 min": []}
    for name, length in minutes.items():
        if length >= 8:
            label = ">= 8 min"
        elif length > 4:
            label = "4 - 8 min"
        elif length > 2:
            label = "2 - 4 min"
        else:
            label = "<= 2 min"
        groups[label].append(name)
    return [(label, names) for label, names in groups.items() if names]


# ------------------------------------------------------ caption scores (§4.1)

# In the formulas below, r is the true sentence (the reference) and s is the predicted one.

N_GRAMS = range(1, 5)
Pair = tuple[str, str]


def caption_scores(pairs: list[Pair],
                   with_meteor: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
    """All scores of the corpus, and all scores of each pair; both by name.

    CIDEr-D and ROUGE-L of the corpus are means over its pairs; METEOR has a way of its own, and is
    left out where it cannot be computed. exact (not in the paper): whether the two are the same.
    """
    each = {"cider": cider(pairs), "rouge_l": rouge_l(pairs)}
    each["exact"] = [true == predicted for true, predicted in pairs]
    corpus = {name: average(scores) for name, scores in each.items()}
    measured = meteor(pairs) if with_meteor else None
    if measured:
        each["meteor"], corpus["meteor"] = measured
    return corpus, each


def ngrams(words: list[str], n: int) -> Counter:
    """How often each n-gram occurs."""
    counts = Counter()
    for i in range(len(words) - n + 1):
        gram = tuple(words[i:i + n])
        counts[gram] += 1
    return counts


def cider(pairs: list[Pair]) -> list[float]:
    """CIDEr-D of each pair (Vedantam et al., 2015); 10 is perfect, for four words or more.

    For n = 1 to 4, a sentence is a vector g of tf-idf weights, one for each n-gram w in it:

        g(w)    = count(w) * (log(number of pairs) - log(number of true sentences with w))
        cos_n   = sum_w min(g_s(w), g_r(w)) * g_r(w) / (|g_r| * |g_s|)
        CIDEr-D = 10 * mean_n(cos_n) * exp(-(length of s - length of r)^2 / (2 * 6^2))

    Lengths are numbers of bigrams, as in the authors' code. A single pair scores 0, because all
    weights are 0.
    """
    true_sentences_with = Counter()         # n-gram: number of true sentences that contain it
    for true, _ in pairs:
        for n in N_GRAMS:
            true_sentences_with.update(ngrams(true.split(), n).keys())
    rarity = {gram: log(len(pairs)) - log(sentences)
              for gram, sentences in true_sentences_with.items()}
    # an n-gram that no true sentence has weighs as much as one that a single one has
    rarest = log(len(pairs))

    scores = []
    for true, predicted in pairs:
        true_counts = [ngrams(true.split(), n) for n in N_GRAMS]
        predicted_counts = [ngrams(predicted.split(), n) for n in N_GRAMS]
        cosines = []
        for true_grams, predicted_grams in zip(true_counts, predicted_counts):
            r = {gram: count * rarity[gram] for gram, count in true_grams.items()}
            s = {gram: count * rarity.get(gram, rarest) for gram, count in predicted_grams.items()}
            product = 0.0
            # min: no gain from repeating an n-gram more often than the true sentence has it
            for gram in s:
                if gram in r:
                    product += min(s[gram], r[gram]) * r[gram]
            r_squared = sum(weight * weight for weight in r.values())
            s_squared = sum(weight * weight for weight in s.values())
            norms = (r_squared * s_squared) ** 0.5
            cosine = product / norms if norms else 0.0
            cosines.append(cosine)
        true_length = true_counts[1].total()           # index 1: n = 2
        predicted_length = predicted_counts[1].total()
        difference = predicted_length - true_length
        penalty = exp(-difference ** 2 / (2 * 6 ** 2))
        scores.append(10 * float(np.mean(cosines)) * penalty)
    return scores


def rouge_l(pairs: list[Pair], beta: float = 1.2) -> list[float]:
    """ROUGE-L of each pair (Lin, 2004): the F-measure of the longest common subsequence (LCS).

        precision = LCS / words of s
        recall    = LCS / words of r
        ROUGE-L   = (1 + beta^2) * precision * recall / (recall + beta^2 * precision)

    As in the authors' code, words are split at single blanks here, elsewhere at any whitespace: two
    blanks have an empty word between them.
    """
    scores = []
    for true, predicted in pairs:
        r = true.split(" ")
        s = predicted.split(" ")
        common = longest_common_subsequence(r, s)
        if common == 0:
            scores.append(0.0)
            continue
        precision = common / len(s)
        recall = common / len(r)
        numerator = (1 + beta ** 2) * precision * recall
        scores.append(numerator / (recall + beta ** 2 * precision))
    return scores


def longest_common_subsequence(r: list[str], s: list[str]) -> int:
    """The largest number of words that occur in both sentences in the same order."""
    above = [0] * (len(s) + 1)                 # above[j]: of the words of r so far, and s[:j]
    for word in r:
        row = [0]
        for j, other in enumerate(s):
            if word == other:
                row.append(above[j] + 1)
            else:
                row.append(max(above[j + 1], row[j]))
        above = row
    return above[-1]


# ------------------------------------------------------ teacher forcing (§4.1)


@dataclass
class SegmentScores:
    """One segment under teacher forcing; the first has no frames to decide on.

    ppl             perplexity of the narration, exp(mean cross entropy): of "Assistant:", the words
                    and the end of text (with a tokenizer that splits "]\\n", of its newline, too:
                    compare with narrators of the same tokenizer alone)
    correctness     LM-Correctness: share of these tokens before the first wrong one
    difference      frames by which the model would end the segment too early (> 0) or too late
                    (< 0). As in the authors' code, also 0 where it does not end a segment and no
                    later frame can be fed: in the last segment, and in one of a single frame
    fluency         share of all decisions (frames and words) before the first wrong one. As in the
                    authors' code, an end that comes too early counts as right itself, one that
                    comes too late does not; with difference 0, all frames count as right
    """
    ppl: float
    correctness: float
    difference: int | None = None
    fluency: float | None = None


@torch.no_grad()
def score_segments(
    narrator: nar.Narrator,
    x: Tensor,
    narrations: nar.Narrations,
    reply_theta: float = 0.0,
    cache: Cache | None = None,
) -> list[SegmentScores]:
    """Teacher-forced evaluation of a video x [T, J, D] with its true narrations (frame, ids).

    The model ends a segment at the first frame where its likeliest next token is not [SKIP], or
    where p([SKIP]) < reply_theta (the authors' results: 0, that is, never). If it has not ended the
    segment by its true end, it is fed frames of the next segment until it does, at most F - 1 for a
    segment of F frames. Segments are never restarted: `max_segment` is for streams, where nobody
    says that a segment ends.

    cache       an empty one, for narrators that need one of their own; default: stream.py's
    """
    if cache is None:
        cache = Cache()
    hidden, labels, tokens = narrator(x, narrations, cache)
    if not hidden.sum().isfinite():
        raise BadData("the model's numbers are not finite; are its weights or the features "
                      "damaged, or is float16 too narrow (--dtype bfloat16)?")
    cache.tokens += tokens
    segment = torch.tensor(tokens.segment)                          # on the CPU, as the labels are
    of_frame = torch.tensor(tokens.ids) == nar.FRAME

    scores = []
    for n, (frame, _) in enumerate(narrations):
        learned = (segment == n) & (labels != -100)
        of_words = learned & ~of_frame
        logits = narrator.logits(hidden[of_words])
        target = labels[of_words].to(hidden.device)
        is_right = logits.argmax(-1) == target
        until_first_wrong = is_right.long().cumprod(0)
        right_words = int(until_first_wrong.sum())
        words = len(target)
        ppl = F.cross_entropy(logits, target).exp().item()
        score = SegmentScores(ppl, right_words / words)
        scores.append(score)
        if n == 0:
            continue                                                # it has no frames to decide on

        ends = ends_segment(narrator, hidden[learned & of_frame], reply_theta)
        frames = len(ends)
        if True in ends:
            score.difference = frames - 1 - ends.index(True)        # too early
        else:
            can_be_fed = 0                                          # frames of the next segment
            if n + 1 < len(narrations):
                next_frame, _ = narrations[n + 1]
                can_be_fed = min(next_frame - frame, frames - 1)
            frames_late = can_be_fed                                # if it ends at none of these
            if can_be_fed:
                # They come after the segment's last frame, in place of its closing.
                last_token = int((of_frame & (segment == n)).nonzero()[-1])
                later = later_frames(narrator, cache, last_token + 1, n,
                                     x[frame + 1:frame + 1 + can_be_fed])
                ends = ends_segment(narrator, later, reply_theta)
                if True in ends:
                    frames_late = ends.index(True) + 1
            score.difference = -frames_late

        right_decisions = frames_decided_rightly(frames, score.difference)
        if score.difference == 0:
            right_decisions += right_words                          # the words come next
        score.fluency = right_decisions / (frames + words)
    return scores


def ends_segment(narrator: nar.Narrator, hidden: Tensor, reply_theta: float) -> list[bool]:
    """Whether the model ends its segment after each frame, from the hidden states of the frames'
    last tokens [F, D_lm].
    """
    skip = narrator.layout.skip
    logits = narrator.logits(hidden)
    is_other = logits.argmax(-1) != skip
    is_unlikely = logits.softmax(-1)[:, skip] < reply_theta
    return (is_other | is_unlikely).tolist()


def frames_decided_rightly(frames: int, difference: int) -> int:
    """How many decisions at the frames of a segment count as right before the first wrong one.

    At each frame but the last of a segment, [SKIP] is right; at the last one, to end it. As in the
    authors' code; the examples are of a segment of 5 frames. difference: see SegmentScores.
    """
    if difference == 0:
        return frames                   # ended at the fifth frame: 5 are right
    elif difference > 0:
        # ended two frames too early, at the third frame: 2 x [SKIP] are right, and as in the
        # authors' code the end itself counts as right: 3
        return frames - difference
    else:
        return frames - 1               # ended too late: 4 x [SKIP] are right, the fifth is not


def later_frames(
    narrator: nar.Narrator,
    whole: Cache,
    position: int,
    n: int,
    x: Tensor,
) -> Tensor:
    """The last hidden state [F, D_lm] of each of F frames x [F, J, D] that follow segment n at
    `position`, in place of its closing.

    They are fed in segment n, so they see what its last frame saw in the parallel form, that frame,
    and each other. whole: the cache of all tokens of the video, which stays as it is.
    """
    config = narrator.config
    # Back to the moment at which the last frame of segment n had been fed: first without what came
    # later, because a baseline's layers hold fewer tokens than the sequence has.
    cache = copy(whole)
    cache.keys = dict(whole.keys)
    cache.values = dict(whole.values)
    cache.tokens = whole.tokens.select([i < position for i in range(len(whole.tokens))])
    cache.crop()
    cache.keep(nar.visible(cache.tokens, n, config.last_k, config.prune))

    fed = nar.Tokens()
    for _ in x:
        fed += narrator.layout.frame(n)
    e = narrator.embed(fed.ids, x)
    positions = torch.arange(position, position + len(fed))
    hidden = narrator.run(e, positions, cache=cache)
    per_frame = hidden.unflatten(0, (len(x), -1))                       # [F, J + 1, D_lm]
    return per_frame[:, -1]


def summary(scores: list[SegmentScores], fps: float) -> dict[str, float]:
    """A sample's values: means over its segments. As in the authors' code, one that has nothing to
    decide counts as perfect.
    """
    decided = scores[1:]                # the first segment has no frames to decide on
    time_diff = 0.0
    fluency = 1.0
    if decided:
        differences = [abs(score.difference) for score in decided]
        time_diff = average(differences) / fps
        fluency = average([score.fluency for score in decided])
    return {
        "ppl": average([score.ppl for score in scores]),
        "time_diff": time_diff,
        "fluency": fluency,
        "lm_correctness": average([score.correctness for score in scores]),
    }


# ------------------------------------------------------ both protocols, over a data set (§4.1)


def self_conditioned(
    narrator: nar.Narrator,
    sample: Sample,
    vision: nar.VisionEncoder | None = None,
    static: bool = False,
    context: Context | None = None,
    batch: int = 1,
) -> list[dict]:
    """The model's own narrations of a sample, each of which depends on those before it: rows as
    stream.py writes them, times in seconds of the video.

    context     how to stream; batch: pictures that `vision` encodes at once
    """
    rows = []
    frames = sample.tokens(vision, batch)
    for decision in narrate(narrator, frames, static, context=context):
        if decision.narration:
            row = dict(vars(decision.narration))
            row["start"] += sample.start
            row["end"] += sample.start
            rows.append(row)
    return rows


def to_predictions(rows: list[dict]) -> list[Sentence]:
    return [Sentence(row["end"], row["text"]) for row in rows]


def true_narrations(narrator: nar.Narrator, sample: Sample) -> nar.Narrations:
    """(frame, ids) of a sample's narrations. Raises BadData if the first is not at frame 0."""
    if not sample.narrations or sample.narrations[0][0] != 0:
        raise BadData(f"{sample.name}: teacher forcing needs a narration at the first frame; "
                      f"annotate one")
    return narrator.layout.encode_narrations(sample.narrations)


Made = TypeVar("Made")


def of_each(
    samples: Sequence[Sample],
    make: Callable[[Sample], Made],
    title: str,
) -> tuple[dict[str, Made], dict[str, str]]:
    """make(sample) of each sample, by name; and why it cannot be made of others, by name.

    Under torchrun each process makes a part, and all get everything.
    """
    def share() -> tuple[dict[str, Made], dict[str, str]]:
        made = {}
        failed = {}
        for sample in progress(my_share(samples), title, unit="video"):
            try:
                made[sample.name] = make(sample)
            except (BadData, OSError) as error:     # of this video; the others go on
                say(f"{sample.name}: {error}")
                failed[sample.name] = str(error)
        return made, failed

    made = {}
    failed = {}
    for made_by_one, failed_in_one in in_shares(share):
        made |= made_by_one
        failed |= failed_in_one
    in_order = {sample.name: made[sample.name] for sample in samples if sample.name in made}
    return in_order, failed


if __name__ == "__main__":
    from beyond.commands.evaluate_command import main
    main()
