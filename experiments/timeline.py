"""One video as a picture: true and predicted sentences, the trigger, the cache.

    python -m experiments.figures timeline toy/kitchen.mp4 --png out/timeline.png
"""
import argparse
import textwrap
from pathlib import Path

import numpy as np

import stream
from commands.evaluate import narrator_of
from evaluate import overlaps, segments
from narrator import Config
from streams.bounds import open_stream
from support.common.devices import vision_dtype
from support.common.disk import check_distinct, check_writable
from support.common.errors import BadData
from support.common.figures import pyplot, save_figure
from support.common.text import one_line
from support.engine.checkpoint import check_vision
from support.files.features import check_inputs, is_features, open_frames
from support.files.narrations import Sentence, read_truth

TRUE_COLOUR = "#4c9be8"
PREDICTED_COLOUR = "#e8a04c"
WRONG_COLOUR = "#c03020"
LETTER = 0.055                                 # inches: about the width of a letter
UPRIGHT = 0.1                                  # inches: the narrowest cell with upright text
ROW = 3.2                                      # inches: the height of a row of sentences


# ------------------------------------------------------------- sentences

def truth_beside(source: Path) -> list[Sentence]:
    """The first annotator's sentences, of the .json beside a video; [] if there is none.

    BadData if it has no narrations of the video.
    """
    file = source.with_suffix(".json")
    if not file.exists():
        return []
    truth = read_truth(file).get(source.stem)
    if truth is None or not any(truth.annotators):
        raise BadData(f"{file}: has no narrations of {source.stem}")
    return next(annotator for annotator in truth.annotators if annotator)


def wrong_sentences(predicted: list[Sentence], true: list[Sentence]) -> list[bool]:
    """Of each predicted sentence, does the true segment that fits best (GIoU) have another one?"""
    has_text = any(sentence.text for sentence in predicted)
    if not true or not has_text:               # nothing to compare with
        return [False] * len(predicted)
    true_segments = segments([sentence.time for sentence in true])
    predicted_segments = segments([sentence.time for sentence in predicted])
    _, giou = overlaps(true_segments, predicted_segments)
    wrong = []
    for sentence, i in zip(predicted, giou.argmax(0)):
        wrong.append(sentence.text != true[i].text)
    return wrong


def in_lines(text: str, width: float) -> tuple[str, int]:
    """A sentence in lines for a cell of `width` inches, and its rotation in degrees.

    It is upright, in one line, if its longest word does not fit across; "" if nothing fits.
    """
    if width < UPRIGHT:
        return "", 0
    text = one_line(text)
    letters = int(width / LETTER)
    longest = max((len(word) for word in text.split()), default=0)
    if longest > letters:
        return text, 90
    return textwrap.fill(text, max(1, letters)), 0


def draw_sentences(axis, title: str, sentences: list[Sentence], true: list[Sentence]) -> None:
    """Each segment with its sentence, clipped to the segment; wrong ones in red. The limits of x
    are set already. The truth itself is a row, too."""
    start, end = axis.get_xlim()
    width, _ = axis.get_window_extent().size / axis.figure.dpi                 # inches
    times = np.clip(segments([sentence.time for sentence in sentences]), start, end)
    wrong = wrong_sentences(sentences, true)
    for i, (low, high) in enumerate(times):
        if low == high:
            continue
        cell = axis.axvspan(low, high, color=TRUE_COLOUR if sentences is true else PREDICTED_COLOUR,
                            alpha=0.25 if i % 2 == 0 else 0.5, linewidth=0)    # neighbours differ
        text, rotation = in_lines(sentences[i].text, (high - low) / (end - start) * width)
        # Upright text starts at the foot, so that its beginning is seen if it is too long.
        drawn = axis.text(
            (low + high) / 2, 0.02 if rotation else 0.5, text, rotation=rotation, ha="center",
            va="bottom" if rotation else "center", fontsize=7,
            color=WRONG_COLOUR if wrong[i] else "black", parse_math=False, clip_on=True,
            transform=axis.get_xaxis_transform())
        drawn.set_clip_path(cell)
    axis.set(yticks=[])
    axis.set_ylabel(title, parse_math=False)


# ------------------------------------------------------------------------------- timeline

def plot_timeline(decisions: list[stream.Decision], true: list[Sentence], fps: float,
                  png: str) -> None:
    """True and predicted segments, p([SKIP]) with its thresholds, and the cache."""
    narrations = [decision.narration for decision in decisions if decision.narration]
    predicted = [Sentence(narration.end, narration.text) for narration in narrations]
    heights = [ROW, 1.2, 1.0]                  # inches: predicted segments, trigger, cache
    if true:
        heights.insert(0, ROW)
    width = min(60, max(10, 0.28 * max(len(predicted), len(true))))
    figure, axes = pyplot().subplots(
        len(heights), 1, figsize=(width, sum(heights)), sharex=True,
        gridspec_kw={"height_ratios": heights, "hspace": 0.08})
    *sentence_axes, trigger, cache = axes
    times = [(decision.frame + 1) / fps for decision in decisions]
    cache.set(xlim=(0, times[-1]))             # of all axes; the sentences are clipped to it
    if true:
        draw_sentences(sentence_axes[0], "truth", true, true)
    draw_sentences(sentence_axes[-1], "narrated", predicted, true)

    # Frame 0 narrates without being decided.
    trigger.step(times[1:], [decision.theta for decision in decisions[1:]], where="mid",
                 color="#b0b0b0", label="threshold")
    trigger.plot(times[1:], [decision.p_skip for decision in decisions[1:]], color="#2060a0",
                 label="p([SKIP])")
    told = [narration for narration in narrations if narration.frame > 0]
    trigger.plot([narration.end for narration in told], [narration.p_skip for narration in told],
                 "o", color="#c03020", markersize=4, label="narrates")
    trigger.set(ylabel="trigger", ylim=(-0.05, 1.05))
    cache.stackplot(times, [decision.text_tokens for decision in decisions],
                    [decision.visual_tokens for decision in decisions],
                    labels=["text", "current segment"], step="pre", colors=["#e8c08c", "#9cc8f0"])
    cache.set(ylabel="cache, tokens", xlabel="seconds")
    for axis in (trigger, cache):
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save_figure(figure, png)


def narrate_video(args: argparse.Namespace) -> tuple[list[stream.Decision], float]:
    """The narrator's stream over a video or its features: decisions, and frames per second."""
    check_inputs([args.input])
    if not is_features(args.input):
        check_vision(args.model, args.vision, Config.vision)
    narrator = narrator_of(args, args.model)
    encoder = None
    if not is_features(args.input):
        encoder = narrator.vision_encoder(args.vision, vision_dtype(args))
    frames, _, _ = open_frames(args.input, narrator.config, encoder)
    decisions = {}                             # of the last frame's two, the second one counts
    for decision in stream.narrate(narrator, frames, args.static, context=open_stream(narrator)):
        decisions[decision.frame] = decision
    return list(decisions.values()), narrator.config.fps


def run_timeline(args: argparse.Namespace) -> None:
    source = Path(args.input)
    check_distinct(args.png, source, source.with_suffix(".json"))
    check_writable(args.png)
    true = truth_beside(source)
    decisions, fps = narrate_video(args)
    plot_timeline(decisions, true, fps, args.png)
