"""How memory words are learned by the paper's loss alone, from the results of tables.py (not in the
paper).

    python -m experiments.tables one-loss               trains and evaluates what has no result yet
    python -m experiments.figures learning --png learning.png

Each point is a training of its own: its learning rate falls to zero at the last update. A line goes
through the means where several trainings made as many updates.
"""
from __future__ import annotations

import argparse
import json

from experiments.forgetting import Curve
from experiments.paper import MEMORY_WORDS, TABLES, TRAININGS, Row
from experiments.tables import good_seeds, measured, seeds_of
from support.common.errors import BadData
from support.common.figures import pyplot, save_figure
from toy.stages import DEFAULTS
from toy.world import COLOURS

TABLE = TABLES["one-loss"]


def updates(row: Row) -> int:
    """How many updates the paper's loss made in a row's training."""
    options = TRAININGS[row.training].toy.split()
    epochs = int(options[options.index("--epochs") + 1])
    videos = DEFAULTS["limit"]
    if "--limit" in options:
        videos = int(options[options.index("--limit") + 1])
    return epochs * videos // DEFAULTS["batch"]


def words_by_updates() -> dict[str, Curve]:
    """{memory: its curve, of memory words by updates}"""
    curves = {}
    for row in TABLE.rows:
        numbers = measured(row, MEMORY_WORDS, good_seeds(row, TABLE, seeds_of(TABLE, None)))
        memory, _, _ = row.label.rpartition(",")
        if numbers:
            curves.setdefault(memory, []).append((updates(row), numbers))
    return curves


def plot_learning(curves: dict[str, Curve], png: str) -> None:
    figure, axes = pyplot().subplots(figsize=(6, 3.5), layout="constrained")
    for memory, curve in curves.items():
        places = [update for update, _ in curve]
        means = [sum(numbers) / len(numbers) for _, numbers in curve]
        line, = axes.plot(places, means, label=memory)
        for update, numbers in curve:
            axes.plot([update] * len(numbers), numbers, "o", color=line.get_color(), alpha=0.6)
    axes.axhline(1 / len(COLOURS), color="#999999", linestyle=":", label="guessed")
    axes.set(xlabel="updates by the paper's loss", ylabel="memory words")
    axes.set(xlim=(0, None), ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, png)


def run_learning(args: argparse.Namespace) -> None:
    curves = words_by_updates()
    if not curves:
        raise BadData("there are no results yet: python -m experiments.tables one-loss")
    plot_learning(curves, args.png)
    if args.json:
        print(json.dumps(curves))


def learning_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_learning)
    parser.add_argument("--png", default="out/learning.png", help="default out/learning.png")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
