"""The list of the paper's tables, what completes them, and the pages that show them."""
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from commands import evaluate_command as evaluation_command
from commands import train_command as training_command
from experiments import paper, runs, tables
from experiments.runs import Experiment, evaluate_command, needed, result, train_command
from helpers import ROOT, TOY
from support.common.errors import BadData
from test_commands import module_and_arguments, parser_of
from test_evaluate import command

ALL_TABLES = list(paper.TABLES.values())
PAGES = [page.read_text() for page in tables.PAGES]
INTERVAL = re.compile(r"\[([+-]?\d\.\d{3}),\s([+-]?\d\.\d{3})\]")
# tables of an earlier commit: name, table
DATED = re.compile(r"<!-- dated ([\w-]+) -->\n(.*?)\n<!-- end -->", re.DOTALL)
CLAIMS = re.compile(r"<!-- the claims -->\n(.*?)\n<!-- end of the claims -->", re.DOTALL)


@pytest.mark.parametrize("name", paper.TABLES)
def test_a_table_is_complete(name):
    table = paper.TABLES[name]
    for row in table.rows:
        assert row.paper == "" or len(row.paper.split()) == len(table.paper.split()), row
    labels = [row.label for row in table.rows]
    assert len(set(labels)) == len(labels)
    assert {column.evaluation for column in table.columns} <= paper.EVALUATIONS.keys()
    measures = {column.header: column for column in table.columns}
    for claim in table.claims:
        assert {claim.first, claim.second} <= set(labels)
        if measures[claim.column].measure in runs.EACH:
            assert "--per-video" in paper.EVALUATIONS[measures[claim.column].evaluation]


def test_every_table_and_training_is_there():
    numbered = {f"T{number}" for number in range(1, 16)} - {"T8"}
    assert numbered <= paper.TABLES.keys()
    used = {row.training for table in ALL_TABLES for row in table.rows}
    assert used == paper.TRAININGS.keys()


def test_narrators_share_a_base():
    """Encoder, language model and stage `look`, but for those whose own are what is compared."""
    base = f"--vision {paper.VISION} --llm {paper.LLM} --look {paper.LOOK}"
    for name in paper.TRAININGS.keys() - {"second", "second-tuned", "cls"}:
        assert base in " ".join(train_command(name, 1, "out")), name
    assert "--init out/mimetic-longer-2" in " ".join(train_command("second-tuned", 2, "out"))


def parsed(words: list[str], monkeypatch):
    """The options of a command without `python`, read by its own parser."""
    if words[0] == "train.py":
        monkeypatch.setattr(sys, "argv", words)
        return training_command.parse()
    module, arguments = module_and_arguments(words)
    return parser_of(module).parse_args(arguments)


def test_commands_are_understood(monkeypatch):
    """A command says where its narrator is."""
    for name in paper.TRAININGS:
        options = parsed(train_command(name, 1, "out/tables"), monkeypatch)
        assert (options.data, options.seed) == ("toy", 1)
        assert options.output == f"out/tables/{name}-1"
    for table in ALL_TABLES:
        for experiment in needed(table):
            parsed(evaluate_command(experiment, "out/tables"), monkeypatch)
    for line in paper.VIDEOS:
        parsed(line.format(videos="out/videos").split(), monkeypatch)
    assert train_command("mimetic", 0, "my tables")[-1] == "my tables/mimetic-0"


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A table, T0, of a small training with one evaluation. Results are kept in another folder."""
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runs, "present_commit", lambda: "0123456789")
    monkeypatch.setitem(paper.TRAININGS, "small", paper.Training(
        "--last-k 10", "--no-recall --limit 2 --epochs 1 --warmup 0.05"))
    monkeypatch.setitem(paper.EVALUATIONS, "short",
                        "evaluate.py stream --data toy --limit 1 --output {keep} --per-video {each}")
    columns = [paper.Column("F1", "short", "f1")]
    rows = [paper.Row("small", "small", "1.0")]
    monkeypatch.setitem(tables.TABLES, "T0", paper.Table("Small", "ego4d", "PPL", columns, rows))
    return str(tmp_path / "out")


def in_this_process(words: list[str]) -> str:
    """`runs.run_command`: what train.py is to go on with is the bundled narrator, which evaluate.py
    evaluates."""
    if words[0] == "train.py":
        assert words[-1] == "--resume"
        shutil.copytree(TOY, words[-2], dirs_exist_ok=True)
        return ""
    return json.dumps(command(*words[1:], main=evaluation_command.main))


def complete(*options, ok=True):
    return command("T0", *options, ok=ok, main=tables.main)


def test_a_table_is_completed_once(small, monkeypatch, tmp_path):
    """An interrupted training goes on, what is there is not made again, and a narrator of another
    kind is refused."""
    folder = tmp_path / "out" / "small-0"
    folder.mkdir(parents=True)                             # a training that was interrupted
    made = " ".join(["python", *train_command("small", 0, small)])
    (folder / runs.MADE).write_text(json.dumps({"train": made}))
    monkeypatch.setattr(runs, "run_command", in_this_process)       # it is faster
    shown = complete("--output", small)
    kept = result(Experiment("small", "short", "", 0))
    assert f"| small | *1.0* | {kept['measures']['f1']:.3f} | 1 |" in shown
    assert kept["commit"] == "0123456789"
    assert kept["videos"]["f1"].keys() == {"toy-3000000"}
    file = tmp_path / "results" / "short.jsonl"
    complete("--output", small)
    complete("--output", tmp_path / "empty")               # the results are enough
    assert len(file.read_text().splitlines()) == 1
    assert not (tmp_path / "empty").exists()

    with monkeypatch.context() as patch:                   # results of other commands are not shown
        patch.setitem(paper.TRAININGS, "small", paper.Training(""))
        assert "| small | *1.0* | - | 0 |" in complete("--show")
        error = complete("--output", small, ok=False)
        assert "was made with train = python train.py --data toy" in error


def test_a_command_that_fails_is_named():
    with pytest.raises(BadData, match="this has failed, .*: python -c raise SystemExit"):
        runs.run_command(["-c", "raise SystemExit(2)"])


@pytest.mark.parametrize("second, cells, claim", [
    ({0: 0.5}, "0.500 | 1",
     "+0.125 [-1.463, +1.713], seeds 2 and 1, cannot be told apart, of these trainings alone"),
    ({}, "- | 0", None),
], ids=["one seed", "no result"])
def test_tables_show_means_deviations_and_intervals(monkeypatch, tmp_path, second, cells, claim):
    """Of a table, T0, of two rows and two seeds with results that are made up."""
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results")
    columns = [paper.Column("words", "stream", "memory_words")]
    rows = [paper.Row("first", "online", "1.0", seeds=[0, 1]),
            paper.Row("second", "none", "1.0", seeds=[0, 1])]
    claims = [paper.Claim("first", "second", "words")]
    table = paper.Table("Small", "ego4d", "PPL", columns, rows, claims)
    monkeypatch.setitem(tables.TABLES, "T0", table)
    for training, numbers in (("online", {0: 0.5, 1: 0.75}), ("none", second)):
        for seed, words in numbers.items():
            runs.add_result(Experiment(training, "stream", "", seed), {
                "measures": {"memory_words": words},
                "videos": {"memory_words": {"a": words, "b": words}}})
    expected = [
        "| T0. Small (paper: Ego4D) | *PPL* | words | seeds |",
        "| --- | --- | --- | --- |",
        "| first | *1.0* | 0.625 ± 0.177 | 2 |",
        f"| second | *1.0* | {cells} |",
    ]
    if claim:
        expected += ["", f"* first - second, words: {claim}"]
    assert complete("--show").splitlines() == expected
    assert f"{2 + len(second)} of 4 results" in complete("--list")


def test_refusals(monkeypatch):
    message = "there is no table T99; choose of T1, T2"
    assert message in command("T99", ok=False, main=tables.main)
    for line in (["--page", "T5"], ["--seeds", "1"], ["T5", "--show", "--seeds", "1"]):
        monkeypatch.setattr(sys, "argv", ["tables", *line])
        with pytest.raises(SystemExit) as end:
            tables.main()
        assert end.value.code == 2


def test_the_tables_of_the_pages_are_the_results(tmp_path, monkeypatch):
    """The pages, written anew, are what they were, and no result is missing. A table stands there
    once; one of which today's commands have no results is dated."""
    page = "".join(PAGES)
    shown = [name for name, _ in tables.TABLE_OF_PAGE.findall(page)]
    dated = {name for name, _ in DATED.findall(page)}
    assert sorted(shown) == sorted(name for name, table in paper.TABLES.items() if not table.dated)
    for name, table in paper.TABLES.items():
        if table.dated:
            assert name in dated and f", at commit {table.dated} |" in page
        else:
            assert all(map(result, needed(table))), name
    copies = [tmp_path / "README.md", tmp_path / "earlier.md"]
    monkeypatch.setattr(tables, "PAGES", copies)
    for copy, text in zip(copies, PAGES, strict=True):
        changed = text.replace("| CLAM | *2.086* |", "| CLAM | *9.999* |")
        # of new tables there are only the two comments
        changed = re.sub(r"<!-- T6 -->.*?<!-- end -->", "<!-- T6 -->\n<!-- end -->", changed,
                         flags=re.DOTALL)
        assert changed != text
        copy.write_text(changed)
    command("--page", main=tables.main)
    assert [copy.read_text() for copy in copies] == PAGES


def test_numbers_of_the_text_are_in_the_tables():
    """Each number with three digits after its point, and each interval with either sign: a is above
    b by as much as b is below a. Some are of the bundled narrator (toy/README.md)."""
    page = "".join(PAGES)
    blocks = [block for _, block in tables.TABLE_OF_PAGE.findall(page) + DATED.findall(page)]
    shown = set(re.findall(r"\d\.\d+", (ROOT / "toy" / "README.md").read_text()))
    intervals = set()
    for block in blocks:
        shown |= set(re.findall(r"\d\.\d+", block))
        for low, high in INTERVAL.findall(block):
            intervals |= {(float(low), float(high)), (-float(high), -float(low))}
    text = DATED.sub("", tables.TABLE_OF_PAGE.sub("", page))
    assert CLAIMS.search(text)
    numbers = re.findall(r"(?<![\d.])\d\.\d{3}(?!\d)", text)
    assert len(numbers) > 20
    assert set(numbers) <= shown, set(numbers) - shown
    for low, high in INTERVAL.findall(text):
        assert (float(low), float(high)) in intervals, (low, high)
    # what is said of many comparisons
    differences = sum(len(re.findall(r"^\* .*\], seeds", block, re.M)) for block in blocks)
    assert f"{differences} intervals stand on the two pages" in text


def test_the_claims():
    """Each has a known verdict and evidence, and their sum is right. What is not measured has no
    numbers; of the others, those that no table has are on docs/speed.md or docs/training.md."""
    total, claims = CLAIMS.search(PAGES[0])[1].split("\n\n")
    _, _, *rows = [line.strip("|").split(" | ") for line in claims.splitlines()]
    counts = Counter()
    others = (ROOT / "docs/speed.md").read_text() + (ROOT / "docs/training.md").read_text()
    elsewhere = set(re.findall(r"\d+\.\d+", others))
    counted = {"55.3", "67.2", "76.6"}         # claim 6: by cost.macs
    for claim, where, of_paper, ours, evidence, verdict, why in rows:
        counts[verdict.strip("*")] += 1
        assert (verdict == "**not measured**") == (ours == evidence == "-"), claim
        written = re.findall(r"(?<![\d.])\d+\.\d{1,2}(?!\d)", ours)
        assert set(written) <= elsewhere | counted, claim
    verdicts = ("agrees", "in part", "disagrees", "not shown", "not measured")
    assert counts.keys() == set(verdicts)
    words = ", ".join(f"{verdict} {counts[verdict]}" for verdict in verdicts)
    assert total == f"Of {len(rows)} claims: {words}."


def test_the_page_is_read():
    """At most 3,500 words, without tables and blocks of code."""
    prose = re.sub(r"```.*?```", "", PAGES[0], flags=re.DOTALL)
    prose = re.sub(r"^\|.*$", "", prose, flags=re.MULTILINE)
    assert len(prose.split()) <= 3500


def test_results_belong_to_the_list():
    """Each result is of an experiment that some table shows, made by today's commands; there are no
    two of one experiment."""
    experiments = {}
    for table in ALL_TABLES:
        for experiment in needed(table):
            experiments[experiment.name] = experiment
    assert Experiment("a", "hard", "--static --theta 0.7", 1).name == "a-hard-static-theta-0.7-1"
    for evaluation in paper.EVALUATIONS:
        names = [line["name"] for line in runs.lines_of(runs.RESULTS / f"{evaluation}.jsonl")]
        assert len(set(names)) == len(names), evaluation
        for name in names:
            assert experiments[name].evaluation == evaluation
            assert result(experiments[name]), name


def git(*words: str, folder=ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)


def test_git_has_the_commit_of_each_result():
    shallow = git("rev-parse", "--is-shallow-repository").stdout.strip()
    if shallow != "false":
        pytest.skip("no repository with its history")
    named = set()
    for file in runs.RESULTS.glob("*.jsonl"):
        for line in runs.lines_of(file):
            # lines from before have one of the training and one of the evaluation
            commits = line["commits"].values() if "commits" in line else [line["commit"]]
            named |= set(commits)
    assert len(named) > 1
    for commit in named:
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit


def test_results_are_of_a_commit_alone(tmp_path, monkeypatch):
    """Other results may be new; any other change is refused before anything is trained."""
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    with pytest.raises(BadData, match="results are made of a commit"):
        runs.present_commit()                  # there is no repository
    git("init", folder=tmp_path)
    (tmp_path / "experiments" / "results").mkdir(parents=True)
    files = [tmp_path / "train.py", tmp_path / "experiments" / "results" / "long.jsonl"]
    for file in files:
        file.write_text("before")
    git("add", ".", folder=tmp_path)
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first", folder=tmp_path)
    files[1].write_text("one more")
    assert re.fullmatch("[0-9a-f]{10}", runs.present_commit())
    files[0].write_text("after")
    monkeypatch.setattr(runs, "result", lambda experiment: None)
    monkeypatch.setattr(runs, "run_command", lambda command: pytest.fail("something runs"))
    with pytest.raises(BadData, match="commit what has changed"):
        runs.carry_out(Experiment("online", "stream", "", 0), "out")


def test_the_base_is_that_of_the_results():
    """Whoever changes it makes all results anew. (The worlds: toy/test_world.py.)"""
    digest = hashlib.sha256()
    for file in (f"{paper.VISION}/model.safetensors", f"{paper.LLM}/model.safetensors", paper.LOOK):
        digest.update((ROOT / file).read_bytes())
    assert digest.hexdigest()[:12] == "cb520d928472"
