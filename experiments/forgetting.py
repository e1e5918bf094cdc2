"""How memories forget: two curves for each, from the results of tables.py (not in the paper).

    python -m experiments.tables knowledge T5 T3       trains and evaluates what has no result yet
    python -m experiments.forgetting --png out/forgetting.png

left    share of the hidden things that a linear read-out of the memory tokens names rightly, by the
        time since they were seen (knowledge.py)
right   share of the memory words that the narrator writes, by the length of the video
Lines are means over seeds; bands reach from the lowest seed to the highest.
"""
import argparse
import json
from collections.abc import Iterable

from experiments.paper import AGES, TABLES, Column, Row, Table
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


def curves() -> tuple[dict[str, Curve], dict[str, Curve]]:
    """{memory: its curve} by the time since a thing was seen, and by the length of the video."""
    table = TABLES["knowledge"]
    by_age = {row.label: curve_of(row, table.columns, AGES, table) for row in table.rows}
    by_length = {}
    baseline = Row("VideoLLM-online (keeps all frames)", "online", "")
    for row in [*table.rows, baseline]:
        by_length[row.label] = curve_of(row, BY_LENGTH, GROUPS.values(), table)
    return by_age, by_length


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
    by_age, by_length = curves()
    if not any(by_age.values()) and not any(by_length.values()):
        raise BadData("there are no results yet: python -m experiments.tables knowledge T5")
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    draw(left, by_age)
    left.set(xlabel="seconds since a thing was seen, up to", ylabel="read out rightly", xticks=AGES)
    left.set_xticklabels([str(age) for age in AGES])
    draw(right, by_length)
    minutes = list(GROUPS.values())
    right.set(xlabel="minutes of the video", ylabel="memory words", xticks=minutes)
    right.set_xticklabels([str(length) for length in minutes])
    for axis in (left, right):
        axis.minorticks_off()
    right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, args.png)
    if args.json:
        print(json.dumps({"by_age": by_age, "by_length": by_length}))


def main():
    parser = Parser(prog="python -m experiments.forgetting", description="How memories forget.")
    parser.add_argument("--png", default="out/forgetting.png", help="default out/forgetting.png")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    command_line(lambda: run_forgetting(args))


if __name__ == "__main__":
    main()
