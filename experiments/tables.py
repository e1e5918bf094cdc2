"""Every table of the paper in miniature, ours beside the paper's.

    python -m experiments.tables                     all results that are there
    python -m experiments.tables T5 T13              train and evaluate what these lack, then show them
    python -m experiments.tables T5 --show           only show them
    python -m experiments.tables --list              what each lacks, and how long that takes
    python -m experiments.tables T1 --data ek100     the commands for the paper's own data, and its numbers

Trained narrators, predictions and messages are kept in --output; what was interrupted goes on. Results are files in
experiments/results/, one for each narrator, evaluation and seed; those that other commands or other worlds have made
are not shown. The paper's numbers are in italics, as printed there; ours are means over seeds.
"""
import argparse
import json
import sys

import numpy as np

from experiments.paper import TABLES, Column, Row
from experiments.runs import Runner, cores, experiments_of, fingerprint_of_worlds, needed, real_commands, result
from support.common import BadData, command_line, in_range, positive_int


def measured(row: Row, column: Column, seeds: list[int], worlds: str) -> list[float]:
    """A number of ours, for each seed that has a result."""
    kept = [result(experiment, worlds) for experiment in experiments_of(row, column.evaluation, seeds)]
    found = [one["measures"].get(column.measure.format(row.part)) for one in kept if one]
    return [value for value in found if value is not None]


def markdown(name: str, seeds: list[int] | None, worlds: str) -> str:
    """A table as Markdown. The last column says how many seeds the row has."""
    table = TABLES[name]
    seeds = seeds or list(range(table.seeds))
    lines = [[f"{name}. {table.title}", *(f"*{header}*" for header in table.paper.split()),
              *(column.header for column in table.columns), "seeds"]]
    lines.append(["---"] * len(lines[0]))
    for row in table.rows:
        found = [measured(row, column, seeds, worlds) for column in table.columns]
        cells = [digits(np.mean(values)) if values else "-" for values in found]
        paper = row.paper.split() or ["-"] * len(table.paper.split())
        lines.append([row.label, *(f"*{number}*" for number in paper), *cells, str(max(map(len, found)))])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def digits(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def as_json(name: str, seeds: list[int] | None, worlds: str) -> dict[str, dict[str, float]]:
    """{row: {measure: mean over seeds}}; where two evaluations give a measure, the second one's name stands before."""
    table, rows = TABLES[name], {}
    for row in table.rows:
        rows[row.label] = {}
        for column in table.columns:
            if values := measured(row, column, seeds or list(range(table.seeds)), worlds):
                key = column.measure.replace("by_duration/{}/", "")
                key = f"{column.evaluation}/{key}" if key in rows[row.label] else key
                rows[row.label][key] = float(np.mean(values))
    return rows


def list_costs(names: list[str], seeds: list[int] | None, worlds: str):
    """What each table lacks; minutes are means of the results that there are."""
    spent = {"train": [], "evaluate": []}
    every = {experiment for table in TABLES.values() for experiment in needed(table, seeds or range(table.seeds))}
    for kept in filter(None, (result(experiment, worlds) for experiment in every)):
        for kind, minutes in kept["minutes"].items():
            spent[kind] += [minutes] if minutes else []
    mean = {kind: float(np.mean(minutes)) if minutes else None for kind, minutes in spent.items()}
    for name in names:
        table = TABLES[name]
        wanted = needed(table, seeds or range(table.seeds))
        missing = [experiment for experiment in wanted if not result(experiment, worlds)]
        trainings = {experiment[::3] for experiment in missing}
        known = all(mean.values())
        minutes = len(trainings) * mean["train"] + len(missing) * mean["evaluate"] if known else 0
        cost = f", about {minutes:.0f} minutes" if known else ""
        print(f"{name:8} {table.title}: {len(wanted) - len(missing)} of {len(wanted)} results"
              + (f"; lacks {len(missing)}, of {len(trainings)} narrators{cost} on one core" if missing else ""))


def print_real(names: list[str], data: str):
    """The commands for real data, and the paper's numbers."""
    for name in names:
        table = TABLES[name]
        rows = [(row, row.paper if data == table.data else row.more.get(data)) for row in table.rows if row.training]
        if not any(numbers for _, numbers in rows):
            continue
        print(f"\n{name}. {table.title}: {table.paper}")
        for row, numbers in rows:
            if numbers:
                print(f"  {row.label}: {numbers}")
                kinds = dict.fromkeys(column.evaluation for column in table.columns)
                lines = dict.fromkeys(line for kind in kinds for line in
                                      real_commands(row.training, kind, row.options, data))
                print("".join(f"    {line}\n" for line in lines), end="")


def run_tables(args: argparse.Namespace):
    if unknown := [name for name in args.names if name not in TABLES]:
        raise BadData(f"there is no table {unknown[0]}; choose of {', '.join(TABLES)}")
    names = args.names or list(TABLES)
    if args.data != "toy":
        return print_real(names, args.data)
    worlds, failed = fingerprint_of_worlds(), []
    if args.list:
        return list_costs(names, args.seeds, worlds)
    if args.names and not args.show:
        wanted = [experiment for name in names for experiment in needed(
            TABLES[name], args.seeds or range(TABLES[name].seeds))]
        failed = Runner(args.output, args.jobs, worlds)(list(dict.fromkeys(wanted)))
    print("\n\n".join(markdown(name, args.seeds, worlds) for name in names))
    for line in failed:
        print(line, file=sys.stderr)
    if args.json:
        print(json.dumps({name: as_json(name, args.seeds, worlds) for name in names}))
    if failed:
        raise BadData(f"{len(failed)} experiments failed; what they had done is kept: run the command again")


def main():
    parser = argparse.ArgumentParser(prog="python -m experiments.tables",
                                     description="The paper's tables in miniature.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"tables to complete: {', '.join(TABLES)}")
    parser.add_argument("--show", action="store_true", help="show what is there of the named tables, and run nothing")
    parser.add_argument("--list", action="store_true", help="only say what is missing, and how long it takes")
    parser.add_argument("--data", choices=["toy", "ego4d", "egoexo4d", "ek100"], default="toy",
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
