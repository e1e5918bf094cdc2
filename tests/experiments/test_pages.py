"""The two pages of results: their tables are those of the rows, and their text that of the tables."""
import hashlib
import re
import subprocess
from collections import Counter, defaultdict

import numpy as np
import pytest

from beyond.commands import train_command
from helpers import ROOT
from support.common.disk import read_jsonl
from test_commands import parser_of

RESULTS = ROOT / "beyond" / "experiments" / "results"
PAGES = [(ROOT / "beyond" / "experiments" / name).read_text() for name in ("README.md", "earlier.md")]
TABLE = re.compile(r"<!-- (?!the |end )([\w -]+) -->\n(.*?)\n<!-- end -->", re.DOTALL)
TABLES = TABLE.findall("".join(PAGES))         # name, and all that stands between the two comments
CLAIMS = re.compile(r"<!-- the claims -->\n(.*?)\n<!-- end of the claims -->", re.DOTALL)
INTERVAL = re.compile(r"\[([+-]?\d\.\d{3}),\s([+-]?\d\.\d{3})\]")

# of each training, beside those of what all have
OPTIONS = dict(re.findall(r"^\| ([\w-]+) \| `(--.*)` \|$", PAGES[1], re.M))
MODELS = "--vision toy/checkpoint/vision --llm toy/checkpoint/llm"
LOOK = "--look experiments/base/look.safetensors"


def cell(numbers: list[float]) -> str:
    mean = np.mean(numbers)
    shown = f"{mean:.3f}" if abs(mean) < 100 else f"{mean:.1f}"
    if len(numbers) == 1:
        return shown
    return f"{shown} ± {np.std(numbers, ddof=1):.3f}"


def training_of(line: dict, file: str) -> str:
    """A result's name is that of its training, its file, options of its evaluation, and its seed."""
    return line["name"].split(f"-{file}-")[0]


def cells_of(file: str, trainings: list[str]) -> set[str]:
    numbers = defaultdict(list)                # of the seeds
    for line in read_jsonl(RESULTS / f"{file}.jsonl"):
        if training_of(line, file) in trainings:
            name = line["name"].removesuffix(f"-{line['seed']}")
            for measure, number in line["measures"].items():
                if number is not None:
                    numbers[name, measure].append(number)
    return {cell(each) for each in numbers.values()}


def test_each_table_names_its_rows_and_shows_their_numbers():
    """Rows of today's commands; those of a dated table are in a commit."""
    checked = 0
    for name, block in TABLES:
        named = re.search(r"^Rows: (.*?)\.$", block, re.M | re.DOTALL)[1]
        files = re.findall(r"`([\w/-]+)\.jsonl`", named)
        assert files, name
        if "of commit" in named:
            continue
        assert all((RESULTS / f"{file}.jsonl").is_file() for file in files), name
        trainings = re.findall(r"`([\w-]+)`", named)
        if not trainings:                      # lines of another form
            continue
        known = set().union(*(cells_of(file, trainings) for file in files))
        lines = [line for line in block.splitlines() if line.startswith("|")]
        for line in lines[2:]:                 # below the heading
            label, *cells = line.strip("| ").split(" | ")
            shown = {text for text in cells if re.match(r"-?\d+\.\d", text)}
            assert shown and shown <= known, (name, label, shown - known)
            checked += len(shown)
    assert checked > 300


def test_the_options_of_a_training_are_those_of_its_results():
    parser = parser_of(train_command)
    for options in OPTIONS.values():
        parser.parse_args(["--data", "toy", *options.split()])
    trained = set()
    for path in RESULTS.glob("*.jsonl"):
        for line in read_jsonl(path):
            if "train" in line:
                training = training_of(line, path.stem)
                trained.add(training)
                seed = f"--data toy --seed {line['seed']}"
                look = "" if training == "cls" else f" {LOOK}"
                command = f"python train.py {seed} {OPTIONS[training]} {MODELS}{look} --output"
                assert line["train"].startswith(command), line["name"]
    assert trained == OPTIONS.keys()


def test_numbers_of_the_text_are_in_the_tables():
    shown = set(re.findall(r"\d\.\d+", (ROOT / "toy" / "README.md").read_text()))
    intervals = set()
    for _, block in TABLES:
        shown |= set(re.findall(r"\d\.\d+", block))
        for low, high in INTERVAL.findall(block):
            intervals |= {(float(low), float(high)), (-float(high), -float(low))}
    text = TABLE.sub("", "".join(PAGES))
    assert CLAIMS.search(text)
    numbers = re.findall(r"(?<![\d.])\d\.\d{3}(?!\d)", text)
    assert len(numbers) > 20
    assert set(numbers) <= shown, set(numbers) - shown
    for low, high in INTERVAL.findall(text):
        assert (float(low), float(high)) in intervals, (low, high)
    # what is said of many comparisons
    differences = sum(len(re.findall(r"^\* .*\], seeds", block, re.M)) for _, block in TABLES)
    assert f"{differences} intervals stand on the two pages" in text


def test_the_claims():
    total, claims = CLAIMS.search(PAGES[0])[1].split("\n\n")
    _, _, *rows = [line.strip("|").split(" | ") for line in claims.splitlines()]
    counts = Counter()
    others = (ROOT / "docs/speed.md").read_text() + (ROOT / "docs/training.md").read_text()
    elsewhere = set(re.findall(r"\d+\.\d+", others))
    counted = {"55.3", "67.2", "76.6", "8.16", "7.88"}         # claim 6: by cost.macs
    for claim, where, of_paper, ours, evidence, verdict, why in rows:
        counts[verdict.strip("*")] += 1
        assert (verdict == "**not measured**") == (ours == evidence == "-"), claim
        written = re.findall(r"(?<![\d.])\d+\.\d{1,2}(?!\d)", ours)
        assert set(written) <= elsewhere | counted, claim
    verdicts = ("agrees", "in part", "disagrees", "not shown", "not measured")
    assert counts.keys() == set(verdicts)
    words = ", ".join(f"{verdict} {counts[verdict]}" for verdict in verdicts)
    assert total == f"Of {len(rows)} claims: {words}."


def test_pages_are_read():
    """Their words; of the results, without tables and blocks of code."""
    prose = re.sub(r"```.*?```", "", PAGES[0], flags=re.DOTALL)
    prose = re.sub(r"^\|.*$", "", prose, flags=re.MULTILINE)
    assert len(prose.split()) <= 3500
    assert len((ROOT / "README.md").read_text().split()) <= 1800


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


def test_git_has_the_commit_of_each_result():
    shallow = git("rev-parse", "--is-shallow-repository").stdout.strip()
    if shallow != "false":
        pytest.skip("no repository with its history")
    named = set()
    for file in RESULTS.glob("*.jsonl"):
        for line in read_jsonl(file):
            # lines from before have one of the training and one of the evaluation
            commits = line["commits"].values() if "commits" in line else [line["commit"]]
            named |= set(commits)
    assert len(named) > 1
    for commit in named:
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit


def test_the_base_is_that_of_the_results():
    """Whoever changes it makes all results anew. (The worlds: toy/test_world.py.)"""
    digest = hashlib.sha256()
    for file in ("toy/checkpoint/vision/model.safetensors", "toy/checkpoint/llm/model.safetensors",
                 "beyond/experiments/base/look.safetensors"):
        digest.update((ROOT / file).read_bytes())
    assert digest.hexdigest()[:12] == "cb520d928472"
