"""The most frequent words of the narrations of a data set (paper Fig. 8).

    python -m experiments.figures words --data toy --png words.png
"""
import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from commands.evaluate import split_of
from data import DATASETS, load_dataset
from support.common.errors import BadData
from support.common.figures import pyplot, save_figure
from support.common.options import data_options, positive_int
from support.files.annotations import tracks
from support.files.tracks import Notes

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
    notes = Notes()
    if args.data in DATASETS[1:] and args.world == "plain":
        root = Path(args.root or f"data/{args.data}")
        videos = tracks(args.data, root, split, notes)[:args.limit]
    else:
        videos = load_dataset(args.data, args.root, split, args.limit, variant=args.world)
    texts = [text for video in videos for _, text in video.narrations]
    if not texts:
        raise BadData(f"the {split} split of {args.data} has no narrations")
    separator = "; " if str(notes) else ""
    print(f"{args.data} {split}: {len(texts)} narrations{separator}{notes}")
    return texts


def count_words(texts: Iterable[str]) -> Counter:
    """How often each word occurs, in lower case, without STOP_WORDS and numbers."""
    counts = Counter()
    for text in texts:
        words = WORD.findall(text.lower())
        counts.update(word for word in words if word not in STOP_WORDS)
    return counts


def plot_words(frequent: list[tuple[str, int]], title: str, png: str) -> None:
    """A bar for each (word, times), the first on top."""
    figure, axes = pyplot().subplots(figsize=(6, 0.8 + 0.2 * len(frequent)))
    words = [word for word, _ in frequent]
    times = [count for _, count in frequent]
    bars = axes.barh(words, times, color="#4c9be8")
    axes.bar_label(bars, padding=3, fontsize=7)
    axes.tick_params(axis="y", labelsize=8)
    axes.set(title=title, xlabel="times", ylim=(len(frequent) - 0.4, -0.6))
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, png)


def run_words(args: argparse.Namespace) -> None:
    split = split_of(args)
    texts = narrations_of(args)
    counts = count_words(texts)
    total = counts.total()
    frequent = counts.most_common(args.top)
    print(f"{total} words, {len(counts)} of them different, without the most common ones of the "
          "language")
    for word, times in frequent:
        print(f"{word:20} {times:9} {times / total:7.1%}")
    if args.png:
        title = f"{args.data}, {split}: words of {len(texts):,} narrations"
        plot_words(frequent, title, args.png)
    if args.json:
        print(json.dumps({
            "data": args.data,
            "split": split,
            "narrations": len(texts),
            "words": total,
            "different": len(counts),
            "frequent": dict(frequent),
        }))


def words_options(parser: argparse.ArgumentParser):
    parser.set_defaults(run=run_words)
    data_options(parser)
    parser.add_argument("--top", type=positive_int, default=30, help="so many words (default %(default)s)")
    parser.add_argument("--png", metavar="FILE", help="also draw them")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
