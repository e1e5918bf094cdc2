"""Frames of a video with the sentences at their times (paper Fig. 5, 12, 13).

    python stream.py toy/kitchen.mp4 --jsonl said.jsonl
    python -m experiments.figures examples toy/kitchen.mp4 --pred FlowNar=said.jsonl \\
        --from 60 --to 80 --png kitchen.png

Glossary
cell    the place of a sentence in a picture: as wide as its segment is long, as high as its row
"""
import argparse
import textwrap
from itertools import islice
from pathlib import Path

import numpy as np

from evaluate import overlaps, segments
from support.common.disk import check_distinct
from support.common.errors import BadData
from support.common.figures import pyplot, save_figure
from support.common.options import frame_rate, named_file, non_negative, positive_float
from support.common.text import one_line
from support.files.narrations import Sentence, read_predictions, read_truth
from support.files.tracks import frame_at
from support.files.video import Video

TRUE_COLOUR = "#4c9be8"
PREDICTED_COLOUR = "#e8a04c"
WRONG_COLOUR = "#c03020"
POINTS = 7                                     # size of the letters

# Inches.
LETTER = 0.055                                 # about the width of a letter
LINE = 0.125                                   # height of a line of text
MARGIN = 0.08                                  # above and below the text of a cell, together
PICTURE = 1.2                                  # height of the frames
GAP = 0.06                                     # between rows, and between frames
TALLEST = 3.2                                  # the highest row
NARROWEST = 14                                 # the least width of the figure,
WIDEST = 60                                    # and the largest
UPRIGHT = 0.1                                  # the narrowest cell with a line of upright text


# ------------------------------------------------------------- sentences

def truth_for(source: Path, gt: str | None) -> list[Sentence]:
    """The first annotator's sentences for a video: of `gt`, or of the .json beside the video.

    [] if there is neither; BadData if there is one without narrations of the video.
    """
    if source.is_dir():
        raise BadData(f"{source}: is a directory; give the name of a file")
    beside = source.with_suffix(".json")
    if gt is None and (source.suffix == ".jsonl" or not beside.exists()):
        return []
    file = Path(gt or beside)
    truths = read_truth(file)
    truth = truths.get(source.stem)
    if truth is None and len(truths) == 1:     # its name does not matter
        truth, = truths.values()
    if truth is None or not any(truth.annotators):
        raise BadData(f"{file}: has no narrations of {source.stem}")
    return next(annotator for annotator in truth.annotators if annotator)


def predictions_for(source: Path, file: Path) -> list[Sentence]:
    """The sentences of a video in a file of predictions, whatever its name if there is only one."""
    predictions = read_predictions(file)
    name = source.stem
    if len(predictions) == 1:
        name, = predictions
    if name not in predictions:
        raise BadData(f"{file}: has no narrations of {name}")
    return predictions[name]


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


# ------------------------------------------------------------- a row of sentences

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


def row_height(sentences: list[Sentence], start: float, end: float, width: float) -> float:
    """Inches that a row from start to end [s] needs for its sentences, at most TALLEST."""
    height = MARGIN + LINE
    times = segments([sentence.time for sentence in sentences])
    for sentence, (low, high) in zip(sentences, times):
        # Seconds of the segment that the picture shows.
        shown = min(high, end) - max(low, start)
        if shown <= 0:
            continue
        text, rotation = in_lines(sentence.text, shown / (end - start) * width)
        if rotation == 0:
            lines = text.count("\n") + 1
            height = max(height, MARGIN + lines * LINE)
        elif shown == high - low:              # a segment that the picture cuts asks for no more
            height = max(height, MARGIN + len(text) * LETTER)
    return min(TALLEST, height)


def draw_sentences(axis, title: str, colour: str, sentences: list[Sentence], wrong: list[bool]):
    """Each segment with its sentence, clipped to the segment. The limits of x are set already."""
    start, end = axis.get_xlim()
    width, height = axis.get_window_extent().size / axis.figure.dpi            # inches
    times = np.clip(segments([sentence.time for sentence in sentences]), start, end)
    for i, (low, high) in enumerate(times):
        if low == high:
            continue
        alpha = 0.25 if i % 2 == 0 else 0.5    # neighbours differ
        cell = axis.axvspan(low, high, color=colour, alpha=alpha, linewidth=0)
        text, rotation = in_lines(sentences[i].text, (high - low) / (end - start) * width)
        # Upright text starts at the foot, so that its beginning is seen if it is too long.
        drawn = axis.text(
            (low + high) / 2,
            MARGIN / 2 / height if rotation else 0.5,
            text,
            rotation=rotation,
            ha="center",
            va="bottom" if rotation else "center",
            fontsize=POINTS,
            color=WRONG_COLOUR if wrong[i] else "black",
            parse_math=False,
            clip_on=True,
            transform=axis.get_xaxis_transform(),
        )
        drawn.set_clip_path(cell)
    axis.set(ylabel=title, yticks=[])


# ------------------------------------------------------------- frames and rows

def frames_between(path: Path, fps: float, start: float, end: float,
                   width: float) -> tuple[list[np.ndarray], list[float]]:
    """Pictures at equal distances from start to end [s], and their times.

    There are as many as have room in `width` inches, but at most `fps` a second.
    """
    # Pictures are about 120 pixels high in the figure: there is no use in larger ones.
    video = Video(path, fps, largest=400)
    pixels_high, pixels_wide = video.size
    room = int(width / (PICTURE * pixels_wide / pixels_high + GAP))
    count = max(1, min(room, int((end - start) * fps)))
    chosen = [frame_at(start + (n + 0.5) * (end - start) / count, fps) for n in range(count)]
    pictures = {}
    for i, picture in enumerate(islice(video, chosen[-1] + 1)):
        if i in chosen:
            pictures[i] = picture
    video.report()
    if chosen[-1] not in pictures:
        raise BadData(f"{path}: ends before {end:g} s; choose an earlier --to")
    return [pictures[i] for i in chosen], [i / fps for i in chosen]


def draw_frames(axis, pictures: list[np.ndarray], times: list[float]):
    """Each picture in the middle of its equal share of the axis, under its time.

    The limits of x are set already.
    """
    start, end = axis.get_xlim()
    width, height = axis.get_window_extent().size / axis.figure.dpi            # inches
    count = len(pictures)
    middles = [start + (n + 0.5) * (end - start) / count for n in range(count)]
    for middle, picture in zip(middles, pictures):
        # As high as the axis, unless the picture would then be wider than its share.
        aspect = picture.shape[1] / picture.shape[0]
        inches_wide = min(height * aspect, width / count)
        half = inches_wide / 2 / width * (end - start)         # seconds
        top = inches_wide / aspect / height
        axis.imshow(picture, extent=(middle - half, middle + half, 0, top), aspect="auto")
    axis.set(xlim=(start, end), ylim=(0, 1), yticks=[])
    labels = [f"{int(time // 60)}:{time % 60:04.1f}" for time in times]
    axis.set_xticks(middles, labels, fontsize=POINTS)
    axis.tick_params(length=0, pad=1, labelbottom=False, labeltop=True)
    axis.spines[:].set_visible(False)


def plot_examples(pictures: list[np.ndarray], times: list[float], rows: dict[str, list[Sentence]],
                  start: float, end: float, width: float, png: str):
    """Frames above rows {title: sentences}; row "truth" is what the others should say."""
    heights = [PICTURE]
    for sentences in rows.values():
        heights.append(row_height(sentences, start, end, width))
    # Rows lie on each other from the top; a figure's coordinates are shares of its size.
    total = sum(heights) + GAP * len(rows)
    figure = pyplot().figure(figsize=(width, total))
    axes = []
    bottom = total
    for height in heights:
        bottom -= height
        axis = figure.add_axes((0, bottom / total, 1, height / total))
        axis.set_xlim(start, end)
        axes.append(axis)
        bottom -= GAP

    draw_frames(axes[0], pictures, times)
    for axis, (title, sentences) in zip(axes[1:], rows.items()):
        if title == "truth":
            colour = TRUE_COLOUR
            wrong = [False] * len(sentences)
        else:
            colour = PREDICTED_COLOUR
            wrong = wrong_sentences(sentences, rows.get("truth", []))
        draw_sentences(axis, title, colour, sentences, wrong)
        axis.set_ylabel(title, rotation=0, ha="right", va="center", parse_math=False)
        last = axis is axes[-1]
        axis.tick_params(labelbottom=last, bottom=last)
    axes[-1].set_xlabel("seconds")
    save_figure(figure, png)


# ------------------------------------------------------------- the command line

def run_examples(args: argparse.Namespace):
    source = Path(args.video)
    start = args.start
    end = args.end
    for file in (source, args.gt or "", *(file for _, file in args.pred)):
        check_distinct(args.png, file)
    if end <= start:
        raise BadData(f"--to ({end:g} s) must be after --from ({start:g} s)")
    rows = {}
    true = truth_for(source, args.gt)
    if true:
        rows["truth"] = true
    for title, file in args.pred:
        if title in rows:
            raise BadData(f"two rows are called {title}; give them names: --pred NAME=FILE")
        rows[title] = predictions_for(source, file)
    if not rows:
        raise BadData(f"{source}: there are no sentences; give --pred or --gt")
    # A segment of a single frame has room for upright text, up to a certain length of the film.
    width = min(WIDEST, max(NARROWEST, UPRIGHT * args.fps * (end - start)))
    pictures, times = frames_between(source, args.fps, start, end, width)
    plot_examples(pictures, times, rows, start, end, width, args.png)


def examples_options(parser: argparse.ArgumentParser):
    parser.set_defaults(run=run_examples)
    parser.add_argument("video")
    parser.add_argument(
        "--pred", action="append", type=named_file, default=[], metavar="NAME=FILE",
        help="narrations: stream.py's --jsonl, or JSON; may be given again for another model; "
             "without NAME=, the row is called as its file")
    parser.add_argument("--gt",
                        help="ground truth (default: the .json beside the video, if there is one)")
    parser.add_argument("--from", dest="start", type=non_negative, required=True, help="seconds")
    parser.add_argument("--to", dest="end", type=positive_float, required=True, help="seconds")
    parser.add_argument("--fps", type=frame_rate, default=2.0,
                        help="frames to choose from a second (default 2)")
    parser.add_argument("--png", metavar="FILE", required=True, help="the picture")
