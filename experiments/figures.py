"""The paper's figures, but for those of cost.py.

    python -m experiments.figures timeline toy/kitchen.mp4                             (timeline.py)
    python -m experiments.figures attention --data toy --teacher --png attention.png
    python -m experiments.figures words --data toy --png words.png
    python -m experiments.figures frequency dynamic.json static.json --png frequency.png
    python -m experiments.figures learning --png learning.png                          (curves.py)
    python -m experiments.figures forgetting --png forgetting.png

timeline     one video: true and predicted sentences, the trigger, the cache
attention    Fig. 10: what narrations attend to, for one or more models
words        Fig. 8: the most frequent words of a data set's narrations
frequency    Fig. 9: narrations a minute with several settings
learning     memory words by the updates of the paper's loss alone (not in the paper)
forgetting   how memories forget (not in the paper)
"""
import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

import narrator as nar
import stream
from commands.evaluate import load_vision, narrator_of, samples, split_of, true_narrations
from data import DATASETS, load_dataset
from experiments import curves, timeline
from streams.bounds import open_stream
from support.common.disk import check_distinct, check_writable, is_number, read_text
from support.common.errors import BadData, command_line
from support.common.figures import print_table, pyplot, save_figure
from support.common.options import (
    DEFAULT_MODEL, Parser, data_options, model_options, named_file, positive_int, trigger_options,
)
from support.common.progress import progress
from support.files.annotations import tracks
from support.files.tracks import Notes

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
    config = narrator.config
    tokens = narrator.layout.sequence(narrations)
    mask = nar.attention_mask(tokens, config.last_k, config.prune, narrator.device)
    weights, labels = last_attention(narrator, x, narrations, mask)            # [L, L], [L]
    segment = torch.tensor(tokens.segment)
    number = torch.tensor(tokens.number)
    ids = torch.tensor(tokens.ids)
    is_frame = ids == nar.FRAME
    shares = []
    for n in range(1, len(narrations)):
        rows = weights[(labels != -100) & (segment == n) & (number == n)]
        groups = [
            (number >= 0) & (number < n),
            is_frame & (segment == n),
            is_frame & (segment < n),
            (ids <= nar.MEMORY) & (segment == n),
        ]
        shares.append([rows[:, group].sum(1).mean().item() for group in groups])
    return np.mean(shares, axis=0)


def last_attention(narrator: nar.Narrator, x: Tensor, narrations: list[tuple[int, list[int]]],
                   mask: Tensor) -> tuple[Tensor, Tensor]:
    """The last layer's attention in the parallel form, mean over heads [L, L], and the labels [L].

    transformers' layers call the function that is registered here, in place of their own attention.
    """
    latest = {}

    def watched(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None,
                scaling: float | None = None, **_) -> tuple[Tensor, None]:
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, 1)                                # [1, h, L, c]
        value = value.repeat_interleave(repeats, 1)
        scores = (query @ key.mT).float() * scaling                            # [1, h, L, L]
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        latest["weights"] = weights[0].mean(0).cpu()           # the last layer's stay
        return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("watched", watched)
    before = narrator.llm.config._attn_implementation
    narrator.llm.set_attn_implementation("watched")
    try:
        _, labels, _ = narrator(x, narrations)
    finally:
        narrator.llm.set_attn_implementation(before)
    return latest["weights"], labels


def plot_attention(results: dict[str, dict[str, float]], narrations: str, png: str) -> None:
    """Bars of {model: {group: share}}."""
    figure, axes = pyplot().subplots(figsize=(6, 3))
    width = 0.8 / len(results)
    places = np.arange(len(GROUPS))
    for i, (model, shares) in enumerate(results.items()):
        axes.bar(places + i * width, list(shares.values()), width, label=model)
    axes.set_xticks(places + 0.4 - width / 2, GROUPS)
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


# ------------------------------------------------------------------------------- words

# Words that are frequent in any text: articles, pronouns, prepositions, conjunctions, auxiliaries.
STOP_WORDS = set("""
    a about after again all along an and another are around as at away back be been before behind
    beside between both but by can did do does down each for from had has have he her his i if in
    inside into is it its itself me more my near next no not of off on one onto or other out over
    she so some that the their them then there these they this those through to together towards
    under up was were what when where which while with you your yourself
    """.split())
# Letters, with an apostrophe or a hyphen inside: C’s, re-heats.
WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")


def narrations_of(args: argparse.Namespace) -> list[str]:
    """The sentences of a split. Features are not needed: the toy's sentences come from its worlds,
    the others' from annotation files."""
    split = split_of(args)
    if args.data in DATASETS[1:] and args.world == "plain":
        root = Path(args.root or f"data/{args.data}")
        videos = tracks(args.data, root, split, Notes())[:args.limit]
    else:
        videos = load_dataset(args.data, args.root, split, args.limit, variant=args.world)
    texts = [text for video in videos for _, text in video.narrations]
    if not texts:
        raise BadData(f"the {split} split of {args.data} has no narrations")
    return texts


def count_words(texts: Iterable[str]) -> Counter:
    """How often each word occurs, in lower case, without STOP_WORDS and numbers."""
    counts = Counter()
    for text in texts:
        words = WORD.findall(text.lower())
        counts.update(word for word in words if word not in STOP_WORDS)
    return counts


def run_words(args: argparse.Namespace) -> None:
    texts = narrations_of(args)
    counts = count_words(texts)
    frequent = counts.most_common(args.top)
    print(f"{len(texts)} narrations, {counts.total()} words, {len(counts)} of them different, "
          "without the most common ones of the language")
    for word, times in frequent:
        print(f"{word:20} {times:9} {times / counts.total():7.1%}")
    if args.png:
        figure, axes = pyplot().subplots(figsize=(6, 0.8 + 0.2 * len(frequent)))
        bars = axes.barh([word for word, _ in frequent], [times for _, times in frequent])
        axes.bar_label(bars, padding=3, fontsize=7)
        axes.invert_yaxis()                                    # the first on top
        axes.set(title=f"{args.data}: words of {len(texts):,} narrations", xlabel="times")
        save_figure(figure, args.png)
    if args.json:
        print(json.dumps({"narrations": len(texts), "words": counts.total(),
                          "different": len(counts), "frequent": dict(frequent)}))


# ------------------------------------------------------------------------------- frequency

PANELS = {"narrations_per_minute": "narrations a minute", "segment_s": "mean segment, seconds"}


def read_pace(file: Path) -> dict[str, float | None]:
    """The values of PANELS, predicted and true, from what `evaluate.py stream` or `score` printed
    with --json; None where there is nothing to average."""
    keys = [*PANELS, *(f"true_{key}" for key in PANELS)]
    lines = read_text(file).splitlines()
    try:
        result = json.loads(lines[-1])
        pace = {key: result[key] for key in keys}
    except (ValueError, LookupError, TypeError):
        pace = {"": ""}
    if not all(value is None or is_number(value) for value in pace.values()):
        raise BadData(f"{file}: its last line must be what evaluate.py stream (or score) prints "
                      "with --json")
    return pace


def plot_frequency(rows: list[tuple[str, dict[str, float | None]]], png: str) -> None:
    """Bars of (setting, pace), the first on top. A line across each bar is the truth's value."""
    figure, panels = pyplot().subplots(1, 2, figsize=(9, 1 + 0.35 * len(rows)), sharey=True)
    settings = [setting for setting, _ in rows]
    places = range(len(rows))
    for axes, (key, label) in zip(panels, PANELS.items()):
        values = [pace[key] for _, pace in rows]
        bars = axes.barh(places, [value or 0 for value in values], 0.6, color="#e8a04c",
                         label="predicted")
        texts = ["-" if value is None else f"{value:.1f}" for value in values]
        axes.bar_label(bars, texts, label_type="center", fontsize=8)
        true = [pace[f"true_{key}"] or np.nan for _, pace in rows]
        axes.plot(true, places, "|", color="black", markersize=20, label="truth")
        axes.set(xlabel=label)
    panels[0].set_yticks(places, settings, parse_math=False)
    panels[0].invert_yaxis()
    panels[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.tight_layout()
    save_figure(figure, png)


def run_frequency(args: argparse.Namespace) -> None:
    for _, file in args.files:
        check_distinct(args.png or "", file)
    rows = [(setting, read_pace(file)) for setting, file in args.files]
    print_table([(setting[-16:], pace) for setting, pace in rows])     # 16: the width of a column
    if args.png:
        plot_frequency(rows, args.png)


# ------------------------------------------------------------------------------- the command line

def attention_options(parser: argparse.ArgumentParser) -> None:
    data_options(parser)
    model_options(parser, nargs="+", default=[DEFAULT_MODEL])
    trigger_options(parser)
    parser.add_argument("--teacher", action="store_true",
                        help="for the true narrations, as in Fig. 10 (default: for the model's own)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")


def words_options(parser: argparse.ArgumentParser) -> None:
    data_options(parser)
    parser.add_argument("--top", type=positive_int, default=30,
                        help="so many words (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")


def frequency_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=named_file, metavar="NAME=FILE",
                        help="a setting and what evaluate.py stream printed for it with --json; "
                             "without NAME=, the setting is called as its file")


def no_options(parser: argparse.ArgumentParser) -> None:
    pass


FIGURES = {                                    # command -> what runs it, its options, help
    "timeline": (timeline.run_timeline, timeline.timeline_options, "one video as a picture"),
    "attention": (run_attention, attention_options,
                  "what narrations attend to, for one or more models"),
    "words": (run_words, words_options, "the most frequent words of a data set's narrations"),
    "frequency": (run_frequency, frequency_options, "narrations a minute with several settings"),
    "learning": (curves.run_learning, no_options,
                 "memory words by the updates of the paper's loss alone"),
    "forgetting": (curves.run_forgetting, no_options, "how memories forget"),
}


def main() -> None:
    parser = Parser(prog="python -m experiments.figures", description="Figures of the paper.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (run, add_options, text) in FIGURES.items():
        options = commands.add_parser(name, help=text, description=text)
        add_options(options)
        options.add_argument("--png", metavar="FILE", help="the picture",
                             required=name in ("learning", "forgetting"))
        options.set_defaults(run=run)
    args = parser.parse_args()

    def run() -> None:
        check_writable(args.png)
        args.run(args)

    command_line(run)


if __name__ == "__main__":
    main()
