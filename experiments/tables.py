"""Every table of the paper in miniature, our numbers beside the paper's.

    python -m experiments.tables                     all results that are there
    python -m experiments.tables T5 T13              train and evaluate what these lack; show them
    python -m experiments.tables T5 --show           only show them
    python -m experiments.tables --list              how many results each lacks
    python -m experiments.tables --page              write all into experiments/README.md

Trained narrators, predictions and the messages of the present command are kept in --output; an
interrupted run goes on where it stopped. For several processors start several of these, each with
seeds of its own and an --output of its own. Results are lines of experiments/results/*.jsonl.
Results of other commands, another recipe (paper.py), world or base are not shown, and are made anew
when the table is completed.

The paper's numbers are in italics, as printed there: precision, recall, F1, C, M and R in
hundredths. Ours are shares: the mean over seeds, with the standard deviation where there are
several. GMACs are of 240 frames, the cache is that after 480 (`experiments.cost`: a narration every
8 frames). Below a table stand its claims: the difference of two rows with its 95 % interval
(support/common/intervals.py).
"""
import argparse
import re
from pathlib import Path

import numpy as np

from experiments import starts
from experiments.paper import EARLIER, TABLES, TRAININGS, Claim, Column, Row, Table
from experiments.runs import FOLDER, carry_out, experiments_of, needed, result
from support.common.disk import write_text
from support.common.errors import BadData, command_line
from support.common.intervals import ConfidenceInterval, compare_means
from support.common.options import Parser, non_negative_int

PAGE = Path(__file__).with_name("README.md")
STARTS = "starts"               # a table of the page that experiments/starts.py makes
DATA = {"ego4d": "Ego4D", "egoexo4d": "EgoExo4D", "ek100": "EPIC-Kitchens"}


# ------------------------------------------------------------------------------- our numbers

def seeds_of(table: Table, seeds: list[int] | None) -> list[int]:
    """The given seeds, or those of the table."""
    return list(dict.fromkeys(seeds or range(table.seeds)))


def results_of(row: Row, column: Column, seeds: list[int]) -> list[dict]:
    """The results of a row that are there, of the evaluation of a column."""
    results = [result(experiment) for experiment in experiments_of(row, column.evaluation, seeds)]
    return [kept for kept in results if kept is not None]


def measured(row: Row, column: Column, seeds: list[int]) -> list[float]:
    """The numbers of a cell: one for each seed that has a result."""
    measure = column.measure.format(row.group)
    numbers = [kept["measures"].get(measure) for kept in results_of(row, column, seeds)]
    return [number for number in numbers if number is not None]


def digits(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def cell(numbers: list[float]) -> str:
    """The mean and the standard deviation of a sample: 0.951 ± 0.003, 0.951 of one number, - of
    none."""
    if not numbers:
        return "-"
    mean = digits(float(np.mean(numbers)))
    if len(numbers) == 1:
        return mean
    return f"{mean} ± {np.std(numbers, ddof=1):.3f}"


def markdown(name: str, seeds: list[int] | None) -> str:
    """A table as Markdown, and below it the intervals of its claims."""
    table = TABLES[name]
    seeds = seeds_of(table, seeds)
    title = f"{name}. {table.title}"
    if table.paper:
        title += f" (paper: {DATA[table.data]})"
    if any(TRAININGS[row.training].commit for row in table.rows):
        title += f" (†: made at commit {EARLIER})"
    headers = [title]
    headers += [f"*{header}*" for header in table.paper.split()]
    headers += [column.header for column in table.columns]
    headers.append("seeds")
    lines = [headers, ["---"] * len(headers)]
    lines += [cells_of(row, table, seeds) for row in table.rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    intervals = [(claim, interval_of(claim, table, seeds)) for claim in table.claims]
    claims = [say_claim(claim, interval) for claim, interval in intervals if interval]
    if claims:
        text += "\n\n" + "\n".join(claims)
    return text


def cells_of(row: Row, table: Table, seeds: list[int]) -> list[str]:
    """The cells of a row: its label, the paper's numbers, ours, and how many seeds they have: one
    number for all columns, or "from-to"."""
    cells = [row.label]
    if TRAININGS[row.training].commit:
        cells[0] += " †"
    paper_numbers = row.paper.split() or ["-"] * len(table.paper.split())
    cells += [f"*{number}*" for number in paper_numbers]
    counts = []
    for column in table.columns:
        numbers = measured(row, column, seeds)
        cells.append(cell(numbers))
        if column.evaluation != "cost":        # which is measured with one seed alone
            counts.append(len(numbers))
    fewest = min(counts)
    most = max(counts)
    cells.append(str(most) if fewest == most else f"{fewest}-{most}")
    return cells


def videos_of(label: str, column: Column, table: Table,
              seeds: list[int]) -> dict[int, dict[str, float | None]]:
    """{seed: {video: the measure of a column}} of the row with this label"""
    row, = (row for row in table.rows if row.label == label)
    return {kept["seed"]: kept["videos"][column.measure]
            for kept in results_of(row, column, seeds)}


def interval_of(claim: Claim, table: Table, seeds: list[int]) -> ConfidenceInterval | None:
    """The difference of a claim's two rows in its column. None without results of both."""
    column, = (column for column in table.columns if column.header == claim.column)
    first = videos_of(claim.first, column, table, seeds)
    second = videos_of(claim.second, column, table, seeds)
    training = {row.label: row.training for row in table.rows}
    same_trainings = training[claim.first] == training[claim.second]
    if same_trainings:                         # they are compared seed by seed
        both = [seed for seed in first if seed in second]
        first = {seed: first[seed] for seed in both}
        second = {seed: second[seed] for seed in both}
    return compare_means(list(first.values()), list(second.values()), same_trainings)


def say_claim(claim: Claim, interval: ConfidenceInterval) -> str:
    """A claim with its interval as an item of a list, in Markdown."""
    seeds = " and ".join(str(count) for count in interval.seeds)
    limits = ""
    if not interval.shown:
        limits += ", cannot be told apart"
    if interval.of_these_trainings:
        limits += ", of these trainings alone"
    return (f"* {claim.first} - {claim.second}, {claim.column}: {interval.mean:+.3f} "
            f"[{interval.low:+.3f}, {interval.high:+.3f}], seeds {seeds}{limits}")


# ------------------------------------------------------------------------------- --page

TABLE_OF_PAGE = re.compile(r"<!-- ([\w-]+) -->\n(.*?)\n<!-- end -->", re.DOTALL)    # name, table


def update_page() -> None:
    """Write the tables of PAGE anew, each between its two comments."""
    def table(match: re.Match) -> str:
        name = match[1]
        content = starts.table_of_starts() if name == STARTS else markdown(name, None)
        return f"<!-- {name} -->\n{content}\n<!-- end -->"

    write_text(PAGE, TABLE_OF_PAGE.sub(table, PAGE.read_text(encoding="utf-8")))


# ------------------------------------------------------------------------------- the command line

def list_missing(names: list[str], seeds: list[int] | None) -> None:
    """Print how many results each table has and lacks."""
    for name in names:
        experiments = needed(TABLES[name], seeds_of(TABLES[name], seeds))
        missing = [experiment for experiment in experiments if not result(experiment)]
        there = len(experiments) - len(missing)
        line = f"{name:10} {TABLES[name].title}: {there} of {len(experiments)} results"
        if missing:
            narrators = {(experiment.training, experiment.seed) for experiment in missing}
            line += f"; narrators to train or evaluate: {len(narrators)}"
        print(line)


def run_tables(args: argparse.Namespace) -> None:
    for name in args.names:
        if name not in TABLES:
            raise BadData(f"there is no table {name}; choose of {', '.join(TABLES)}")
    names = args.names or list(TABLES)
    if args.list:
        list_missing(names, args.seeds)
        return
    if args.page:
        update_page()
        return
    if not args.show:
        for name in args.names:                # without names, no table is completed
            for experiment in needed(TABLES[name], seeds_of(TABLES[name], args.seeds)):
                carry_out(experiment, args.output)
    print("\n\n".join(markdown(name, args.seeds) for name in names))


def main():
    parser = Parser(prog="python -m experiments.tables",
                    description="The paper's tables in miniature.")
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"tables to complete: {', '.join(TABLES)}")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--show", action="store_true",
                        help="show what is there of the named tables, and run nothing")
    action.add_argument("--page", action="store_true",
                        help="only write all tables of experiments/README.md anew")
    action.add_argument("--list", action="store_true", help="only say what is missing")
    parser.add_argument("--seeds", nargs="+", type=non_negative_int, metavar="N",
                        help="default: 0 to 2 for the main tables, else 0")
    parser.add_argument("--output", default=FOLDER,
                        help=f"folder of trained narrators (default {FOLDER})")
    args = parser.parse_args()
    if args.page and (args.names or args.seeds):
        parser.error("--page writes all tables, with the seeds of each")
    command_line(lambda: run_tables(args))


if __name__ == "__main__":
    main()
