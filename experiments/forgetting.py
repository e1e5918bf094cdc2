"""How memories forget: three curves for each, from the results of tables.py (not in the paper).

    python -m experiments.tables knowledge ages T5 T3  trains and evaluates what has no result yet
    python -m experiments.forgetting --png out/forgetting.png

left    share of the hidden things that a linear read-out of the memory tokens names rightly, by the
        time since they were seen (knowledge.py)
middle  share of the memory words that the narrator writes, by the time since their thing was seen
        (ages.py)
right   the same by the length of the video
Lines are means over seeds; bands reach from the lowest seed to the highest.
"""
import argparse
import json
from collections.abc import Iterable

from experiments.paper import AGES, AGES_OF_WORDS, KEEPS_ALL, TABLES, Column, Row, Table
from experiments.tables import good_seeds, measured, seeds_of
from support.common.disk import check_writable
from support.common.errors import BadData, command_line
from support.common.figures import pyplot, save_figure
from support.common.options import Parser

GROUPS = {"<= 2 min": 1, "2 - 4 min": 3, "4 - 8 min": 6, ">= 8 min": 11}       # minutes of VIDEOS
BY_LENGTH = [Column(str(minutes), "long", f"by_duration/{group}/memory_words")
             for group, minutes in GROUPS.items()]
COLOURS = ("#999999", "#c7a252", "#8c6bb1", "#66a61e", "#1b9e77", "#e6550d", "#2060a0", "black")

Curve = list[tuple[float, list[float]]]        # x, and y of each seed


def curve_of(row: Row, columns: list[Column], places: Iterable[float], table: Table) -> Curve:
    """The points of a row that have results."""
    seeds = good_seeds(row, table, seeds_of(table, None))
    points = []
    for column, x in zip(columns, places):
        numbers = measured(row, column, seeds)
        if numbers:
            points.append((x, numbers))
    return points


def curves() -> dict[str, dict[str, Curve]]:
    """{panel: {memory: its curve}}: read out and written, by the time since a thing was seen, and
    written, by the length of the video."""
    knowledge = TABLES["knowledge"]
    ages = TABLES["ages"]
    panels = {"read_out": {}, "written": {}, "by_length": {}}
    for row in ages.rows:
        label = row.label
        if row is not KEEPS_ALL:                           # it has no memory that could be read
            panels["read_out"][label] = curve_of(row, knowledge.columns, AGES, knowledge)
        panels["written"][label] = curve_of(row, ages.columns, AGES_OF_WORDS, ages)
        panels["by_length"][label] = curve_of(row, BY_LENGTH, GROUPS.values(), ages)
    return panels


def draw(axis, curves_of_memories: dict[str, Curve]) -> None:
    for (label, curve), colour in zip(curves_of_memories.items(), COLOURS):
        if not curve:
            continue
        places = [x for x, _ in curve]
        means = [sum(numbers) / len(numbers) for _, numbers in curve]
        axis.plot(places, means, marker=".", color=colour, label=label)
        axis.fill_between(places, [min(numbers) for _, numbers in curve],
                          [max(numbers) for _, numbers in curve], color=colour, alpha=0.2,
                          linewidth=0)
    axis.set(xscale="log", ylim=(0, 1))
    axis.grid(alpha=0.3)


def run_forgetting(args: argparse.Namespace) -> None:
    check_writable(args.png)
    panels = curves()
    if not any(curve for panel in panels.values() for curve in panel.values()):
        raise BadData("there are no results yet: python -m experiments.tables knowledge ages T5 T3")
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    left, middle, right = axes
    draw(left, panels["read_out"])
    left.set(xlabel="seconds since a thing was seen, up to", ylabel="read out rightly", xticks=AGES)
    left.set_xticklabels([str(age) for age in AGES])
    draw(middle, panels["written"])
    middle.set(xlabel="seconds since its thing was seen, up to", ylabel="memory words",
               xticks=AGES_OF_WORDS)
    middle.set_xticklabels([str(age) for age in AGES_OF_WORDS])
    draw(right, panels["by_length"])
    minutes = list(GROUPS.values())
    right.set(xlabel="minutes of the video", ylabel="memory words", xticks=minutes)
    right.set_xticklabels([str(length) for length in minutes])
    for axis in axes:
        axis.minorticks_off()
    right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, args.png)
    if args.json:
        print(json.dumps(panels))


def main():
    parser = Parser(prog="python -m experiments.forgetting", description="How memories forget.")
    parser.add_argument("--png", default="out/forgetting.png", help="default out/forgetting.png")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    command_line(lambda: run_forgetting(args))


if __name__ == "__main__":
    main()
