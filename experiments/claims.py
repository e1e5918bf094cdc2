"""The paper's claims one by one, with what the tables of experiments/README.md say of each.

claims.json has for each claim: where it stands in the paper, the paper's numbers, ours, a verdict,
why in a sentence, and checks: what the tables show if the verdict is right (tests hold it to them).

In "ours", {T5|CLAM|memory words} is a cell of a table, and {T5|CLAM - K-Means|memory words} the
difference that stands below it, with its interval. Both are read from the page: tables of an
earlier commit, which are text, are read like those that are made from results.
"""
import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from experiments.show import as_markdown

VERDICTS = ("agrees", "in part", "disagrees", "not shown", "not measured")
# A table that is made, or that is dated: its name, and what stands there
BLOCK = re.compile(r"<!-- (?!end )(?:dated )?([\w-]+) -->\n(.*?)\n?<!-- end -->", re.DOTALL)
DIFFERENCE = re.compile(r"^\* (.+): (\S+ \[(\S+), (\S+)\]), seeds (\d) and (\d)", re.MULTILINE)
REFERENCE = re.compile(r"\{([^{}|]+)\|([^{}|]+)\|([^{}|]+)\}")


class Difference(NamedTuple):
    """What stands below a table: "* first - second, header: +0.1 [+0.0, +0.2], seeds 3 and 1"."""
    text: str                                  # with the interval
    low: float
    high: float
    seeds: list[int]                           # of the first row, and of the second


class Shown(NamedTuple):
    """What a table of the page says."""
    cells: dict[tuple[str, str], str]          # {(label of a row, header): text}
    differences: dict[str, Difference]         # {"first - second, header": ...}


def cells_of_line(line: str) -> list[str]:
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def tables_of(page: str) -> dict[str, Shown]:
    """{name: what the table says}; two tables of one name are read as one."""
    tables = {}
    for name, text in BLOCK.findall(page):
        table = tables.setdefault(name, Shown({}, {}))
        for paragraph in text.split("\n\n"):                # a block may have several tables
            lines = [cells_of_line(line) for line in paragraph.splitlines()]
            headers, *rows = lines if paragraph.startswith("|") else [[]]
            for label, *cells in rows[1:]:                  # the first is | --- |
                for header, cell in zip(headers[1:], cells, strict=True):
                    table.cells[label, header] = cell
        for match in DIFFERENCE.finditer(text):
            key, shown, low, high, *seeds = match.groups()
            table.differences[key] = Difference(
                text=shown,
                low=float(low),
                high=float(high),
                seeds=[int(count) for count in seeds],
            )
    return tables


def look_up(match: re.Match, tables: dict[str, Shown]) -> tuple[str, list[int]]:
    """What the tables say where a text has a REFERENCE, and of how many trainings."""
    name, label, header = match.groups()
    table = tables[name]
    difference = table.differences.get(f"{label}, {header}")
    if difference:
        return difference.text, difference.seeds
    seeds = table.cells.get((label, "seeds"), "1")         # "3", or "1-3"
    counts = [int(count) for count in seeds.split("-")]
    return table.cells[label, header], counts


def ours(claim: dict, tables: dict[str, Shown]) -> tuple[str, str]:
    """Our numbers, and of how many trainings they are: "3", "1-3", or "-" where no table has them."""
    counts = []

    def number(match: re.Match) -> str:
        text, of_number = look_up(match, tables)
        counts.extend(of_number)
        return text

    numbers = REFERENCE.sub(number, claim["ours"])
    if not counts:
        return numbers, "-"
    fewest = min(counts)
    most = max(counts)
    return numbers, str(most) if fewest == most else f"{fewest}-{most}"


# ------------------------------------------------------------------------------- the table

def read_claims() -> list[dict]:
    file = Path(__file__).with_suffix(".json")
    return json.loads(file.read_text(encoding="utf-8"))


def count_verdicts(claims: list[dict]) -> str:
    """Of 3 claims: agrees 2, ..."""
    counts = Counter(claim["verdict"] for claim in claims)
    words = [f"{verdict} {counts[verdict]}" for verdict in VERDICTS]
    return f"Of {len(claims)} claims: {', '.join(words)}."


def table_of_claims(page: str) -> str:
    """The claims as Markdown, with the numbers of a page's tables."""
    tables = tables_of(page)
    claims = read_claims()
    headers = ["claim", "where", "the paper", "here", "trainings", "verdict", "why"]
    rows = []
    for claim in claims:
        numbers, trainings = ours(claim, tables)
        rows.append([
            claim["claim"],
            claim["where"],
            claim["paper"],
            numbers,
            trainings,
            f"**{claim['verdict']}**",
            claim["why"],
        ])
    return f"{count_verdicts(claims)}\n\n{as_markdown(headers, rows)}"
