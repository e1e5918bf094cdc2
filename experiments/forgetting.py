"""How memories forget, from the results of tables.py (not in the paper).

    python -m experiments.tables knowledge ages T5 T3    trains and evaluates what has no result yet
    python -m experiments.figures forgetting --png assets/forgetting.png

Left: share of the hidden things that a linear read-out of the memory tokens names rightly, by the
time since they were seen (knowledge.py). Middle: share of the memory words that the narrator
writes, by the time since their thing was seen (ages.py). Right: the same by the length of the
video. Bands reach from the lowest seed to the highest.
"""
import argparse

from experiments.ages import AGES_OF_WORDS
from experiments.knowledge import AGES
from experiments.paper import TABLES, Column, Row, Table
from experiments.tables import good_seeds, measured
from support.common.disk import check_writable
from support.common.errors import BadData
from support.common.figures import pyplot, save_figure

MINUTES_OF_GROUP = {"<= 2 min": 1, "2 - 4 min": 3, "4 - 8 min": 6, ">= 8 min": 11}     # VIDEOS
BY_LENGTH = [Column(group, "long", f"by_duration/{group}/memory_words")
             for group in MINUTES_OF_GROUP]
# title of a panel -> label of its axis, places of its points on it
PANELS = {
    "read out rightly": ("seconds since a thing was seen, up to", AGES),
    "written": ("seconds since its thing was seen, up to", AGES_OF_WORDS),
    "written, long videos": ("minutes of the video", tuple(MINUTES_OF_GROUP.values())),
}
LINES = ("#999999", "#c7a252", "#8c6bb1", "#66a61e", "#1b9e77", "#e6550d", "#2060a0", "black")


def curve_of(row: Row, columns: list[Column], table: Table) -> list[list[float]]:
    """The numbers of each seed in each column. BadData if one has none."""
    seeds = good_seeds(row, table, list(range(table.seeds)))
    curve = [measured(row, column, seeds) for column in columns]
    if not all(curve):
        raise BadData(f"there are no results of {row.label} yet: python -m experiments.tables "
                      "knowledge ages T5 T3")
    return curve


def forgetting() -> dict[str, dict[str, list[list[float]]]]:
    """{panel: {memory: its curve}}"""
    knowledge = TABLES["knowledge"]
    ages = TABLES["ages"]
    read_out = {row.label: curve_of(row, knowledge.columns, knowledge) for row in knowledge.rows}
    written = {row.label: curve_of(row, ages.columns[:len(AGES_OF_WORDS)], ages)
               for row in ages.rows}
    by_length = {row.label: curve_of(row, BY_LENGTH, ages) for row in ages.rows}
    return dict(zip(PANELS, (read_out, written, by_length)))


def run_forgetting(args: argparse.Namespace) -> None:
    check_writable(args.png)
    figure, axes = pyplot().subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for axis, (title, curves) in zip(axes, forgetting().items()):
        label, places = PANELS[title]
        for (memory, curve), colour in zip(curves.items(), LINES):
            means = [sum(numbers) / len(numbers) for numbers in curve]
            lowest = [min(numbers) for numbers in curve]
            highest = [max(numbers) for numbers in curve]
            axis.plot(places, means, marker=".", color=colour, label=memory)
            axis.fill_between(places, lowest, highest, color=colour, alpha=0.2, linewidth=0)
        axis.set(title=title, xlabel=label, xscale="log", ylim=(0, 1))
        axis.set_xticks(places, [str(place) for place in places])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, args.png)
