"""One video as a picture: true and predicted sentences, the trigger, the cache.

    python -m experiments.figures timeline toy/kitchen.mp4 --png out/timeline.png
"""
import argparse
from pathlib import Path

import stream
from baselines.variants import check_vision
from commands.evaluate import narrator_of
from evaluate import overlaps, segments
from streams.bounds import open_stream
from support.common.devices import vision_dtype
from support.common.disk import check_distinct, check_writable
from support.common.errors import BadData
from support.common.figures import pyplot, save_figure
from support.common.text import one_line
from support.files.features import check_inputs, file_and_name, is_features, open_frames
from support.files.narrations import Sentence, read_truth

TRUE_COLOUR = "#4c9be8"
PREDICTED_COLOUR = "#e8a04c"
WRONG_COLOUR = "#c03020"
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


def draw_sentences(axis, sentences: list[Sentence], colour: str, wrong: list[bool]) -> None:
    """Each segment with its sentence, upright from the foot and clipped to the segment; wrong ones
    in red. A segment of less than a second has no room for words."""
    times = segments([sentence.time for sentence in sentences])
    for i, (low, high) in enumerate(times):
        opacity = 0.25 if i % 2 == 0 else 0.5              # neighbours differ
        cell = axis.axvspan(low, high, color=colour, alpha=opacity, linewidth=0)
        if high - low < 1:
            continue
        words = one_line(sentences[i].text)
        text = axis.text((low + high) / 2, 0.02, words, rotation=90, ha="center", va="bottom",
                         fontsize=7, parse_math=False, clip_on=True,
                         transform=axis.get_xaxis_transform())
        text.set_clip_path(cell)
        if wrong[i]:
            text.set_color(WRONG_COLOUR)
    axis.set(yticks=[])


# ------------------------------------------------------------------------------- timeline

def draw_trigger(axis, decisions: list[stream.Decision], times: list[float]) -> None:
    """p([SKIP]) and its thresholds. Frame 0 narrates without being decided."""
    thresholds = [decision.theta for decision in decisions]
    skips = [decision.p_skip for decision in decisions]
    axis.step(times[1:], thresholds[1:], where="mid", color="#b0b0b0", label="threshold")
    axis.plot(times[1:], skips[1:], color="#2060a0", label="p([SKIP])")
    told = [decision.narration for decision in decisions[1:] if decision.narration]
    ends = [narration.end for narration in told]
    reached = [narration.p_skip for narration in told]
    axis.plot(ends, reached, "o", color=WRONG_COLOUR, markersize=4, label="narrates")
    axis.set(ylabel="trigger", ylim=(-0.05, 1.05))


def plot_timeline(decisions: list[stream.Decision], true: list[Sentence], fps: float,
                  png: str) -> None:
    """True and predicted segments, p([SKIP]) with its thresholds, and the cache."""
    predicted = []
    for decision in decisions:
        if decision.narration:
            predicted.append(Sentence(decision.narration.end, decision.narration.text))
    times = [(decision.frame + 1) / fps for decision in decisions]
    width = min(60, max(10, 0.28 * max(len(predicted), len(true))))            # inches
    heights = [ROW, ROW, 1.2, 1.0]
    figure, axes = pyplot().subplots(4, 1, figsize=(width, sum(heights)), sharex=True,
                                     gridspec_kw={"height_ratios": heights, "hspace": 0.08})
    truth, narrated, trigger, cache = axes
    draw_sentences(truth, true, TRUE_COLOUR, [False] * len(true))
    truth.set(ylabel="truth")
    draw_sentences(narrated, predicted, PREDICTED_COLOUR, wrong_sentences(predicted, true))
    narrated.set(ylabel="narrated")
    draw_trigger(trigger, decisions, times)
    text_tokens = [decision.text_tokens for decision in decisions]
    visual_tokens = [decision.visual_tokens for decision in decisions]
    cache.stackplot(times, text_tokens, visual_tokens, labels=["text", "current segment"],
                    step="pre", colors=["#e8c08c", "#9cc8f0"])
    cache.set(ylabel="cache, tokens", xlabel="seconds", xlim=(0, times[-1]))
    for axis in (trigger, cache):
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save_figure(figure, png)


def narrate_video(args: argparse.Namespace) -> tuple[list[stream.Decision], float]:
    """The narrator's stream over a video or its features: decisions, and frames per second."""
    check_inputs([args.input])
    if not is_features(args.input):
        check_vision(args.model, args.vision)
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
    source, _ = file_and_name(args.input)
    check_distinct(args.png, source, source.with_suffix(".json"))
    check_writable(args.png)
    true = truth_beside(source)
    decisions, fps = narrate_video(args)
    plot_timeline(decisions, true, fps, args.png)
