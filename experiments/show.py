"""The tables of `paper.py` as Markdown, of the results that are there.

The paper's numbers are in italics, as printed there: precision, recall, F1, C, M and R in
hundredths. Ours are shares: the mean over seeds, with the standard deviation where there are
several. GMACs are of 240 frames, the cache is that after 480 (`experiments.cost`: a narration every
8 frames). Below a table stand its claims: the difference of two rows with its 95 % interval
(support/common/intervals.py).
"""
import numpy as np

from experiments.paper import TABLES, Claim, Column, Row, Table
from experiments.runs import EACH, experiments_of, result
from support.common.intervals import ConfidenceInterval, compare_means, compare_trainings

DATA = {"ego4d": "Ego4D", "egoexo4d": "EgoExo4D", "ek100": "EPIC-Kitchens"}


# ------------------------------------------------------------------------------- our numbers

def results_of(row: Row, column: Column) -> list[dict]:
    """The results of a row that are there, of the evaluation of a column."""
    experiments = experiments_of(row, column.evaluation)
    results = [result(experiment) for experiment in experiments]
    return [kept for kept in results if kept is not None]


def numbers_by_seed(row: Row, column: Column) -> dict[int, float]:
    """{seed: the number of a cell}; one for each seed that has a result."""
    measure = column.measure.format(row.group)
    numbers = {}
    for kept in results_of(row, column):
        number = kept["measures"].get(measure)
        if number is not None:
            numbers[kept["seed"]] = number
    return numbers


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


def as_markdown(headers: list[str], rows: list[list[str]]) -> str:
    """A table of cells."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markdown(name: str) -> str:
    """A table as Markdown, and below it the intervals of its claims."""
    table = TABLES[name]
    title = f"{name}. {table.title}"
    if table.paper:
        title += f" (paper: {DATA[table.data]})"
    headers = [title]
    headers += [f"*{header}*" for header in table.paper.split()]
    headers += [column.header for column in table.columns]
    headers.append("seeds")
    lines = [as_markdown(headers, [cells_of(row, table) for row in table.rows])]

    claims = []
    for claim in table.claims:
        interval = interval_of(claim, table)
        if interval:
            claims.append(say_claim(claim, interval))
    if claims:
        lines.append("")
    if claims and table.percent != 95:
        lines += [f"With {table.percent} %:", ""]
    return "\n".join(lines + claims)


def cells_of(row: Row, table: Table) -> list[str]:
    """The cells of a row: its label, the paper's numbers, ours, and how many seeds those have that
    are there: one number for all columns, or "from-to"."""
    paper_numbers = row.paper.split() or ["-"] * len(table.paper.split())
    cells = [row.label]
    cells += [f"*{number}*" for number in paper_numbers]
    counts = []
    for column in table.columns:
        numbers = list(numbers_by_seed(row, column).values())
        cells.append(cell(numbers))
        if numbers and column.evaluation != "cost":     # which is measured with one seed alone
            counts.append(len(numbers))
    fewest = min(counts, default=0)
    most = max(counts, default=0)
    cells.append(str(most) if fewest == most else f"{fewest}-{most}")
    return cells


def videos_of(row: Row, column: Column) -> dict[int, dict[str, float | None]]:
    """{seed: {video: the measure of a column}} of a row."""
    return {kept["seed"]: kept["videos"][column.measure]
            for kept in results_of(row, column)}


def interval_of(claim: Claim, table: Table) -> ConfidenceInterval | None:
    """The difference of a claim's two rows in its column. None without results of both.

    Over videos and trainings where each video's measure is kept (runs.EACH), else over trainings.
    """
    rows = {row.label: row for row in table.rows}
    columns = {column.header: column for column in table.columns}
    first_row = rows[claim.first]
    second_row = rows[claim.second]
    column = columns[claim.column]
    if column.measure in EACH:
        kept = videos_of
        compare = compare_means
    else:
        kept = numbers_by_seed
        compare = compare_trainings

    first = kept(first_row, column)
    second = kept(second_row, column)
    same_trainings = first_row.training == second_row.training
    if same_trainings:                         # they are compared seed by seed
        both = [seed for seed in first if seed in second]
        first = {seed: first[seed] for seed in both}
        second = {seed: second[seed] for seed in both}
    return compare(
        list(first.values()),
        list(second.values()),
        same_trainings,
        table.percent,
    )


def say_claim(claim: Claim, interval: ConfidenceInterval) -> str:
    """A claim with its interval as an item of a list, in Markdown."""
    seeds = " and ".join(str(count) for count in interval.seeds)
    limits = ""
    if not interval.shown:
        limits += ", cannot be told apart"
    if interval.of_these_trainings:
        limits += ", of these trainings alone"
    if interval.of_these_videos:
        limits += ", of these videos alone"
    difference = f"{claim.first} - {claim.second}, {claim.column}"
    between = f"[{interval.low:+.3f}, {interval.high:+.3f}]"
    return f"* {difference}: {interval.mean:+.3f} {between}, seeds {seeds}{limits}"
