"""The claims of experiments/README.md: their verdicts are what the tables show."""
import re

import pytest

from experiments.claims import (
    REFERENCE, VERDICTS, count_verdicts, ours, read_claims, table_of_claims, tables_of,
)
from helpers import ROOT

PAGE = (ROOT / "experiments" / "README.md").read_text()
TABLES = tables_of(PAGE)
CLAIMS = read_claims()
OF_DIFFERENCE = re.compile(r"([^|]+)\|([^|]+)\|(.+) (above|below|not told apart)")
FIELDS = {"claim", "where", "paper", "ours", "verdict", "why"}


def number_of(place: str, tables) -> float:
    """Of "T1|FlowNar|GMACs", the mean; or the number itself."""
    if "|" not in place:
        return float(place)
    name, label, header = place.split("|")
    return float(tables[name].cells[label, header].split()[0])


def holds(check: str, tables=TABLES) -> bool:
    """Whether "T5|CLAM - K-Means|memory words above", or "T1|FlowNar|GMACs < T1|VideoLLM-MoD|GMACs"."""
    difference = OF_DIFFERENCE.fullmatch(check)
    if not difference:
        first, second = check.split(" < ")
        return number_of(first, tables) < number_of(second, tables)
    name, label, header, relation = difference.groups()
    shown = tables[name].differences[f"{label}, {header}"]
    relations = {"above": shown.low > 0, "below": shown.high < 0,
                 "not told apart": shown.low <= 0 <= shown.high}
    return relations[relation]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["claim"][:40])
def test_a_verdict_is_what_the_tables_show(claim):
    """A claim whose numbers are of tables has checks, and they hold. "not shown" is no more than
    that: no difference is told apart. What is not measured has no numbers."""
    assert claim.keys() - {"checks"} == FIELDS
    assert claim["verdict"] in VERDICTS
    checks = claim.get("checks", [])
    for check in checks:
        assert holds(check), check
    if claim["verdict"] == "not shown":
        relations = {match[4] for match in map(OF_DIFFERENCE.fullmatch, checks) if match}
        assert relations <= {"not told apart"}
    if claim["verdict"] == "not measured":
        assert claim["ours"] == "-" and not checks


def test_checks_can_fail():
    """Each kind of check, against a page on which it does not hold."""
    page = """<!-- T0 -->
| T0. Small | words | seeds |
| --- | --- | --- |
| first | 0.500 ± 0.100 | 2 |
| second | 0.750 | 1 |

* first - second, words: -0.250 [-0.300, -0.200], seeds 2 and 1, of these trainings alone
<!-- end -->"""
    tables = tables_of(page)
    assert holds("T0|first - second|words below", tables)
    assert not holds("T0|first - second|words above", tables)
    assert not holds("T0|first - second|words not told apart", tables)
    assert holds("T0|first|words < T0|second|words", tables)
    assert not holds("T0|second|words < 0.7", tables)
    claim = {"ours": "{T0|first|words} and {T0|first - second|words}"}
    assert ours(claim, tables) == ("0.500 ± 0.100 and -0.250 [-0.300, -0.200]", "1-2")
    assert ours({"ours": "-"}, tables) == ("-", "-")


def test_the_table_of_the_page():
    written = re.search(r"<!-- claims -->\n(.*?)\n<!-- end -->", PAGE, re.DOTALL)[1]
    assert written == table_of_claims(PAGE)
    assert len(CLAIMS) >= 32
    for verdict in VERDICTS:
        count = sum(claim["verdict"] == verdict for claim in CLAIMS)
        assert f" {verdict} {count}" in count_verdicts(CLAIMS)


def test_numbers_that_no_table_of_the_page_has_are_on_another_one():
    """Of ours, what is written out and not looked up: on docs/speed.md or docs/training.md."""
    others = (ROOT / "docs/speed.md").read_text() + (ROOT / "docs/training.md").read_text()
    shown = set(re.findall(r"\d[\d.,]*\d|\d", others))
    for claim in CLAIMS:
        if claim["verdict"] != "not measured":
            text = REFERENCE.sub("", claim["ours"])
            for number in re.findall(r"\d+\.\d+", text):
                assert number in shown, number


def test_the_readme_has_the_sum():
    readme = (ROOT / "README.md").read_text()
    sum_of_all = count_verdicts(CLAIMS).removesuffix(".")
    assert sum_of_all in " ".join(readme.split())
