"""The paper's figures but those of efficiency.py: here attention (App. C.2), and one video as a timeline.

    python -m experiments.figures attention --data toy --teacher --png attention.png
    python -m experiments.figures timeline toy/kitchen.mp4
    python -m experiments.figures words --data toy --png words.png                          words.py, Fig. 8
    python -m experiments.figures frequency dynamic.json static.json --png frequency.png    frequency.py, Fig. 9
    python -m experiments.figures examples toy/kitchen.mp4 --from 60 --to 80 --png at60.png examples.py, Fig. 5, 12, 13
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
from experiments.words import words_options
from streams.checks import check_input
from streams.fast import open_stream
from support.common.devices import vision_dtype
from support.common.disk import check_distinct, check_writable, is_number, read_jsonl
from support.common.errors import BadData, command_line
from support.common.figures import print_table, pyplot, save_figure
from support.common.options import (
    DEFAULT_MODEL, Parser, data_options, model_options, positive_float, trigger_options,
)
from support.common.progress import progress
from support.engine.vision import check_vision
from support.files.features import is_features, open_frames
from support.files.narrations import Sentence, to_sentences

# ---------------------------------------------------------------------- attention (App. C.2)

GROUPS = ("past narrations", "current frames", "past frames", "memory tokens")


@torch.no_grad()
def attention(narrator: nar.Narrator, x: Tensor, narrations: list[tuple[int, list[int]]]) -> np.ndarray:
    """Attention of the last layer, mean over heads, from the tokens that predict a narration to four groups of tokens.

    Mean over all narrations but the first -> [4], as in GROUPS; the rest goes to the prompt and the narration itself.
    """
    seen = {}

    def watch(query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        seen.update(query=query[0], key=key[0], scale=scale)        # what stays is the last layer's

    hook = narrator.llm.model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"watch": watch}), with_kwargs=True)
    try:
        _, labels, tokens = narrator(x, narrations)
    finally:
        hook.remove()
    segment, number, ids = (torch.tensor(y) for y in (tokens.segment, tokens.number, tokens.ids))
    queries = [(segment == n) & (labels != -100) & (number == n) for n in range(1, len(narrations))]
    config = narrator.config
    mask = nar.attention_mask(tokens, config.last_k, config.prune, narrator.device)
    rows = attention_rows(seen["query"], seen["key"], seen["scale"], mask, queries)
    shares = []
    for n, weights in enumerate(rows, 1):
        memory, frames = (ids <= nar.MEMORY) & (segment == n), ids == nar.FRAME
        groups = (number >= 0) & (number < n), frames & (segment == n), frames & (segment < n), memory
        shares.append([weights[:, group].sum(1).mean().item() for group in groups])
    return np.mean(shares, axis=0)


def attention_rows(query: Tensor, key: Tensor, scale: float, mask: Tensor,
                   queries: list[Tensor]) -> Iterator[Tensor]:
    """softmax(Q K^T) of an attention layer, mean over heads, only for the given queries.

    query [H, L, c] and key [G, L, c] as the layer's attention gets them, mask [L, L]; for each bool
    [L] in `queries`: its rows [rows, L].
    """
    key = key.repeat_interleave(len(query) // len(key), 0).transpose(1, 2)               # [H, c, L]
    for rows in queries:
        scores = (query[:, rows] @ key).float() * scale
        yield scores.masked_fill(~mask[rows], float("-inf")).softmax(-1).mean(0)


def plot_attention(results: dict[str, dict[str, float]], narrations: str, png: str):
    """Bars of {model: {group: share}}."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3))
    for i, (model, row) in enumerate(results.items()):
        axes.bar(np.arange(4) + i * 0.8 / len(results), list(row.values()), 0.8 / len(results), label=model)
    axes.set_xticks(np.arange(4) + 0.4 - 0.4 / len(results), GROUPS)
    axes.set(ylabel="attention", title=f"What a narration attends to (last layer; {narrations})")
    axes.legend(fontsize=7)
    figure.tight_layout()
    save_figure(figure, png)


def run_attention(args: argparse.Namespace):
    results, narrations = {}, "true narrations" if args.teacher else "the model's own narrations"
    for model in args.model:
        narrator = narrator_of(args, model)
        if narrator.config.mod_keep:
            raise BadData(f"{model}: in a layer with a router, few tokens attend; its attention cannot be compared")
        vision, shares = load_vision(args, narrator), []
        for sample in progress(samples(args, narrator), model, unit="video", leave=False):
            x = torch.stack(list(sample.tokens(vision)))
            if args.teacher:
                given = true_narrations(narrator, sample)
            else:
                written = [y.narration for y in stream.narrate(narrator, x, args.static, context=open_stream(narrator)) if y.narration]
                given = [(y.frame, y.tokens) for y in written]
            if len(given) > 1:
                shares.append(attention(narrator, x, given))
        if not shares:
            raise BadData(f"{model}: no video has a narration ({narrations}) after the first frame's")
        results[model] = dict(zip(GROUPS, np.mean(shares, axis=0).tolist()))
    print(f"attention of the last layer while it predicts {narrations}")
    print_table([(Path(model).name[-16:], row) for model, row in results.items()])
    if args.png:
        plot_attention(results, narrations, args.png)
    if args.json:
        print(json.dumps({"narrations": narrations, "models": results}))


# ---------------------------------------------------------------------- timeline

def plot_timeline(trace: list[dict], predicted: list[Sentence], true: list[Sentence], fps: float, memory: int,
                  png: str):
    """True and predicted segments, p([SKIP]) with its thresholds, the cache; `trace` as stream.py writes it.

    A predicted sentence is red if the true segment that fits its own best has another sentence. memory: how many of the
    visual tokens are memory tokens (0 where that is not known: they get no band of their own).
    """
    plt = pyplot()
    heights = [3.2] * bool(true) + [3.2, 1.2, 1.0]                                    # inches
    width = min(60, max(10, 0.28 * max(len(predicted), len(true))))
    figure, axes = plt.subplots(len(heights), 1, figsize=(width, sum(heights)), sharex=True,
                                gridspec_kw={"height_ratios": heights, "hspace": 0.08})
    every = [(row["frame"] + 1) / fps for row in trace]
    axes[-1].set(xlim=(0, every[-1]))
    if true:
        draw_sentences(axes[0], "truth", TRUE_COLOUR, true, [False] * len(true))
    draw_sentences(axes[-3], "narrated", PREDICTED_COLOUR, predicted, wrong_sentences(predicted, true))
    draw_trigger(axes[-2], trace, fps)
    bands = {"text": ([row["text_tokens"] for row in trace], "#e8c08c")}
    if memory:
        bands["memory"] = [min(memory, row["visual_tokens"]) for row in trace], "#8cc89c"
    bands["frames" if memory else "current segment"] = (
        [max(0, row["visual_tokens"] - memory) for row in trace], "#9cc8f0")
    axes[-1].stackplot(every, *(band for band, _ in bands.values()), labels=list(bands), step="pre",
                       colors=[colour for _, colour in bands.values()])
    axes[-1].set(ylabel="cache, tokens", xlabel="seconds")
    for axis in axes[-2:]:
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save_figure(figure, png)


def draw_trigger(axis, trace: list[dict], fps: float):
    """p([SKIP]) and the active threshold; a dot for each narration, hollow where it was forced (the last frame's)."""
    decided = [((row["frame"] + 1) / fps, row) for row in trace if row["p_skip"] is not None]
    at = [time for time, _ in decided]
    axis.step(at, [row["theta"] for _, row in decided], where="mid", color="#b0b0b0", label="threshold")
    axis.plot(at, [row["p_skip"] for _, row in decided], color="#2060a0", label="p([SKIP])")
    for forced, label, face in ((False, "narrates", "#c03020"), (True, "forced", "white")):
        dots = [(time, row["p_skip"]) for time, row in decided if row["narrate"] and row.get("forced", False) == forced]
        if dots:
            axis.plot(*zip(*dots), "o", color="#c03020", markerfacecolor=face, markersize=4, label=label)
    axis.set(ylabel="trigger", ylim=(-0.05, 1.05))


def check_trace(trace: list[dict], source: Path):
    """BadData unless it is what stream.py writes."""
    if not trace:
        raise BadData(f"{source}: has no frames")
    right = {key: is_number for key in ("frame", "text_tokens", "visual_tokens")}
    right |= {key: lambda value: value is None or is_number(value) for key in ("p_skip", "theta")}
    right["narrate"] = lambda value: isinstance(value, bool)
    if not all(key in row and check(row[key]) for row in trace for key, check in right.items()):
        raise BadData(f"{source}: is no trace of stream.py (it needs {', '.join(right)} in every line)")


def run_timeline(args: argparse.Namespace):
    """A video, or a trace that stream.py has written (with its --jsonl as --pred), as one picture."""
    source, fps, memory = Path(args.input), args.fps, 0
    png = args.png or str(source.with_suffix(".png"))
    for read in (args.input, args.pred, args.gt):
        check_distinct(png, read or "")
    check_writable(png)
    true = truth_for(source, args.gt)
    if source.suffix == ".jsonl":
        trace = read_jsonl(source)
        predicted = to_sentences(read_jsonl(Path(args.pred)), args.pred) if args.pred else None
    else:
        check_input(args.input)
        if not is_features(args.input):
            check_vision(args.model, args.vision, nar.Config.vision)
        narrator = narrator_of(args, args.model)
        fps = narrator.config.fps
        opening = narrator.layout.reopening(1)
        memory = sum(i <= nar.MEMORY for i in opening.ids) if narrator.config.prune else 0
        dtype = vision_dtype(args)
        encoder = None if is_features(args.input) else narrator.vision_encoder(args.vision, dtype)
        frames, _, _ = open_frames(args.input, narrator.config, encoder)
        decisions = {y.frame: y for y in stream.narrate(narrator, frames, args.static, context=open_stream(narrator))}
        trace = [trace_row(y, narrator.layout) for y in decisions.values()]
        predicted = [Sentence(y.narration.end, y.narration.text) for y in decisions.values() if y.narration]
    check_trace(trace, source)
    if predicted is None:
        predicted = [Sentence((row["frame"] + 1) / fps, "") for row in trace if row["narrate"]]
    plot_timeline(trace, predicted, true, fps, memory, png)


# ---------------------------------------------------------------------- the command line

def main():
    parser = Parser(prog="python -m experiments.figures", description="Figures of the paper.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "what narrations attend to, for one or more models"
    look = commands.add_parser("attention", help=text, description=text)
    look.set_defaults(run=run_attention)
    data_options(look)
    model_options(look, nargs="+", default=[DEFAULT_MODEL])
    look.add_argument("--teacher", action="store_true",
                      help="for the true narrations, as in Fig. 10 (default: for the model's own)")
    look.add_argument("--json", action="store_true", help="one JSON object as the last line")
    line = commands.add_parser("timeline", help="one video as a picture", description="One video as a picture.")
    line.set_defaults(run=run_timeline)
    line.add_argument("input", metavar="VIDEO_OR_TRACE",
                      help="a video, frame features, or a trace of stream.py (.jsonl)")
    line.add_argument("--pred", help="with a trace: the narrations, stream.py's --jsonl")
    line.add_argument("--gt", help="ground truth (default: the .json beside a video, if there is one)")
    line.add_argument("--fps", type=positive_float, default=2.0, help="frames per second of a trace (default 2)")
    model_options(line, default=DEFAULT_MODEL)
    for one in (look, line):
        trigger_options(one)
    look.add_argument("--png", metavar="FILE", help="also write a picture")
    line.add_argument("--png", metavar="FILE", help="the picture (default: beside the input)")
    for name, add_options, text in (
            ("words", words_options, "the most frequent words of a data set's narrations"),
            ("frequency", frequency_options, "narrations a minute with several settings"),
            ("examples", examples_options, "frames of a video with the sentences under them, wrong ones in red")):
        add_options(commands.add_parser(name, help=text, description=text))
    args = parser.parse_args()

    def run():
        check_writable(args.png)
        args.run(args)

    command_line(run)


if __name__ == "__main__":
    main()
