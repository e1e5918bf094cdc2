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
    seeds: tuple[int, int]


class Shown(NamedTuple):
    """What a table of the page says."""
    cells: dict[tuple[str, str], str]          # {(label of a row, header): text}
    differences: dict[str, Difference]         # {"first - second, header": ...}


def tables_of(page: str) -> dict[str, Shown]:
    """{name: what the table says}; two tables of one name are read as one."""
    tables = {}
    for name, text in BLOCK.findall(page):
        table = tables.setdefault(name, Shown({}, {}))
        rows = [[cell.strip() for cell in line.strip("|").split("|")]
                for line in text.splitlines() if line.startswith("|")]
        for label, *cells in rows[2:]:
            for header, cell in zip(rows[0][1:], cells, strict=True):
                table.cells[label, header] = cell
        for key, shown, low, high, *seeds in DIFFERENCE.findall(text):
            seeds = tuple(map(int, seeds))
            table.differences[key] = Difference(shown, float(low), float(high), seeds)
    return tables


def look_up(match: re.Match, tables: dict[str, Shown]) -> tuple[str, list[int]]:
    """What the tables say where a text has a REFERENCE, and of how many trainings."""
    name, label, header = match.groups()
    cells, differences = tables[name]
    difference = differences.get(f"{label}, {header}")
    if difference:
        return difference.text, list(difference.seeds)
    seeds = cells.get((label, "seeds"), "1")                # "3", or "1-3"
    return cells[label, header], [int(count) for count in seeds.split("-")]


def read_claims() -> list[dict]:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def count_verdicts(claims: list[dict]) -> str:
    """Of 3 claims: 2 agrees, ..."""
    counts = Counter(claim["verdict"] for claim in claims)
    words = [f"{verdict} {counts[verdict]}" for verdict in VERDICTS]
    return f"Of {len(claims)} claims: {', '.join(words)}."


def ours(claim: dict, tables: dict[str, Shown]) -> tuple[str, str]:
    """Our numbers, and of how many trainings they are: "3", "1-3", or "-" where no table has them."""
    found = [look_up(match, tables) for match in REFERENCE.finditer(claim["ours"])]
    texts = iter([text for text, _ in found])
    counts = [count for _, seeds in found for count in seeds]
    ends = dict.fromkeys([min(counts), max(counts)]) if counts else [""]
    trainings = "-".join(str(end) for end in ends) or "-"
    return REFERENCE.sub(lambda _: next(texts), claim["ours"]), trainings


def table_of_claims(page: str) -> str:
    """The claims as Markdown, with the numbers of a page's tables."""
    tables = tables_of(page)
    claims = read_claims()
    headers = ["claim", "where", "the paper", "here", "trainings", "verdict", "why"]
    lines = [headers, ["---"] * len(headers)]
    for claim in claims:
        numbers, trainings = ours(claim, tables)
        lines.append([claim["claim"], claim["where"], claim["paper"], numbers, trainings,
                      f"**{claim['verdict']}**", claim["why"]])
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([count_verdicts(claims), "", *rows])
