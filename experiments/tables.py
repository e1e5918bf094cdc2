"""Every table of the paper in miniature, ours beside the paper's.

    python -m experiments.tables                     all results that are there
    python -m experiments.tables T5 T13              train and evaluate what these lack, then show them
    python -m experiments.tables T5 --show           only show them
    python -m experiments.tables --list              what each lacks, and how long that takes
    python -m experiments.tables T5 --commands       the commands of each row
    python -m experiments.tables T1 --data ek100     those for the paper's own data, and its numbers

Trained narrators, predictions and messages are kept in --output; what was interrupted goes on. Results are files in
experiments/results/, one for each narrator, evaluation and seed; those that other commands or other worlds have made
are not shown. Those of another recipe (paper.py) stand in rows of their own, whose last column says so, and are made
anew when the table is completed. --list says at which commits they were made; a + means changed files.

The paper's numbers are in italics, as printed there: precision, recall, F1, C, M and R in hundredths. Ours are shares,
and means over seeds. GMACs: of 240 frames; cache: after 480 (`experiments.efficiency`: a narration every 8 frames).
"""
import argparse
import json
import sys
from collections import Counter

import numpy as np

from experiments.paper import RECIPE, TABLES, Column, Row, Table
from experiments.runs import (
    Runner, cores, evaluate_command, experiments_of, fingerprint_of_worlds, needed, real_commands,
    result, result_of_today, train_command,
)
from support.common.errors import BadData, command_line
from support.common.options import Parser, in_range, positive_int

DATA = {"ego4d": "Ego4D", "egoexo4d": "EgoExo4D", "ek100": "EPIC-Kitchens"}


def measured(row: Row, column: Column, seeds: list[int], worlds: str, recipe: int) -> list[float]:
    """A number of ours, for each seed that has a result of a recipe."""
    kept = [result(experiment, worlds) for experiment in experiments_of(row, column.evaluation, seeds)]
    found = [one["measures"].get(column.measure.format(row.part)) for one in kept if one and one["recipe"] == recipe]
    return [value for value in found if value is not None]


def recipes_of(row: Row, table: Table, seeds: list[int], worlds: str) -> list[int]:
    """The recipes of the results that a row has, today's first; today's alone if there are none."""
    kept = [result(experiment, worlds) for experiment in needed(table._replace(rows=[row]), seeds)]
    return sorted({one["recipe"] for one in kept if one}, reverse=True) or [RECIPE]


def markdown(name: str, seeds: list[int] | None, worlds: str) -> str:
    """A table as Markdown. The last column says how many seeds the row has: all of its cells, or from - to; where there
    are results of other recipes than today's, a column after it says of which one the row is."""
    table = TABLES[name]
    seeds = seeds or list(range(table.seeds))
    rows = [(row, recipe) for row in table.rows for recipe in recipes_of(row, table, seeds, worlds)]
    several = any(recipe != RECIPE for _, recipe in rows)
    lines = [[f"{name}. {table.title} (paper: {DATA[table.data]})", *(f"*{header}*" for header in table.paper.split()),
              *(column.header for column in table.columns), "seeds", *["recipe"] * several]]
    lines.append(["---"] * len(lines[0]))
    for row, recipe in rows:
        found = {column: measured(row, column, seeds, worlds, recipe) for column in table.columns}
        cells = [digits(np.mean(values)) if values else "-" for values in found.values()]
        paper = row.paper.split() or ["-"] * len(table.paper.split())
        counts = [len(values) for column, values in found.items() if column.evaluation != "cost"]
        lines.append([row.label, *(f"*{number}*" for number in paper), *cells,
                      "-".join(map(str, sorted({min(counts), max(counts)}))), *[str(recipe)] * several])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def warn_of_bases(name: str, seeds: list[int] | None, worlds: str):
    """Say so if the rows of a table have different recipes, or different encoders and language models."""
    wanted = needed(TABLES[name], seeds or range(TABLES[name].seeds))
    there = [kept for experiment in wanted if (kept := result(experiment, worlds))]
    if len({kept["recipe"] for kept in there}) > 1:
        print(f"{name}: its rows are of different recipes, so their numbers do not compare; complete it: python -m "
              f"experiments.tables {name}", file=sys.stderr)
    elif len({kept.get("base") for kept in there}) > 1:
        print(f"{name}: its narrators have different encoders and language models, so their numbers do not compare; to "
              f"compare them, delete its files in experiments/results and run it again", file=sys.stderr)


def digits(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def as_json(name: str, seeds: list[int] | None, worlds: str) -> dict[str, dict[str, float]]:
    """{row: {measure: mean over seeds}}; where two evaluations give a measure, the second one's name stands before. A row
    of another recipe has its number in the name."""
    table, keys = TABLES[name], {}
    for column in table.columns:
        key = column.measure.replace("by_duration/{}/", "")
        keys[column] = f"{column.evaluation}/{key}" if key in keys.values() else key
    seeds, found = seeds or list(range(table.seeds)), {}
    for row in table.rows:
        for recipe in recipes_of(row, table, seeds, worlds):
            label = row.label if recipe == RECIPE else f"{row.label} (recipe {recipe})"
            found[label] = {keys[column]: measured(row, column, seeds, worlds, recipe) for column in table.columns}
    return {label: {key: float(np.mean(values)) for key, values in measures.items() if values}
            for label, measures in found.items()}


def list_costs(names: list[str], seeds: list[int] | None, worlds: str):
    """What each table lacks; minutes are means of the results that there are."""
    spent, commits = {"train": [], "evaluate": []}, Counter()
    every = {experiment for table in TABLES.values() for experiment in needed(table, seeds or range(table.seeds))}
    for kept in filter(None, (result(experiment, worlds) for experiment in every)):
        commits.update(kept["commits"].values())
        for kind, minutes in kept["minutes"].items():
            spent[kind] += [minutes] if minutes else []
    mean = {kind: float(np.mean(minutes)) if minutes else None for kind, minutes in spent.items()}
    for name in names:
        table = TABLES[name]
        wanted = needed(table, seeds or range(table.seeds))
        missing = [experiment for experiment in wanted if not result_of_today(experiment, worlds)]
        earlier = sum(result(experiment, worlds) is not None for experiment in missing)
        trainings = {experiment[::3] for experiment in missing}
        known = all(mean.values())
        minutes = len(trainings) * mean["train"] + len(missing) * mean["evaluate"] if known else 0
        cost = f", about {minutes:.0f} minutes" if known else ""
        print(f"{name:8} {table.title}: {len(wanted) - len(missing)} of {len(wanted)} results"
              + (f"; lacks {len(missing)}, of {len(trainings)} narrators{cost} on one core" if missing else "")
              + (f"; shown until then: {earlier} of an earlier recipe" if earlier else ""))
    print("results by commit: " + ", ".join(f"{commit} {count}" for commit, count in commits.most_common()))


def numbers_of(table: Table, data: str) -> list[str]:
    """The paper's numbers in each row of a table for a data set, "" if there are none; beside the toy's, the main ones.
    """
    return [row.paper if data in ("toy", table.data) else row.more.get(data, "") for row in table.rows]


def print_commands(names: list[str], data: str, seeds: list[int] | None):
    """The commands of each row, and the paper's numbers for that data set. BadData if one of the tables has none."""
    for name in names:
        table = TABLES[name]
        if not any(found := numbers_of(table, data)):
            raise BadData(f"{name} has no numbers of {DATA[data]} in the paper, but of {DATA[table.data]}")
        print(f"\n{name}. {table.title}: {table.paper}")
        for row, numbers in zip(table.rows, found):
            if numbers or data == "toy":
                commands = toy_commands(row, table, seeds) if data == "toy" else real_commands(row, table, data)
                print("\n    ".join([f"  {row.label}: {numbers or '-'}", *commands]))


def toy_commands(row: Row, table: Table, seeds: list[int] | None) -> list[str]:
    """Those that `Runner` carries out."""
    lines = []
    for experiment in needed(table._replace(rows=[row]), seeds or range(table.seeds)):
        lines += [train_command(*experiment[::3], "out/tables"), evaluate_command(experiment, "out/tables")]
    return [" ".join(["python", *line]) for line in dict.fromkeys(map(tuple, lines))]


def run_tables(args: argparse.Namespace):
    if unknown := [name for name in args.names if name not in TABLES]:
        raise BadData(f"there is no table {unknown[0]}; choose of {', '.join(TABLES)}")
    names = args.names or list(TABLES)
    if args.data != "toy" or args.commands:
        there = [name for name in names if any(numbers_of(TABLES[name], args.data))]
        return print_commands(args.names or there, args.data, args.seeds)
    worlds, failed = fingerprint_of_worlds(), []
    if args.list:
        return list_costs(names, args.seeds, worlds)
    if args.names and not args.show:
        wanted = [experiment for name in names for experiment in needed(
            TABLES[name], args.seeds or range(TABLES[name].seeds))]
        failed = Runner(args.output, args.jobs, worlds)(list(dict.fromkeys(wanted)))
    print("\n\n".join(markdown(name, args.seeds, worlds) for name in names))
    for name in names:
        warn_of_bases(name, args.seeds, worlds)
    for line in failed:
        print(line, file=sys.stderr)
    if args.json:
        print(json.dumps({name: as_json(name, args.seeds, worlds) for name in names}))
    if failed:
        raise BadData(f"{len(failed)} experiments failed; what they had done is kept: run the command again")


def main():
    parser = Parser(prog="python -m experiments.tables",
                    description="The paper's tables in miniature.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"tables to complete: {', '.join(TABLES)}")
    parser.add_argument("--show", action="store_true", help="show what is there of the named tables, and run nothing")
    parser.add_argument("--list", action="store_true", help="only say what is missing, and how long it takes")
    parser.add_argument("--commands", action="store_true", help="only print the commands of each row")
    parser.add_argument("--data", choices=["toy", *DATA], default="toy",
                        help="of real data, print the commands and the paper's numbers")
    parser.add_argument("--seeds", nargs="+", type=in_range(int, 0, 2 ** 32 - 1, "0 to 2^32 - 1"), metavar="N",
                        help="default: 0 and 1 for tables 1, 3 and 5, else 0")
    parser.add_argument("--jobs", type=positive_int, default=cores(),
                        help="commands at a time (default: one for each core)")
    parser.add_argument("--output", default="out/tables", help="folder of trained narrators (default out/tables)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    command_line(lambda: run_tables(args))


if __name__ == "__main__":
    main()
