"""Every table of the paper in miniature, our numbers beside the paper's.

    python -m experiments.tables                     all results that are there
    python -m experiments.tables T5 T13              train and evaluate what these lack, and show them
    python -m experiments.tables T5 --show           only show them
    python -m experiments.tables --list              what each lacks, and how long that takes
    python -m experiments.tables T5 --commands       the commands of each row
    python -m experiments.tables T1 --data ek100     those for the paper's own data, and its numbers

Trained narrators, predictions and messages are kept in --output; an interrupted run goes on where
it stopped. Results are files in experiments/results/, one for each narrator, evaluation and seed.
Results of other commands or other worlds are not shown. Results of another recipe (paper.py) stand
in rows of their own, whose last column names the recipe, and are made anew when the table is
completed. --list counts the results of each commit; a + means changed files.

The paper's numbers are in italics, as printed there: precision, recall, F1, C, M and R in
hundredths. Ours are shares, and means over seeds. GMACs are of 240 frames, the cache is that after
480 (`experiments.efficiency`: a narration every 8 frames).
"""
import argparse
import json
import sys
from collections import Counter

import numpy as np

from experiments.paper import RECIPE, TABLES, Column, Row, Table
from experiments.runs import (
    Experiment, Runner, cores, evaluate_command, experiments_of, needed, real_commands, result,
    train_command,
)
from support.common.errors import BadData, command_line
from support.common.options import Parser, in_range, positive_int

DATA = {"ego4d": "Ego4D", "egoexo4d": "EgoExo4D", "ek100": "EPIC-Kitchens"}


# ------------------------------------------------------------------------------- our numbers

def seeds_of(table: Table, seeds: list[int] | None) -> list[int]:
    """The given seeds, or those of the table."""
    return seeds or list(range(table.seeds))


def results_of(experiments: list[Experiment]) -> list[dict]:
    """The results that are there, of any recipe."""
    results = [result(experiment) for experiment in experiments]
    return [kept for kept in results if kept is not None]


def recipes_of(row: Row, table: Table, seeds: list[int]) -> list[int]:
    """The recipes of a row's results, the latest first. Without results: today's."""
    experiments = needed(table._replace(rows=[row]), seeds)
    recipes = {kept["recipe"] for kept in results_of(experiments)}
    return sorted(recipes, reverse=True) or [RECIPE]


def measured(row: Row, column: Column, seeds: list[int], recipe: int) -> list[float]:
    """The numbers of a cell: one for each seed that has a result of this recipe."""
    measure = column.measure.format(row.group)
    experiments = experiments_of(row, column.evaluation, seeds)
    numbers = [kept["measures"].get(measure) for kept in results_of(experiments)
               if kept["recipe"] == recipe]
    return [number for number in numbers if number is not None]


def digits(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def seed_count(numbers: dict[Column, list[float]]) -> str:
    """How many seeds a row's cells have: one number for all, or "from-to"."""
    # A cost is measured with one seed alone.
    counts = [len(values) for column, values in numbers.items() if column.evaluation != "cost"]
    fewest = min(counts)
    most = max(counts)
    return str(most) if fewest == most else f"{fewest}-{most}"


def markdown(name: str, seeds: list[int] | None) -> str:
    """A table as Markdown. The column "seeds" has the `seed_count`. Where a result is not of
    today's recipe, the column "recipe" follows it."""
    table = TABLES[name]
    seeds = seeds_of(table, seeds)
    rows = [(row, recipe) for row in table.rows for recipe in recipes_of(row, table, seeds)]
    with_recipe = any(recipe != RECIPE for _, recipe in rows)

    paper_headers = table.paper.split()
    headers = [f"{name}. {table.title} (paper: {DATA[table.data]})"]
    headers += [f"*{header}*" for header in paper_headers]
    headers += [column.header for column in table.columns]
    headers.append("seeds")
    if with_recipe:
        headers.append("recipe")

    lines = [headers, ["---"] * len(headers)]
    for row, recipe in rows:
        numbers = {column: measured(row, column, seeds, recipe) for column in table.columns}
        paper_numbers = row.paper.split() or ["-"] * len(paper_headers)
        cells = [row.label]
        cells += [f"*{number}*" for number in paper_numbers]
        cells += [digits(np.mean(values)) if values else "-" for values in numbers.values()]
        cells.append(seed_count(numbers))
        if with_recipe:
            cells.append(str(recipe))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def as_json(name: str, seeds: list[int] | None) -> dict[str, dict[str, float]]:
    """{row: {measure: mean over seeds}}.

    Where two evaluations give the same measure, the name of the second one stands before it. A row
    of another recipe than today's has the recipe in its name.
    """
    table = TABLES[name]
    seeds = seeds_of(table, seeds)
    keys = {}                                  # column -> name of its measure
    for column in table.columns:
        key = column.measure.replace("by_duration/{}/", "")
        if key in keys.values():
            key = f"{column.evaluation}/{key}"
        keys[column] = key

    rows = {}
    for row in table.rows:
        for recipe in recipes_of(row, table, seeds):
            label = row.label if recipe == RECIPE else f"{row.label} (recipe {recipe})"
            rows[label] = {}
            for column, key in keys.items():
                numbers = measured(row, column, seeds, recipe)
                if numbers:
                    rows[label][key] = float(np.mean(numbers))
    return rows


def warn_of_bases(name: str, seeds: list[int] | None) -> None:
    """Say so if the rows of a table have different recipes, or different encoders and language
    models."""
    table = TABLES[name]
    results = results_of(needed(table, seeds_of(table, seeds)))
    recipes = {kept["recipe"] for kept in results}
    bases = {kept.get("base") for kept in results}
    if len(recipes) > 1:
        print(f"{name}: its rows are of different recipes, so their numbers do not compare; "
              f"complete it: python -m experiments.tables {name}", file=sys.stderr)
    elif len(bases) > 1:
        print(f"{name}: its narrators have different encoders and language models, so their "
              "numbers do not compare; to compare them, delete its files in experiments/results "
              "and run it again", file=sys.stderr)


# ------------------------------------------------------------------------------- --list

def list_costs(names: list[str], seeds: list[int] | None) -> None:
    """Print what each table lacks. Minutes are estimated as means over all results."""
    # Each experiment counts once, though several tables may show it.
    all_needed = set()
    for table in TABLES.values():
        all_needed |= set(needed(table, seeds_of(table, seeds)))
    commits = Counter()
    minutes = {"train": [], "evaluate": []}
    for kept in results_of(all_needed):
        commits.update(kept["commits"].values())
        for kind, spent in kept["minutes"].items():
            if spent:
                minutes[kind].append(spent)
    means = {kind: float(np.mean(values)) if values else None for kind, values in minutes.items()}

    for name in names:
        table = TABLES[name]
        experiments = needed(table, seeds_of(table, seeds))
        missing = [experiment for experiment in experiments if not result_of_today(experiment)]
        present = len(experiments) - len(missing)
        line = f"{name:8} {table.title}: {present} of {len(experiments)} results"
        if missing:
            narrators = {(experiment.training, experiment.seed) for experiment in missing}
            line += f"; lacks {len(missing)}, of {len(narrators)} narrators"
            if all(means.values()):
                cost = len(narrators) * means["train"] + len(missing) * means["evaluate"]
                line += f", about {cost:.0f} minutes"
            line += " on one core"
        earlier = len(results_of(missing))
        if earlier:
            line += f"; shown until then: {earlier} of an earlier recipe"
        print(line)
    counts = [f"{commit} {count}" for commit, count in commits.most_common()]
    print("results by commit: " + ", ".join(counts))


# ------------------------------------------------------------------------------- --commands, --data

def numbers_of(table: Table, data: str) -> list[str]:
    """The paper's numbers of each row for a data set, "" where it has none. Beside the toy's
    commands stand the table's main numbers."""
    if data in ("toy", table.data):
        return [row.paper for row in table.rows]
    return [row.other_numbers.get(data, "") for row in table.rows]


def toy_commands(row: Row, table: Table, seeds: list[int] | None) -> list[str]:
    """The commands that `Runner` carries out for a row, each once, with `python`."""
    commands = []
    for experiment in needed(table._replace(rows=[row]), seeds_of(table, seeds)):
        commands.append(train_command(experiment.training, experiment.seed, "out/tables"))
        commands.append(evaluate_command(experiment, "out/tables"))
    lines = [" ".join(["python", *command]) for command in commands]
    return list(dict.fromkeys(lines))


def print_commands(names: list[str], data: str, seeds: list[int] | None) -> None:
    """Print each row's commands and the paper's numbers for a data set. BadData if the paper has
    no numbers of one of the tables for it."""
    for name in names:
        table = TABLES[name]
        numbers = numbers_of(table, data)
        if not any(numbers):
            raise BadData(f"{name} has no numbers of {DATA[data]} in the paper, but of "
                          f"{DATA[table.data]}")
        print(f"\n{name}. {table.title}: {table.paper}")
        for row, row_numbers in zip(table.rows, numbers):
            if data == "toy":
                commands = toy_commands(row, table, seeds)
            elif row_numbers:
                commands = real_commands(row, table, data)
            else:
                continue
            print(f"  {row.label}: {row_numbers or '-'}")
            for command in commands:
                print(f"    {command}")


# ------------------------------------------------------------------------------- the command line

def run_tables(args: argparse.Namespace) -> None:
    for name in args.names:
        if name not in TABLES:
            raise BadData(f"there is no table {name}; choose of {', '.join(TABLES)}")
    names = args.names or list(TABLES)
    if args.data != "toy" or args.commands:
        if not args.names:                     # of all tables, those that have numbers
            names = [name for name in names if any(numbers_of(TABLES[name], args.data))]
        print_commands(names, args.data, args.seeds)
        return
    if args.list:
        list_costs(names, args.seeds)
        return

    # Without names, all tables are shown and none is completed.
    errors = []
    if args.names and not args.show:
        experiments = []
        for name in names:
            experiments += needed(TABLES[name], seeds_of(TABLES[name], args.seeds))
        errors = Runner(args.output, args.jobs)(list(dict.fromkeys(experiments)))
    print("\n\n".join(markdown(name, args.seeds) for name in names))
    for name in names:
        warn_of_bases(name, args.seeds)
    for error in errors:
        print(error, file=sys.stderr)
    if args.json:
        print(json.dumps({name: as_json(name, args.seeds) for name in names}))
    if errors:
        raise BadData(f"{len(errors)} experiments failed; what they had done is kept: run the "
                      "command again")


def main():
    parser = Parser(prog="python -m experiments.tables",
                    description="The paper's tables in miniature.")
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"tables to complete: {', '.join(TABLES)}")
    parser.add_argument("--show", action="store_true",
                        help="show what is there of the named tables, and run nothing")
    parser.add_argument("--list", action="store_true",
                        help="only say what is missing, and how long it takes")
    parser.add_argument("--commands", action="store_true",
                        help="only print the commands of each row")
    parser.add_argument("--data", choices=["toy", *DATA], default="toy",
                        help="of real data, print the commands and the paper's numbers")
    parser.add_argument("--seeds", nargs="+", type=in_range(int, 0, 2 ** 32 - 1, "0 to 2^32 - 1"),
                        metavar="N", help="default: 0 and 1 for tables 1, 3 and 5, else 0")
    parser.add_argument("--jobs", type=positive_int, default=cores(),
                        help="commands at a time (default: one for each core)")
    parser.add_argument("--output", default="out/tables",
                        help="folder of trained narrators (default out/tables)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    command_line(lambda: run_tables(args))


if __name__ == "__main__":
    main()
