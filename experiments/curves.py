"""Curves from the results of tables.py (not in the paper).

    python -m experiments.tables one-loss               trains and evaluates what has no result yet
    python -m experiments.figures learning --png assets/learning.png
    python -m experiments.tables knowledge ages T5 T3
    python -m experiments.figures forgetting --png assets/forgetting.png

learning    memory words by the updates of the paper's loss alone. Each point is a training of its
            own: its learning rate falls to zero at the last update
forgetting  left: share of the hidden things that a linear read-out of the memory tokens names
            rightly, by the time since they were seen (knowledge.py). Middle: share of the memory
            words that the narrator writes, by the time since their thing was seen (ages.py). Right:
            the same by the length of the video. Bands reach from the lowest seed to the highest
"""
import argparse
from collections.abc import Iterable

from experiments.ages import AGES_OF_WORDS
from experiments.knowledge import AGES
from experiments.paper import TABLES, TRAININGS, Column, Row, Table
from experiments.tables import good_seeds, measured, seeds_of
from support.common.errors import BadData
from support.common.figures import pyplot, save_figure
from toy.stages import DEFAULTS
from toy.world import COLOURS

Curve = list[tuple[float, list[float]]]        # x, and y of each seed
MEMORY_WORDS = Column("memory words", "stream", "memory_words")
GROUPS = {"<= 2 min": 1, "2 - 4 min": 3, "4 - 8 min": 6, ">= 8 min": 11}       # minutes of VIDEOS
BY_LENGTH = [Column(str(minutes), "long", f"by_duration/{group}/memory_words")
             for group, minutes in GROUPS.items()]
LINES = ("#999999", "#c7a252", "#8c6bb1", "#66a61e", "#1b9e77", "#e6550d", "#2060a0", "black")


def curve_of(row: Row, columns: list[Column], places: Iterable[float], table: Table) -> Curve:
    """The points of a row that have results."""
    seeds = good_seeds(row, table, seeds_of(table, None))
    points = []
    for column, x in zip(columns, places):
        numbers = measured(row, column, seeds)
        if numbers:
            points.append((x, numbers))
    return points


def means(curve: Curve) -> tuple[list[float], list[float]]:
    """x, and the mean of y."""
    return [x for x, _ in curve], [sum(numbers) / len(numbers) for _, numbers in curve]


def demand(curves: Iterable[Curve], tables: str) -> None:
    if not any(curves):
        raise BadData(f"there are no results yet: python -m experiments.tables {tables}")


# ------------------------------------------------------------------------------- learning

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
    table = TABLES["one-loss"]
    curves = {}
    for row in table.rows:
        memory, _, _ = row.label.rpartition(",")
        points = curve_of(row, [MEMORY_WORDS], [updates(row)], table)
        if points:
            curves.setdefault(memory, []).extend(points)
    return curves


def run_learning(args: argparse.Namespace) -> None:
    curves = words_by_updates()
    demand(curves.values(), "one-loss")
    figure, axes = pyplot().subplots(figsize=(6, 3.5), layout="constrained")
    for memory, curve in curves.items():
        line, = axes.plot(*means(curve), label=memory)
        for x, numbers in curve:
            axes.plot([x] * len(numbers), numbers, "o", color=line.get_color(), alpha=0.6)
    axes.axhline(1 / len(COLOURS), color="#999999", linestyle=":", label="guessed")
    axes.set(xlabel="updates by the paper's loss", ylabel="memory words")
    axes.set(xlim=(0, None), ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, args.png)


# ------------------------------------------------------------------------------- forgetting

def forgetting() -> dict[str, dict[str, Curve]]:
    """{panel: {memory: its curve}}: read out and written, by the time since a thing was seen, and
    written, by the length of the video."""
    knowledge = TABLES["knowledge"]
    ages = TABLES["ages"]
    readable = [row.label for row in knowledge.rows]       # a cache has no memory that can be read
    panels = {"read out": {}, "written": {}, "by length": {}}
    for row in ages.rows:
        if row.label in readable:
            panels["read out"][row.label] = curve_of(row, knowledge.columns, AGES, knowledge)
        panels["written"][row.label] = curve_of(row, ages.columns, AGES_OF_WORDS, ages)
        panels["by length"][row.label] = curve_of(row, BY_LENGTH, GROUPS.values(), ages)
    return panels


def run_forgetting(args: argparse.Namespace) -> None:
    panels = forgetting()
    demand([curve for panel in panels.values() for curve in panel.values()], "knowledge ages T5 T3")
    figure, axes = pyplot().subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    left, middle, right = axes
    left.set(xlabel="seconds since a thing was seen, up to", ylabel="read out rightly")
    middle.set(xlabel="seconds since its thing was seen, up to", ylabel="memory words")
    right.set(xlabel="minutes of the video", ylabel="memory words")
    for axis, panel, places in zip(axes, panels.values(), (AGES, AGES_OF_WORDS, GROUPS.values())):
        for (label, curve), colour in zip(panel.items(), LINES):
            axis.plot(*means(curve), marker=".", color=colour, label=label)
            axis.fill_between([x for x, _ in curve], [min(numbers) for _, numbers in curve],
                              [max(numbers) for _, numbers in curve], color=colour, alpha=0.2,
                              linewidth=0)
        axis.set(xscale="log", ylim=(0, 1))
        axis.set_xticks(list(places), [str(place) for place in places])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, args.png)
