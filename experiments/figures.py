"""The paper's figures, but for those of efficiency.py. In this file: attention (App. C.2), and the
timeline of one video.

    python -m experiments.figures attention --data toy --teacher --png attention.png
    python -m experiments.figures timeline toy/kitchen.mp4

In words.py (Fig. 8), frequency.py (Fig. 9), examples.py (Fig. 5, 12, 13) and learning.py (not in the
paper):

    python -m experiments.figures words --data toy --png words.png
    python -m experiments.figures frequency dynamic.json static.json --png frequency.png
    python -m experiments.figures examples toy/kitchen.mp4 --from 60 --to 80 --png at60.png
    python -m experiments.figures learning --png learning.png
"""
import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import narrator as nar
import stream
from commands.evaluate import load_vision, narrator_of, samples, true_narrations
from commands.stream import trace_row
from experiments.examples import (
    PREDICTED_COLOUR, TRUE_COLOUR, draw_sentences, examples_options, truth_for, wrong_sentences,
)
from experiments.frequency import frequency_options
from experiments.learning import learning_options
from experiments.words import words_options
from streams.bounds import open_stream
from support.common.devices import vision_dtype
from support.common.disk import check_distinct, check_writable, is_number, read_jsonl
from support.common.errors import BadData, command_line
from support.common.figures import print_table, pyplot, save_figure
from support.common.options import (
    DEFAULT_MODEL, Parser, data_options, model_options, positive_float, trigger_options,
)
from support.common.progress import progress
from support.engine.vision import check_vision
from support.files.features import check_inputs, is_features, open_frames
from support.files.narrations import Sentence, to_sentences

# ------------------------------------------------------------------------------- attention

GROUPS = ("past narrations", "current frames", "past frames", "memory tokens")


@torch.no_grad()
def attention(narrator: nar.Narrator, x: Tensor,
              narrations: list[tuple[int, list[int]]]) -> np.ndarray:
    """Attention of the last layer, mean over heads, from the tokens that predict a narration to
    four groups of tokens.

    x [T, J, D]; narrations: (frame, ids)
    Returns the means over all narrations but the first, [4], in the order of GROUPS. The rest goes
    to the prompt and to the narration itself.
    """
    layer = {}

    def watch(query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        # Each layer calls this; the last one's values stay.
        layer.update(query=query[0], key=key[0], scale=scale)

    def add_watch(module, args, kwargs):
        return args, kwargs | {"watch": watch}

    hook = narrator.llm.model.register_forward_pre_hook(add_watch, with_kwargs=True)
    try:
        _, labels, tokens = narrator(x, narrations)
    finally:
        hook.remove()

    segment = torch.tensor(tokens.segment)
    number = torch.tensor(tokens.number)
    ids = torch.tensor(tokens.ids)
    learned = labels != -100                   # [L]: tokens whose next token is predicted
    queries = []
    for n in range(1, len(narrations)):
        queries.append(learned & (segment == n) & (number == n))
    config = narrator.config
    mask = nar.attention_mask(tokens, config.last_k, config.prune, narrator.device)
    rows = attention_rows(layer["query"], layer["key"], layer["scale"], mask, queries)

    shares = []
    for n, weights in enumerate(rows, 1):      # weights [rows, L]
        is_frame = ids == nar.FRAME
        groups = [
            (number >= 0) & (number < n),
            is_frame & (segment == n),
            is_frame & (segment < n),
            (ids <= nar.MEMORY) & (segment == n),
        ]
        shares.append([weights[:, group].sum(1).mean().item() for group in groups])
    return np.mean(shares, axis=0)


def attention_rows(query: Tensor, key: Tensor, scale: float, mask: Tensor,
                   queries: list[Tensor]) -> Iterator[Tensor]:
    """softmax(Q K^T) of an attention layer, mean over heads, only for the given queries.

    query [H, L, c] and key [G, L, c] as the layer's attention gets them, mask [L, L]; for each bool
    [L] in `queries`: its rows [rows, L].
    """
    key = key.repeat_interleave(len(query) // len(key), 0).transpose(1, 2)     # [H, c, L]
    for rows in queries:
        scores = (query[:, rows] @ key).float() * scale                        # [H, rows, L]
        yield scores.masked_fill(~mask[rows], float("-inf")).softmax(-1).mean(0)


def plot_attention(results: dict[str, dict[str, float]], narrations: str, png: str) -> None:
    """Bars of {model: {group: share}}."""
    figure, axes = pyplot().subplots(figsize=(6, 3))
    width = 0.8 / len(results)
    places = np.arange(len(GROUPS))
    for i, (model, shares) in enumerate(results.items()):
        axes.bar(places + i * 0.8 / len(results), list(shares.values()), width, label=model)
    axes.set_xticks(places + 0.4 - 0.4 / len(results), GROUPS)
    axes.set(ylabel="attention", title=f"What a narration attends to (last layer; {narrations})")
    axes.legend(fontsize=7)
    figure.tight_layout()
    save_figure(figure, png)


def written_narrations(narrator: nar.Narrator, x: Tensor,
                       static: bool) -> list[tuple[int, list[int]]]:
    """The narrations that the model itself writes for x [T, J, D]: (frame, ids)."""
    narrations = []
    for decision in stream.narrate(narrator, x, static, context=open_stream(narrator)):
        if decision.narration:
            narrations.append((decision.narration.frame, decision.narration.tokens))
    return narrations


def run_attention(args: argparse.Namespace) -> None:
    which = "true narrations" if args.teacher else "the model's own narrations"
    results = {}
    for model in args.model:
        narrator = narrator_of(args, model)
        if getattr(narrator, "routing", None) is not None:
            raise BadData(f"{model}: in a layer with a router, few tokens attend; its attention "
                          "cannot be compared")
        vision = load_vision(args, narrator)
        shares = []
        for sample in progress(samples(args, narrator), model, unit="video", leave=False):
            x = torch.stack(list(sample.tokens(vision)))                       # [T, J, D]
            if args.teacher:
                narrations = true_narrations(narrator, sample)
            else:
                narrations = written_narrations(narrator, x, args.static)
            if len(narrations) > 1:
                shares.append(attention(narrator, x, narrations))
        if not shares:
            raise BadData(f"{model}: no video has a narration ({which}) after the first frame's")
        results[model] = dict(zip(GROUPS, np.mean(shares, axis=0).tolist()))
    print(f"attention of the last layer while it predicts {which}")
    print_table([(Path(model).name[-16:], shares) for model, shares in results.items()])
    if args.png:
        plot_attention(results, which, args.png)
    if args.json:
        print(json.dumps({"narrations": which, "models": results}))


# ------------------------------------------------------------------------------- timeline

def plot_timeline(trace: list[dict], predicted: list[Sentence], true: list[Sentence], fps: float,
                  memory: int, png: str) -> None:
    """True and predicted segments, p([SKIP]) with its thresholds, and the cache.

    A predicted sentence is red if the true segment that fits its own best has another sentence.

    trace: rows as stream.py writes them
    memory: how many of the visual tokens are memory tokens; 0 where that is not known: they get no
    band of their own
    """
    heights = [3.2, 1.2, 1.0]                  # inches: predicted segments, trigger, cache
    if true:
        heights.insert(0, 3.2)
    width = 0.28 * max(len(predicted), len(true))
    width = min(60, max(10, width))
    figure, axes = pyplot().subplots(
        len(heights), 1, figsize=(width, sum(heights)), sharex=True,
        gridspec_kw={"height_ratios": heights, "hspace": 0.08})
    predicted_axis, trigger_axis, cache_axis = axes[-3:]
    times = [(row["frame"] + 1) / fps for row in trace]
    cache_axis.set(xlim=(0, times[-1]))        # of all axes; the sentences are clipped to it

    if true:
        draw_sentences(axes[0], "truth", TRUE_COLOUR, true, [False] * len(true))
    draw_sentences(predicted_axis, "narrated", PREDICTED_COLOUR, predicted,
                   wrong_sentences(predicted, true))
    draw_trigger(trigger_axis, trace, fps)
    draw_cache(cache_axis, trace, times, memory)
    for axis in (trigger_axis, cache_axis):
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save_figure(figure, png)


def draw_trigger(axis, trace: list[dict], fps: float) -> None:
    """p([SKIP]) and the active threshold. A dot for each narration, hollow where it was forced (at
    the last frame)."""
    decided = [((row["frame"] + 1) / fps, row) for row in trace if row["p_skip"] is not None]
    times = [time for time, _ in decided]
    thresholds = [row["theta"] for _, row in decided]
    axis.step(times, thresholds, where="mid", color="#b0b0b0", label="threshold")
    axis.plot(times, [row["p_skip"] for _, row in decided], color="#2060a0", label="p([SKIP])")
    for forced, label, face in ((False, "narrates", "#c03020"), (True, "forced", "white")):
        dots = [(time, row["p_skip"]) for time, row in decided
                if row["narrate"] and row.get("forced", False) == forced]
        if dots:
            axis.plot(*zip(*dots), "o", color="#c03020", markerfacecolor=face, markersize=4,
                      label=label)
    axis.set(ylabel="trigger", ylim=(-0.05, 1.05))


def draw_cache(axis, trace: list[dict], times: list[float], memory: int) -> None:
    """The tokens in the cache, in bands: text, memory tokens if their number is known, frames."""
    text = [row["text_tokens"] for row in trace]
    visual = [row["visual_tokens"] for row in trace]
    frames = [max(0, tokens - memory) for tokens in visual]
    if memory:
        bands = [text, [min(memory, tokens) for tokens in visual], frames]
        labels = ["text", "memory", "frames"]
        colours = ["#e8c08c", "#8cc89c", "#9cc8f0"]
    else:
        bands = [text, frames]
        labels = ["text", "current segment"]
        colours = ["#e8c08c", "#9cc8f0"]
    axis.stackplot(times, *bands, labels=labels, step="pre", colors=colours)
    axis.set(ylabel="cache, tokens", xlabel="seconds")


def is_number_or_none(value) -> bool:
    return value is None or is_number(value)


def is_bool(value) -> bool:
    return isinstance(value, bool)


TRACE_FIELDS = {                               # fields of a trace -> the check of their values
    "frame": is_number,
    "text_tokens": is_number,
    "visual_tokens": is_number,
    "p_skip": is_number_or_none,
    "theta": is_number_or_none,
    "narrate": is_bool,
}


def check_trace(trace: list[dict], source: Path) -> None:
    """BadData unless it is a trace as stream.py writes it."""
    if not trace:
        raise BadData(f"{source}: has no frames")
    for row in trace:
        for field, check in TRACE_FIELDS.items():
            if field not in row or not check(row[field]):
                raise BadData(f"{source}: is no trace of stream.py (it needs "
                              f"{', '.join(TRACE_FIELDS)} in every line)")


def narrate_video(args: argparse.Namespace) -> tuple[list[dict], list[Sentence], float, int]:
    """The narrator's stream over a video or its features: trace, sentences, frames per second, and
    the number of memory tokens in a segment."""
    check_inputs([args.input])
    if not is_features(args.input):
        check_vision(args.model, args.vision, nar.Config.vision)
    narrator = narrator_of(args, args.model)
    memory = 0
    if narrator.config.prune:                  # else those of earlier segments stay, too
        opening = narrator.layout.memory_and_frame(1)
        memory = sum(token <= nar.MEMORY for token in opening.ids)
    encoder = None
    if not is_features(args.input):
        encoder = narrator.vision_encoder(args.vision, vision_dtype(args))
    frames, _, _ = open_frames(args.input, narrator.config, encoder)

    decisions = {}                             # of the last frame's two, the second one counts
    for decision in stream.narrate(narrator, frames, args.static, context=open_stream(narrator)):
        decisions[decision.frame] = decision
    trace = [trace_row(decision, narrator.layout) for decision in decisions.values()]
    narrations = [decision.narration for decision in decisions.values() if decision.narration]
    predicted = [Sentence(narration.end, narration.text) for narration in narrations]
    return trace, predicted, narrator.config.fps, memory


def run_timeline(args: argparse.Namespace) -> None:
    """A video as one picture, or a trace that stream.py has written (with its --jsonl as --pred).
    """
    source = Path(args.input)
    true = truth_for(source, args.gt)
    png = args.png or str(source.with_suffix(".png"))
    if not args.png and Path(png).exists():
        raise BadData(f"{png}: is there already; say by --png where the picture is to be written")
    for file in (args.input, args.pred, args.gt, source.with_suffix(".json")):
        check_distinct(png, file or "")
    check_writable(png)
    if args.pred and source.suffix != ".jsonl":
        raise BadData("--pred is for a trace (.jsonl); a video is narrated")
    if source.suffix == ".jsonl":
        trace = read_jsonl(source)
        predicted = to_sentences(read_jsonl(Path(args.pred)), args.pred) if args.pred else None
        fps = args.fps
        memory = 0
    else:
        trace, predicted, fps, memory = narrate_video(args)
    check_trace(trace, source)
    if predicted is None:                      # a trace alone: segments without words
        predicted = [Sentence((row["frame"] + 1) / fps, "") for row in trace if row["narrate"]]
    plot_timeline(trace, predicted, true, fps, memory, png)


# ------------------------------------------------------------------------------- the command line

def attention_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_attention)
    data_options(parser)
    model_options(parser, nargs="+", default=[DEFAULT_MODEL])
    parser.add_argument("--teacher", action="store_true",
                        help="for the true narrations, as in Fig. 10 (default: for the model's own)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    trigger_options(parser)
    parser.add_argument("--png", metavar="FILE", help="also write a picture")


def timeline_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "One video as a picture."
    parser.set_defaults(run=run_timeline)
    parser.add_argument("input", metavar="VIDEO_OR_TRACE",
                        help="a video, frame features, or a trace of stream.py (.jsonl)")
    parser.add_argument("--pred", help="with a trace: the narrations, stream.py's --jsonl")
    parser.add_argument("--gt",
                        help="ground truth (default: the .json beside a video, if there is one)")
    parser.add_argument("--fps", type=positive_float, default=2.0,
                        help="frames per second of a trace (default 2)")
    model_options(parser, default=DEFAULT_MODEL)
    trigger_options(parser)
    parser.add_argument("--png", metavar="FILE", help="the picture (default: beside the input)")


FIGURES = {                                    # command -> its options, help
    "attention": (attention_options, "what narrations attend to, for one or more models"),
    "timeline": (timeline_options, "one video as a picture"),
    "words": (words_options, "the most frequent words of a data set's narrations"),
    "frequency": (frequency_options, "narrations a minute with several settings"),
    "examples": (examples_options,
                 "frames of a video with the sentences under them, wrong ones in red"),
    "learning": (learning_options, "memory words by the updates of the paper's loss alone"),
}


def run_figure(args: argparse.Namespace) -> None:
    check_writable(args.png)
    args.run(args)


def main():
    parser = Parser(prog="python -m experiments.figures", description="Figures of the paper.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_options, text) in FIGURES.items():
        add_options(commands.add_parser(name, help=text, description=text))
    args = parser.parse_args()
    command_line(lambda: run_figure(args))


if __name__ == "__main__":
    main()
