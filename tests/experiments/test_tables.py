"""The list of the paper's tables, what completes them, and the tables of experiments/README.md."""
import json
import re
import sys

import pytest

from commands import train as training_command
from experiments import paper, runs, tables
from experiments.runs import (
    Experiment, evaluate_command, needed, real_commands, result, train_command,
)
from helpers import ROOT
from test_commands import module_and_arguments, parser_of
from test_evaluate import command

ALL_TABLES = list(paper.TABLES.values())


# ------------------------------------------------------------------------------- the list

@pytest.mark.parametrize("name", paper.TABLES)
def test_a_table_is_complete(name):
    table = paper.TABLES[name]
    for row in table.rows:
        for numbers in [row.paper, *row.other_numbers.values()]:
            assert numbers == "" or len(numbers.split()) == len(table.paper.split()), row
    labels = [row.label for row in table.rows]
    assert len(set(labels)) == len(labels)
    assert {column.evaluation for column in table.columns} <= paper.EVALUATIONS.keys()
    measures = {column.header: column for column in table.columns}
    for claim in table.claims:
        assert {claim.first, claim.second} <= set(labels)
        assert measures[claim.column].measure in runs.EACH
        assert "--per-video" in paper.EVALUATIONS[measures[claim.column].evaluation]


def test_every_table_and_training_is_there():
    numbered = {f"T{number}" for number in range(1, 18)} - {"T8"}
    assert numbered <= paper.TABLES.keys()
    used = {row.training for table in ALL_TABLES for row in table.rows}
    assert used == paper.TRAININGS.keys()


def test_narrators_share_a_base():
    """Encoder, language model and stage `look`, but for those whose own are what is compared."""
    base = f"--vision {paper.VISION} --llm {paper.LLM} --look {paper.LOOK}"
    others = {"lion", "second", "second-tuned", "large", "large-slow", "cls"}
    for name in paper.TRAININGS.keys() - others:
        assert base in " ".join(train_command(name, 1, "out")), name
    for file in (paper.VISION, paper.LLM, paper.LOOK):
        assert (ROOT / file).exists()
    assert "--init out/flownar-2" in " ".join(train_command("second-tuned", 2, "out"))


def test_rows_of_a_table_share_a_warm_up():
    """Each command names it, as the toy's default is not the paper's."""
    for name, table in paper.TABLES.items():
        warm_ups = set()
        for row in table.rows:
            words = train_command(row.training, 0, "out")
            warm_ups.add(words[words.index("--warmup") + 1])
        if name not in ("trainings", "start"):             # these compare warm-ups
            assert len(warm_ups) == 1, name


# ------------------------------------------------------------------------------- commands

def parsed(words: list[str], monkeypatch):
    """The options of a command without `python`, read by its own parser."""
    if words[0] == "train.py":
        monkeypatch.setattr(sys, "argv", words)
        return training_command.parse()
    module, arguments = module_and_arguments(words)
    return parser_of(module).parse_args(arguments)


def test_commands_are_understood(monkeypatch):
    """A command says where its narrator is, and a narrator sees as all others do, or learns that
    from the narrator that it starts from."""
    for name in paper.TRAININGS:
        options = parsed(train_command(name, 1, "out/tables"), monkeypatch)
        assert (options.data, options.seed) == ("toy", 1)
        assert options.output == f"out/tables/{name}-1"
        assert bool(options.vision) != bool(options.init)
    for table in ALL_TABLES:
        for experiment in needed(table, [0]):
            parsed(evaluate_command(experiment, "out/tables"), monkeypatch)
    for line in paper.VIDEOS:
        parsed(line.format(videos="out/videos").split(), monkeypatch)
    assert train_command("flownar", 0, "my tables")[-1] == "my tables/flownar-0"


def real_lines(data: str) -> list[str]:
    """The commands of all rows of all tables for a real data set."""
    return [line for table in ALL_TABLES for row in table.rows
            for line in real_commands(row, table, data)]


@pytest.mark.parametrize("data", ["ego4d", "egoexo4d", "ek100"])
def test_commands_for_real_data(data, monkeypatch):
    """A narrator is trained in one way only, is read where it was written, and starts from a
    narrator that Ego4D's commands train."""
    trained = {}                               # output -> command
    starts = set()
    for line in dict.fromkeys(real_lines(data)):
        words = line.split()[1:]
        options = parsed(words, monkeypatch)
        if words[0] == "train.py":
            assert trained.setdefault(options.output, line) == line
            assert options.data == data
            assert options.epochs == (4 if data == "ek100" else 2)
            if options.init:
                starts.add(options.init)
        elif words[0] == "evaluate.py":
            assert options.model in trained
    of_ego4d = {line.split()[-1] for line in real_lines("ego4d") if "train.py" in line}
    assert starts <= of_ego4d
    assert bool(starts) == (data != "ego4d")


def test_names_tell_experiments_apart():
    assert Experiment("a", "hard", "--static --theta 0.7", 1).name == "a-hard-static-theta-0.7-1"
    experiments = {experiment for table in ALL_TABLES for experiment in needed(table, range(2))}
    assert len({experiment.name for experiment in experiments}) == len(experiments)


@pytest.mark.parametrize("name", paper.TABLES)
def test_printed_commands_read_only_what_earlier_ones_have_written(name):
    lines = command(name, "--commands", "--seeds", 3, main=tables.main).splitlines()
    commands = [line.split() for line in lines if line.startswith("    python")]
    made = set()
    read = 0
    for words in commands:
        for option in ("--model", "--init", "--root", "--gt", "--pred"):
            if option in words:
                path = words[words.index(option) + 1].removesuffix("/predictions")
                assert path in made, words
                read += 1
        if "--output" in words:
            made.add(words[words.index("--output") + 1])
    assert read >= len({row.training for row in paper.TABLES[name].rows})


# ------------------------------------------------------------------------------- a table is completed

@pytest.fixture
def small(monkeypatch, tmp_path):
    """A table, T0, of a small training with one evaluation. Results are kept in another folder."""
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(paper.TRAININGS, "small", paper.Training(
        "--last-k 10", "--no-recall --limit 2 --epochs 1 --warmup 0.05"))
    monkeypatch.setitem(paper.EVALUATIONS, "short",
                        "evaluate.py stream --data toy --limit 2 --output {keep} --per-video {each}")
    columns = [paper.Column("F1", "short", "f1")]
    rows = [paper.Row("small", "small", "1.0")]
    monkeypatch.setitem(tables.TABLES, "T0", paper.Table("Small", "ego4d", "PPL", columns, rows))
    return str(tmp_path / "out")


def complete(*options, ok=True):
    return command("T0", *options, ok=ok, main=tables.main)


def test_a_table_is_completed_once(small, monkeypatch, tmp_path):
    """An interrupted training goes on, what is there is not made again, and a narrator of another
    kind is refused."""
    folder = tmp_path / "out" / "small-0"
    folder.mkdir(parents=True)                             # a training that was interrupted
    made = {"command": train_command("small", 0, small), "worlds": runs.fingerprint_of_worlds(),
            "recipe": runs.RECIPE, "base": runs.fingerprint_of_base(), "commit": "earlier"}
    (folder / runs.MADE).write_text(json.dumps(made))
    found = complete("--output", small, "--json")["T0"]["small"]["f1"]
    kept = result(Experiment("small", "short", "", 0))
    assert found == {"mean": kept["measures"]["f1"], "std": None, "n": 1}
    assert kept["losses"].keys() == {"narrator"}
    assert kept["videos"]["f1"].keys() == {"toy-3000000", "toy-3000001"}
    assert kept["commits"]["train"] == "earlier"
    assert kept["minutes"]["train"] is None                # it took longer than this part of it
    assert kept["minutes"]["evaluate"] > 0
    file = tmp_path / "results" / "short.jsonl"
    assert len(file.read_text().splitlines()) == 1
    complete("--output", small)
    complete("--output", tmp_path / "empty")               # the results are enough
    assert len(file.read_text().splitlines()) == 1
    assert not (tmp_path / "empty").exists()

    # results of other commands, recipes and worlds are not shown
    for change in (lambda patch: patch.setattr(runs, "RECIPE", runs.RECIPE + 1),
                   lambda patch: patch.setattr(runs, "fingerprint_of_worlds", lambda: "another"),
                   lambda patch: patch.setitem(paper.TRAININGS, "small", paper.Training())):
        with monkeypatch.context() as patch:
            change(patch)
            assert "| small | *1.0* | - | 0 |" in complete("--show")
            error = complete("--output", small, ok=False)
            assert "1 experiments failed" in error
    assert "small: 1 of 1 results" in complete("--list").lower()


def test_a_failed_command_is_named(small, monkeypatch, capsys):
    monkeypatch.setitem(paper.EVALUATIONS, "short", "evaluate.py stream --data nowhere")
    monkeypatch.setitem(paper.TRAININGS, "small", paper.Training("--data nowhere"))
    error = complete("--output", small, ok=False)
    assert "1 experiments failed; what they had done is kept" in error


# ------------------------------------------------------------------------------- what is shown

def kept_results(monkeypatch, tmp_path, losses=(0.1, 0.1)):
    """A table, T0, of two rows and two seeds with results that are made up."""
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results")
    columns = [paper.Column("words", "stream", "memory_words")]
    rows = [paper.Row("first", "flownar", "1.0"), paper.Row("second", "retnet", "1.0")]
    claims = [paper.Claim("first", "second", "words")]
    table = paper.Table("Small", "ego4d", "PPL", columns, rows, seeds=2, claims=claims)
    monkeypatch.setitem(tables.TABLES, "T0", table)
    numbers = {("flownar", 0): 0.5, ("flownar", 1): 0.75, ("retnet", 0): 0.5}
    for (training, seed), words in numbers.items():
        loss = losses[seed] if training == "flownar" else 0.1
        runs.add_result(Experiment(training, "stream", "", seed), {
            "commits": {"train": "a", "evaluate": "a"}, "minutes": {"train": 2, "evaluate": 1},
            "losses": {"narrator": loss}, "measures": {"memory_words": words},
            "videos": {"memory_words": {"a": words, "b": words}}})


def test_tables_show_means_deviations_and_how_many_seeds(monkeypatch, tmp_path):
    kept_results(monkeypatch, tmp_path)
    lines = complete("--show").splitlines()
    assert lines[:5] == [
        "| T0. Small (paper: Ego4D) | *PPL* | words | seeds |",
        "| --- | --- | --- | --- |",
        "| first | *1.0* | 0.625 ± 0.177 | 2 |",
        "| second | *1.0* | 0.500 | 1 |",
        "",
    ]
    assert re.match(r"\* first - second, words: \+0.125 \[-\d.\d+, \+\d.\d+\], seeds 2 and 1: cannot "
                    "be told apart", lines[5])
    assert complete("--show", "--json")["T0"]["first"] == {
        "memory_words": {"mean": 0.625, "std": pytest.approx(0.25 / 2 ** 0.5), "n": 2}}
    assert "3 of 4 results; narrators to train or evaluate: 1, at most about 3 min" in complete("--list")


def test_a_failed_training_is_said_and_not_counted(monkeypatch, tmp_path):
    """One whose loss at its end is far above that of another seed."""
    kept_results(monkeypatch, tmp_path, losses=(0.1, 0.3))
    lines = complete("--show").splitlines()
    assert lines[2] == "| first | *1.0* | 0.500 | 1 |"
    assert lines[5] == ("* first, seed 1: its training has failed (loss 0.300 at its end), and is "
                        "not counted")


@pytest.mark.parametrize("arguments, message", [
    ("T99", "there is no table T99; choose of T1, T2"),
    ("T4 --data ek100", "the paper has no numbers of EPIC-Kitchens for T4"),
    ("ages --data ego4d", "the paper has no numbers of Ego4D for ages"),
])
def test_refusals(arguments, message):
    assert message in command(*arguments.split(), ok=False, main=tables.main)


@pytest.mark.parametrize("arguments", ["T5 --show --list", "--list --json", "T5 --commands --json",
                                       "--page T5", "--page --seeds 5", "T1 --data ek100 --json"])
def test_one_thing_is_done_at_a_time(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tables", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        tables.main()
    assert end.value.code == 2


def test_commands_are_printed():
    lines = command("T5", "--commands", main=tables.main).splitlines()
    assert "  CLAM: 2.086 2.237 45.4% 52.2%" in lines
    text = command("T1", "--data", "ek100", main=tables.main)
    assert "FlowNar-C: 24.09T 22.7M" in text
    assert "python train.py --data ek100 --last-k 10 --init" in text
    all_tables = command("--data", "ek100", main=tables.main)
    assert "T16. Size of the language model: PPL TimeDiff Fluency LM-Corr." in all_tables


# ------------------------------------------------------------------------------- the page

def rows_with_results(table: paper.Table) -> int:
    count = 0
    for row in table.rows:
        experiments = needed(table._replace(rows=[row]), range(table.seeds))
        count += any(result(experiment) for experiment in experiments)
    return count


def test_the_readmes_tables_are_the_results():
    """Between <!-- NAME --> and <!-- end --> is the output of `experiments.tables NAME --show`. A
    table is there if at least two of its rows have results."""
    shown = dict(tables.TABLE_OF_PAGE.findall(tables.PAGE.read_text()))
    with_results = {name for name, table in paper.TABLES.items() if rows_with_results(table) > 1}
    assert shown.keys() == with_results
    for name, text in shown.items():
        assert text == tables.markdown(name, None), name


def test_intervals_in_the_text_are_those_of_the_tables():
    """With either sign: a is above b by as much as b is below a."""
    text = tables.PAGE.read_text()
    number = r"([+-]?\d\.\d{3})"
    interval = re.compile(rf"\[{number},\s{number}\]")
    shown = set()
    for table in tables.TABLE_OF_PAGE.finditer(text):
        for low, high in interval.findall(table[2]):
            shown |= {(float(low), float(high)), (-float(high), -float(low))}
    in_text = interval.findall(tables.TABLE_OF_PAGE.sub("", text))
    assert in_text
    for low, high in in_text:
        assert (float(low), float(high)) in shown, (low, high)


def test_the_page_is_written_anew(tmp_path, monkeypatch):
    page = tables.PAGE.read_text()
    old = tmp_path / "README.md"
    old.write_text(page.replace("| CLAM | *2.086* |", "| CLAM | *9.999* |"))
    assert "9.999" in old.read_text()
    monkeypatch.setattr(tables, "PAGE", old)
    command("--page", main=tables.main)
    assert old.read_text() == page


def test_results_belong_to_the_list():
    """Each result is of an experiment that some table shows, made by today's commands; there are no
    two of one experiment."""
    experiments = {}
    for table in ALL_TABLES:
        for experiment in needed(table, range(table.seeds)):
            experiments[experiment.name] = experiment
    for file in runs.RESULTS.glob("*.jsonl"):
        names = list(runs.results_in(file))
        assert len(names) == len(file.read_text().splitlines()), file
        for name in names:
            assert experiments[name].evaluation == file.stem
            assert result(experiments[name]), name
