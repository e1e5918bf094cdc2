"""Frames of a video with the sentences at their times (paper Fig. 5, 12, 13): python -m experiments.figures examples.

    python stream.py toy/kitchen.mp4 --jsonl said.jsonl
    python -m experiments.figures examples toy/kitchen.mp4 --pred FlowNar=said.jsonl --from 60 --to 80 --png kitchen.png

Glossary
cell    the place of a sentence in a picture, in inches: as wide as its segment is long, as high as its row
"""
import argparse
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np

from data import frame_at
from evaluate import overlaps, segments
from support.common import BadData, apart, non_negative, one_line, positive_float, pyplot, save_figure
from support.narrations import Sentence, read_predictions, read_truth
from support.options import named_file
from support.video import Video

TRUE_COLOUR, PREDICTED_COLOUR, WRONG_COLOUR = "#4c9be8", "#e8a04c", "#c03020"
POINTS = 7                                     # size of the letters
LINE, UPRIGHT, MARGIN = 0.125, 0.1, 0.08       # inches: a line among others; one alone; the margins of a cell together
WIDTH, PICTURE, GAP, TALLEST = 14, 1.2, 0.06, 3.2     # inches: the figure, about a frame, between them, a row at most


# ---------------------------------------------------------------------- a row of sentences

def truth_for(source: Path, gt: str | None) -> list[Sentence]:
    """The first annotator's sentences for a video: of the file given, or of the .json beside the video; else none."""
    beside = source.with_suffix(".json")
    if gt is None and (source.suffix == ".jsonl" or not beside.exists()):
        return []
    file = Path(gt or beside)
    truths = read_truth(file)
    chosen = truths.get(source.stem) or (next(iter(truths.values())) if len(truths) == 1 else None)
    if chosen is None or not any(chosen.annotators):
        raise BadData(f"{file}: has no narrations of {source.stem}")
    return next(annotator for annotator in chosen.annotators if annotator)


def wrong_sentences(predicted: list[Sentence], true: list[Sentence]) -> list[bool]:
    """For each predicted sentence, whether the true segment that fits its own best (GIoU) has another sentence."""
    if not true or not any(y.text for y in predicted):                                     # nothing to compare with
        return [False] * len(predicted)
    _, giou = overlaps(segments([y.time for y in true]), segments([y.time for y in predicted]))
    return [y.text != true[i].text for y, i in zip(predicted, giou.argmax(0))]


@cache
def inches(text: str) -> float:
    """The width of a line in the pictures' letters."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path
    return text_to_path.get_text_width_height_descent(text, FontProperties(size=POINTS), ismath=False)[0] / 72


def lines_across(text: str, width: float) -> list[str]:
    """The text in lines for a cell of that width; none if one of its words is too long."""
    lines = []
    for word in text.split():
        if lines and inches(f"{lines[-1]} {word}") <= width - MARGIN:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines if all(inches(line) <= width - MARGIN for line in lines) else []


def height_of(text: str, width: float) -> float:
    """Inches that a cell needs for all of its text: across if its words fit, else upright in one line."""
    return MARGIN + (LINE * len(lines_across(text, width)) or inches(text))


def fitted(text: str, width: float, height: float) -> tuple[str, int]:
    """The text in lines and its rotation: across, else upright (shortened in a cell of an inch or more); else ""."""
    lines = lines_across(text, width)
    if lines and MARGIN + len(lines) * LINE <= height + 1e-6:
        return "\n".join(lines), 0
    if width < UPRIGHT or height < min(1, height_of(text, 0) - 1e-6):
        return "", 0
    rest = ""
    while text and inches(text + rest) > height - MARGIN + 1e-6:
        text, rest = text.rpartition(" ")[0], " ..."
    return text and text + rest, 90


def draw_sentences(axis, title: str, colour: str, sentences: list[Sentence], wrong: list[bool]):
    """Each segment with its sentence, where there is room for a line. The limits of x are set already."""
    start, end = axis.get_xlim()
    width, height = axis.get_window_extent().size / axis.figure.dpi
    for i, (low, high) in enumerate(np.clip(segments([y.time for y in sentences]), start, end)):
        axis.axvspan(low, high, color=colour, alpha=0.25 + 0.25 * (i % 2), linewidth=0)
        text, rotation = fitted(one_line(sentences[i].text), (high - low) / (end - start) * width, height)
        if text:
            y, side = (MARGIN / 2 / height, "bottom") if rotation else (0.5, "center")
            axis.text((low + high) / 2, y, text, rotation=rotation, ha="center", va=side, fontsize=POINTS,
                      color=WRONG_COLOUR if wrong[i] else "black", clip_on=True, parse_math=False,
                      transform=axis.get_xaxis_transform())
    axis.set(ylabel=title, yticks=[])


# ---------------------------------------------------------------------- frames and rows

def frames_between(path: Path, fps: float, start: float, end: float, width: float) -> tuple[list[np.ndarray], list]:
    """Pictures at equal distances from start to end (s), as many as have room in `width` inches, and their times."""
    video = Video(path, fps, largest=400)
    height, across = video.size
    count = max(1, min(int(width / (PICTURE * across / height + GAP)), int((end - start) * fps)))
    chosen = [frame_at(start + (n + 0.5) * (end - start) / count, fps) for n in range(count)]
    found = {i: picture for i, picture in enumerate(islice(video, chosen[-1] + 1)) if i in chosen}
    video.report()
    if chosen[-1] not in found:
        raise BadData(f"{path}: ends before {end:g} s; choose an earlier --to")
    return [found[i] for i in chosen], [i / fps for i in chosen]


def draw_frames(axis, pictures: list[np.ndarray], times: list[float]):
    """Each picture in the middle of its equal part of the axis, under its time. The limits of x are set already."""
    start, end = axis.get_xlim()
    width, height = axis.get_window_extent().size / axis.figure.dpi
    middle = [start + (n + 0.5) * (end - start) / len(pictures) for n in range(len(pictures))]
    for x, picture in zip(middle, pictures):
        aspect = picture.shape[1] / picture.shape[0]
        wide = min(height * aspect, width / len(pictures))                                            # inches
        half = wide / 2 / width * (end - start)
        axis.imshow(picture, extent=(x - half, x + half, 0, wide / aspect / height), aspect="auto")
    axis.set(xlim=(start, end), ylim=(0, 1), yticks=[])
    axis.set_xticks(middle, [f"{int(time // 60)}:{time % 60:04.1f}" for time in times], fontsize=POINTS)
    axis.tick_params(length=0, pad=1, labelbottom=False, labeltop=True)
    axis.spines[:].set_visible(False)


def row_height(sentences: list[Sentence], start: float, end: float, width: float) -> float:
    """Inches that a row from start to end (s) needs for its sentences; upright only those that are not cut."""
    needed = [MARGIN + LINE]
    for y, (low, high) in zip(sentences, segments([y.time for y in sentences])):
        text, cell = one_line(y.text), (min(high, end) - max(low, start)) / (end - start) * width
        if cell >= UPRIGHT and (start <= low and high <= end or lines_across(text, cell)):
            needed.append(height_of(text, cell))
    return min(TALLEST, max(needed))


def plot_examples(pictures: list[np.ndarray], times: list[float], rows: dict[str, list[Sentence]], start: float,
                  end: float, width: float, png: str):
    """Frames above rows {title: sentences}; the row that is called "truth" is what the others should say."""
    heights = [PICTURE, *(row_height(sentences, start, end, width) for sentences in rows.values())]
    bottom = sum(heights) + GAP * len(rows)
    figure = pyplot().figure(figsize=(width, bottom))
    axes = []
    for height in heights:
        bottom -= height
        axes.append(figure.add_axes((0, bottom / figure.get_figheight(), 1, height / figure.get_figheight())))
        axes[-1].set_xlim(start, end)
        bottom -= GAP
    draw_frames(axes[0], pictures, times)
    for axis, (title, sentences) in zip(axes[1:], rows.items()):
        true = title == "truth"
        wrong = [False] * len(sentences) if true else wrong_sentences(sentences, rows.get("truth", []))
        draw_sentences(axis, title, TRUE_COLOUR if true else PREDICTED_COLOUR, sentences, wrong)
        axis.set_ylabel(title, rotation=0, ha="right", va="center", parse_math=False)
        axis.tick_params(labelbottom=axis is axes[-1], bottom=axis is axes[-1])
    axes[-1].set_xlabel("seconds")
    save_figure(figure, png)


def run_examples(args: argparse.Namespace):
    source, start, end = Path(args.video), args.start, args.end
    for read in (source, args.gt or "", *(file for _, file in args.pred)):
        apart(args.png, read)
    if end <= start:
        raise BadData(f"--to ({end:g} s) must be after --from ({start:g} s)")
    true = truth_for(source, args.gt)
    rows = {"truth": true} if true else {}
    for title, file in args.pred:
        if title in rows:
            raise BadData(f"two rows are called {title}; give them names: --pred NAME=FILE")
        rows[title] = predictions_for(source, file)
    if not rows:
        raise BadData(f"{source}: there are no sentences; give --pred or --gt")
    width = min(60, max(WIDTH, UPRIGHT * args.fps * (end - start)))          # room for a line in a frame
    plot_examples(*frames_between(source, args.fps, start, end, width), rows, start, end, width, args.png)


def predictions_for(source: Path, file: Path) -> list[Sentence]:
    """The sentences of a video in a file of predictions, whatever its name if there is only one."""
    found = read_predictions(file)
    name = next(iter(found)) if len(found) == 1 else source.stem
    if name not in found:
        raise BadData(f"{file}: has no narrations of {name}")
    return found[name]


def examples_options(parser: argparse.ArgumentParser):
    parser.set_defaults(run=run_examples)
    parser.add_argument("video")
    parser.add_argument("--pred", action="append", type=named_file, default=[], metavar="NAME=FILE",
                        help="narrations: stream.py's --jsonl, or JSON; may be given again for another model; without "
                             "NAME=, the row is called as its file")
    parser.add_argument("--gt", help="ground truth (default: the .json beside the video, if there is one)")
    parser.add_argument("--from", dest="start", type=non_negative, required=True, help="seconds")
    parser.add_argument("--to", dest="end", type=positive_float, required=True, help="seconds")
    parser.add_argument("--fps", type=positive_float, default=2.0, help="frames to choose from a second (default 2)")
    parser.add_argument("--png", metavar="FILE", required=True, help="the picture")
